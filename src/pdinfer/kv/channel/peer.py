"""The other end of one link: its session, what waits to be sent to it, and what moved between it and us. Also a peer
that is to be dialled."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import attrs

from pdinfer.errors import LayoutMismatch, PDInferError, TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.snapshot import LinkSnapshot
from pdinfer.kv.channel.wire import FrameMac
from pdinfer.kv.layout import KVLayout, Spans
from pdinfer.kv.transports.base import Link, Transfer, Transport
from pdinfer.log import log
from pdinfer.process.locks import EXHAUSTED, new_lock
from pdinfer.process.silence import LINKS, SilenceWatch
from pdinfer.types import PeerAddress, PeerKey, peer_key

MAX_WARNINGS = 20
"""How many are logged in each WINDOW_S. The rest are counted."""
WINDOW_S = 10.0


@attrs.define
class Complaints:
    """A logger of warnings that stops after MAX_WARNINGS in one window. The next window begins with the number of those
    that were left out."""

    clock: Callable[[], float] = time.monotonic
    _since: float = -WINDOW_S
    _num: int = 0

    def warn(self, text: str, *values: object, exc_info: bool = False) -> None:
        """Log as `Logger.warning` does. May be called from any thread; a race miscounts by one."""
        now = self.clock()
        if now - self._since >= WINDOW_S:
            unsaid = self._num - MAX_WARNINGS
            self._since, self._num = now, 0
            if unsaid > 0:
                log.warning("%d more warnings about peers were not logged", unsaid)
        self._num += 1
        if self._num <= MAX_WARNINGS:
            log.warning(text, *values, exc_info=exc_info)


@attrs.define(eq=False)
class Counts:
    """What moved, with one peer or with all. It changes under the channel's lock."""

    bytes_sent: int = 0
    bytes_received: int = 0
    receive_s: float = 0.0
    frames_dropped: int = 0


@attrs.define(eq=False)
class PeerCounts(Counts):
    """The counts of one peer. `granted` is set once there has been a room between it and this end. Until then the peer
    is a guest: this host has given it nothing to do."""

    address: PeerAddress = attrs.field(kw_only=True)
    granted: bool = False
    left_at: float = 0.0
    num_links: int = 0


@attrs.define(eq=False)
class Totals(Counts):
    """The counts of one end over all its peers: the fields of ChannelStats."""

    writes_sent: int = 0
    writes_received: int = 0
    writes_damaged: int = 0


class Occupied(TransferError):
    """There is a link to this peer already, or one is on its way. Trying again finds it, or opens another. `there` is
    who the peer is, where that is known."""

    def __init__(self, message: str, there: PeerAddress | None = None) -> None:
        super().__init__(message)
        self.there = there


@attrs.define(eq=False)
class Write:
    """The payload of a frame; see `Transport.write`. `then` is called exactly once, whatever happens."""

    source: Spans
    ready: Callable[[], None] | None
    then: Callable[[Transfer], None]
    _done: bool = False

    def complete(self, transfer: Transfer) -> None:
        """Note that the memory is no longer read."""
        if not self._done:
            self._done = True
            self.then(transfer)


@attrs.define(eq=False)
class Wanted:
    """A peer that this end dials whenever there is no link to it: next at `due`, and until RELINK_S after `lost_at`."""

    address: PeerAddress
    lost_at: float
    due: float
    attempts: int = 0


@attrs.define(eq=False)
class Arriving:
    """A payload of `num_bytes` that was announced at `since` and is on its way into our pages."""

    data: wire.Data
    heads: range
    num_bytes: int
    since: float


@attrs.define(eq=False)
class Peer:
    """The other end of `link`: its `address` once the handshake is done, or the reason why it is not welcome
    (`refusal`). Between the two, while both ends look for a tensor that differs, `difference` is what is known of the
    reason, and `num_compared` how often the peer has told of tensors. `stepped_at` is the time, by our clock, when the
    engine of that end last looked at its channel.

    `post` may be called from any thread. Everything else belongs to the book of links and changes under its lock."""

    link: Link
    transport: Transport
    nonce: bytes
    dialled: bool
    since: float
    complaints: Complaints
    silence: SilenceWatch = attrs.field(
        init=False, default=attrs.Factory(lambda peer: SilenceWatch(LINKS, peer.since), takes_self=True)
    )
    address: PeerAddress | None = None
    layout: KVLayout | None = None
    difference: LayoutMismatch | None = None
    num_compared: int = 0
    refusal: PDInferError | None = None
    asked_for: PeerAddress | None = None
    stepped_at: float | None = None
    arriving: dict[bytes, Arriving] = attrs.field(factory=dict)
    _ours: FrameMac | None = None
    _theirs: FrameMac | None = None
    _lock: threading.RLock = attrs.field(factory=new_lock)
    _outbox: deque[tuple[bytes, Write | None]] = attrs.field(factory=deque)
    _posting: bool = False
    _opened: bool = False
    _broken: TransferError | None = None

    @property
    def has_session(self) -> bool:
        """Whether the peer's first frame has come, so that every later frame carries a tag."""
        return self._theirs is not None

    @property
    def heads(self) -> range:
        """The heads that its pages hold, none where they have no head axis."""
        return (self.layout and self.layout.heads) or range(0)

    @property
    def key(self) -> PeerKey | None:
        """The identity of the peer, or of the peer that was dialled. None on an accepted link that is not open yet."""
        address = self.address or self.asked_for
        return None if address is None else peer_key(address)

    @property
    def is_pending(self) -> bool:
        """Whether this end dialled and has no answer yet."""
        return self.asked_for is not None and self.address is None and self.refusal is None

    def snapshot(self) -> LinkSnapshot:
        return LinkSnapshot(
            endpoint=self.link.endpoint,
            address=self.address,
            num_frames_waiting=len(self._outbox),
            num_writes_arriving=len(self.arriving),
        )

    def begin_session(self, their_nonce: bytes, key: bytes | None) -> None:
        """Begin to put tags on frames, now that both nonces are known."""
        session = self.nonce + their_nonce if self.dialled else their_nonce + self.nonce
        self._ours, self._theirs = FrameMac(session, self.dialled, key), FrameMac(session, not self.dialled, key)

    def verify(self, tagged: bytes) -> bytes:
        """Return the frame without its tag. Raises TransferError when it is not the next frame of the session."""
        if self._theirs is None:
            raise TransferError(f"{self.link.endpoint} sent a tagged frame before its first one")
        return self._theirs.verify(tagged)

    def open(self, frame: bytes) -> None:
        """Send this end's first frame, the one without a tag, unless it was sent before."""
        with self._lock:
            if self._opened:
                return
            self._opened = True
            self._outbox.append((frame, None))
        self.flush()

    def queue(self, frame: bytes, write: Write | None = None) -> None:
        """Add the tag and queue the frame. Frames leave in the order in which they were queued, whichever thread
        flushes."""
        with self._lock:
            if self._ours is None:
                raise TransferError(f"nothing can be sent to {self.link.endpoint} before its first frame came")
            broken = self._broken
            if broken is None:
                self._outbox.append((self._ours.sign(frame), write))
        if broken is not None and write is not None:
            write.complete(Transfer(0, done=True, error=broken))

    def post(self, frame: bytes, write: Write | None = None) -> None:
        self.queue(frame, write)
        self.flush()

    def flush(self) -> None:
        """Send what is queued, unless another thread is doing so. No lock is held while the transport is called: it may
        call back, or deliver to an end that posts to this one. A frame that the transport cannot send closes the link,
        since no frame after a missing one verifies."""
        with self._lock:
            if self._posting:
                return
            self._posting = True
        while (item := self._next()) is not None:
            try:
                self._send(*item)
            except EXHAUSTED as error:  # it may have hit anything, so whoever steps the engine has to know
                self._break_off(item, error)
                raise
            except Exception as error:  # noqa: BLE001 - what a third party's transport raises must not stop an engine
                is_bug = not isinstance(error, TransferError)
                self.complaints.warn(
                    "a frame could not be sent, %s is given up: %s", self.link.endpoint, error, exc_info=is_bug
                )
                self._break_off(item, error)
                return
            except BaseException as error:
                self._break_off(item, error)
                raise

    def fence(self) -> None:
        self.transport.fence(self.link)

    def _next(self) -> tuple[bytes, Write | None] | None:
        with self._lock:
            if self._outbox:
                return self._outbox.popleft()
            self._posting = False
            return None

    def _send(self, tagged: bytes, write: Write | None) -> None:
        if write is None:
            self.transport.send(self.link, tagged)
        else:
            self.transport.write(self.link, tagged, write.source, ready=write.ready, then=write.complete)

    def _break_off(self, item: tuple[bytes, Write | None], error: BaseException) -> None:
        with self._lock:
            self._broken = TransferError(f"the link to {self.link.endpoint} was closed: a frame failed: {error!r}")
            self.refusal = self.refusal or self._broken
            lost = [item, *self._outbox]
            self._outbox.clear()
            self._posting = False
        for _, write in lost:
            if write is not None:
                write.complete(Transfer(0, done=True, error=self._broken))
        self.fence()
