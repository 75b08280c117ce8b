"""Two-batch overlap: a step runs as two halves, shifted by one phase, so that one computes while rows of the other
travel to experts and back.

    first    attention, dispatch │                     │ experts, send back │                    │ end, next attention
    second                       │ attention, dispatch │                    │ experts, send back │

DeepSeek-V3's prefill overlaps two batches so (report, arXiv 2412.19437, section 3.4). Layers without experts belong to
the phase that they are in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pdinfer.model.batch import Step
from pdinfer.model.block import Block


def stream_halves(blocks: Sequence[Block], halves: Sequence[tuple[Tensor, Step]]) -> Iterator[tuple[int, Tensor]]:
    """Run the blocks on halves (hidden state, step) of a batch, and yield (layer, hidden [T, D]) once both have written
    that layer's cache. The second half may read what the first one wrote, never the other way round."""
    runs = [_states(blocks, hidden_TD, step) for hidden_TD, step in halves]
    ended: list[deque[Tensor]] = [deque() for _ in halves]
    layer = 0
    while layer < len(blocks):
        for run, mine in zip(runs, ended, strict=True):
            for state_TD in run:
                if state_TD is None:
                    break
                mine.append(state_TD)
                if all(ended):
                    yield layer, torch.cat([each.popleft() for each in ended])
                    layer += 1


def _states(blocks: Sequence[Block], hidden_TD: Tensor, step: Step) -> Iterator[Tensor | None]:
    """Yield the hidden state after every block, and None where rows have begun to travel."""
    for block in blocks:
        phases = block.phases(hidden_TD, step)
        while True:
            try:
                next(phases)
            except StopIteration as end:
                hidden_TD = end.value
                break
            yield None
        yield hidden_TD
