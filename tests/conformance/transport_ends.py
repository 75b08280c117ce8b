"""The two ends of a transport under test: their memories, and receivers that record their calls."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs

from pdinfer.errors import Forked, TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.memfd import Memfd
from pdinfer.kv.memory import Landing, Memory
from pdinfer.kv.transports.base import Link, Transfer, Transport
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.kv.transports.stream.transport import Strangers
from tests.waiting import TIMEOUT_S, wait_until

PATIENT = Strangers(first_message_s=TIMEOUT_S, message_s=TIMEOUT_S)
"""For peers that a test makes by hand, as fast as the machine is."""
STAGED_BYTES = 1000
"""A block of a memory that behaves like a device. Odd, so that spans are cut."""


class BytesMemory:
    """A Memory that is a bytearray. `staged` makes it behave like a device: landing buffers are copies until commit."""

    def __init__(self, num_bytes: int, *, staged: bool = False) -> None:
        self.data: bytearray | memoryview = bytearray(num_bytes)
        self._staged = staged

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    def read(self, spans: Spans) -> list[memoryview]:
        view = memoryview(self.data)
        pieces = [view[offset : offset + length] for offset, length in spans]
        return [memoryview(bytes(piece)) for piece in pieces] if self._staged else pieces

    @property
    def block_bytes(self) -> int:
        return STAGED_BYTES if self._staged else self.num_bytes

    def landing(self, spans: Spans) -> Landing:
        if not self._staged:
            return Landing(self.read(spans))
        landed = [memoryview(bytearray(length)) for _, length in spans]

        def commit() -> None:
            for (offset, length), data in zip(spans, landed, strict=True):
                self.data[offset : offset + length] = data

        return Landing(landed, commit)

    def copy_from(self, spans: Spans, source: Memory, source_spans: Spans) -> None:
        data = b"".join(source.read(source_spans))
        for offset, length in spans:
            self.data[offset : offset + length] = data[:length]
            data = data[length:]

    def contents(self, spans: Spans) -> bytes:
        return b"".join(self.data[offset : offset + length] for offset, length in spans)


class MemfdMemory(BytesMemory):
    """The same in a memfd, which a transport may share with its peer."""

    def __init__(self, num_bytes: int, *, staged: bool = False) -> None:
        super().__init__(num_bytes, staged=staged)
        self.memfd = Memfd(num_bytes, "test")
        self.data = self.memfd.view


@attrs.frozen
class Call:
    """One call that a receiver got."""

    name: str
    link: Link
    frame: bytes = b""
    error: TransferError | None = None


class Recorder:
    """A Receiver that records its calls and the rules that they broke. `hooks[name]` runs inside the call of that name;
    for `place` it returns the spans."""

    def __init__(self, *, trusts: bool = True) -> None:
        self.calls: list[Call] = []
        self.num_ticks = 0
        self.authenticates = False
        self.broken: list[str] = []
        self.hooks: dict[str, Callable[..., Any]] = {}
        self._trusts = trusts
        self._inside: dict[Link, int] = {}
        self._changed = threading.Condition()

    def opened(self, link: Link) -> None:
        link.trusted = self._trusts
        self._call(Call("opened", link), link)

    def received(self, link: Link, frame: bytes) -> None:
        self._call(Call("received", link, frame), link, frame)

    def place(self, link: Link, frame: bytes, num_bytes: int) -> Spans | None:
        spans: Spans | None = self._call(Call("place", link, frame), link, frame, num_bytes)
        return spans

    def placed(self, link: Link, frame: bytes, error: TransferError | None) -> None:
        self._call(Call("placed", link, frame, error), link, frame, error)

    def tick(self) -> None:
        with self._changed:
            self.num_ticks += 1
            self._changed.notify_all()
        if "tick" in self.hooks:
            self.hooks["tick"]()

    def closed(self, link: Link, error: TransferError | None) -> None:
        self._call(Call("closed", link, error=error), link, error)

    def _call(self, call: Call, *arguments: Any) -> Any:
        me = threading.get_ident()
        with self._changed:
            if any(c.name == "closed" and c.link is call.link for c in self.calls):
                self.broken.append(f"{call} after closed")
            if self._inside.setdefault(call.link, me) != me:
                self.broken.append(f"{call} while another call of that link is in progress")
            self.calls.append(call)
            self._changed.notify_all()
        try:
            hook = self.hooks.get(call.name)
            return hook(*arguments) if hook else None
        finally:
            with self._changed:
                self._inside.pop(call.link, None)

    def of(self, name: str, link: Link | None = None) -> list[Call]:
        with self._changed:
            return [c for c in self.calls if c.name == name and link in (None, c.link)]

    def wait(self, name: str, count: int = 1, link: Link | None = None) -> list[Call]:
        """Return the calls of that name, once there are `count`."""
        deadline = time.monotonic() + TIMEOUT_S
        with self._changed:
            while len(found := [c for c in self.calls if c.name == name and link in (None, c.link)]) < count:
                assert self._changed.wait(deadline - time.monotonic()), f"{len(found)} of {count} {name}: {self.calls}"
            return found


@attrs.define(eq=False)
class End:
    """One registered transport with its memory and receiver."""

    transport: Transport
    memory: BytesMemory
    receiver: Recorder = attrs.field(factory=Recorder)
    endpoints: tuple[str, ...] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.endpoints = self.transport.register(self.memory, self.receiver)

    def connect(self, other: End, *, trusted: bool = True) -> tuple[Link, Link]:
        """Open a link to `other`. Return (our side, theirs)."""
        count = len(other.receiver.of("opened"))
        link = self.transport.connect(other.endpoints, timeout_s=TIMEOUT_S)
        link.trusted = trusted
        return link, other.receiver.wait("opened", count + 1)[count].link

    def num_refused(self, link: Link, other: End) -> int:
        """Try all four calls that a forked child may not make, and count those that raise Forked."""
        count = 0
        for call in (
            lambda: self.transport.send(link, b"f"),
            lambda: self.transport.write(link, b"w", []),
            lambda: self.transport.fence(link),
            lambda: self.transport.connect(other.endpoints, timeout_s=1),
        ):
            try:
                call()
            except Forked:
                count += 1
        return count


@contextlib.contextmanager
def closing() -> Iterator[list[End]]:
    """Close the ends that a test makes; none may have broken a rule."""
    ends: list[End] = []
    try:
        yield ends
    finally:
        for end in ends:
            end.transport.close()
    assert not [broken for end in ends for broken in end.receiver.broken]


def anywhere(_: Link, __: bytes, num_bytes: int) -> Spans:
    """A hook that places a write at the start of the memory."""
    return [(0, num_bytes)]


def finished(transfer: Transfer) -> Transfer:
    wait_until(lambda: transfer.done)
    return transfer


def say_alive(endpoint: str) -> None:
    """Connect to an end from a process of its own, which then does nothing until it is killed."""
    transport = SocketTransport()
    transport.register(BytesMemory(8), Recorder())
    transport.send(transport.connect([endpoint], timeout_s=TIMEOUT_S), b"alive")
    threading.Event().wait()
