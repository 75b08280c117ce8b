"""A vLLM as a port of a Pairing: what prefill and decode in vLLM have in common, whichever engines are here."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Generic, TypeVar

from pdinfer.adapters.vllm.probe import Probe
from pdinfer.adapters.vllm.prompts import Answer, Complete, Prompts, Server
from pdinfer.checks import typed
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import ConfigError, LayoutMismatch, Overloaded, PDInferError, TransferError
from pdinfer.inbox import Inbox
from pdinfer.process.forked import OfOneProcess
from pdinfer.process.threads import start
from pdinfer.stats import ChannelStats, PeerStats
from pdinfer.types import PeerAddress, PeerKey, RequestLimits, peer_key

LINK_S = 10.0
"""Seconds that dialling a vLLM that was lost may take."""
GONE_S = 1.0
"""Seconds without a link to any engine before the port counts as lost. A link that broke is dialled again meanwhile."""
AGAIN_S = 0.25
"""The pause between two attempts to reach a vLLM that was lost."""

AnyEngine = TypeVar("AnyEngine", PrefillEngine, DecodeEngine)
Item = TypeVar("Item")
Open = TypeVar("Open")


def engines_of(given: AnyEngine | Sequence[AnyEngine]) -> tuple[AnyEngine, ...]:
    """Return the engines that a vLLM is to be connected with. Raises ConfigError for those that are not served."""
    engines = tuple(given) if isinstance(given, Sequence) else (given,)
    if not engines:
        raise ConfigError("a vLLM is connected with engines of this process, and none was given")
    for engine in engines:
        if engine.model.topology.world_size > 1:
            raise ConfigError(f"vLLM links to engines of one rank, and {engine} is one of several")
    return engines


class VLLMPort(OfOneProcess, Generic[AnyEngine, Item, Open]):
    """A vLLM whose connector listens at `kv`, and that works with `engines` of this process, whose channels have this
    `key`. `complete` has it compute a prompt. `_open` has the requests that are there, by their rooms. `cancel`, `load`
    and `notify` may be called from any thread, everything else from the one that steps the Pairing.

    Every vLLM is probed before it serves, see `Probe.check`. When it is lost, `step` raises TransferError, and
    `recover` returns whether one is back at the same address."""

    def __init__(
        self,
        engines: Sequence[AnyEngine],
        kv: str,
        complete: Complete,
        *,
        key: bytes | None,
        max_model_len: int | None,
        max_concurrent: int,
    ) -> None:
        model, layout = engines[0].model, engines[0].pool.layout
        if max_model_len is None and isinstance(complete, Server):
            max_model_len = complete.max_model_len()
        most = model.config.max_position_embeddings
        max_tokens = most if max_model_len is None else min(max_model_len, most)
        self.limits = RequestLimits(name="vllm", vocab_size=model.config.vocab_size, max_tokens=max_tokens)
        self._kv, self._complete, self._key = kv, complete, key
        self._probe = Probe.of(model, layout, max_tokens)
        self.address = self._probe.check(kv, complete, key)
        self._engines: dict[PeerKey, AnyEngine] = {peer_key(engine.address): engine for engine in engines}
        self._max_concurrent = max_concurrent
        self._clock = time.monotonic
        self._inbox: Inbox[Item | Answer] = Inbox()
        self._open: dict[bytes, Open] = {}
        self._num_tokens = 0
        self._prompts = self._begin()
        self._missing_since: float | None = None
        self._returning: Future[PeerAddress] | None = None
        self._closed = threading.Event()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address}, {len(self._open)} requests at vLLM)"

    @property
    def addresses(self) -> tuple[PeerAddress, ...]:
        """The one rank of vLLM."""
        return (self.address,)

    @typed
    def connect(self, peer: PeerAddress, *, timeout_s: float = 10.0) -> None:
        """Have the engine at `peer` dial vLLM. Raises TransferError when it cannot, when another vLLM answers by now,
        or for an engine that this vLLM was not connected with."""
        engine = self._engine_at(peer)
        # a call that may not wait dials the address it knows, without asking who answers there
        if timeout_s <= 0:
            engine.connect(self.address, timeout_s=timeout_s)
        elif peer_key(engine.channel.links.dial(self._kv, timeout_s=timeout_s)) != peer_key(self.address):
            raise TransferError(f"{self._kv} answers as another engine: its vLLM was restarted")

    @typed
    def disconnect(self, peer: PeerAddress) -> None:
        """Have the engine at `peer` close its link. What one end still owed the other settles as ABORTED."""
        self._engine_at(peer).disconnect(self.address)

    @typed
    def notify(self, listener: Callable[[], None]) -> None:
        """Call `listener`, from any thread, whenever a step would do something."""
        self._inbox.listen(listener)

    @typed
    def wait(self, timeout_s: float) -> bool:
        """Sleep until a step would do something, at most `timeout_s`, and return whether it would."""
        return self._inbox.wait(timeout_s)

    def close(self) -> None:
        """Close the links to vLLM, which goes on by itself."""
        if not self._closed.is_set():
            self._closed.set()
            self._forget()
            for engine in self._engines.values():
                engine.disconnect(self.address)

    def recover(self) -> bool:
        """Return whether vLLM is back. Raises LayoutMismatch when the one that is back has another model, or does not
        compute as it should."""
        if self._returning is None:
            returning: Future[PeerAddress] = Future()
            reach = partial(self._reach_again, returning)
            with contextlib.suppress(Overloaded):
                start(threading.Thread(target=reach, name="pdinfer-vllm-return", daemon=True))
                self._returning = returning
        if self._returning is None or not self._returning.done():
            return False
        self.address, self._missing_since, self._returning = self._returning.result(), None, None
        self._prompts = self._begin()
        return True

    # -- for the two ports ------------------------------------------------------------------------------------------

    def _begin(self) -> Prompts:
        return Prompts(self._complete, self._max_concurrent, self._inbox.put)

    def _forget(self) -> None:
        """Forget the requests of a vLLM that is lost or left alone. The engines here learn of it by their links."""
        self._prompts.close()
        self._open.clear()

    def _engine_at(self, peer: PeerAddress) -> AnyEngine:
        engine = self._engines.get(peer_key(peer))
        if engine is None:
            raise TransferError(f"this vLLM was not connected with {peer}: give all engines of the Pairing")
        return engine

    def _check_links(self) -> None:
        """Raise TransferError when no engine has had a link to vLLM for GONE_S."""
        if any(engine.channel.connected(self.address) for engine in self._engines.values()):
            self._missing_since = None
            return
        now = self._clock()
        self._missing_since = now if self._missing_since is None else self._missing_since
        if now - self._missing_since > GONE_S:
            self._forget()
            raise TransferError(f"the vLLM at {self._kv} is gone: nothing here has a link to it")

    def _kv_stats(self) -> ChannelStats:
        return ChannelStats(
            peers=tuple(
                PeerStats(address=engine.address, connected=engine.channel.connected(self.address))
                for engine in self._engines.values()
            )
        )

    # -- a vLLM that was lost ---------------------------------------------------------------------------------------

    def _reach_again(self, returning: Future[PeerAddress]) -> None:
        while not self._closed.is_set():
            try:
                returning.set_result(self._reach())
            except LayoutMismatch as error:
                returning.set_exception(error)
            except PDInferError:
                self._closed.wait(AGAIN_S)
                continue
            self._inbox.wake()
            return

    def _reach(self) -> PeerAddress:
        """Link every engine to vLLM, and return who it is. One that was restarted is probed."""
        first, *others = self._engines.values()
        peer = first.channel.links.dial(self._kv, timeout_s=LINK_S)
        try:
            is_known = peer_key(peer) == peer_key(self.address)
            probed = peer if is_known else self._probe.check(self._kv, self._complete, self._key)
            for other in others:
                other.channel.links.dial(self._kv, timeout_s=LINK_S)
            if peer_key(probed) != peer_key(peer):
                raise TransferError(f"the vLLM at {self._kv} was restarted again")
        except PDInferError:
            # half of the links would look like a vLLM that is back
            for engine in self._engines.values():
                engine.disconnect(peer)
            raise
        return peer
