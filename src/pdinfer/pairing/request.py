"""One request in a Pairing, and its attempts: where it was sent, how far it got, and when it has to end."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import cached_property

import attrs

from pdinfer.errors import PDInferError, RequestError, TransferError
from pdinfer.kv.prefix import KeyScheme
from pdinfer.pairing.losses import Losses
from pdinfer.pairing.stopping import Stopping
from pdinfer.scheduling.rules import due_at, forecast_tokens
from pdinfer.types import COMPLETE, Choice, FinishReason, PeerAddress, Request, Timeline, TokenEvent, Usage

OVERDUE_S = 0.02
"""How often to check whether a port has ended a request whose deadline has passed."""
DEADLINE_GRACE_S = 0.1
"""How long after its deadline a request may be ended by its decode. After that the Pairing ends it."""
CANCEL_GRACE_S = 0.05
"""The same after a request was cancelled."""
STOP_GRACE_S = 1.0
"""The same after `Request.stop` ended a request. Its text is complete, and only decode knows all of its usage."""

End = tuple[FinishReason, PDInferError | None]
"""How a request ends that no decode ends."""
TOKENLESS = frozenset(FinishReason) - COMPLETE


@attrs.define(eq=False)
class PromptKeys:
    """The keys of the full pages of one prompt and its output so far, made once for each scheme and set of writers."""

    request: Request
    _made: dict[tuple[KeyScheme, tuple[PeerAddress, ...]], list[bytes]] = attrs.field(factory=dict, init=False)

    def of(self, scheme: KeyScheme, writers: tuple[PeerAddress, ...] = ()) -> list[bytes]:
        """Return the keys that a pool would find, which leaves out the page of the last token: that one runs."""
        writers = writers if scheme.by_writer else ()
        keys = self._made.get((scheme, writers))
        if keys is None:
            chain = scheme.chain(self.request.cache_salt, writers)
            tokens = self.request.tokens
            chain.extend(tokens)
            keys = self._made[scheme, writers] = chain.keys[: (len(tokens) - 1) // scheme.page_size]
        return keys


@attrs.define(eq=False)
class Attempt:
    """One try of a request, from the moment that it waits for a pair. It ends with the request, or when its decode is
    lost or has no room. What is tried again gets a new one, so whatever is here is forgotten then.

    It waits in the queue, since `waiting_since`, while `decode` is None. When its pair was chosen, its prefill had to
    compute `prefill_tokens`, and `link_bytes` had to cross the link. `forwarded` says that prefill has the last of its
    grants; before that, only the Pairing knows that it is coming. `landed` is set by the first token after a grant,
    when prefill is done with it. `tokens` came in this attempt, the first of them at `runs_from_s`. `give_up_at` is
    when it stops waiting for a missing port or link. Its decode has no prefill for it since `stranded_at`. Both are
    infinite where nothing is missing."""

    waiting_since: float
    prefill: PeerAddress | None = None
    decode: PeerAddress | None = None
    prefill_tokens: int = 0
    link_bytes: int = 0
    num_grants: int = 0
    forwarded: bool = False
    landed: bool = False
    tokens: list[int] = attrs.field(factory=list)
    runs_from_s: float | None = None
    give_up_at: float = math.inf
    stranded_at: float = math.inf

    def needs(self, address: PeerAddress) -> bool:
        """Return whether it cannot go on without this port."""
        return self.decode == address or (self.prefill == address and not self.landed)

    def gives_up(self, now: float, grace_s: float) -> bool:
        """Return whether it has waited in vain for `grace_s`, counted from the first call."""
        self.give_up_at = min(self.give_up_at, now + grace_s)
        return now >= self.give_up_at


@attrs.define(eq=False)
class TrackedRequest:
    """One unfinished request with its id and seed filled in, and the `attempt` to serve it.

    `choice` is the last that was made for it, and `queued_s` is how long it waited for that. The host's threads set
    `cancel_wanted`, and `displaced`, which is why it gives its place in the queue to another request. `cancelled` says
    that decode was asked to end it, `failure` why if its host did not ask, and `ends_by` when the Pairing ends it even
    if decode does not answer. `lost` is why it had to leave its last decode, and `losses` are all
    ports that it has lost. Of the decodes that it left, `num_decodes_lost` had granted it pages, and they ran it for
    `streamed_s`. `stopping` looks for the end that `Request.stop` asks for. Once it has come, or the matcher has
    failed, `ending` is the final event: it waits for decode's usage, and later tokens are dropped."""

    request_id: str
    request: Request
    submitted_at: float
    deadline_at: float
    ends_by: float
    attempt: Attempt
    keys: PromptKeys
    num_tokens: int = 0
    choice: Choice | None = None
    queued_s: float = 0.0
    granted_s: float | None = None
    first_token_s: float | None = None
    cancel_wanted: bool = False
    cancelled: bool = False
    failure: PDInferError | None = None
    displaced: PDInferError | None = None
    lost: PDInferError | None = None
    losses: Losses = attrs.field(factory=Losses)
    num_decodes_lost: int = 0
    continued: bool = False
    streamed_s: float = 0.0
    stopping: Stopping | None = None
    ending: TokenEvent | None = None

    @classmethod
    def of(
        cls, request: Request, now: float, default_deadline_s: float | None, random_bytes: Callable[[int], bytes]
    ) -> TrackedRequest:
        """Track a request. An id and a seed are made up where it has none. Raise RequestError when its `stop` fails."""
        request_id, sampling = request.request_id, request.sampling
        if request_id is None:
            request_id = random_bytes(8).hex()
        if sampling.seed is None:
            sampling = attrs.evolve(sampling, seed=int.from_bytes(random_bytes(8), "little"))
        deadline_s = default_deadline_s if request.deadline_s is None else request.deadline_s
        deadline_at = math.inf if deadline_s is None else now + deadline_s
        return cls(
            request_id,
            attrs.evolve(request, request_id=request_id, sampling=sampling, stop=()),
            submitted_at=now,
            deadline_at=deadline_at,
            ends_by=deadline_at + DEADLINE_GRACE_S,
            attempt=Attempt(waiting_since=now),
            keys=PromptKeys(request),
            num_tokens=len(request.output),
            stopping=Stopping(request) if request.stop != () else None,
        )

    @property
    def max_tokens(self) -> int:
        """The tokens of the prompt and the longest output."""
        return len(self.request.prompt) + self.request.sampling.max_new_tokens

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens that prefill has to run: the prompt, and the output so far."""
        return len(self.request.prompt) + self.num_tokens

    @property
    def to_generate(self) -> int:
        """How many tokens it is still expected to get."""
        return max(0, forecast_tokens(self.request) - self.num_prompt_tokens)

    @property
    def is_resumed(self) -> bool:
        """Whether it has output, so that its stream is being read already."""
        return self.num_tokens > 0

    @cached_property
    def due_at(self) -> float:
        """The key by which requests of one priority are ordered."""
        return due_at(self.submitted_at, self.deadline_at)

    # -- when it ends -----------------------------------------------------------------------------------------------

    def end_requested(self, now: float, failure: PDInferError | None = None) -> None:
        """Note that decode was asked to end it: it was cancelled, has stopped or, with `failure`, cannot go on."""
        self.cancelled |= failure is None
        self.failure = self.failure or failure
        self.ends_by = min(self.ends_by, now + (CANCEL_GRACE_S if self.ending is None else STOP_GRACE_S))
        self.attempt.give_up_at = math.inf

    @property
    def is_to_end(self) -> bool:
        """Whether decode was asked to end it."""
        return self.cancelled or self.failure is not None or self.ending is not None

    @property
    def overdue_end(self) -> End:
        """How it ends when its decode has used up its time."""
        if self.cancelled:
            return FinishReason.CANCELLED, None
        if self.failure is not None:
            return FinishReason.FAILED, self.failure
        return FinishReason.DEADLINE, None

    def wakes_at(self, now: float) -> float:
        """Return when to look at it again. Its decode ends it by a clock of its own, so look a little after its
        deadline."""
        if self.attempt.decode is None:
            return min(self.deadline_at, self.attempt.give_up_at)
        look_at = now + OVERDUE_S if now >= self.deadline_at else self.deadline_at
        return min(look_at, self.ends_by, self.attempt.give_up_at)

    # -- when its decode is lost ------------------------------------------------------------------------------------

    def was_computed(self, computing: Collection[str] | None) -> bool:
        """Return whether its port computed rows of it, which that has reported to be `computing`; None if it reports
        nothing."""
        return self.attempt.forwarded if computing is None else self.request_id in computing

    def stays_lost(self, *, may_continue: bool) -> bool:
        """Return whether no other decode may have it: it may break them, or it has given tokens and the host wants no
        more."""
        return self.losses.are_too_many or (self.first_token_s is not None and not may_continue)

    def leave(self, now: float, lost: PDInferError) -> None:
        """Note that it has lost its decode, so that it waits for another one, alone if it may be what breaks them."""
        if self.losses.is_suspect:
            self.request = attrs.evolve(self.request, alone=True)
        self.lost = lost
        self.try_again(now, waiting_since=now)

    def try_again(self, now: float, *, waiting_since: float) -> None:
        """Begin another attempt. It goes on behind the tokens that the host got, like a request that its host resumes.
        Tokens depend on seed and position, so it gives the same ones."""
        attempt = self.attempt
        self.num_decodes_lost += attempt.num_grants > 0
        if attempt.runs_from_s is not None:
            self.continued = True
            self.request = attrs.evolve(self.request, output=(*self.request.output, *attempt.tokens))
            self.keys = PromptKeys(self.request)
            self.streamed_s += now - self.submitted_at - attempt.runs_from_s
        self.attempt = Attempt(waiting_since)  # last: what is interrupted before still has its decode, which ends it

    # -- what others see of it --------------------------------------------------------------------------------------

    def request_at(self, now: float) -> Request:
        """Return the request for the next hop, with the seconds that are left."""
        if self.deadline_at == math.inf:
            return self.request
        return attrs.evolve(self.request, deadline_s=max(0.0, self.deadline_at - now))

    def chosen(self, choice: Choice, now: float) -> None:
        self.choice, self.attempt.prefill, self.attempt.decode = choice, choice.prefill, choice.decode
        self.queued_s = now - self.submitted_at

    def granted(self, now: float) -> None:
        """Note that decode has granted pages, for the first time in this attempt or anew."""
        self.attempt.num_grants += 1
        self.granted_s = now - self.submitted_at
        self.attempt.landed = False

    def passed_on(self, event: TokenEvent, now: float) -> TokenEvent | None:
        """Return decode's event as the host sees it, or None for a token that it does not see: the one with which it
        stops, until decode's last event brings its usage, and those that come in between. Raises TransferError for an
        event that cannot come now."""
        self._check(event)
        attempt = self.attempt
        attempt.landed = True
        if event.token is not None:
            attempt.tokens.append(event.token)
            if attempt.runs_from_s is None:
                attempt.runs_from_s = now - self.submitted_at
                self.first_token_s = attempt.runs_from_s if self.first_token_s is None else self.first_token_s
        if event.at_s is not None:  # in place: a second event for each token cost as much as the rest of it here
            object.__setattr__(event, "at_s", event.at_s + self.queued_s)
        if event.finish_reason is not None:
            event = self._last(event)
        if self.stopping is not None and self.ending is None:
            self.ending = self._stopped(event, self.stopping)
        if self.ending is None:
            return event
        if event.finish_reason is not None:
            return self._ended(self.ending, event.usage)
        self.num_tokens += 1  # those that the host sees count once it has them
        return None

    def _last(self, event: TokenEvent) -> TokenEvent:
        """Return decode's last event with times since the Pairing's submit, where decode counts from its own."""
        if self.failure is not None and event.finish_reason is FinishReason.CANCELLED and not self.cancelled:
            event = attrs.evolve(event, finish_reason=FinishReason.FAILED, error=self.failure)
        if (usage := event.usage) is None:
            return event
        ttft_s = None if usage.ttft_s is None else usage.ttft_s + self.queued_s
        usage = attrs.evolve(
            usage,
            queue_s=usage.queue_s + self.queued_s - self.streamed_s,
            ttft_s=self.first_token_s if self.continued else ttft_s,
            timeline=self._timeline(usage.timeline),
            choice=self.choice,
            num_retries=usage.num_retries + self.num_decodes_lost,
        )
        return attrs.evolve(event, usage=usage)

    def _stopped(self, event: TokenEvent, stopping: Stopping) -> TokenEvent | None:
        """Return the last event of the request if `Request.stop` ends it with this token, or fails on it."""
        try:
            if event.token is None or not stopping.ends_with(event.token):
                return None
        except RequestError as error:
            return failed(self.request_id, error, index=event.index)
        return attrs.evolve(event, finish_reason=FinishReason.STOP)

    @staticmethod
    def _ended(ending: TokenEvent, usage: Usage | None) -> TokenEvent:
        """Return the last event with its usage, which does not count the tokens behind it."""
        num_tokens = ending.index + (ending.token is not None)
        return attrs.evolve(ending, usage=usage and attrs.evolve(usage, output_tokens=num_tokens))

    def _check(self, event: TokenEvent) -> None:
        """Check that events come in order and match what the request asked for."""
        usage = event.usage
        num_tokens = self.num_tokens + (event.token is not None)
        reason = None
        if event.index != self.num_tokens:
            reason = f"token {event.index} came when token {self.num_tokens} was due"
        elif (event.token is None) != (event.finish_reason in TOKENLESS):
            reason = f"a token of {event.token} came with {event.finish_reason}"
        elif len(event.top_logprobs) > (self.request.sampling.logprobs or 0):
            reason = f"{len(event.top_logprobs)} log-probabilities came that nobody asked for"
        elif usage is not None and usage.output_tokens != num_tokens:
            reason = f"its usage counts {usage.output_tokens} tokens, and {num_tokens} came"
        elif usage is not None and usage.prompt_tokens != len(self.request.prompt):
            reason = f"its usage counts {usage.prompt_tokens} tokens of its prompt of {len(self.request.prompt)}"
        elif usage is not None and usage.cached_tokens > len(self.request.prompt) + num_tokens:
            reason = f"its usage says that {usage.cached_tokens} of its tokens were cached, more than it has"
        elif usage is not None and usage.num_accepted_tokens > usage.num_draft_tokens:
            reason = f"its usage says that {usage.num_accepted_tokens} of {usage.num_draft_tokens} drafts were accepted"
        elif event.finish_reason is FinishReason.CANCELLED and not self.is_to_end:
            reason = "nobody had cancelled it: the decode was closed, by its host or with another of its ranks"
        if reason is not None:
            raise TransferError(f"a decode sent an impossible event for request {self.request_id!r}: {reason}")

    def final_event(self, reason: FinishReason, error: PDInferError | None, now: float) -> TokenEvent:
        """Return the final event of a request that no decode ends. One that has stopped ends as it would have."""
        usage = Usage(
            prompt_tokens=len(self.request.prompt),
            output_tokens=self.num_tokens,
            cached_tokens=0,
            queue_s=(now - self.submitted_at if self.attempt.decode is None else self.queued_s) - self.streamed_s,
            ttft_s=self.first_token_s,
            timeline=self._timeline(None),
            choice=self.choice,
            num_retries=max(0, self.attempt.num_grants - 1) + self.num_decodes_lost,
        )
        if self.ending is not None:
            return self._ended(self.ending, usage)
        return TokenEvent(
            request_id=self.request_id,
            token=None,
            index=self.num_tokens,
            finish_reason=reason,
            error=error,
            usage=usage,
            at_s=now - self.submitted_at,
        )

    def _timeline(self, decodes: Timeline | None) -> Timeline:
        """Return decode's timeline counted from the Pairing's submit or, without one, what the Pairing saw itself."""
        if decodes is None:
            queued_s = None if self.attempt.decode is None and self.lost is None else self.queued_s
            return Timeline(queued_s=queued_s, granted_s=self.granted_s, first_token_s=self.first_token_s)
        stages = {stage: None if at is None else at + self.queued_s for stage, at in attrs.asdict(decodes).items()}
        if self.continued:
            stages["first_token_s"] = self.first_token_s
        return Timeline(**stages)


def failed(request_id: str, error: PDInferError, *, index: int = 0) -> TokenEvent:
    """Return the final event of a request that fails after `index` tokens, without a usage."""
    return TokenEvent(request_id=request_id, token=None, index=index, finish_reason=FinishReason.FAILED, error=error)
