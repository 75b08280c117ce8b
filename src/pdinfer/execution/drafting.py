"""The first half of speculative decoding: the MTP layer proposes tokens, which one step of the model then checks.

The cache entry that the layer writes for a position depends on the next token and on the model's own state there. So it
is written one step late, once the model has accepted the token and computed the state. It overwrites what drafting left
in the pages meanwhile, which was computed from the layer's own states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import attrs
import numpy as np
import torch
from torch import Tensor

from pdinfer.execution.sampling import Draw, Drawn
from pdinfer.kv.view import DTYPES, KVView, PageMemory
from pdinfer.log import log
from pdinfer.model.decode_rows import MAX_NEWEST, DecodeRows
from pdinfer.model.model import Model
from pdinfer.model.mtp import MTP
from pdinfer.trace import Trace, mark
from pdinfer.types import NamedState

STATE, STATE_VERSION = "mtp.hidden", 1
"""What a hand-off brings for drafting: the model's state, after its final norm, at the last token that prefill ran."""


Sampler = Callable[[Tensor, Sequence[Draw]], list[Drawn]]
"""`sample`, or a sampler that gives the same tokens on several ranks."""

DrawDrafts = Callable[[Tensor, int], Tensor]
"""Draws the draft number n, int64 [B], from logits [B, vocab]."""


@attrs.define(eq=False)
class Draft:
    """The part of one sequence in drafting. `num_tokens` is how many tokens may be proposed in this step. `state`
    [1..4, D] are the model's states at the newest positions, which the runner takes while the sequence runs."""

    num_tokens: int = 0
    state: Tensor | None = None
    num_newest: int = 0
    """How many the newest positions are; 0 when nothing can be proposed, because the hand-off brought no state to begin
    with, or because a step was broken off, so that nobody knows of which positions the states are."""

    @classmethod
    def of(cls, state_ND: Tensor | None) -> Draft:
        """Return a draft that begins with these states of the newest positions, if there are any."""
        return cls() if state_ND is None else cls(state=state_ND, num_newest=len(state_ND))

    def newest(self, output: Sequence[int]) -> list[int]:
        """Return the token after each newest position, from those of the sequence."""
        return [*output[len(output) - self.num_newest :]]


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


class Drafter:
    """Proposes tokens with the MTP layer of `model` for the sequences in `rows`, and keeps the cache of that layer.

    Beside the rows it has the model's states, after its final norm, at the newest positions of every slot: those whose
    cache entries are not written yet."""

    def __init__(
        self, model: Model, mtp: MTP, memory: PageMemory, rows: DecodeRows, trace: Trace | None = None
    ) -> None:
        self._mtp = mtp
        self._rows = rows
        self._view = KVView.of(memory)
        self._trace = trace
        self._state_SND = model.embed_VD.new_zeros(0, MAX_NEWEST, model.config.hidden_size)
        self._slots: WeakKeyDictionary[Draft, int] = WeakKeyDictionary()

    def reserve(self, num_rows: int) -> None:
        """Make room for the states of so many rows."""
        if num_rows > len(self._state_SND):
            self._state_SND = torch.cat(
                (self._state_SND, self._state_SND.new_zeros(num_rows, *self._state_SND.shape[1:]))
            )

    def seat(self, slots: Sequence[int], drafts: Sequence[Draft]) -> None:
        """Bring the states of these sequences to their slots. Those of others that are left return to their drafts."""
        self.reserve(len(slots))
        seats = {draft: slot for slot, draft in zip(slots, drafts, strict=True) if draft.num_newest}
        arriving = [(slot, draft) for draft, slot in seats.items() if self._slots.get(draft) != slot]
        left = [(slot, draft) for draft, slot in self._slots.items() if seats.get(draft) != slot]
        for slot, draft in left:  # all of them before any slot is taken anew
            draft.state = self._state_SND[slot, : draft.num_newest].clone()
            del self._slots[draft]
        for slot, draft in arriving:
            assert draft.state is not None
            self._state_SND[slot, : draft.num_newest] = draft.state
            draft.state, self._slots[draft] = None, slot

    def forget(self) -> None:
        """Drop all states that are in slots: nobody knows of which positions they are."""
        for draft in self._slots:
            draft.num_newest = 0

    def propose(
        self, num_rows: int, num_newest: int, num_drafts: int, draw: DrawDrafts, *, num_passes: int, padded: bool
    ) -> Tensor:
        """Return tokens [B, `num_drafts`] after the newest of the first rows, and bring the cache of the layer up to
        date, where at most `num_newest` entries of a row are due. A row that drafts fewer has tokens after its own
        that mean nothing. The layer runs at least `num_passes` times, as on other ranks, in the end without rows."""
        done = 0
        tokens_BK = self._rows.column("token", num_rows).new_empty(num_rows, 0)
        if num_newest:
            y_BD = self._catch_up(num_rows, num_newest, padded)
            position_B = self._rows.column("position", num_rows)
            num_drafts_B = self._rows.column("num_drafts", num_rows)
            done = 1
            for step in range(num_drafts):
                if step:  # the entry of the position before, from the layer's own state there
                    y_BD = self._run(y_BD, tokens_BK[:, -1:], position_B + (step - 1), num_drafts_B - step, padded)
                    done += 1
                mark(self._trace, "head")
                logits_BV = self._mtp.logits(y_BD)
                mark(self._trace, "sample")
                tokens_BK = torch.cat((tokens_BK, draw(logits_BV, step)[:, None]), 1)
        for _ in range(done, num_passes):
            self._run(self._state_SND[:0, 0], tokens_BK.new_empty(0, 1), tokens_BK.new_empty(0), None, padded)
        return tokens_BK

    def _catch_up(self, num_rows: int, num_newest: int, padded: bool) -> Tensor:
        """Write the entries that are due. Return y [B, D] at each row's newest one."""
        newest_BN = self._rows.column("newest", num_rows)[:, :num_newest]
        num_newest_B = self._rows.column("num_newest", num_rows)
        first_B = self._rows.column("position", num_rows) - num_newest_B
        state_TD = self._state_SND[:num_rows, :num_newest].flatten(0, 1)
        y_TD = self._run(state_TD, newest_BN, first_B, num_newest_B, padded)
        last_B = (num_newest_B - 1).clamp(min=0)
        y_BND = y_TD.view(num_rows, num_newest, -1)
        return y_BND.gather(1, last_B[:, None, None].expand(-1, 1, y_BND.shape[2]))[:, 0]

    def _run(
        self, state_TD: Tensor, tokens_BQ: Tensor, first_B: Tensor, num_live_B: Tensor | None, padded: bool
    ) -> Tensor:
        mark(self._trace, "batch")
        batch = self._rows.batch(len(tokens_BQ), tokens_BQ, first_B=first_B, num_live_B=num_live_B, padded=padded)
        return self._mtp(state_TD, batch, self._view, self._trace)

    def keep(self, state_TD: Tensor, num_queries: int) -> None:
        """Keep the states of a step of the model: those of the tokens that turn out right are the newest."""
        state_BQD = state_TD.view(-1, num_queries, state_TD.shape[1])
        self._state_SND[: len(state_BQD), :num_queries].copy_(state_BQD)


def accepted(drawn_BQ: Tensor, is_right_BQ: Tensor, drafted_BK: Tensor, num_drafts_B: Tensor) -> Tensor:
    """Return how many of the drawn tokens of each row count, int64 [B]: those after drafts that the model drew itself,
    and one more. None follows a token that is not `is_right_BQ`."""
    num_drafts = drafted_BK.shape[1]
    steps_K = torch.arange(num_drafts, device=drafted_BK.device, dtype=torch.int64)
    same_BK = (drawn_BQ[:, :num_drafts] == drafted_BK) & is_right_BQ[:, :num_drafts] & (steps_K < num_drafts_B[:, None])
    return same_BK.cumprod(1).sum(1) + 1


class HostDraws:
    """What a sampler on the host draws in one step: for each row up to as many drafts as `counts` says, and the tokens
    that check them. It sees the live rows alone. Syncs the device for each draw."""

    def __init__(self, sampler: Sampler, draws: Sequence[Draw], counts: Sequence[int]) -> None:
        self._sampler = sampler
        self._draws = draws
        self._counts = counts
        self._proposed: list[list[int]] = [[] for _ in draws]
        self.kept: list[list[Drawn]] = []
        """The tokens that count of each row, the last one after drafts that were right. None follows an error."""

    def draft(self, logits_BV: Tensor, step: int) -> Tensor:
        """Draw the draft number `step` of the rows that have one, int64 [B]. It is drawn as the model's own token will
        be, with the same parameters, seed and position, so that noise moves both alike."""
        wanted = zip(self._proposed, self._counts, strict=True)
        rows = [row for row, (more, count) in enumerate(wanted) if len(more) == step < count]
        if rows:
            draws = [after(self._draws[row], self._proposed[row]) for row in rows]
            for row, new in zip(rows, self._sampler(_some(logits_BV, rows), draws), strict=True):
                if new.error is None:
                    self._proposed[row].append(new.token)
        tokens = [more[step] if step < len(more) else 0 for more in self._proposed]
        return torch.tensor(tokens, dtype=torch.int64, device=logits_BV.device)

    def draw(self, logits_TV: Tensor, num_queries: int) -> tuple[Tensor, Tensor]:
        """Draw the tokens [B, Q], int64, and return how many of each row count, int64 [B]."""
        places = [row * num_queries + at for row, more in enumerate(self._proposed) for at in range(len(more) + 1)]
        draws = [
            after(draw, more[:at])
            for draw, more in zip(self._draws, self._proposed, strict=True)
            for at in range(len(more) + 1)
        ]
        drawn = iter(self._sampler(_some(logits_TV, places), draws))
        tokens = []
        for more in self._proposed:
            new = [next(drawn) for _ in range(len(more) + 1)]
            tokens.append([0 if one.error is not None else one.token for one in new] + [0] * (num_queries - len(new)))
            right = 0
            while right < len(more) and new[right].error is None and new[right].token == more[right]:
                right += 1
            self.kept.append(new[: right + 1])
        device = logits_TV.device
        tokens_BQ = torch.tensor(tokens, dtype=torch.int64, device=device).view(len(tokens), num_queries)
        return tokens_BQ, torch.tensor([len(new) for new in self.kept], dtype=torch.int64, device=device)


def _some(logits_TV: Tensor, rows: Sequence[int]) -> Tensor:
    return (
        logits_TV
        if len(rows) == len(logits_TV)
        else logits_TV[torch.tensor(rows, device=logits_TV.device, dtype=torch.int64)]
    )


def num_passes(drafts: Sequence[Draft]) -> int:
    """Return how often the layer runs at most for these drafts. A draft of no tokens needs one run for the cache."""
    return max((max(1, draft.num_tokens) for draft in drafts if draft.num_newest), default=0)


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
    log.warning("a hand-off's state %s cannot be used: its request is decoded without drafts", STATE)
    return None
