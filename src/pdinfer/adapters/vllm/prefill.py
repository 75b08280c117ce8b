"""Prefill in vLLM, decode here: a vLLM whose connector sends is a prefill port of a Pairing.

    Pairing ── submit(request, grant) ──► VLLMPrefill ── the grant ──► decode's channel ──► vLLM's worker
                                              └───────── the prompt ──► vLLM's server ──► scheduler: joined by the room
    decode ◄── pages, layer by layer; the first token a step later ── vLLM's worker

The grant goes over the link that decode's channel has to vLLM, and the prompt the way in which vLLM takes prompts. What
decode does not want any more it reports to vLLM's worker over the link, and only the answer to that gives the pages
back."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from pdinfer.adapters.vllm.messages import proof_of
from pdinfer.adapters.vllm.port import VLLMPort, engines_of
from pdinfer.adapters.vllm.prompts import Answer, Complete, Server, body_of
from pdinfer.checks import typed
from pdinfer.engine.decode import DecodeEngine
from pdinfer.errors import PDInferError
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.stats import PrefillLoad, QueuedSizes
from pdinfer.types import Event, PageGrant, Request

MAX_CONCURRENT = 64


class VLLMPrefill(VLLMPort[DecodeEngine, Answer, tuple[str, PageGrant]]):
    """A vLLM that computes prompts for decode engines of this process: a `PrefillPort`, made by `connect`."""

    role = "prefill"

    @typed
    def submit(self, request: Request, grant: PageGrant) -> None:
        """Send the grant to vLLM's worker, and the prompt to its server."""
        channel = self._channel_of(grant)
        sends = {"do_remote_decode": True, "room": grant.room.hex(), "first_token": True}
        try:
            body = body_of(request, sends)
            channel.receiver.offer(attrs.evolve(grant, request_id=proof_of(request.tokens)))
        except PDInferError as error:
            channel.abort(grant, error)
            return
        self._open[grant.room] = request.request_id or "", grant
        self._num_tokens += len(grant.tokens)
        self._prompts.ask(grant.room, body)

    @typed
    def cancel(self, request_id: str) -> None:
        """Keep a prompt from vLLM that it does not have yet, and leave a server that has it, so that vLLM ends it. One
        that a function of the host has given to vLLM is computed, and not sent."""
        for room, (known, _) in list(self._open.items()):
            if known == request_id:
                self._prompts.drop(room)

    def step(self) -> list[Event]:
        """Take vLLM's answers: a prompt that it did not compute is aborted at decode. One that decode has given up is
        kept from vLLM, or ended there. Raises TransferError when no decode has a link to vLLM any more."""
        for answer in self._inbox.take():
            _, grant = self._open.pop(answer.room, ("", None))
            if grant is not None and answer.error is not None:
                self._channel_of(grant).abort(grant, answer.error)
        for room, (_, grant) in self._open.items():
            if not self._channel_of(grant).receiver.awaits(room):
                self._prompts.drop(room)
        self._check_links()
        return []

    def load(self) -> PrefillLoad:
        """Return what vLLM was asked for and has not answered. Its pages are its own business."""
        sizes = [len(grant.tokens) for _, grant in list(self._open.values())]
        layout = self._probe.layout
        return PrefillLoad(
            address=self.address,
            num_free_pages=1,
            num_total_pages=1,
            page_size=layout.page_size,
            token_bytes=layout.token_bytes,
            num_tokens=self._num_tokens,
            num_queued_requests=len(sizes),
            num_queued_tokens=sum(sizes),
            queued=QueuedSizes.of(sizes),
            kv=self._kv_stats(),
        )

    def _channel_of(self, grant: PageGrant) -> KVChannel:
        return self._engine_at(grant.destinations[0]).channel


@typed
def connect(
    decode: DecodeEngine | Sequence[DecodeEngine],
    *,
    kv: str,
    server: str | Complete,
    key: bytes | None = None,
    max_model_len: int | None = None,
    max_concurrent: int = MAX_CONCURRENT,
) -> VLLMPrefill:
    """Return a vLLM as a prefill port, for a Pairing with these decode engines of this process.

    `kv` is the `listen` of vLLM's connector, whose role sends. `server` is the URL of its HTTP server
    ("http://127.0.0.1:8100"), or a function that gives the body of a completion to vLLM in another way, and returns
    when it is computed (see `prompts.Complete`). `key` is that of decode's channel. vLLM is asked for at most
    `max_concurrent` prompts at a time. `max_model_len` is vLLM's, which a server is asked for.

    First both engines compute the same prompt, here in the calling thread, and what they leave in their caches is
    compared: a kernel that is wrong in one of them would give wrong tokens and no error. Raises LayoutMismatch when
    model, weights, dtype or these caches differ, with the field or the layer and component; TransferError when vLLM
    cannot be reached or does not compute; ConfigError for decodes that are not served."""
    reached = Server(server) if isinstance(server, str) else server
    engines = engines_of(decode)
    return VLLMPrefill(engines, kv, reached, key=key, max_model_len=max_model_len, max_concurrent=max_concurrent)
