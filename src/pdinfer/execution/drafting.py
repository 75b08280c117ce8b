"""The first half of speculative decoding: the MTP layer proposes tokens, which one step of the model then checks.

The cache entry that the layer writes for a position depends on the next token and on the model's own state there. So it
is written one step late, once the model has accepted the token and computed the state. It overwrites what drafting left
in the pages meanwhile, which was computed from the layer's own states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate

import attrs
import numpy as np
import torch
from torch import Tensor

from pdinfer.errors import ConfigError
from pdinfer.execution.sampling import Draw, Drawn, sample
from pdinfer.kv.view import DTYPES, KVView, PageMemory
from pdinfer.model.batch import Batch, Row
from pdinfer.model.model import Model
from pdinfer.model.mtp import MTP
from pdinfer.trace import Trace, mark
from pdinfer.types import NamedState

STATE, STATE_VERSION = "mtp.hidden", 1
"""What a hand-off brings for drafting: the model's state, after its final norm, at the last token that prefill ran."""

MAX_NEWEST = 4
"""The maximum number of positions whose entries are not written yet, which is how many one step may accept."""

_log = logging.getLogger("pdinfer")

Sampler = Callable[[Tensor, Sequence[Draw]], list[Drawn]]
"""`sample`, or a sampler that gives the same tokens on several ranks."""


@attrs.define(eq=False)
class Draft:
    """The part of one sequence in drafting. `num_tokens` is how many tokens may be proposed in this step. The runner
    keeps `state`, which is None when nothing can be proposed because the hand-off brought no state to begin with."""

    num_tokens: int = 0
    state: Tensor | None = None


@attrs.define
class DraftCounts:
    """How many tokens were drafted and how many of them the model accepted. For an engine, `accept_length` is how many
    tokens a sequence got in the last step on average."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accept_length: float = 0.0

    def add(self, num_drafted: int, *, num_accepted: int) -> None:
        """Count the drafts that a step has checked."""
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted


def check_drafter(model: Model, num_draft_tokens: int) -> None:
    """Raise ConfigError when tokens are to be drafted and the model was loaded without the layer that drafts."""
    if num_draft_tokens and model.mtp is None:
        raise ConfigError(
            f"num_draft_tokens is {num_draft_tokens} and the model was loaded without the MTP layer that drafts: load "
            "it with mtp=True, or leave num_draft_tokens 0"
        )


class Drafter:
    """Proposes tokens with the MTP layer of `model`, and keeps the cache of that layer.

    The `state` of a draft is [1..4, D] here: the model's states, after its final norm, at the newest positions, whose
    cache entries are not written yet.
    """

    def __init__(self, model: Model, mtp: MTP, memory: PageMemory, trace: Trace | None = None) -> None:
        self.sample: Sampler = sample
        self._device = model.device
        self._no_state_TD = model.embed_VD.new_empty(0, model.config.hidden_size)
        self._mtp = mtp
        self._page_size, self._scratch_page = memory.layout.page_size, memory.scratch_page
        self._view = KVView.of(memory)
        self._trace = trace
        self._num_passes = 0

    def propose(
        self, rows: Sequence[Row], draws: Sequence[Draw], drafts: Sequence[Draft], num_passes: int = 0
    ) -> list[list[int]]:
        """Propose up to `num_tokens` tokens after each row of one token, and bring the cache of the layer up to date.

        They are drawn as the model's own tokens will be, with the same parameters, seed and position, so that noise
        moves both alike. The layer runs at least `num_passes` times, as on other ranks, in the end without rows. Syncs
        the device once per drafted token.
        """
        self._num_passes = 0
        proposed = self._propose(rows, draws, drafts)
        while self._num_passes < num_passes:
            self._run(self._no_state_TD, [])
        return proposed

    def _propose(self, rows: Sequence[Row], draws: Sequence[Draw], drafts: Sequence[Draft]) -> list[list[int]]:
        proposed: list[list[int]] = [[] for _ in rows]
        ready = [(at, draft.state) for at, draft in enumerate(drafts) if draft.state is not None]
        if not ready:
            return proposed
        counts = [len(state_TD) for _, state_TD in ready]
        behind = [
            Row(draws[at].output[-n:], rows[at].start - n, rows[at].pages)
            for n, (at, _) in zip(counts, ready, strict=True)
        ]
        y_TD = self._run(torch.cat([state_TD for _, state_TD in ready]), behind)
        y_BD = y_TD[[end - 1 for end in accumulate(counts)]]
        length, going = 0, [at for at, _ in ready]
        while True:
            more = [index for index, at in enumerate(going) if length == len(proposed[at]) < drafts[at].num_tokens]
            if not more:
                return proposed
            y_BD, going = y_BD[more], [going[index] for index in more]
            if length:
                chained = [Row(proposed[at][-1:], rows[at].start + length - 1, rows[at].pages) for at in going]
                y_BD = self._run(y_BD, chained)
            mark(self._trace, "head")
            logits_BV = self._mtp.logits(y_BD)
            mark(self._trace, "sample")
            drawn = self.sample(logits_BV, [after(draws[at], proposed[at]) for at in going])
            for at, new in zip(going, drawn, strict=True):
                if new.error is None:
                    proposed[at].append(new.token)
            length += 1

    def _run(self, state_TD: Tensor, rows: Sequence[Row]) -> Tensor:
        mark(self._trace, "batch")
        self._num_passes += 1
        batch = Batch.build(
            rows, page_size=self._page_size, device=self._device, decode=True, scratch_page=self._scratch_page
        )
        return batch.live(self._mtp(batch.filled_up(state_TD), batch, self._view, self._trace))


def num_passes(drafts: Sequence[Draft]) -> int:
    """Return how often the layer runs at most for these drafts. A draft of no tokens needs one run for the cache."""
    return max((max(1, draft.num_tokens) for draft in drafts if draft.state is not None), default=0)


def after(draw: Draw, tokens: Sequence[int]) -> Draw:
    """Return `draw` as it is once `tokens` follow."""
    return attrs.evolve(draw, output=[*draw.output, *tokens]) if tokens else draw


def pack_state(state_D: Tensor) -> NamedState:
    """Pack the state of one position for a hand-off."""
    data = state_D.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    dtype = str(state_D.dtype).removeprefix("torch.")
    return NamedState(name=STATE, version=STATE_VERSION, dtype=dtype, shape=tuple(state_D.shape), data=data)


def unpack_state(states: Sequence[NamedState], size: int, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Return the state [1, size] among those that a peer sent. Return None when it is missing or does not fit this
    version and model; then the request is decoded without drafts."""
    found = next((state for state in states if state.name == STATE), None)
    if found is None:
        return None
    fits = found.version == STATE_VERSION and DTYPES.get(found.dtype) is dtype and found.shape == (size,)
    if fits and len(found.data) == size * dtype.itemsize:
        state_1D = torch.from_numpy(np.frombuffer(found.data, np.uint8).copy()).view(dtype)[None]
        if bool(torch.isfinite(state_1D).all()):
            return state_1D.to(device)
    _log.warning("a hand-off's state %s cannot be used: its request is decoded without drafts", STATE)
    return None
