"""What the layers of one step share: its tokens, the cache, rotary angles and what one layer leaves for the next."""

from __future__ import annotations

import attrs
from torch import Tensor

from pdinfer.kv.view import KVView
from pdinfer.model.batch import Batch
from pdinfer.trace import Trace


@attrs.define
class Step:
    """One pass through layers. The model makes it, and every layer reads it.

    `angles` are (cos_TF, sin_TF) of the batch's positions. `trace` is told which part of the model runs.
    """

    batch: Batch
    view: KVView
    angles: tuple[Tensor, Tensor]
    trace: Trace | None = None
    selected_TS: Tensor | None = None
    """The positions that the last indexer of this step chose, as `kernels.ops.IndexTopK` returns them, for its own
    layer and those that share its choice. None before the first indexer and where every position is read."""
