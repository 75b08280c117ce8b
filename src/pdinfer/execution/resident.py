"""Decode steps of one token per sequence, whose batch stays on the device.

Rows go in only as far as they changed (`DecodeRows`); model, draw and advance queue work and wait for nothing; then the
drawn tokens are read with one wait. On a device the work in between is one launch where it was captured (`graphs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from pdinfer.execution.drafting import Sampler
from pdinfer.execution.graphs import DecodeGraphs, Output
from pdinfer.execution.sampling import (
    CONTROLS,
    Controls,
    Draw,
    DrawKind,
    Drawn,
    control_values,
    draw_tokens,
    read_drawn,
    sample,
)
from pdinfer.kv.view import KVView, PageMemory
from pdinfer.model.batch import Row
from pdinfer.model.decode_rows import DecodeRows
from pdinfer.model.model import Model
from pdinfer.process.memory import pinned_empty
from pdinfer.process.streams import record_event
from pdinfer.trace import Trace, mark


class ResidentDecode:
    """The decode steps of one runner. `end_step` is called when the model has run."""

    def __init__(
        self, model: Model, memory: PageMemory, end_step: Callable[[], None], trace: Trace | None = None
    ) -> None:
        self._model = model
        self._view = KVView.of(memory)
        self._end_step = end_step
        self._trace = trace
        self._rows = DecodeRows(
            CONTROLS,
            control_values,
            page_size=memory.layout.page_size,
            device=model.device,
            scratch_page=memory.scratch_page,
        )
        self._width = -(-model.config.max_position_embeddings // memory.layout.page_size)
        self._results = torch.empty(0, dtype=torch.int32)
        self.graphs = DecodeGraphs(model.device, partial(self._run, padded=True), _refusal(model))

    def decode(self, rows: Sequence[Row], draws: Sequence[Draw], sampler: Sampler) -> list[Drawn]:
        """Run one token per row, and draw the next. Rows whose logits are changed go through `sampler`, and all rows do
        where it is not `sample`."""
        mark(self._trace, "batch")
        slots, num_rows = self._rows.place(rows, [draw.sampling for draw in draws]), len(rows)
        of_slot = [draw for _, draw in sorted(zip(slots, draws, strict=True), key=lambda pair: pair[0])]
        kind = max((DrawKind.of(draw.sampling) for draw in draws), default=DrawKind.GREEDY)
        output = None if self.graphs.refusal is not None else self.graphs.step(num_rows, kind, self._rows.address)
        output = output or self._run(num_rows, kind)
        self._end_step()
        mark(self._trace, "sample")
        if sampler is not sample or any(draw.changes_logits for draw in draws):
            drawn = sampler(output.logits_BV, of_slot)
        else:
            drawn = read_drawn(self._read(output.packed_3B), output.logits_BV, of_slot, {})
            self._rows.advanced([new.token for new in drawn])
        mark(self._trace, "emit")
        return [drawn[slot] for slot in slots]

    def _run(self, num_rows: int, kind: DrawKind, *, padded: bool = False) -> Output:
        """Run the first rows that are on the device, and draw. Waits for nothing."""
        batch = self._rows.batch(num_rows, padded=padded)
        hidden_BD = self._model.forward(batch, self._view, self._trace)
        mark(self._trace, "head")
        logits_BV = self._model.head(self._model.norm(hidden_BD))
        mark(self._trace, "sample")
        columns = {f"{name}_B": self._rows.column(name, num_rows) for name in CONTROLS}
        controls = Controls(position_B=batch.context_lens_B, **columns)
        packed_3B = draw_tokens(logits_BV, logits_BV, controls, kind)
        self._rows.advance(packed_3B[0])
        return Output(packed_3B, logits_BV)

    def _read(self, packed_3B: Tensor) -> Tensor:
        """Return a result on the host: the one wait of a step."""
        if self._model.device.type == "cpu":
            return packed_3B
        if self._results.numel() < packed_3B.numel():
            self._results = pinned_empty(8 * packed_3B.nbytes, self._model.device).view(torch.int32)
        host_3B = self._results[: packed_3B.numel()].view(packed_3B.shape)
        host_3B.copy_(packed_3B, non_blocking=True)
        if (event := record_event(self._model.device)) is not None:
            event.synchronize()
        return host_3B

    def capture(self, sizes: Sequence[int], most_rows: int) -> Iterator[int]:
        """Capture decode steps of these numbers of rows, the largest first, and yield each once that is done. Steps
        will have at most `most_rows`. Yields nothing where steps cannot be captured."""
        if self.graphs.refusal is not None:
            return
        mark(self._trace, "capture")
        self._rows.reserve(max(most_rows, *sizes, 1), self._width)
        self._rows.place([], [])
        for size in sorted(sizes, reverse=True):
            self.graphs.capture(size, self._rows.address)
            yield size


def _refusal(model: Model) -> str | None:
    """Return why steps of the model cannot be captured, or None."""
    if model.device.type == "cpu":
        return "a CPU launches nothing"
    if model.mtp is not None:
        return "steps that draft tokens are not captured yet"
    if model.groups.world.size > 1:
        return "steps of several ranks are not captured yet"
    if not model.experts.dispatcher.graph_safe:
        return f"the dispatcher {type(model.experts.dispatcher).__name__} waits for the device"
    return None
