"""One step of a model over the pages of one pool: rows in, tokens out. All that the engines know of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from pdinfer.batch import Batch, Row
from pdinfer.errors import ConfigError
from pdinfer.kv.transport import Memory
from pdinfer.kv.view import KVView, PageMemory
from pdinfer.model import Model
from pdinfer.sampling import Draw, Drawn, sample

Ready = Callable[[], None] | None
"""Returns once what was computed may be read by the host; None when that is so already."""


class Runner(Protocol):
    """What an engine runs its steps with."""

    def prefill(self, rows: Sequence[Row]) -> Iterator[tuple[int, Ready]]:
        """Runs the rows' tokens layer by layer; each layer is yielded when its latents are in the pages, or will be
        once `ready` returns."""

    def first_tokens(self, rows: Sequence[int], draws: Sequence[Draw]) -> list[Drawn]:
        """Draws a token behind these rows of the prefill that was just run to its end."""

    def decode(self, rows: Sequence[Row], draws: Sequence[Draw]) -> list[Drawn]:
        """Runs one token per row and draws the next one of each."""


class ModelRunner:
    """Runs a `Model` in the pages of `memory`; raises ConfigError when that holds no tensors."""

    def __init__(self, model: Model, memory: Memory) -> None:
        if not isinstance(memory, PageMemory):
            raise ConfigError(f"an engine needs a pool of tensors, this one holds a {type(memory).__name__}")
        self._model = model
        self._view = KVView.of(memory)
        self._page_size = memory.layout.page_size
        self._hidden_TD = torch.empty(0)
        self._last_rows: list[int] = []

    def prefill(self, rows: Sequence[Row]) -> Iterator[tuple[int, Ready]]:
        batch = self._batch(rows, absorbed=False)
        self._last_rows = batch.last_rows
        for layer, hidden_TD in self._model.stream_layers(batch, self._view):
            self._hidden_TD = hidden_TD
            yield layer, _event(self._model.device)

    def first_tokens(self, rows: Sequence[int], draws: Sequence[Draw]) -> list[Drawn]:
        logits_BV = self._model.head(self._hidden_TD, [self._last_rows[row] for row in rows])
        return sample(logits_BV, draws)

    def decode(self, rows: Sequence[Row], draws: Sequence[Draw]) -> list[Drawn]:
        batch = self._batch(rows, absorbed=True)
        logits_BV = self._model.head(self._model.forward(batch, self._view), range(len(rows)))
        return sample(logits_BV, draws)

    def _batch(self, rows: Sequence[Row], *, absorbed: bool) -> Batch:
        return Batch.build(rows, page_size=self._page_size, device=self._model.device, absorbed=absorbed)


def _event(device: torch.device) -> Ready:
    """What to call before reading what was computed so far; None when the device is never behind the host."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize
