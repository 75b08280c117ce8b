"""One request inside a Pairing: where it was sent and how far it got."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs

from pdinfer.errors import PDInferError, TransferError
from pdinfer.types import FinishReason, PeerAddress, Request, RequestShape, TokenEvent, Usage

OVERDUE_S = 0.02
"""How often to look whether a port has ended a request whose deadline is over."""


@attrs.define(eq=False)
class Ticket:
    """One unfinished request, its id and seed filled in. It waits in the line while `decode` is None. `landed` is set
    by the first token after a grant: from then on prefill is out of it. `forwarded` says that prefill has the attempt
    under way; before that only we know that it is coming. `failure` is why we had decode end it."""

    request_id: str
    request: Request
    submitted_at: float
    deadline_at: float | None
    prefill: PeerAddress | None = None
    decode: PeerAddress | None = None
    line_s: float = 0.0
    num_tokens: int = 0
    forwarded: bool = False
    landed: bool = False
    cancelled: bool = False
    failure: PDInferError | None = None

    @classmethod
    def of(
        cls, request: Request, now: float, default_deadline_s: float | None, random_bytes: Callable[[int], bytes]
    ) -> Ticket:
        """Makes up an id and a seed where the request has none."""
        request_id, sampling = request.request_id, request.sampling
        if request_id is None:
            request_id = random_bytes(8).hex()
        if sampling.seed is None:
            sampling = attrs.evolve(sampling, seed=int.from_bytes(random_bytes(8), "little"))
        deadline_s = default_deadline_s if request.deadline_s is None else request.deadline_s
        return cls(
            request_id,
            attrs.evolve(request, request_id=request_id, sampling=sampling),
            submitted_at=now,
            deadline_at=None if deadline_s is None else now + deadline_s,
            num_tokens=len(request.output),
        )

    @property
    def max_tokens(self) -> int:
        """Prompt and output when it has run to its length."""
        return len(self.request.prompt) + self.request.sampling.max_new_tokens

    def needs(self, address: PeerAddress) -> bool:
        """Whether the request cannot go on without this port."""
        return self.decode == address or (self.prefill == address and not self.landed)

    def expired(self, now: float) -> bool:
        """Whether its deadline is over."""
        return self.deadline_at is not None and now >= self.deadline_at

    def wakes_at(self, now: float) -> float | None:
        """When its deadline is worth waking up for. One that a port holds is that port's to end, by a clock and a
        moment of its own: look again a little later."""
        if self.decode is not None and self.expired(now):
            return now + OVERDUE_S
        return self.deadline_at

    def end_in_line(
        self, now: float, most_tokens: Mapping[str, int]
    ) -> tuple[FinishReason, PDInferError | None] | None:
        """Why it need not wait any longer, if so; `most_tokens` is what the ports of each side can hold."""
        if self.expired(now):
            return FinishReason.DEADLINE, None
        side = next((side for side, tokens in most_tokens.items() if self.max_tokens > tokens), None)
        if side is None:
            return None
        return FinishReason.FAILED, TransferError(f"no {side} port is left that holds its {self.max_tokens} tokens")

    def request_at(self, now: float) -> Request:
        """The request as the next hop gets it: with the seconds that are left."""
        left_s = None if self.deadline_at is None else max(0.0, self.deadline_at - now)
        return attrs.evolve(self.request, deadline_s=left_s)

    def shape(self, ordinal: int) -> RequestShape:
        """What a policy may know of it."""
        return RequestShape(
            ordinal=ordinal,
            num_prompt_tokens=len(self.request.prompt),
            num_output_tokens=self.num_tokens,
            max_new_tokens=self.request.sampling.max_new_tokens,
            priority=self.request.priority,
        )

    def passed_on(self, event: TokenEvent) -> TokenEvent:
        """Decode's event as the host sees it: decode counts seconds from its own submit, the host from ours."""
        self.landed = True
        self.num_tokens = event.index + (event.token is not None)
        if self.failure is not None and event.finish_reason is FinishReason.CANCELLED and not self.cancelled:
            event = attrs.evolve(event, finish_reason=FinishReason.FAILED, error=self.failure)
        usage = event.usage
        if usage is None:
            return event
        ttft_s = None if usage.ttft_s is None else usage.ttft_s + self.line_s
        return attrs.evolve(event, usage=attrs.evolve(usage, queue_s=usage.queue_s + self.line_s, ttft_s=ttft_s))

    def final_event(self, reason: FinishReason, error: PDInferError | None, now: float) -> TokenEvent:
        """The end of a request that decode never accepted or whose decode is lost."""
        usage = Usage(
            prompt_tokens=len(self.request.prompt),
            output_tokens=self.num_tokens,
            cached_tokens=0,
            queue_s=now - self.submitted_at if self.decode is None else self.line_s,
            ttft_s=None,
        )
        return TokenEvent(
            request_id=self.request_id,
            token=None,
            index=self.num_tokens,
            finish_reason=reason,
            error=error,
            usage=usage,
        )


def refusal(request: Request, error: PDInferError, spare_id: str) -> TokenEvent:
    """The final event of a request that was never taken; `spare_id` names it when it has no usable id itself."""
    request_id = request.request_id if isinstance(request.request_id, str) else spare_id
    return TokenEvent(request_id=request_id, token=None, index=0, finish_reason=FinishReason.FAILED, error=error)
