"""One request inside an engine: a `Prompt` at prefill; at decode a `Sequence`, with its tokens, pages and state. And
the queue of sequences that wait for pages."""

from __future__ import annotations

import enum
from array import array
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import cached_property, partial
from operator import attrgetter
from typing import Protocol

import attrs

from pdinfer.engine.commands import DecodeCommand, SubmitDecode
from pdinfer.errors import PDInferError, TransferError
from pdinfer.execution.drafting import Draft, DraftCounts
from pdinfer.execution.sampling import Draw, Drawn, LogitsProcessor
from pdinfer.kv.prefix import PrefixChain
from pdinfer.scheduling.rules import by_age, due_at, tokens_to_find, tokens_to_reserve
from pdinfer.types import (
    Event,
    FinishReason,
    Granted,
    Handoff,
    PageGrant,
    PeerAddress,
    Refused,
    Request,
    Timeline,
    TokenEvent,
    Usage,
)

WRITER_GRACE_S = 60.0
"""How long a request waits for a prefill that is not connected. Hosts notice a lost prefill sooner than that and name
another one. A broken link between two live engines is dialled again, which may take this long."""


class SequenceState(enum.Enum):
    """WAITING holds no page, GRANTED holds pages that prefill may write, RUNNING owns pages with its whole context."""

    WAITING = enum.auto()
    GRANTED = enum.auto()
    RUNNING = enum.auto()


@attrs.define(eq=False, kw_only=True)
class Sequence:
    """One request at decode.

    `pages` is its page table: while GRANTED, owned pages that were known already and then the grant's pages; while
    RUNNING, owned pages only. `spare` holds owned pages that are kept for its growth; `protected` says that they are
    all it can ever need. `missed_at` is when its writers were found to be gone. The cache holds every token except the
    last one of `output`. `chain` has the keys by which its full pages are known. The host was told the first
    `num_told` tokens of `output`. Of its `attempts`, other writers took over `num_taken_over`. `cuts` is how those
    ended that lost these writers.
    """

    request_id: str
    request: Request
    writers: tuple[PeerAddress, ...]
    arrival: int
    submitted_at: float
    deadline_at: float | None
    output: list[int]
    chain: PrefixChain
    num_told: int = 0
    processor: LogitsProcessor | None = None
    state: SequenceState = SequenceState.WAITING
    grant: PageGrant | None = None
    pages: list[int] = attrs.field(factory=list)
    spare: list[int] = attrs.field(factory=list)
    next_draw: Draw | None = None
    draft: Draft = attrs.field(factory=Draft)
    drafted: DraftCounts = attrs.field(factory=DraftCounts)
    attempts: int = 0
    num_taken_over: int = 0
    cuts: list[PDInferError] = attrs.field(factory=list)
    protected: bool = False
    cached_tokens: int = 0
    waited_s: float = 0.0
    waiting_since: float = 0.0
    missed_at: float | None = None
    first_token_at: float | None = None
    timeline: Timeline = attrs.field(factory=lambda: Timeline(queued_s=0.0))

    @classmethod
    def of(
        cls,
        request: Request,
        writers: tuple[PeerAddress, ...],
        arrival: int,
        now: float,
        chain: PrefixChain,
        processor: LogitsProcessor | None,
    ) -> Sequence:
        """Return the sequence of a request that comes now, as number `arrival`."""
        return cls(
            request_id=request.request_id or "",
            request=request,
            writers=writers,
            arrival=arrival,
            submitted_at=now,
            deadline_at=None if request.deadline_s is None else now + request.deadline_s,
            output=list(request.output),
            num_told=len(request.output),
            chain=chain,
            processor=processor,
        )

    @property
    def order(self) -> tuple[int, bool, float, int]:
        """The sort key of waiting sequences: priority first, then requests that come back, here or from another decode,
        then deadline and age."""
        due = due_at(self.submitted_at, self.deadline_at)
        return -self.request.priority, not (self.attempts or self.request.output), due, self.arrival

    @cached_property
    def prompt(self) -> Seq[int]:
        """The prompt of the request. It is packed if every step reads all of it, which is slow for a tuple of ints."""
        penalized = self.request.sampling.repetition_penalty != 1
        return array("q", self.request.prompt) if penalized else self.request.prompt

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the prompt and the output so far."""
        return len(self.request.prompt) + len(self.output)

    @property
    def max_tokens(self) -> int:
        """The number of tokens in prompt and output once the request has run to its full length."""
        return len(self.request.prompt) + self.request.sampling.max_new_tokens

    @property
    def num_failed(self) -> int:
        """How many attempts count as failed, or would if the last one failed: those that no other writers took over."""
        return self.attempts - self.num_taken_over

    def extend_chain(self) -> None:
        """Add the keys of the pages that are full by now."""
        if len(self.chain.keys) < self.chain.num_full(self.num_tokens):
            self.chain.extend(self.all_tokens())

    def all_tokens(self) -> tuple[int, ...]:
        """Return the tokens of the prompt and of the output so far."""
        return (*self.request.prompt, *self.output)

    def granted(self, now: float) -> None:
        """Begin an attempt, and with it its part of the timeline."""
        self.timeline = Timeline(queued_s=0.0, granted_s=now - self.submitted_at)

    def committed(self, handoffs: Iterable[Handoff], now: float) -> None:
        """Note when the KV of an attempt came, now that it is complete. Hand-offs count seconds since the grant."""
        granted_s = self.timeline.granted_s or 0.0
        first = [granted_s + handoff.first_byte_s for handoff in handoffs if handoff.first_byte_s is not None]
        last = [granted_s + handoff.last_byte_s for handoff in handoffs if handoff.last_byte_s is not None]
        began = [granted_s + handoff.queue_s for handoff in handoffs]
        ended = [granted_s + handoff.queue_s + handoff.compute_s for handoff in handoffs]
        self.timeline = attrs.evolve(
            self.timeline,
            prefill_began_s=min(began),
            prefill_ended_s=max(ended),
            first_byte_s=min(first, default=None),
            last_byte_s=max(last, default=None),
            committed_s=now - self.submitted_at,
        )

    def first_token(self, handoffs: Seq[Handoff], vocab_size: int) -> Drawn:
        """Return the token that a hand-off brings; its log-probability is None when the hand-off has none at all. Note
        how much prefill found in its pages, unless the request was resumed and found its own. Raise TransferError when
        the hand-offs say what cannot be true."""
        first = next((handoff for handoff in handoffs if handoff.token is not None), handoffs[0])
        ids = [-1 if first.token is None else first.token, *(token for token, _ in first.top_logprobs)]
        if first.token is None or not all(0 <= token < vocab_size for token in ids):
            raise TransferError("the hand-off holds no token of this vocabulary")
        if first.logprob is None and first.top_logprobs:
            raise TransferError("the hand-off holds log-probabilities, and none of the token that it brings")
        if len(first.top_logprobs) > (self.request.sampling.logprobs or 0):
            raise TransferError(f"the hand-off holds {len(first.top_logprobs)} log-probabilities that nobody asked for")
        found = max(handoff.num_cached_tokens for handoff in handoffs)
        if not 0 <= found <= self.num_tokens:
            raise TransferError(f"the hand-off says that {found} of {self.num_tokens} tokens were cached")
        if self.first_token_at is None:
            self.cached_tokens = found
        self.waited_s += max(handoff.queue_s for handoff in handoffs)
        return Drawn(token=first.token, logprob=first.logprob, top_logprobs=first.top_logprobs)

    def tokens_to_reserve(self, max_attempts: int) -> int:
        """Return how many tokens the next grant has room for."""
        return tokens_to_reserve(self.num_tokens, self.max_tokens, attempts=self.num_failed, max_attempts=max_attempts)

    def tokens_to_find(self, max_attempts: int) -> int:
        """Return how many tokens need room before the next grant."""
        return tokens_to_find(self.num_tokens, self.max_tokens, attempts=self.num_failed, max_attempts=max_attempts)

    def missing_s(self, now: float, *, connected: bool) -> float:
        """Return how long its writers have been gone, counted from the first call that found them gone."""
        if connected:
            self.missed_at = None
        elif self.missed_at is None:
            self.missed_at = now
        return 0.0 if self.missed_at is None else now - self.missed_at

    @property
    def ends_at(self) -> list[float]:
        """The times at which it ends if nothing happens before."""
        missed_until = None if self.missed_at is None else self.missed_at + WRITER_GRACE_S
        return [end for end in (self.deadline_at, missed_until) if end is not None]

    def ends_with(self, token: int, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """Return the reason to end if `token`, just appended, is the last one; None if more may follow."""
        sampling = self.request.sampling
        if token in sampling.stop_token_ids or (not sampling.ignore_eos and token in eos_token_ids):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.output) >= sampling.max_new_tokens else None

    def event(
        self,
        new: Drawn | None = None,
        *,
        now: float | None = None,
        finish_reason: FinishReason | None = None,
        error: PDInferError | None = None,
    ) -> TokenEvent:
        """Make the event for the host: a new token (already appended), the end, or both. The end carries the usage."""
        return TokenEvent(
            request_id=self.request_id,
            token=new.token if new else None,
            index=len(self.output) - (new is not None),
            logprob=new.logprob if new else None,
            top_logprobs=new.top_logprobs if new else (),
            finish_reason=finish_reason,
            error=error,
            usage=None if finish_reason is None else self.usage,
            at_s=None if now is None else max(0.0, now - self.submitted_at),
        )

    @property
    def usage(self) -> Usage:
        """What the request has used so far."""
        ttft_s = None if self.first_token_at is None else self.first_token_at - self.submitted_at
        return Usage(
            prompt_tokens=len(self.request.prompt),
            output_tokens=len(self.output),
            cached_tokens=self.cached_tokens,
            queue_s=self.waited_s,
            ttft_s=ttft_s,
            timeline=attrs.evolve(self.timeline, first_token_s=ttft_s),
            num_draft_tokens=self.drafted.num_draft_tokens,
            num_accepted_tokens=self.drafted.num_accepted_tokens,
            num_retries=max(0, self.attempts - 1),
        )


def ends_of(
    sequences: Iterable[Sequence],
    arrived: Iterable[DecodeCommand],
    events: Iterable[Event],
    error: PDInferError,
) -> list[Event]:
    """Return what to tell a host after a step that stopped at an unknown point: the `events` of that step except for
    grants, whose rooms are gone, and one end for each of `sequences` and for each request that `arrived`, unless its
    end was told already."""
    told: list[Event] = [event for event in events if not isinstance(event, Granted)]
    tokens = [event for event in told if isinstance(event, TokenEvent)]
    ended = {event.request_id for event in told if isinstance(event, Refused)}
    ended |= {event.request_id for event in tokens if event.finish_reason is not None}
    for sequence in sequences:
        if sequence.request_id not in ended:
            emitted = [event.index + 1 for event in tokens if event.request_id == sequence.request_id]
            del sequence.output[max([sequence.num_told, *emitted]) :]
            told.append(sequence.event(finish_reason=FinishReason.FAILED, error=error))
            ended.add(sequence.request_id)
    for command in arrived:
        match command:
            case SubmitDecode(Request(request_id=str(request_id))) if request_id not in ended:
                told.append(Refused(request_id=request_id, error=error))
    return told


class Sending(Protocol):
    """Bytes on their way out of our pages, such as a Transfer."""

    @property
    def done(self) -> bool: ...


@attrs.define(eq=False)
class Prompt:
    """One accepted grant.

    `pages` is its page table: known pages of its beginning, then new ones. In a pool that both ends share, the new
    ones are the grant's own. All other pages are `held` until everything is sent. The pages contain `num_computed`
    tokens, the first `num_cached` of them from earlier requests. Tokens up to `num_pushed` are at decode or on the way.
    `keys` are the keys of its full pages. When it came, the pool knew its first `num_found` tokens. `pushed_at` is when
    the first of them were pushed.
    """

    request: Request
    grant: PageGrant
    arrival: int
    submitted_at: float
    num_pushed: int
    processor: LogitsProcessor | None = None
    keys: list[bytes] = attrs.field(factory=list)
    pages: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    started_at: float = 0.0
    pushed_at: float | None = None
    num_found: int = 0
    num_cached: int = 0
    num_computed: int = 0
    sent: Sending | None = None
    landed: bool = False

    @property
    def num_remaining(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the prompt and the output so far, all of which have to be in the pages."""
        return len(self.request.prompt) + len(self.request.output)

    @cached_property
    def deadline_at(self) -> float | None:
        """The deadline by this engine's clock."""
        return None if self.request.deadline_s is None else self.submitted_at + self.request.deadline_s

    @cached_property
    def order(self) -> tuple[int, bool, float, int]:
        """The sort key of waiting and of active prompts: priority first, then requests that have given tokens already,
        whose readers wait for the next, then deadline and age."""
        is_new = not self.request.output
        return -self.request.priority, is_new, due_at(self.submitted_at, self.deadline_at), self.arrival


class WaitingQueue:
    """The sequences that wait for pages, in the order of their turns. A sequence has a turn only while its writers are
    connected, which `has_writers` tells."""

    def __init__(self, has_writers: Callable[[Sequence], bool], clock: Callable[[], float]) -> None:
        self._has_writers = has_writers
        self._clock = clock
        self._sequences: list[Sequence] = []
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the sequences that wait now. They may leave the queue meanwhile."""
        return iter(list(self._sequences))

    def add(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        sequence.waiting_since = self._clock()
        insort(self._sequences, sequence, key=lambda waiting: waiting.order)

    def next(self) -> Sequence | None:
        """Return the sequence whose turn it is: every OLDEST_EVERY-th time the one that has waited longest."""
        able, now = partial(filter, self._has_writers, self._sequences), self._clock()
        return by_age(able(), attrgetter("waiting_since"), num_turns=self._num_turns, now=now) or next(able(), None)

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence that has had its turn."""
        self._sequences.remove(sequence)
        self._num_turns += 1

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence for any other reason, if it waits."""
        if sequence in self._sequences:
            self._sequences.remove(sequence)

    def deserted(self) -> list[Sequence]:
        """Return the sequences whose writers have been gone for WRITER_GRACE_S. Their host should have named others by
        then, and will not."""
        now = self._clock()
        return [s for s in self if s.missing_s(now, connected=self._has_writers(s)) >= WRITER_GRACE_S]

    def clear(self) -> None:
        self._sequences = []
