"""What a decode engine decides: which request has pages next, what runs in a step, and who gives way.

It counts pages and reads a clock. Whoever obeys has the pages, the writers and the tokens: a `DecodeEngine` real ones,
a simulated decode counts and modelled seconds."""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

import attrs

from pdinfer.config import EngineConfig
from pdinfer.errors import Overloaded, PDInferError, TransferError
from pdinfer.scheduling.rules import (
    Scheduled,
    StepCosts,
    by_age,
    choose_victim,
    learn_growth,
    may_grant,
    order_of,
    share_a_step,
)

WRITER_GRACE_S = 60.0
"""How long a request waits for a prefill that is not connected. Hosts notice a lost prefill sooner than that and name
another one. A broken link between two live engines is dialled again, which may take this long."""
RESUME_TOKENS = 128
"""How many tokens beyond its own a sequence that lost its KV must have room for before it comes back (fewer near its
end). Its prompt and output are computed and sent again, so it should not lose them at once."""


SINCE, ORDER, ALONE = attrgetter("waiting_since"), attrgetter("order"), attrgetter("alone")


class SequenceState(enum.Enum):
    """WAITING holds no page, GRANTED holds pages that prefill may write, RUNNING owns pages with its whole context."""

    WAITING = enum.auto()
    GRANTED = enum.auto()
    RUNNING = enum.auto()


@attrs.define(eq=False, kw_only=True)
class ScheduledSequence(Scheduled, ABC):
    """One request as the decisions see it.

    It has at most `max_tokens` tokens when it ends, and is expected to have `expected_tokens`. Its next grant has room
    for `reserved_tokens`; it is `protected` if that is all it can ever need. Of its `attempts`, other writers took over
    `num_taken_over`. `cuts` is how those ended that lost these writers, and `missed_at` when these writers were found
    to be gone."""

    max_tokens: int
    expected_tokens: int
    state: SequenceState = SequenceState.WAITING
    attempts: int = 0
    num_taken_over: int = 0
    cuts: list[PDInferError] = attrs.field(factory=list)
    reserved_tokens: int = 0
    protected: bool = False
    waiting_since: float = 0.0
    missed_at: float | None = None

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """The number of tokens in the prompt and the output so far."""

    @property
    def order(self) -> tuple[int, bool, float, int]:
        """The sort key of waiting sequences. Those come back that had pages before, here or at another decode."""
        is_new = not (self.attempts or self.is_resumed)
        return order_of(self.priority, self.submitted_at, self.deadline_at, self.arrival, is_new=is_new)

    @property
    def num_failed(self) -> int:
        """How many attempts count as failed, or would if the last one failed: those that no other writers took over."""
        return self.attempts - self.num_taken_over

    @property
    def ends_at(self) -> float:
        """The time at which it ends if nothing happens before."""
        ends = (self.deadline_at, None if self.missed_at is None else self.missed_at + WRITER_GRACE_S)
        return min((end for end in ends if end is not None), default=float("inf"))

    def missing_s(self, now: float, *, connected: bool) -> float:
        """Return how long its writers have been gone, counted from the first call that found them gone."""
        if connected:
            self.missed_at = None
        elif self.missed_at is None:
            self.missed_at = now
        return 0.0 if self.missed_at is None else now - self.missed_at


S = TypeVar("S", bound=ScheduledSequence)
S_contra = TypeVar("S_contra", bound=ScheduledSequence, contravariant=True)


class SequencePages(Protocol[S_contra]):
    """The pages of decode. `num_available` can be had within all limits; it is zero or less when there are none.
    `num_orphans` rooms were given up and have writers that have not stopped yet."""

    @property
    def num_available(self) -> int: ...
    @property
    def num_orphans(self) -> int: ...

    def num_in_use(self, sequence: S_contra, /) -> int:
        """Return how many pages with the beginning of a waiting sequence are in use anyway."""

    def extend(self, sequence: S_contra, num_drafts: int = 0, /) -> bool:
        """Make sure that the next token of the sequence and the `num_drafts` tokens after it have slots. Only the last
        of them may lack one before the call. Return False when there is no page for it."""

    def release(self, sequence: S_contra, /) -> None:
        """Take back all pages of a sequence that runs."""


class DecodeScheduler(Generic[S]):
    """The requests of a decode, by what they have: `waiting` in the order of their turns, `granted`, and `running`.

    A sequence has a turn only while its writers are connected, which `has_writers` tells. `retracted` are those that
    lost their pages in the last `plan`, and `stalled` says that nobody could run then. `costs` is what steps have
    taken, for each step, each sequence and each token of the contexts."""

    def __init__(
        self,
        pages: SequencePages[S],
        config: EngineConfig,
        clock: Callable[[], float],
        *,
        num_pages: int,
        page_size: int,
        has_writers: Callable[[S], bool] = lambda _: True,
    ) -> None:
        self.costs = StepCosts(3)
        self._pages, self._config, self._clock = pages, config, clock
        self._page_size = page_size
        self._has_writers = has_writers
        self._watermark = max(1, int(num_pages * config.growth_watermark))
        self._num_turns = 0
        self._num_steps = 0
        self.clear()

    def clear(self) -> None:
        """Forget all sequences."""
        self.waiting: list[S] = []
        self.granted: dict[S, None] = {}
        self.running: dict[S, None] = {}
        self.retracted: list[S] = []
        self.stalled = False
        self.growth_share = 0.0

    # -- from one state to another ----------------------------------------------------------------------------------

    def check_room(self) -> None:
        """Raise Overloaded when no other request may wait."""
        if len(self.waiting) >= self._config.max_queued_requests:
            raise Overloaded(f"decode already has {len(self.waiting)} requests waiting for pages")

    def wait(self, sequence: S) -> None:
        """Queue a sequence that holds no pages."""
        sequence.state, sequence.waiting_since = SequenceState.WAITING, self._clock()
        insort(self.waiting, sequence, key=ORDER)

    def grant(self, sequence: S) -> None:
        """Begin the attempt of the sequence whose turn it is."""
        self.waiting.remove(sequence)
        self._num_turns += 1
        sequence.reserved_tokens = self._tokens_to_reserve(sequence)
        sequence.protected = sequence.reserved_tokens == sequence.max_tokens
        sequence.attempts += 1
        sequence.state = SequenceState.GRANTED
        self.granted[sequence] = None

    def admit(self, sequence: S) -> None:
        """Let a sequence run whose KV has all landed."""
        del self.granted[sequence]
        sequence.state = SequenceState.RUNNING
        self.running[sequence] = None

    def lose(self, sequence: S, error: PDInferError) -> bool:
        """End an attempt that brought no KV, and return whether the request waits for another one. Only a failed
        transfer is retried. When the writers are gone, whether it has failed is seen once they are back or others are
        named."""
        del self.granted[sequence]
        is_cut = not self._has_writers(sequence)
        sequence.cuts += [error] * is_cut
        is_retried = isinstance(error, TransferError) and (is_cut or sequence.num_failed < self._config.max_attempts)
        if is_retried:
            self.wait(sequence)
        return is_retried

    def take_over(self, sequence: S) -> bool:
        """Note that other writers take over. Return whether an attempt ends with that; then the request waits again."""
        ends = sequence.state is SequenceState.GRANTED
        sequence.num_taken_over += len(sequence.cuts) + ends
        sequence.cuts = []
        if ends:
            del self.granted[sequence]
            self.wait(sequence)
        return ends

    def leave(self, sequence: S) -> None:
        """Forget a sequence that ends, in whatever state it is."""
        self.granted.pop(sequence, None)
        self.running.pop(sequence, None)
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)

    # -- who ends, and who is next ----------------------------------------------------------------------------------

    def overdue(self) -> list[S]:
        """Return the sequences whose deadline is over."""
        now = self._clock()
        return [one for one in self._all() if one.deadline_at is not None and now >= one.deadline_at]

    def deserted(self) -> list[S]:
        """Return the sequences whose writers have been gone for WRITER_GRACE_S. Their host should have named others by
        then, and will not."""
        now = self._clock()
        return [one for one in self.waiting if one.missing_s(now, connected=self._has_writers(one)) >= WRITER_GRACE_S]

    def next_end(self) -> float:
        """Return when the first sequence ends if nothing happens before."""
        return min((one.ends_at for one in self._all()), default=float("inf"))

    def next(self) -> S | None:
        """Return the sequence whose turn it is: every OLDEST_EVERY-th time the one that has waited longest. Those
        without their writers are passed over."""
        if not self.waiting:
            return None
        able = partial(filter, self._has_writers, self.waiting)
        oldest = by_age(able(), SINCE, num_turns=self._num_turns, now=self._clock())
        return oldest or next(able(), None)

    def next_turn(self) -> S | None:
        """Return the sequence whose turn it is if it can have pages, or must end for its failed attempts. If not, it
        holds up the others, so none starves."""
        sequence = self.next()
        return sequence if sequence is not None and (self.has_failed(sequence) or self.may_grant(sequence)) else None

    def has_failed(self, sequence: S) -> bool:
        """Return whether its writers were lost at the last attempt that it had."""
        return bool(sequence.cuts) and sequence.num_failed >= self._config.max_attempts

    def may_grant(self, sequence: S) -> bool:
        """Return whether there are pages for the next attempt of a sequence."""
        num_holding = len(self.running) + len(self.granted)
        if num_holding >= self._config.max_running_requests:
            return False
        return may_grant(
            self._num_pages(self._tokens_to_find(sequence)) - self._pages.num_in_use(sequence),
            available=self._pages.num_available,
            watermark=max(self._watermark, self._expected_growth()),
            others=num_holding + self._pages.num_orphans,
        )

    # -- steps ------------------------------------------------------------------------------------------------------

    def plan(self) -> list[S]:
        """Return the sequences of the next step. Each has a slot for its next token; others may have been retracted
        for it."""
        num_running, running = len(self.running), SequenceState.RUNNING  # one that was retracted is not
        turn = share_a_step([*self.running], ALONE, num_steps=self._num_steps)
        self._num_steps += 1
        self.retracted = []
        grown = [sequence for sequence in turn if sequence.state is running and self._grow(sequence)]
        self.learn(num_retracted=len(self.retracted))
        # growing a later sequence may have retracted an earlier one of lower priority
        batch = [sequence for sequence in grown if sequence.state is running]
        self.stalled = not batch and len(turn) == num_running
        return batch

    def learn(self, *, num_retracted: int) -> None:
        """Learn from a step how many sequences it retracted."""
        self.growth_share = learn_growth(self.growth_share, num_retracted=num_retracted)

    def num_drafts(self, sequence: S) -> int:
        """Return how many tokens may be drafted after the next one: those that could be used and have a slot."""
        wanted = min(self._config.num_draft_tokens, sequence.max_tokens - sequence.num_tokens - 1)
        return next((count for count in range(wanted) if not self._pages.extend(sequence, count + 1)), wanted)

    def _grow(self, sequence: S) -> bool:
        """Make sure that the next token of the sequence has a slot. If needed, retract others or the sequence itself.
        Return False when it cannot run in this step."""
        while not self._pages.extend(sequence):
            candidates = [running for running in self.running if not running.protected]
            victim = candidates[choose_victim([(one.priority, one.attempts, one.arrival) for one in candidates])]
            if victim is sequence and (self.granted or self._pages.num_orphans):
                return False  # pages are on their way: the sequence that lands next may give way
            del self.running[victim]
            self._pages.release(victim)
            self.retracted.append(victim)
            self.wait(victim)
            if victim is sequence:
                return False
        return True

    # -- inside -----------------------------------------------------------------------------------------------------

    def _all(self) -> Iterable[S]:
        return *self.waiting, *self.granted, *self.running

    def _tokens_to_reserve(self, sequence: S) -> int:
        """Return how many tokens the next grant has room for: those so far, or at the last attempt all there can be."""
        is_last = sequence.num_failed + 1 >= self._config.max_attempts
        return sequence.max_tokens if is_last else sequence.num_tokens

    def _tokens_to_find(self, sequence: S) -> int:
        """Return how many tokens need room before the next grant. A resumed request must not be retracted at once."""
        reserved = self._tokens_to_reserve(sequence)
        return min(sequence.max_tokens, reserved + RESUME_TOKENS) if sequence.num_failed else reserved

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def _expected_growth(self) -> int:
        """Return how many pages those that hold some are expected to need. A protected sequence has all it needs."""
        if not self.growth_share:
            return 0
        growing = [one for holding in (self.running, self.granted) for one in holding if not one.protected]
        owed = sum(max(0, one.expected_tokens - one.num_tokens) for one in growing)
        return math.ceil(self.growth_share * owed / self._page_size)
