"""The south side of a channel: what moves frames and bytes, and knows nothing of rooms, grants or requests.

A transport carries two things over a link, in order: *frames* (small control messages) and *writes* (a frame plus a
payload read from our memory and placed in the peer's). The receiving channel decides where the payload goes, and a
sender never names an address of its peer.

    ours                                     theirs
    channel.push ─► transport.write(link, frame, source)
                        ┊ frame ─────────────► receiver.place(link, frame, num_bytes) ─► where | None (discard)
                        ┊ payload ───────────► their memory, at `where`
                    Transfer.done              receiver.placed(link, frame, error)

`source` and `where` are spans, each in the memory of its own end; see `kv/memory.py`. A transport may call `place` when
the frame arrives, or hold it back until some or all of the payload is there. What was sent later waits after it."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

import attrs

from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Memory
from pdinfer.process.forked import NotCopied, OfOneProcess
from pdinfer.process.locks import new_lock
from pdinfer.process.silence import LINKS
from pdinfer.values import Value

MAX_FRAME_BYTES = 1 << 20
MAX_UNTRUSTED_FRAME_BYTES = 2 << 10
"""Enough for the layout of a model of 61 layers with an indexer and an MTP layer, each of its values in two parts."""
TICK_S = LINKS.look_s
"""The interval at which a transport that crosses a process calls `Receiver.tick`."""
MESSAGE_BYTES = 256
"""The size of the objects around a frame that waits."""
SPAN_BYTES = 128
"""The size of one span of a write that waits: a tuple and two ints."""


@attrs.define(eq=False)
class Transfer(Value):
    """Bytes on their way. `done` means that our memory is no longer read; `error` means that they did not all leave.
    `then`, if given, is called with this transfer once it is done, in the thread that completed it."""

    num_bytes: int
    then: Callable[[Transfer], None] | None = None
    done: bool = False
    error: TransferError | None = None

    def complete(self, error: TransferError | None = None) -> None:
        """Mark the transfer done. Called once by the thread that moves the bytes."""
        self.error = error
        self.done = True
        if self.then is not None:
            self.then(self)


@attrs.define(eq=False)
class Link(Value):
    """One connection as both sides of the seam see it. `endpoint` names the other end in errors, logs and snapshots.
    Nothing is dialled by it. Until the channel sets `trusted`, frames are limited to MAX_UNTRUSTED_FRAME_BYTES and
    writes are refused. A transport sets `same_memory` when both ends registered the very same memory, so that equal
    spans need no copy.

    `heard_at` is when the peer last sent a whole message or a byte of a payload, by the channel's clock: that is
    `time.monotonic`, unless the channel was given another. A transport that calls `tick` sets it when it makes the link
    and at every such arrival. If it stays 0.0, the channel takes the peer for silent, whatever arrives, and fences the
    link after `LINKS.silent_s`."""

    endpoint: str
    trusted: bool = False
    same_memory: bool = False
    heard_at: float = 0.0


class Receiver(Protocol):
    """A channel as its transport sees it. The calls for one link come one at a time and in order, from the transport's
    I/O thread or from inside a call to the transport. An exception raised from one closes the link, except from `tick`.

    `authenticates` means that only peers that prove a shared key pass the handshake. A transport may then listen where
    other machines reach it without being told that the network is trusted."""

    @property
    def authenticates(self) -> bool: ...

    def opened(self, link: Link) -> None:
        """A peer has connected to us. Not called for a link that `connect` returned."""

    def received(self, link: Link, frame: bytes) -> None:
        """A control frame."""

    def place(self, link: Link, frame: bytes, num_bytes: int) -> Spans | None:
        """Return where in our memory a write's payload goes, exactly `num_bytes` in all. None discards it: the
        transport reads the payload away and does not call `placed`."""

    def placed(self, link: Link, frame: bytes, error: TransferError | None) -> None:
        """A placed payload is whole and visible, or did not verify. Not called for a discarded payload."""

    def tick(self) -> None:
        """Called about every TICK_S from the I/O thread of a transport that crosses a process, after the thread has
        read what had arrived. This is the place for heartbeats, and for closing (`fence`) links that were silent for
        too long. A transport inside one process need not call it: there no end dies alone."""

    def closed(self, link: Link, error: TransferError | None) -> None:
        """The link is gone, and nothing of it can land any more. Called exactly once per link. `error` is None when
        this end closed the link by `fence` or `close`, otherwise the reason; a peer that closed the link also counts as
        a reason, since it looks like a peer that died. A transfer that was under way ends soon, if it has not ended:
        check its `done`."""


class Transport(Protocol):
    """What a channel needs. Methods may be called from any thread unless they say otherwise, and never hold a lock
    while calling the receiver. One that is derived from this class has its own `ticks` and `cut` where they differ."""

    in_doubt: bool = False
    """Whether a host was interrupted at any line inside a callback at either end of a link, or while it sent. What
    either end knows may be half true, and it may not even know that a link is closed. The channel's to set, too."""

    @property
    def name(self) -> str:
        """A short name for tables: "loopback", "tcp", …"""

    def register(self, memory: Memory, receiver: Receiver) -> tuple[str, ...]:
        """Start to receive. Called once. Return the endpoints that peers may connect to."""

    def connect(self, endpoints: Sequence[str], *, timeout_s: float) -> Link:
        """Open a link to the first endpoint that it understands. Raise TransferError with the reason. A peer that
        speaks first may be heard before this returns. With `timeout_s` 0 it does not wait: the link may still be
        opening (it takes frames already), and a link that cannot be opened is `closed` with the reason."""

    def send(self, link: Link, frame: bytes) -> None:
        """Queue a control frame after everything sent before, without blocking. A closed link swallows the frame.
        Raise ConfigError for a frame that no transport carries.

        A peer may live and not read, so what waits must be bounded. Past the bound, close a link or raise
        TransferError, for which the caller closes this one. `StreamTransport` lets MAX_WAITING_BYTES wait over
        all its links. Past that it raises nothing. Of the links that hold an even share or more, it closes the one that
        has not moved for the longest time."""

    def write(
        self,
        link: Link,
        frame: bytes,
        source: Spans,
        *,
        ready: Callable[[], None] | None = None,
        then: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        """Queue a frame and the payload at `source` in our memory, without blocking. `ready` is called before the
        payload is read, in the thread that reads it; for pages on a device it puts the reading after what writes them.
        An exception from `ready` closes the link, since what follows the lost write would be misread. On a closed link
        the transfer is done, with an error. Raise ConfigError as `send` does, and for a source outside our memory.
        `then` is called with the transfer when it is done, from the thread that moved the bytes.

        Payloads need no bound: they wait in their pages, and prefill starts no prompt for a peer to which more than
        `EngineConfig.send_window_bytes` are on their way. The frames and span lists of writes may count as frames
        do."""

    def fence(self, link: Link) -> None:
        """Close the link. When this returns, nothing of that peer can land, and `closed` has been called. Whatever was
        queued and has not left is dropped.

        The caller holds no lock that a callback needs, so this may wait for the I/O thread. It may also be called from
        inside a receiver callback or `ready`. Then it must not wait for the call that it is in. It calls `closed`
        itself, and nothing is placed after that."""

    @property
    def ticks(self) -> bool:
        """Whether a thread of its own calls `Receiver.tick`, which also dials lost peers. Otherwise the host does."""
        return True

    def cut(self) -> None:
        """Close every link after a call that was interrupted at any line. The channel fences each link after that,
        which is enough where such a call leaves nothing half changed."""
        return

    def close(self) -> None:
        """Fence every link and free what was opened. A second call does nothing."""


def check_frame(frame: bytes) -> None:
    """Refuse, before it is sent, a frame for which the peer would close the link. Raise ConfigError."""
    if not 1 <= len(frame) <= MAX_FRAME_BYTES:
        raise ConfigError(f"a frame has 1 to {MAX_FRAME_BYTES} bytes, not {len(frame)}; split what it says")


def check_arriving(link: Link, frame_bytes: int, *, is_write: bool) -> None:
    """Check what a link may carry, before anything is allocated for it. Raise TransferError."""
    limit = MAX_FRAME_BYTES if link.trusted else MAX_UNTRUSTED_FRAME_BYTES
    trust = "trusted" if link.trusted else "untrusted"
    if not 1 <= frame_bytes <= limit:
        raise TransferError(f"{link.endpoint} sent a frame of {frame_bytes} bytes; a {trust} link takes 1 to {limit}")
    if is_write and not link.trusted:
        raise TransferError(f"{link.endpoint} sent a write before its handshake was done; the link is closed")


def check_placed(link: Link, spans: Spans, memory: Memory, num_bytes: int) -> None:
    """Check that a place has the size of its write. Raise TransferError when it does not, and ConfigError when a span
    leaves our memory."""
    placed = total_bytes(spans, memory)
    if placed != num_bytes:
        raise TransferError(f"{link.endpoint} sent a write of {num_bytes} bytes for {placed} bytes of ours")


def total_bytes(spans: Spans, memory: Memory) -> int:
    """Return the bytes in `spans`. Raise ConfigError when a span leaves the memory."""
    if not spans:
        return 0
    end = memory.num_bytes
    offsets, lengths = zip(*spans, strict=True)
    if min(lengths) >= 0 and min(offsets) >= 0 and max(offsets) <= end - max(lengths):
        return sum(lengths)  # checked together, since a write has thousands of spans
    total = 0
    for offset, length in spans:
        if not (0 <= length <= end and 0 <= offset <= end - length):
            raise ConfigError(f"span (offset {offset}, length {length}) leaves a memory of {end} bytes")
        total += length
    return total


# -- what the transports here share ------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Message:
    """A frame on its way out."""

    frame: bytes

    @property
    def cost_bytes(self) -> int:
        """Memory that the message takes while it waits. A payload does not count: it waits in its pages."""
        return MESSAGE_BYTES + len(self.frame)


@attrs.frozen(eq=False)
class WriteMessage(Message):
    """A frame with a payload, which is at `source`. `ready`, if there is one, is called before the source is read."""

    transfer: Transfer
    source: Spans
    ready: Callable[[], None] | None

    @property
    def cost_bytes(self) -> int:
        return MESSAGE_BYTES + len(self.frame) + SPAN_BYTES * len(self.source)


class QueuingTransport(OfOneProcess, Transport):
    """A transport of one memory and one receiver that queues messages. It belongs to the process that registered them:
    in a forked child every method raises Forked, except `close`, which does nothing."""

    _owned: tuple[Memory, Receiver] | None = None
    __reduce_ex__ = NotCopied.__reduce_ex__  # nor is it copied before that

    @property
    def _is_shared_by_fork(self) -> bool:
        return self._owned is not None

    def register(self, memory: Memory, receiver: Receiver) -> tuple[str, ...]:
        if self._owned is not None:
            raise ConfigError("this transport already has its memory and receiver; make one transport per channel")
        self._owned = memory, receiver
        try:
            return self._listen(memory, receiver)
        except BaseException:
            self._owned = None
            raise

    @abstractmethod
    def _listen(self, memory: Memory, receiver: Receiver) -> tuple[str, ...]:
        """Start to receive; see `Transport.register`."""

    @abstractmethod
    def _queue(self, link: Link, message: Message) -> bool:
        """Queue a message. Return False when the link is closed."""

    def send(self, link: Link, frame: bytes) -> None:
        check_frame(frame)
        self._queue(link, Message(frame))

    def write(
        self,
        link: Link,
        frame: bytes,
        source: Spans,
        *,
        ready: Callable[[], None] | None = None,
        then: Callable[[Transfer], None] | None = None,
    ) -> Transfer:
        check_frame(frame)
        transfer = Transfer(total_bytes(source, self._memory), then)
        if not self._queue(link, WriteMessage(frame, transfer, source, ready)):
            transfer.complete(TransferError(f"the link to {link.endpoint} is closed"))
        return transfer

    @property
    def _memory(self) -> Memory:
        return self._registered[0]

    @property
    def _receiver(self) -> Receiver:
        return self._registered[1]

    @property
    def _registered(self) -> tuple[Memory, Receiver]:
        if self._owned is None:
            raise ConfigError("register a memory and a receiver first")
        return self._owned


MAX_WAITING_BYTES = 32 << 20
"""Frames that may wait to be sent, over all links. More wait only when peers live and do not read."""
MAX_ARRIVING_BYTES = 16 << 20
"""Frames that have arrived in part, over all links."""

H = TypeVar("H", bound=Hashable)


@attrs.define
class _Share:
    num_bytes: int
    moved_at: float


@attrs.define(eq=False)
class Budget(Generic[H]):
    """Bytes that the holders have, `num_bytes` in all and at most `limit_bytes`. Any thread may call it.

    Past the limit, one holder gives way: of those with at least an even share, the one that has not moved for the
    longest. A holder that takes what it is sent, or that holds little, never gives way before one that stands still."""

    _limit_bytes: int
    _clock: Callable[[], float]
    num_bytes: int = 0
    _lock: threading.RLock = attrs.field(factory=new_lock)
    _shares: dict[H, _Share] = attrs.field(factory=dict)

    def take(self, holder: H, num_bytes: int) -> H | None:
        """Give the holder so many more bytes. Return the holder that must give way and no longer counts, or None."""
        with self._lock:
            share = self._shares.get(holder)
            if share is None:
                share = self._shares[holder] = _Share(0, self._clock())
            share.num_bytes += num_bytes
            self.num_bytes += num_bytes
            if self.num_bytes <= self._limit_bytes:
                return None
            even = self.num_bytes / len(self._shares)
            large = (each for each, share in self._shares.items() if share.num_bytes >= even)
            slowest = min(large, key=lambda each: self._shares[each].moved_at)
            self.num_bytes -= self._shares.pop(slowest).num_bytes
            return slowest

    def give(self, holder: H, num_bytes: int) -> None:
        """Take back so many of the holder's bytes: they have moved on."""
        with self._lock:
            share = self._shares.get(holder)
            if share is None:
                return
            share.num_bytes -= num_bytes
            share.moved_at = self._clock()
            self.num_bytes -= num_bytes
            if share.num_bytes <= 0:
                self.num_bytes -= share.num_bytes
                del self._shares[holder]

    def drop(self, holder: H) -> None:
        with self._lock:
            share = self._shares.pop(holder, None)
            self.num_bytes -= 0 if share is None else share.num_bytes


@attrs.frozen
class Limits(Generic[H]):
    """What all links of a transport may hold: frames that wait, and frames that have arrived in part. A holder that
    must give way is passed to `crowded`, with the reason."""

    waiting: Budget[H]
    arriving: Budget[H]
    crowded: Callable[[H, str], None]
