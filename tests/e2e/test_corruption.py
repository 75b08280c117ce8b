"""Transfers over real transports with random bits flipped on the way: each ends in a typed error, none is decoded."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import attrs
import pytest

import pdinfer as pd
from pdinfer.kv import ShmTransport, SocketTransport, Transport
from pdinfer.kv.channel import book, links, peer
from pdinfer.kv.transports.stream.endpoints import dial
from pdinfer.process.silence import LINKS
from pdinfer.testing import random_model
from pdinfer.types import Handoff, HandoffStatus
from tests.unit.kv.channel.channels import granted
from tests.waiting import TIMEOUT_S

LANDED, ABORTED = HandoffStatus.LANDED, HandoffStatus.ABORTED
NUM_TOKENS = 10
SLICE = 150
ATTEMPTS = 5
"""On a busy machine a link may be given up before its transfer begins, or in it: silence is short here."""
WHOLE = 34_000
"""Per transport, of three: more than 10^5 in all."""


class FlippingSocket(socket.socket):
    """Sends what it is told, but for the bits `flips` says: (byte from now on, mask) each."""

    flips: dict[int, int]
    num_sent: int
    num_flipped: int
    lock: threading.Lock

    @classmethod
    def of(cls, sock: socket.socket) -> FlippingSocket:
        family, kind, timeout = sock.family, sock.type, sock.gettimeout()
        made = cls(family, kind, fileno=sock.detach())
        made.settimeout(timeout)
        made.lock = threading.Lock()
        made.arm({})
        return made

    def arm(self, flips: dict[int, int]) -> None:
        """Counts from here."""
        with self.lock:
            self.flips, self.num_sent, self.num_flipped = flips, 0, 0

    def send(self, data: bytes, flags: int = 0) -> int:  # type: ignore[override]
        return self.sendmsg([data])

    def sendmsg(self, buffers: Sequence[bytes | memoryview], *rest: object) -> int:  # type: ignore[override]
        with self.lock:
            data = bytearray(b"".join(buffers))
            here = [offset for offset in self.flips if 0 <= offset - self.num_sent < len(data)]
            for offset in here:
                data[offset - self.num_sent] ^= self.flips[offset]
                self.num_flipped += 1
            count = super().sendmsg([data], *rest)  # type: ignore[arg-type]
            self.num_sent += count
            return count


@attrs.define
class Bench:
    """Prefill's and decode's end over one transport, and the socket between them."""

    make: Callable[[], Transport]
    sockets: list[FlippingSocket]
    prefill: pd.KVChannel
    decode: pd.KVChannel
    pages: tuple[int, ...]
    rng: random.Random

    def clean(self) -> tuple[Handoff, int]:
        for _ in range(ATTEMPTS):
            word, num_sent = self.transfer({})
            if word.status is LANDED:
                return word, num_sent
        raise AssertionError(f"{ATTEMPTS} clean transfers did not land, the last for {word.error}")

    def corrupted(self, flips: dict[int, int]) -> Handoff:
        """What decode hears of a room that something happened to; a link that broke before that is not it."""
        for _ in range(ATTEMPTS):
            word, _ = self.transfer(flips)
            if self.sockets[-1].num_flipped:
                return word
        raise AssertionError(f"{flips} met no byte in {ATTEMPTS} transfers")

    def transfer(self, flips: dict[int, int]) -> tuple[Handoff, int]:
        """Over a new link: what decode hears of the room, and how many bytes were sent for it."""
        prefill, decode = self.prefill, self.decode
        with suppress(pd.TransferError):  # a link that is given up: decode then says that its writer is lost
            prefill.connect(decode.address)
        pool, room = decode.pool, self.rng.randbytes(16)
        grant = granted(decode, prefill.address, tokens=range(NUM_TOKENS), room=room)
        sock = self.sockets[-1]
        sock.arm(flips)
        sent = None
        with suppress(pd.TransferError):
            prefill.accept(grant)
            for layer in pool.layout.layers:
                prefill.push(grant, layers=range(layer, layer + 1), tokens=grant.tokens, pages=self.pages)
            sent = prefill.finish(
                grant, Handoff(room=grant.room, writer=prefill.address, status=LANDED, token=7, logprob=-1.0)
            )
        end = time.monotonic() + TIMEOUT_S
        while not (words := decode.poll()):
            assert time.monotonic() < end, f"nobody was told of {flips}"
            decode.wait(0.5)
        num_sent = sock.num_sent
        (word,) = words
        if word.status is LANDED:
            assert self.contents(decode, grant.pages) == self.contents(prefill, self.pages)
        pool.release(grant.pages)
        prefill.drop_peer(decode.address)
        while (sent and not sent.done) or decode.connected(prefill.address):
            assert time.monotonic() < end, "the link did not go"
            time.sleep(0.0002)
        return word, num_sent

    def contents(self, channel: pd.KVChannel, pages: Sequence[int]) -> bytes:
        pool = channel.pool
        spans = pool.layout.spans(
            pool.memory_pages, layers=pool.layout.layers, tokens=range(NUM_TOKENS), pages=pages, first_token=0
        )
        return b"".join(pool.memory.read(spans))


@pytest.fixture(params=["tcp", *(pytest.param(name, marks=pytest.mark.full) for name in ("unix", "shm"))])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[Bench]:
    made = iter(range(10))

    def make() -> Transport:
        match request.param:
            case "tcp":
                return SocketTransport()
            case "unix":
                return SocketTransport(path=f"{tmp_path}/{next(made)}.sock")
            case _:
                return ShmTransport()

    sockets: list[FlippingSocket] = []

    def flipping(*arguments: object, **more: object) -> tuple[socket.socket, str, OSError | None]:
        sock, endpoint, problem = dial(*arguments, **more)  # type: ignore[arg-type]
        sockets.append(FlippingSocket.of(sock))
        return sockets[-1], endpoint, problem

    monkeypatch.setattr("pdinfer.kv.transports.stream.transport.dial", flipping)
    # a damaged length is noticed when the rest never comes: sooner here than in earnest
    for module in (links, peer):
        monkeypatch.setattr(module, "LINKS", attrs.evolve(LINKS, max_look_s=0.1, silent_s=0.3))
    monkeypatch.setattr("pdinfer.kv.transports.stream.io_thread.TICK_S", 0.05)
    monkeypatch.setattr(book, "REDIAL_S", (1000.0, 1000.0))  # every transfer dials for itself
    model = random_model()
    pools = [pd.PagePool(model, pd.CacheConfig(page_size=4, num_pages=16)) for _ in range(2)]
    for pool in pools:
        pool.memory.buffer.random_(0, 255)
    with pd.KVChannel(pools[0], make()) as prefill, pd.KVChannel(pools[1], make()) as decode:
        yield Bench(make, sockets, prefill, decode, pools[0].own(3), random.Random(request.param))


def corrupt(bench: Bench, count: int) -> None:
    """`count` transfers with one to three bits flipped somewhere."""
    clean = [bench.clean() for _ in range(8)]
    assert {(word.status, word.token) for word, _ in clean} == {(LANDED, 7)}
    num_bytes = min(count for _, count in clean)  # more when a heartbeat was among them
    for _ in range(count):
        # where lengths, spans and headers are, as often as in the payload, which is most of the bytes
        near = bench.rng.choice((96, num_bytes))
        flips = {bench.rng.randrange(near): 1 << bench.rng.randrange(8) for _ in range(bench.rng.randint(1, 3))}
        word = bench.corrupted(flips)
        assert word.status is ABORTED, f"{flips} of {num_bytes} bytes went unseen"
        assert isinstance(word.error, pd.TransferError)
    bench.clean()


def test_no_corrupted_transfer_is_decoded(bench: Bench) -> None:
    corrupt(bench, SLICE)


@pytest.mark.full(minutes=4)
def test_none_of_a_hundred_thousand_corrupted_transfers_is_decoded(bench: Bench) -> None:
    corrupt(bench, WHOLE)
