"""The south side of a channel: what moves frames and bytes, and knows nothing of rooms, grants or requests.

A transport carries two things over a link, in order: *frames* (small control messages) and *writes* (a frame plus a
payload read from our memory and placed in the peer's). Where the payload goes is the receiving channel's decision, made
when the write's frame arrives; a sender never names an address of its peer.

    ours                                     theirs
    channel.push ─► transport.write(link, frame, spans)
                        ┊ frame ─────────────► receiver.place(link, frame, num_bytes) ─► spans | None (discard)
                        ┊ payload ───────────► their memory, at those spans
                    Transfer.done              receiver.placed(link, frame, error)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs

from pdinfer.errors import TransferError
from pdinfer.kv.layout import Spans

MAX_FRAME_BYTES = 1 << 20
MAX_UNTRUSTED_FRAME_BYTES = 1 << 10


@attrs.define(eq=False)
class Transfer:
    """Bytes on their way. `done` means that our memory is no longer read; `error` that they did not all leave."""

    num_bytes: int
    done: bool = False
    error: TransferError | None = None

    def complete(self, error: TransferError | None = None) -> None:
        """Called once by whoever moves the bytes."""
        self.error = error
        self.done = True


@attrs.define(eq=False)
class Link:
    """One connection as both sides of the seam see it. Until the channel sets `trusted`, frames are limited to
    MAX_UNTRUSTED_FRAME_BYTES and writes are refused."""

    endpoint: str
    trusted: bool = False


class Memory(Protocol):
    """A pool's bytes, on whatever device. Offsets are bytes from the start of the pool."""

    @property
    def num_bytes(self) -> int: ...

    def read(self, spans: Spans) -> list[memoryview]:
        """The contents of `spans` as host buffers; no copy when the memory is on the host."""

    def landing(self, spans: Spans) -> list[memoryview]:
        """Writable host buffers for `spans`; the memory itself when it is on the host."""

    def commit(self, spans: Spans, landed: Sequence[memoryview]) -> None:
        """Makes what was written to `landing(spans)` visible in the memory; nothing to do on the host."""

    def copy_from(self, spans: Spans, source: Memory, source_spans: Spans) -> None:
        """Copies from another memory of this process; both span lists have the same total length."""


class Receiver(Protocol):
    """A channel as its transport sees it. The calls for one link come one at a time and in order, from the
    transport's I/O thread or from inside a call to it. A TransferError raised from one closes the link."""

    def opened(self, link: Link) -> None:
        """A peer has connected to us."""

    def received(self, link: Link, frame: bytes) -> None:
        """A control frame."""

    def place(self, link: Link, frame: bytes, num_bytes: int) -> Spans | None:
        """Where a write's payload goes in our memory (exactly `num_bytes` in all); None discards it."""

    def placed(self, link: Link, frame: bytes, error: TransferError | None) -> None:
        """A placed payload is whole and visible, or did not verify. Not called for a discarded one."""

    def closed(self, link: Link, error: TransferError | None) -> None:
        """The link is gone and nothing of it can land any more. Called exactly once per link."""


class Transport(Protocol):
    """What a channel needs. Methods are called from any thread unless they say otherwise, and never hold a lock while
    calling the receiver."""

    @property
    def name(self) -> str:
        """What explains itself in a table: "loopback", "tcp", …"""

    def register(self, memory: Memory, receiver: Receiver) -> tuple[str, ...]:
        """Starts receiving; called once. Returns the endpoints that peers may connect to."""

    def connect(self, endpoints: Sequence[str], *, timeout_s: float) -> Link:
        """Opens a link to the first endpoint it understands; raises TransferError with the reason."""

    def send(self, link: Link, frame: bytes) -> None:
        """Queues a control frame behind everything sent before; never blocks. A closed link swallows it."""

    def write(
        self, link: Link, frame: bytes, source: Spans, *, ready: Callable[[], None] | None = None
    ) -> Transfer:
        """Queues a frame and the payload at `source` in our memory; never blocks. `ready` is called (it may wait for
        a device event) before the payload is read. On a closed link the transfer is done, with an error."""

    def fence(self, link: Link) -> None:
        """Closes the link; when it returns, nothing of that peer can land and `closed` has been called."""

    def close(self) -> None:
        """Fences every link and frees what was opened. A second call does nothing."""
