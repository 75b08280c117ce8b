"""Prefill here, decode in vLLM: a vLLM whose connector receives is a decode port of a Pairing.

    Pairing ── submit(request) ──► VLLMDecode ── the prompt and a room ──► vLLM's server ──► scheduler: blocks
    Granted ◄── prefill's channel, joined by the room ◄── the grant ◄── vLLM's worker
       └──► PrefillEngine ── pages, layer by layer ──► vLLM's worker; tokens ──► VLLMDecode ──► TokenEvent

vLLM computes the last token of a loaded prompt itself, so that is what prefill leaves out. It draws every token."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from pdinfer.adapters.vllm.messages import proof_of
from pdinfer.adapters.vllm.port import VLLMPort, engines_of
from pdinfer.adapters.vllm.prompts import Answer, Piece, Prompts, Server, Stream, body_of
from pdinfer.checks import typed
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import ConfigError, PDInferError, RequestError, TransferError
from pdinfer.kv.channel.channel import turn_away
from pdinfer.stats import DecodeLoad
from pdinfer.types import (
    Event,
    FinishReason,
    Granted,
    PageGrant,
    PeerAddress,
    Refused,
    Request,
    SamplingParams,
    TokenEvent,
    Usage,
)

MAX_STREAMS = 256
ENDS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@attrs.define(eq=False)
class Streamed:
    """A request that vLLM has, to be loaded from `engine`. Its `tokens` have come so far. A `grant` comes when vLLM
    lacks pages."""

    request_id: str
    request: Request
    engine: PrefillEngine
    since: float
    grant: PageGrant | None = None
    tokens: list[int] = attrs.field(factory=list)
    first_token_s: float | None = None

    @property
    def ends_at(self) -> float:
        """Its deadline, by the clock of `since`."""
        return float("inf") if self.request.deadline_s is None else self.since + self.request.deadline_s

    @property
    def num_tokens(self) -> int:
        """The tokens of its context."""
        return len(self.request.tokens) + len(self.tokens)

    def for_prefill(self) -> Request:
        """Return what prefill has to run: all but the last token. The token that it draws is not used."""
        return attrs.evolve(
            self.request,
            prompt=self.request.tokens[:-1],
            output=(),
            sampling=SamplingParams(temperature=0.0, max_new_tokens=1),
        )

    def event(
        self,
        now: float,
        token: int | None = None,
        logprob: float | None = None,
        reason: FinishReason | None = None,
        error: PDInferError | None = None,
    ) -> TokenEvent:
        """Make the event of a token, of the end, or of both."""
        if token is not None:
            self.tokens.append(token)
            self.first_token_s = now - self.since if self.first_token_s is None else self.first_token_s
        num_tokens = len(self.request.output) + len(self.tokens)
        usage = Usage(
            prompt_tokens=len(self.request.prompt),
            output_tokens=num_tokens,
            cached_tokens=0,
            queue_s=0.0,
            ttft_s=self.first_token_s,
        )
        return TokenEvent(
            request_id=self.request_id,
            token=token,
            index=num_tokens - (token is not None),
            logprob=logprob,
            finish_reason=reason,
            error=error,
            usage=None if reason is None else usage,
            at_s=max(0.0, now - self.since),
        )


class VLLMDecode(VLLMPort[PrefillEngine, tuple[bytes, Piece] | str, Streamed]):
    """A vLLM that goes on from prompts of prefill engines of this process: a `DecodePort`, made by `connect_decode`.

    A request whose prefill is lost ends or is computed by vLLM alone, as its `kv_load_failure_policy` says."""

    role = "decode"

    def __init__(
        self,
        engines: Sequence[PrefillEngine],
        kv: str,
        server: Server | Stream,
        *,
        key: bytes | None,
        max_model_len: int | None,
        max_concurrent: int,
    ) -> None:
        for engine in engines:
            if not engine.channel.takes_offers:
                raise ConfigError(f"vLLM sends its grants over the link: make {engine.channel} with takes_offers=True")
        self._stream = stream = server.stream if isinstance(server, Server) else server

        def complete(body: Mapping[str, Any]) -> None:
            for _ in stream(body):
                pass

        reached = server if isinstance(server, Server) else complete
        super().__init__(engines, kv, reached, key=key, max_model_len=max_model_len, max_concurrent=max_concurrent)
        self._left: dict[bytes, Streamed] = {}
        self._events: list[Event] = []
        for engine in engines:
            engine.channel.notify(self._inbox.wake)

    @typed
    def submit(self, request: Request, *, writers: Sequence[PeerAddress]) -> None:
        """Send a request to vLLM's server. A later `step` returns `Granted` for it, or `Refused`."""
        request_id, room, sampling = request.request_id or "", os.urandom(16), request.sampling
        try:
            if len(writers) != 1:
                raise RequestError(f"vLLM takes the pages of one prefill, and this request has {len(writers)} writers")
            engine = self._engine_at(writers[0])
            loads = {"do_remote_prefill": True, "room": room.hex(), "prefill": engine.address.endpoints[0]}
            body = body_of(request, loads, max_tokens=sampling.max_new_tokens - len(request.output))
        except PDInferError as error:
            # a Pairing reads refusals from `step`, as those of an engine
            self._events.append(Refused(request_id=request_id, error=error))
            self._inbox.wake()
            return
        self._open[room] = Streamed(request_id, request, engine, self._clock())
        self._prompts.ask(room, body)

    def change_writers(self, request_id: str, *, writers: Sequence[PeerAddress]) -> None:
        """Do nothing: vLLM's own policy says what becomes of a request whose prefill is lost."""

    @typed
    def cancel(self, request_id: str) -> None:
        """End a request at the next step. vLLM is left at the next token that it says."""
        self._inbox.put(request_id)

    def step(self) -> list[Event]:
        """Return what vLLM sent: grants for prompts, tokens and ends. Raises TransferError when no prefill has a link
        to vLLM any more."""
        for item in self._inbox.take():
            match item:
                case (room, piece):
                    if room in self._open:
                        self._hear(room, piece)
                case Answer(room, error):
                    if room in self._open:
                        lost = TransferError("vLLM ended a request without a last token")
                        self._end(room, FinishReason.FAILED, error or lost)
                    self._left.pop(room, None)
                case str(request_id):
                    for room in [room for room, known in self._open.items() if known.request_id == request_id]:
                        self._end(room, FinishReason.CANCELLED)
        now = self._clock()
        for room in [room for room, known in self._open.items() if known.ends_at <= now]:
            self._end(room, FinishReason.DEADLINE)
        for engine in self._engines.values():
            for grant in engine.channel.poll_offers(self._open.keys() | self._left.keys()):
                self._grant(grant)
        # what has come is returned first: it would be lost with the exception
        if not self._events:
            self._check_links()
        events, self._events = self._events, []
        return events

    @typed
    def wait(self, timeout_s: float) -> bool:
        left_s = min((each.ends_at for each in list(self._open.values())), default=float("inf")) - self._clock()
        return self._inbox.wait(max(0.0, min(timeout_s, left_s))) or left_s <= timeout_s

    def load(self) -> DecodeLoad:
        """Return what vLLM has of ours. Its pages are its own business."""
        known, layout = list(self._open.values()), self._probe.layout
        running = [each.num_tokens for each in known if each.tokens]
        granted = sum(each.grant is not None and not each.tokens for each in known)
        waiting = [each.num_tokens for each in known if not each.tokens]
        return DecodeLoad(
            address=self.address,
            # vLLM keeps its own accounts; 0 would say that no request fits
            num_free_pages=1,
            num_total_pages=1,
            page_size=layout.page_size,
            token_bytes=layout.token_bytes,
            num_tokens=self._num_tokens,
            num_waiting_requests=len(waiting) - granted,
            num_waiting_tokens=sum(waiting),
            num_granted_requests=granted,
            num_running_requests=len(running),
            num_running_tokens=sum(running),
            max_running_requests=self._max_concurrent,
            kv=self._kv_stats(),
        )

    # -- inside -----------------------------------------------------------------------------------------------------

    def _begin(self) -> Prompts:
        return Prompts(self._say, self._max_concurrent, self._inbox.put)

    def _forget(self) -> None:
        super()._forget()
        self._left.clear()

    def _say(self, body: Mapping[str, Any]) -> None:
        """Pass on what vLLM says to a request, until the request has ended here. Runs in a thread."""
        room = bytes.fromhex(body["kv_transfer_params"]["room"])
        for piece in self._stream(body):
            if room not in self._open:
                break
            self._inbox.put((room, piece))

    def _grant(self, grant: PageGrant) -> None:
        """Have a grant written, or turned away when its request has ended meanwhile."""
        known = self._open.get(grant.room) or self._left[grant.room]
        means_it = grant.request_id == proof_of(known.request.tokens[:-1])
        known.grant = attrs.evolve(grant, request_id=known.request_id, writers=(known.engine.address,))
        if means_it and grant.room in self._open:
            self._events.append(Granted(grant=known.grant, request=known.for_prefill()))
            return
        turn_away(known.engine.channel, known.grant, RequestError("the request was ended"))
        if grant.room in self._open:
            why = "vLLM's grant is for other tokens than its request"
            self._end(grant.room, FinishReason.FAILED, TransferError(why))

    def _hear(self, room: bytes, piece: Piece) -> None:
        now, known = self._clock(), self._open[room]
        self._num_tokens += len(piece.tokens)
        logprobs = piece.logprobs or (None,) * len(piece.tokens)
        for left, token, logprob in zip(range(len(piece.tokens))[::-1], piece.tokens, logprobs, strict=True):
            if not 0 <= token < self.limits.vocab_size:
                why = f"vLLM drew token {token}, which is outside the vocabulary of {self.limits.vocab_size}"
                self._end(room, FinishReason.FAILED, TransferError(why))
                return
            reason = ENDS.get(piece.finish_reason or "") if not left else None
            self._events.append(known.event(now, token, logprob, reason))
            if reason is not None:
                del self._open[room]
                return
        if piece.finish_reason is not None:
            why = f"vLLM ended the request with {piece.finish_reason!r}; its log says more"
            self._end(room, FinishReason.FAILED, TransferError(why))

    def _end(self, room: bytes, reason: FinishReason, error: PDInferError | None = None) -> None:
        """End a request here. vLLM learns of it when it sends the next token, or by its prefill when it still waits."""
        self._prompts.drop(room)
        known = self._left[room] = self._open.pop(room)
        self._events.append(known.event(self._clock(), reason=reason, error=error))
        if known.grant is not None and not known.tokens:
            known.engine.cancel(known.request_id)


@typed
def connect_decode(
    prefill: PrefillEngine | Sequence[PrefillEngine],
    *,
    kv: str,
    server: str | Stream,
    key: bytes | None = None,
    max_model_len: int | None = None,
    max_concurrent: int = MAX_STREAMS,
) -> VLLMDecode:
    """Return a vLLM as a decode port, for a Pairing with these prefill engines of this process.

    Their channels take offers: `KVChannel(..., takes_offers=True)`. The role of vLLM's connector is "kv_both", since it
    computes the first prompt that is compared. `server` is the URL of its HTTP server, or a function that gives the
    body of a completion to vLLM in another way and yields what it says (see `prompts.Stream`). All else is as in
    `connect`."""
    reached = Server(server) if isinstance(server, str) else server
    engines = engines_of(prefill)
    return VLLMDecode(engines, kv, reached, key=key, max_model_len=max_model_len, max_concurrent=max_concurrent)
