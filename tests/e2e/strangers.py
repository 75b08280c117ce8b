"""A victim in a process of its own, an honest peer here, and peers by hand that do what they should not."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pdinfer as pd
from pdinfer.errors import TransferError
from pdinfer.kv.channel import wire
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.channel.wire import NONCE_BYTES, FrameMac
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.transports.stream.framing import HEADER, Header, MessageKind
from pdinfer.types import Handoff, HandoffStatus, PageGrant, PeerAddress
from tests.e2e import knocking
from tests.e2e.knocking import bare
from tests.forks import FAR_S, context
from tests.unit.kv.channel.channels import LAYERS, granted, link_to, pool_of

MIB = 1 << 20
KEY = b"k" * 32
TRANSPORTS: dict[str, Callable[[Path], pd.kv.Transport]] = {
    "tcp": lambda folder: pd.kv.SocketTransport(),
    "unix": lambda folder: pd.kv.SocketTransport(path=folder / "kv.sock"),
    "shm": lambda folder: pd.kv.ShmTransport(folder / "kv.sock"),
}
DIALLING: dict[str, Callable[[], pd.kv.Transport]] = {
    "tcp": pd.kv.SocketTransport,
    "unix": pd.kv.SocketTransport,
    "shm": pd.kv.ShmTransport,
}


def suffer(control: Connection, kind: str, folder: Path, keyed: bool) -> None:
    """The victim: a decode's end that grants rooms and tells what arrived, as it is asked to."""
    pool = pool_of()
    with KVChannel(pool, TRANSPORTS[kind](folder), key=KEY if keyed else None) as channel:
        control.send(channel.address)
        for number in range(1 << 40):
            asked = control.recv()
            if asked is None:
                return
            if asked == "memory":
                control.send(memory())
            elif asked == "peers":
                control.send(len(channel.stats.peers))
            else:
                grant = granted(channel, asked, tokens=range(12), room=number.to_bytes(16, "big"))
                control.send(grant)
                control.send(_settled(pool, channel, grant))


def _settled(pool: pd.PagePool, channel: KVChannel, grant: PageGrant) -> tuple[HandoffStatus, bytes]:
    end = time.monotonic() + FAR_S
    while time.monotonic() < end:
        channel.wait(1.0)
        for word in channel.poll():
            pool.release(grant.pages)
            return word.status, _digest(pool, grant.pages)
    raise AssertionError("a room did not settle")


def _digest(pool: pd.PagePool, pages: tuple[int, ...]) -> bytes:
    spans = pool.layout.spans(pool.memory_pages, layers=LAYERS, tokens=range(12), pages=pages, first_token=0)
    return hashlib.sha256(b"".join(pool.memory.read(spans))).digest()


def memory() -> tuple[int, int, int]:
    """(bytes in memory now, the most since this was asked last, open descriptors) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith(("VmRSS", "VmHWM"))}
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return sizes["VmRSS"], sizes["VmHWM"], len(os.listdir("/proc/self/fd"))


class Victim:
    """The process, and an honest prefill here that hands rooms over to it."""

    def __init__(self, kind: str, folder: Path, *, keyed: bool = False) -> None:
        self._control, theirs = context().Pipe()
        self.process = context().Process(target=suffer, args=(theirs, kind, folder, keyed), daemon=True)
        self.process.start()
        theirs.close()
        assert self._control.poll(FAR_S), "the victim did not start"
        self.address: PeerAddress = self._control.recv()
        self.layout = pool_of().layout
        self.honest = KVChannel(pool_of(), DIALLING[kind](), key=KEY if keyed else None)
        self.honest.connect(self.address)
        self.pages = self.honest.pool.own(3)

    def ask(self, question: str) -> Any:
        self._control.send(question)
        assert self._control.poll(FAR_S), "the victim does not answer"
        return self._control.recv()

    def hand_over(self, seed: int) -> float:
        """One room, whose bytes must arrive as they are; how many seconds it took."""
        began = time.monotonic()
        pool = self.honest.pool
        for offset, length in pool.layout.spans(
            pool.memory_pages, layers=LAYERS, tokens=range(12), pages=self.pages, first_token=0
        ):
            pool.memory.buffer[offset : offset + length].random_(1, 255)
        self._control.send(self.honest.address)
        grant = self._control.recv()
        self.honest.accept(grant)
        self.honest.push(grant, layers=LAYERS, tokens=grant.tokens, pages=self.pages)
        word = Handoff(room=grant.room, writer=self.honest.address, status=HandoffStatus.LANDED, token=seed)
        self.honest.finish(grant, word)
        assert self._control.poll(FAR_S), "the victim does not answer"
        status, digest = self._control.recv()
        assert (status, digest) == (HandoffStatus.LANDED, _digest(pool, self.pages))
        return time.monotonic() - began

    def relink(self) -> float:
        """Breaks the honest link; how many seconds later it is back."""
        link = link_to(self.honest, self.address)
        began = time.monotonic()
        self.honest.transport.fence(link)
        while not self.honest.connected(self.address):
            assert time.monotonic() < began + FAR_S, "the honest link did not come back"
            time.sleep(0.005)
        return time.monotonic() - began

    def close(self) -> None:
        self.honest.close()
        with contextlib.suppress(OSError):
            self._control.send(None)
        self.process.join(FAR_S)
        self.process.kill()


def many_descriptors() -> int:
    """Lets this process open as many as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def framed(frame: bytes) -> bytes:
    return Header(MessageKind.FRAME, len(frame)).packed() + frame


def opening(*, keyed: bool = False) -> bytes:
    """A first message as it should be."""
    return framed(wire.encode(wire.Open((wire.MAJOR, wire.MINOR), b"n" * NONCE_BYTES, keyed=keyed)))


class Identity:
    """A welcome peer by hand: it says what it is made to say, and reads nothing after its welcome."""

    def __init__(self, endpoint: str, layout: KVLayout, number: int) -> None:
        self.sock = bare(endpoint, limit_s=FAR_S)
        self.address = PeerAddress(number.to_bytes(16, "big"), 1, 0, ("tcp://127.0.0.1:9",))
        try:
            self._greet(layout)
        except BaseException:
            self.sock.close()
            raise

    def _greet(self, layout: KVLayout) -> None:
        self.sock.sendall(opening())
        theirs = wire.decode(self._frame())
        assert isinstance(theirs, wire.Open)
        self.mac = FrameMac(b"n" * NONCE_BYTES + theirs.nonce, True, None)
        self.sock.sendall(self.said(wire.Hello(self.address, layout)))
        self._frame()

    def said(self, message: wire.Message) -> bytes:
        return framed(self.mac.sign(wire.encode(message)))

    def aborts(self, first: int, count: int, text: str = "no") -> bytes:
        """So many rooms that nobody heard of."""
        error = TransferError(text)
        return b"".join(self.said(wire.Abort(room.to_bytes(16, "big"), error)) for room in range(first, first + count))

    def _frame(self) -> bytes:
        header = Header.parse(self._exactly(HEADER.size))
        return self._exactly(header.frame_bytes)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            piece = self.sock.recv(count - len(data))
            if not piece:
                raise ConnectionError("the victim closed the link")
            data += piece
        return data


@contextlib.contextmanager
def strangers(endpoint: str, count: int, says: bytes = b"", byte_s: float = 0.0) -> Iterator[None]:
    """So many connections, made by a process of their own, that say `says` at once or a byte at a time, and come again
    when they are closed."""
    command = [sys.executable, knocking.__file__, endpoint, str(count), str(byte_s), says.hex()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.readline(), "the strangers did not come"
            yield
        finally:
            process.stdin.close()
