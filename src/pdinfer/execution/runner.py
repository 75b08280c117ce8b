"""One step of a model over the pages of one pool: rows in, tokens out. Engines know no more of tensors than this."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pdinfer.errors import ConfigError
from pdinfer.execution.drafting import Draft, Sampler, pack_state, unpack_state
from pdinfer.execution.resident import ResidentDecode
from pdinfer.execution.sampling import Draw, Drawn, sample
from pdinfer.kv.memory import Memory
from pdinfer.kv.view import KVView, PageMemory
from pdinfer.model.batch import Batch, Row
from pdinfer.model.model import Model
from pdinfer.trace import Trace, mark
from pdinfer.types import NamedState, PageGrant

Ready = Callable[[], None] | None
"""Called before what was computed is read from its pool, and orders the read after it. None means that it is there."""


class ModelRunner:
    """Runs a `Model` in the pages of `memory`. Raises ConfigError when the memory holds no tensors. `trace` shows
    which part of a step runs."""

    def __init__(self, model: Model, memory: Memory, trace: Trace | None = None) -> None:
        if not isinstance(memory, PageMemory):
            raise ConfigError(f"an engine needs a pool of tensors, this one holds a {type(memory).__name__}")
        self._model = model
        self._memory = memory
        self._view = KVView.of(memory)
        self._page_size = memory.layout.page_size
        self._trace = trace
        self._sampler: Sampler | None = None
        self._last_BD = torch.empty(0, dtype=torch.float32, device="cpu")
        self.resident = ResidentDecode(model, memory, self._end_step, trace)

    @property
    def drafts(self) -> bool:
        """Whether it drafts tokens."""
        return self._model.mtp is not None

    def sample(self, logits_BV: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        """Draw as `sampling.sample` says, with the op of the model."""
        return sample(logits_BV, draws, self._model.resolved.ops.draw)

    @property
    def captured_passes(self) -> int:
        """How often the MTP layer runs in every captured step; 0 where none is captured."""
        return self.resident.captured_passes

    def sample_with(self, sampler: Sampler) -> None:
        """Draw with `sampler` whatever `decode` draws, both drafts and tokens, in steps that are not captured."""
        self._sampler = sampler

    def do_while_waiting(self, work: Callable[[], None]) -> None:
        """Do this in `decode` while a device computes. It may change anything but the rows of the step."""
        self.resident.while_waiting = work

    def idle(self) -> None:
        """Do nothing: there are no other ranks."""

    def announce(self, rows: Sequence[Row], grants: Sequence[PageGrant], tokens: Sequence[range]) -> None:
        """Do nothing: no other rank runs these rows."""

    def prefill(self, rows: Sequence[Row]) -> Iterator[tuple[int, Ready]]:
        """Run the tokens of the rows layer by layer. Yield each layer once its latents are in the pages, or will be
        read from there when `ready` was called."""
        mark(self._trace, "batch")
        model, batch = self._model, self._batch(rows, decode=False)
        hidden_TD = torch.empty(0, dtype=torch.float32, device="cpu")
        with self._memory.step():
            for layer, layer_TD in model.stream_layers(batch, self._view, self._trace):
                hidden_TD = layer_TD
                yield layer, self._memory.computed()
            mark(self._trace, "head")
            state_TD = model.norm(hidden_TD)
            self._last_BD = batch.last_of(state_TD)
            if model.mtp is not None:
                # no token follows the last one of a prompt yet: its entry is made with a stand-in, and decode
                # overwrites it
                model.mtp(state_TD, batch.shifted(), self._view, self._trace)
                yield model.mtp.layer, self._memory.computed()
        self._end_step()

    def first_tokens(self, rows: Sequence[int], draws: Sequence[Draw]) -> list[Drawn]:
        """Draw the next token for each of these rows of the prefill that was just run to its end."""
        mark(self._trace, "head")
        logits_BV = self._model.head(self._last_BD[list(rows)])
        mark(self._trace, "sample")
        return self.sample(logits_BV, draws)

    def states(self, rows: Sequence[int]) -> list[tuple[NamedState, ...]]:
        """Return what decode needs besides the pages to continue these rows of the prefill that was just run."""
        if self._model.mtp is None:
            return [() for _ in rows]
        return [(pack_state(self._last_BD[row]),) for row in rows]

    def draft(self, states: Sequence[NamedState]) -> Draft:
        """Make the part of a sequence in drafting from the states that came with its pages."""
        if not self.drafts:
            return Draft()
        model = self._model
        return Draft.of(unpack_state(states, model.config.hidden_size, model.dtype, model.device))

    def forward(self, rows: Sequence[Row]) -> None:
        """Run the part of `decode` that writes to the pages when nothing is drafted, captured where `decode` is."""
        with self._memory.step():
            if not self.resident.follow(rows):
                self._model.forward(self._batch(rows, decode=True), self._view, self._trace)
        self._end_step()

    def order(self, rows: Sequence[Row]) -> list[int]:
        """Return the order in which `decode` runs these rows, so that other ranks can run them alike."""
        return self.resident.order(rows)

    def decode(
        self,
        rows: Sequence[Row],
        draws: Sequence[Draw],
        drafts: Sequence[Draft],
        *,
        num_passes: int = 0,
        on_host: bool = False,
    ) -> list[list[Drawn]]:
        """Run one token per row. For each row draw the next token and, as far as its drafts were right, those after it:
        at most the draft's `num_tokens` more. The pages of a row have slots for that many. The MTP layer runs at least
        `num_passes` times, as on other ranks. `on_host` says that the rank that draws does so on its host."""
        with self._memory.step():
            return self.resident.decode(rows, draws, drafts, self._sampler, num_passes=num_passes, on_host=on_host)

    def _end_step(self) -> None:
        """Close a step of the recorder, after all layers have run once. Syncs nothing."""
        if (recorder := self._model.experts.recorder) is not None:
            recorder.end_step()

    def _batch(self, rows: Sequence[Row], *, decode: bool) -> Batch:
        return Batch.build(
            rows, page_size=self._page_size, device=self._model.device, decode=decode, cp=self._model.groups.cp
        )


@contextlib.contextmanager
def using_threads(num_threads: int | None) -> Iterator[None]:
    """Let torch's ops in this thread use `num_threads` threads, and afterwards as many as before. None changes nothing.

    torch keeps the number for each calling thread. A thread that uses torch for the first time takes the number that
    was set last in any thread (ATen/ParallelOpenMP.cpp)."""
    before = torch.get_num_threads()
    if num_threads is None or num_threads == before:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
