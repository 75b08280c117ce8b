"""What the layers of one step share: its tokens, the cache, the rotary angles, and what one layer leaves for the
next."""

from __future__ import annotations

from typing import Any

import attrs
from torch import Tensor

from pdinfer.kv.view import KVView
from pdinfer.model.batch import Batch
from pdinfer.trace import Trace


@attrs.define
class Step:
    """One pass through the layers. The model makes one at the start of a step, and the MTP layer makes its own.

    `angles` are (cos_TF, sin_TF) of the batch's positions. `trace` is told which part of the model runs.
    """

    batch: Batch
    view: KVView
    angles: tuple[Tensor, Tensor]
    trace: Trace | None = None
    live_T: Tensor | None = None
    """Which tokens are more than padding: bool, None where all are. The others go to no routed expert, and what is
    computed of them means nothing."""
    selected_TS: Tensor | None = None
    """The positions that the last indexer of this step chose, in the form that `Ops.index_topk` returns. They
    hold for its own layer and for the layers that share its choice. None before the first indexer, and where every
    position is read."""
    of_lengths: dict[object, Any] = attrs.field(factory=dict)
    """What ops made of the batch's lengths for the first layer, and use in the others."""
