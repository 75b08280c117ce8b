"""One request inside an engine: a `Prompt` at prefill; at decode a `Sequence`, with its tokens, pages and state. Before
it is one, it is a command of the host, which waits in the engine's inbox for the next step."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import attrs

from pdinfer.engine.ranks.leader import Sent
from pdinfer.errors import PDInferError, TransferError
from pdinfer.execution.drafting import Draft, DraftCounts
from pdinfer.execution.sampling import Draw, Drawn, LogitsProcessor
from pdinfer.kv.prefix import PrefixChain
from pdinfer.kv.transports.base import Transfer
from pdinfer.scheduling.admission import MAX_STOP_TOKENS
from pdinfer.scheduling.decode import ScheduledSequence
from pdinfer.scheduling.prefill import ScheduledPrompt
from pdinfer.scheduling.rules import forecast_tokens
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


@attrs.frozen
class SubmitPrefill:
    """Run a prompt into the pages that decode has granted."""

    request: Request
    grant: PageGrant


@attrs.frozen
class SubmitDecode:
    """Serve a request that `writers` will prefill."""

    request: Request
    writers: tuple[PeerAddress, ...]


@attrs.frozen
class ChangeWriters:
    """Let other prefills write the next attempt of a request."""

    request_id: str
    writers: tuple[PeerAddress, ...]


@attrs.frozen
class Cancel:
    """Stop a request."""

    request_id: str


DecodeCommand = SubmitDecode | ChangeWriters | Cancel


@attrs.define(eq=False, kw_only=True)
class Sequence(ScheduledSequence):
    """One request at decode.

    `pages` is its page table: while GRANTED, owned pages that were known already and then the grant's pages; while
    RUNNING, owned pages only. `spare` holds owned pages that are kept for its growth. The cache holds every token
    except the last one of `output`. `chain` has the keys by which its full pages are known. `next_draw` is what the
    next token depends on, always the same object, whose `output` grows. The host has the first `num_told` tokens of it.
    """

    request_id: str
    request: Request
    writers: tuple[PeerAddress, ...]
    output: list[int]
    chain: PrefixChain
    next_draw: Draw
    num_told: int = 0
    grant: PageGrant | None = None
    pages: list[int] = attrs.field(factory=list)
    spare: list[int] = attrs.field(factory=list)
    draft: Draft = attrs.field(factory=Draft)
    drafted: DraftCounts = attrs.field(factory=DraftCounts)
    cached_tokens: int = 0
    waited_s: float = 0.0
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
        *,
        eos_token_ids: Seq[int],
        processor: LogitsProcessor | None,
    ) -> Sequence:
        """Return the sequence of a request that comes now, as number `arrival`."""
        output = list(request.output)
        return cls(
            request_id=request.request_id or "",
            request=request,
            writers=writers,
            arrival=arrival,
            submitted_at=now,
            deadline_at=None if request.deadline_s is None else now + request.deadline_s,
            priority=request.priority,
            is_resumed=bool(request.output),
            alone=request.alone,
            max_tokens=len(request.prompt) + request.sampling.max_new_tokens,
            expected_tokens=forecast_tokens(request),
            output=output,
            num_told=len(output),
            chain=chain,
            next_draw=Draw.of(request, output, eos_token_ids=eos_token_ids, processor=processor),
        )

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the prompt and the output so far."""
        return len(self.request.prompt) + len(self.output)

    def extend_chain(self) -> None:
        """Add the keys of the pages that are full by now."""
        if len(self.chain.keys) < self.chain.num_full(self.num_tokens):
            self.chain.extend(self.all_tokens())

    def all_tokens(self) -> tuple[int, ...]:
        """Return the tokens of the prompt and of the output so far."""
        return (*self.request.prompt, *self.output)

    def granted(self, now: float) -> Request:
        """Note that it has been granted pages, and return the request as prefill must run it: which tokens must not end
        it yet is decode's word, as prefill's folder may name other eos tokens."""
        self.waited_s += now - self.waiting_since
        self.timeline = Timeline(queued_s=0.0, granted_s=now - self.submitted_at)
        left_s = None if self.deadline_at is None else max(0.0, self.deadline_at - now)
        sampling, ends = self.request.sampling, tuple(dict.fromkeys(self.next_draw.forbidden))
        if len(self.output) < sampling.min_new_tokens and len(ends) <= MAX_STOP_TOKENS:
            sampling = attrs.evolve(sampling, stop_token_ids=ends, ignore_eos=True)
        return attrs.evolve(self.request, sampling=sampling, output=tuple(self.output), deadline_s=left_s)

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

    def append(self, token: int, now: float) -> None:
        """Add a token to the output."""
        self.output.append(token)
        if self.first_token_at is None:
            self.first_token_at = now

    def ends_with(self, token: int) -> FinishReason | None:
        """Return the reason to end if `token`, just appended, is the last one; None if more may follow."""
        sampling = self.request.sampling
        if token in sampling.stop_token_ids or (not sampling.ignore_eos and token in self.next_draw.eos_token_ids):
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
    sequences: Iterable[Sequence], arrived: Iterable[DecodeCommand], events: Iterable[Event], error: PDInferError
) -> list[Event]:
    """Return what to tell a host after a step that stopped at an unknown point: the `events` of that step except for
    grants, whose rooms are gone, and one end for each of `sequences` and for each request that `arrived`, unless its
    end is among the events already."""
    ends: list[Event] = [event for event in events if not isinstance(event, Granted)]
    tokens = [event for event in ends if isinstance(event, TokenEvent)]
    ended = {event.request_id for event in ends if isinstance(event, Refused)}
    ended |= {event.request_id for event in tokens if event.finish_reason is not None}
    for sequence in sequences:
        if sequence.request_id not in ended:
            emitted = [event.index + 1 for event in tokens if event.request_id == sequence.request_id]
            del sequence.output[max([sequence.num_told, *emitted]) :]
            ends.append(sequence.event(finish_reason=FinishReason.FAILED, error=error))
            ended.add(sequence.request_id)
    for command in arrived:
        match command:
            case SubmitDecode(Request(request_id=str(request_id))) if request_id not in ended:
                ends.append(Refused(request_id=request_id, error=error))
    return ends


@attrs.define(eq=False, kw_only=True)
class Prompt(ScheduledPrompt):
    """One accepted grant.

    `pages` is its page table: known pages of its beginning, then new ones. In a pool that both ends share, the new
    ones are the grant's own. All other pages are `held` until everything is sent. The first `num_cached` of the tokens
    in the pages are from earlier requests. Tokens up to `num_pushed` are at decode or on the way. `keys` are the keys
    of its full pages. When it came, the pool knew its first `num_found` tokens. `pushed_at` is when the first of them
    were pushed."""

    request: Request
    grant: PageGrant
    num_pushed: int
    processor: LogitsProcessor | None = None
    keys: list[bytes] = attrs.field(factory=list)
    pages: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    started_at: float = 0.0
    pushed_at: float | None = None
    num_found: int = 0
    num_cached: int = 0
    sent: Transfer | Sent | None = None
    landed: bool = False

    @classmethod
    def of(cls, request: Request, grant: PageGrant, arrival: int, now: float) -> Prompt:
        """Return the prompt of a request that comes now, as number `arrival`."""
        return cls(
            request=request,
            grant=grant,
            arrival=arrival,
            submitted_at=now,
            deadline_at=None if request.deadline_s is None else now + request.deadline_s,
            priority=request.priority,
            is_resumed=bool(request.output),
            alone=request.alone,
            num_tokens=len(request.prompt) + len(request.output),
            num_pushed=grant.tokens.start,
        )
