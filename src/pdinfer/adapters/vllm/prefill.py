"""Prefill in vLLM, decode here: a vLLM whose connector sends is a prefill port of a Pairing.

    Pairing ── submit(request, grant) ──► VLLMPrefill ── the grant ──► decode's channel ──► vLLM's worker
                                              └───────── the prompt ──► vLLM's server ──► scheduler: joined by the room
    decode ◄── pages, layer by layer; the first token a step later ── vLLM's worker

The grant goes over the link that decode's channel has to vLLM, and the prompt the way in which vLLM takes prompts. What
decode does not want any more it tells vLLM's worker over the link, and only the answer to that gives the pages back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pdinfer.adapters.vllm.probe import Probe
from pdinfer.adapters.vllm.prompts import Answer, Complete, Prompts, Server, body_of
from pdinfer.checks import typed
from pdinfer.engine.decode import DecodeEngine
from pdinfer.errors import ConfigError, LayoutMismatch, PDInferError, TransferError
from pdinfer.inbox import Inbox
from pdinfer.process.forked import OfOneProcess
from pdinfer.stats import ChannelStats, PeerStats, PrefillLoad, QueuedSizes
from pdinfer.types import Event, PageGrant, PeerAddress, Request, RequestLimits, peer_key

LINK_S = 10.0
"""How long dialling a vLLM that was lost may take."""
GONE_S = 1.0
"""How long no decode may have a link before the port counts as lost. A link that broke is dialled again meanwhile."""
AGAIN_S = 0.25
"""The pause between two attempts to reach a vLLM that was lost."""
MAX_CONCURRENT = 64


class VLLMPrefill(OfOneProcess):
    """A vLLM that computes prompts for decode engines of this process: a `PrefillPort`, made by `connect`.

    `load`, `cancel` and `notify` may be called from any thread, everything else from the one that steps the Pairing.
    When vLLM is lost, `step` raises TransferError, and `recover` returns whether one is back at the same addresses. A
    vLLM that was restarted is probed as the first one was.
    """

    role = "prefill"

    def __init__(
        self,
        decodes: Sequence[DecodeEngine],
        kv: str,
        complete: Complete,
        probe: Probe,
        *,
        key: bytes | None,
        limits: RequestLimits,
        max_concurrent: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = probe.check(kv, complete, key)
        self.limits = limits
        self._decodes = {peer_key(decode.address): decode for decode in decodes}
        self._kv = kv
        self._complete = complete
        self._probe = probe
        self._key = key
        self._max_concurrent = max_concurrent
        self._clock = clock
        self._inbox: Inbox[Answer] = Inbox()
        self._prompts = Prompts(complete, max_concurrent, self._inbox.put)
        self._open: dict[bytes, tuple[str, PageGrant]] = {}
        self._num_tokens = 0
        self._missing_since: float | None = None
        self._returning: threading.Thread | None = None
        self._returned: PeerAddress | PDInferError | None = None
        self._closed = threading.Event()

    def __repr__(self) -> str:
        return f"VLLMPrefill({self.address}, {len(self._open)} prompts at vLLM)"

    @property
    def addresses(self) -> tuple[PeerAddress, ...]:
        """The one rank that writes."""
        return (self.address,)

    # -- links ------------------------------------------------------------------------------------------------------

    @typed
    def connect(self, peer: PeerAddress, *, timeout_s: float = 10.0) -> None:
        """Have the decode at `peer` dial vLLM. Raises TransferError when it cannot, when another vLLM answers by now,
        or for a decode that was not given to `connect`."""
        decode = self._decode_at(peer)
        if timeout_s <= 0:
            decode.connect(self.address, timeout_s=timeout_s)
        elif peer_key(decode.channel.dial(self._kv, timeout_s=timeout_s)) != peer_key(self.address):
            raise TransferError(f"{self._kv} answers as another engine: its vLLM was restarted")

    @typed
    def disconnect(self, peer: PeerAddress) -> None:
        """Have the decode at `peer` close its link. What vLLM still owed it settles as ABORTED."""
        self._decode_at(peer).disconnect(self.address)

    def _decode_at(self, peer: PeerAddress) -> DecodeEngine:
        decode = self._decodes.get(peer_key(peer))
        if decode is None:
            raise TransferError(f"{peer} was not given to pd.adapters.vllm.connect: give it all decodes of the Pairing")
        return decode

    # -- requests ---------------------------------------------------------------------------------------------------

    @typed
    def submit(self, request: Request, grant: PageGrant) -> None:
        """Send the grant to vLLM's worker, and the prompt to its server."""
        channel = self._decode_at(grant.destinations[0]).channel
        sends = {"do_remote_decode": True, "room": grant.room.hex(), "first_token": True}
        try:
            body = body_of(request, sends)
            channel.offer(grant)
        except PDInferError as error:
            channel.abort(grant, error)
            return
        self._open[grant.room] = request.request_id or "", grant
        self._num_tokens += len(grant.tokens)
        self._prompts.ask(grant.room, body)

    @typed
    def cancel(self, request_id: str) -> None:
        """Keep a prompt from vLLM that it does not have yet. One that it has is computed, and not sent."""
        for room, (known, _) in list(self._open.items()):
            if known == request_id:
                self._prompts.drop(room)

    def step(self) -> list[Event]:
        """Take vLLM's answers: a prompt that it did not compute is aborted at decode. Raises TransferError when no
        decode has a link to vLLM any more."""
        for answer in self._inbox.take():
            _, grant = self._open.pop(answer.room, ("", None))
            if grant is not None and answer.error is not None:
                self._decode_at(grant.destinations[0]).channel.abort(grant, answer.error)
        if any(decode.channel.connected(self.address) for decode in self._decodes.values()):
            self._missing_since = None
            return []
        now = self._clock()
        self._missing_since = now if self._missing_since is None else self._missing_since
        if now - self._missing_since > GONE_S:
            self._forget()
            raise TransferError(f"the vLLM at {self._kv} is gone: no decode has a link to it")
        return []

    def load(self) -> PrefillLoad:
        """Return what vLLM was asked for and has not answered. Its pages are its own business."""
        sizes = [len(grant.tokens) for _, grant in list(self._open.values())]
        layout = self._probe.layout
        peers = tuple(
            PeerStats(address=decode.address, connected=decode.channel.connected(self.address))
            for decode in self._decodes.values()
        )
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
            kv=ChannelStats(peers=peers),
        )

    @typed
    def notify(self, listener: Callable[[], None]) -> None:
        """Call `listener`, from any thread, whenever a step would do something."""
        self._inbox.listen(listener)

    @typed
    def wait(self, timeout_s: float) -> bool:
        """Sleep until a step would do something, at most `timeout_s`, and return whether it would."""
        return self._inbox.wait(timeout_s)

    def close(self) -> None:
        """Close the links to vLLM, which goes on by itself. What it still owed settles as ABORTED."""
        if not self._closed.is_set():
            self._closed.set()
            self._forget()
            for decode in self._decodes.values():
                decode.disconnect(self.address)

    # -- a vLLM that was lost ---------------------------------------------------------------------------------------

    def recover(self) -> bool:
        """Return whether vLLM is back. Raises LayoutMismatch when the one that is back is not the same model, or does
        not compute as it should."""
        if self._returning is None:
            self._returned = None
            self._returning = threading.Thread(target=self._reach_again, name="pdinfer-vllm-return", daemon=True)
            self._returning.start()
        match self._returned:
            case None:
                return False
            case PDInferError() as error:
                raise error
            case peer:
                self.address, self._missing_since, self._returning = peer, None, None
                self._prompts = Prompts(self._complete, self._max_concurrent, self._inbox.put)
                return True

    def _forget(self) -> None:
        """Ask for nothing more. Decodes that had asked learn of it by the loss of their links."""
        self._prompts.close()
        self._open.clear()

    def _reach_again(self) -> None:
        while not self._closed.is_set():
            try:
                self._returned = self._reach()
            except LayoutMismatch as error:
                self._returned = error
            except PDInferError:
                self._closed.wait(AGAIN_S)
                continue
            self._inbox.wake()
            return

    def _reach(self) -> PeerAddress:
        """Link every decode to vLLM, and return who it is. One that was restarted is probed."""
        first, *others = self._decodes.values()
        peer = first.channel.dial(self._kv, timeout_s=LINK_S)
        try:
            is_same = peer_key(peer) == peer_key(self.address)
            probed = peer if is_same else self._probe.check(self._kv, self._complete, self._key)
            for decode in others:
                decode.channel.dial(self._kv, timeout_s=LINK_S)
            if peer_key(probed) != peer_key(peer):
                raise TransferError(f"the vLLM at {self._kv} was restarted again")
        except PDInferError:
            for decode in self._decodes.values():
                decode.disconnect(peer)
            raise
        return peer


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
    cannot be reached or does not compute; ConfigError for decodes that are not served.
    """
    decodes = [decode] if isinstance(decode, DecodeEngine) else list(decode)
    if not decodes:
        raise ConfigError("pd.adapters.vllm.connect needs a decode engine to connect vLLM with")
    for each in decodes:
        if each.model.topology.world_size > 1:
            raise ConfigError(f"vLLM can write to decodes of one rank, and {each} is one of several")
    model, layout = decodes[0].model, decodes[0].pool.layout
    complete = Server(server) if isinstance(server, str) else server
    if max_model_len is None and isinstance(complete, Server):
        max_model_len = complete.max_model_len()
    most = model.config.max_position_embeddings
    max_tokens = most if max_model_len is None else min(max_model_len, most)
    limits = RequestLimits(name="vllm", vocab_size=model.config.vocab_size, max_tokens=max_tokens)
    probe = Probe.of(model, layout, max_tokens)
    return VLLMPrefill(decodes, kv, complete, probe, key=key, limits=limits, max_concurrent=max_concurrent)
