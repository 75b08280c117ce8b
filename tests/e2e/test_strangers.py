"""What strangers, and peers that are welcome and hostile, cost an end: at most some memory, and nobody's answers.

The slices of `make test` are small; the attacks at ten times the size at which they once did harm are marked `full`.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator

import pytest

from pdinfer.kv.channel import wire
from pdinfer.kv.channel.book import MAX_GUESTS
from pdinfer.kv.transports.stream.framing import Header, MessageKind
from pdinfer.types import Handoff, HandoffStatus
from tests.e2e.strangers import MIB, TRANSPORTS, Identity, Victim, many_descriptors, opening, strangers
from tests.waiting import wait_until

GROWTH = 64 * MIB
KINDS = list(TRANSPORTS)
FLOOD_S = 300.0
DELAY_S = 0.05
"""A hand-over may take so much longer under attack: about what a request that generates a few tokens takes at all."""


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Victim]]:
    """Victims by transport, each made once: a process takes a while to start."""
    made: dict[tuple[str, bool, str], Victim] = {}

    def make(kind: str, *, keyed: bool, name: str = "") -> Victim:
        if (kind, keyed, name) not in made:
            made[kind, keyed, name] = Victim(kind, tmp_path_factory.mktemp(kind), keyed=keyed)
        return made[kind, keyed, name]

    yield make
    for victim in made.values():
        victim.close()


@pytest.fixture
def attacked(victims: Callable[..., Victim]) -> Iterator[Callable[..., Victim]]:
    """Gives a victim, warmed up, that must not have grown by more than GROWTH when the test is over."""
    sizes: list[tuple[Victim, int]] = []

    def give(kind: str, *, keyed: bool = False) -> Victim:
        victim = victims(kind, keyed=keyed)
        victim.hand_over(0)
        victim.ask("memory")
        sizes.append((victim, victim.ask("memory")[0]))
        return victim

    yield give
    for victim, before in sizes:
        victim.hand_over(1)
        grown = victim.ask("memory")[1] - before
        assert grown <= GROWTH, f"the victim grew by {grown / MIB:.0f} MiB"


# -- strangers ---------------------------------------------------------------------------------------------------------

SAYS: dict[str, tuple[bytes, float]] = {
    "silent": (b"", 0.0),
    "a byte at a time": (opening(keyed=True), 1.0),
    "an Open and no more": (opening(keyed=True), 0.0),
}


def test_an_honest_link_comes_back_while_strangers_hold_the_door(attacked: Callable[..., Victim]) -> None:
    victim = attacked("tcp")
    with strangers(victim.address.endpoints[0], 200):
        for seed in range(3):
            victim.relink()
            victim.hand_over(seed)
        assert victim.ask("memory")[2] < 200


@pytest.mark.timed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("says", SAYS)
def test_a_thousand_strangers_delay_an_honest_link_by_a_second_at_most(
    attacked: Callable[..., Victim], victims: Callable[..., Victim], kind: str, says: str
) -> None:
    """Compared with strangers at somebody else's door, who take as much of this machine. What else this machine does
    slows some rounds and not others, so there are more of them while the medians do not say enough."""
    many_descriptors()
    victim, other = attacked(kind, keyed=True), victims(kind, keyed=True, name="other")
    relinks: dict[Victim, list[float]] = {other: [], victim: []}
    speeds: dict[Victim, list[float]] = {other: [], victim: []}
    for rounds in range(1, 9):
        for besieged in relinks:
            with strangers(besieged.address.endpoints[0], 1000, *SAYS[says]):
                relinks[besieged] += [victim.relink() for _ in range(3)]
                speeds[besieged].append(_rooms_per_s(victim))
                assert besieged.ask("memory")[2] < 300
        delay_s = statistics.median(relinks[victim]) - statistics.median(relinks[other])
        speed = statistics.median(speeds[victim]) / statistics.median(speeds[other])
        if rounds >= 3 and delay_s <= 1.0 and speed >= 0.5:
            return
    raise AssertionError(f"an honest link comes back {delay_s:.2f} s later, and is {speed:.2f} times as fast")


# -- welcome, and hostile ----------------------------------------------------------------------------------------------


def test_peers_that_do_not_read_lose_their_links_and_nobody_elses(attacked: Callable[..., Victim]) -> None:
    victim = attacked("tcp")
    _flood(victim, num_peers=4, num_bytes=2 * GROWTH, text="poem " * 800)


@pytest.mark.timed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_peers", [10, 320])
@pytest.mark.parametrize(("text", "num_bytes"), [("", GROWTH // 4), ("poem " * 800, 4 * GROWTH)], ids=["short", "long"])
def test_many_peers_that_do_not_read_hardly_delay_others(
    attacked: Callable[..., Victim], kind: str, num_peers: int, text: str, num_bytes: int
) -> None:
    many_descriptors()
    victim = attacked(kind)
    alone = statistics.median(victim.hand_over(seed) for seed in range(20))
    among = statistics.median(_flood(victim, num_peers=num_peers, num_bytes=num_bytes, text=text))
    assert among < alone + DELAY_S, (alone, among)


def _flood(victim: Victim, *, num_peers: int, num_bytes: int, text: str) -> list[float]:
    """Peers that ask for answers, `num_bytes` of questions in all, and take none; those that were closed come again as
    somebody else. An honest room is handed over after each MiB: how many seconds each of them took."""
    numbers, rooms = itertools.count(1 << 64), itertools.count(0, 100)
    peers: list[Identity | None] = [None] * num_peers
    unsent = [b""] * num_peers
    took: list[float] = []
    num_taken, end = 0, time.monotonic() + FLOOD_S
    while num_taken < num_bytes:
        assert time.monotonic() < end, "the victim reads too slowly"
        for index in range(num_peers):
            try:
                peer = peers[index]
                if peer is None:
                    peer = peers[index] = Identity(victim.address.endpoints[0], victim.layout, next(numbers))
                    peer.sock.setblocking(False)
                    unsent[index] = b""
                data = unsent[index] or peer.aborts(next(rooms), 100, text)
                unsent[index] = data
                count = peer.sock.send(data)
                num_taken += count
                unsent[index] = data[count:]
            except BlockingIOError:
                continue
            except OSError:
                if (peer := peers[index]) is not None:
                    peer.sock.close()
                peers[index] = None
        if num_taken >= len(took) * MIB:
            took.append(victim.hand_over(len(took)))
    assert victim.honest.connected(victim.address)
    for peer in filter(None, peers):
        peer.sock.close()
    return took


@pytest.mark.parametrize(("num_identities", "num_aborts"), [(300, 40), pytest.param(10240, 40, marks=pytest.mark.full)])
def test_identities_leave_little_behind(attacked: Callable[..., Victim], num_identities: int, num_aborts: int) -> None:
    """Links, tombstones and what steps report of peers are bounded over all of them."""
    many_descriptors()
    victim = attacked("tcp")
    held = []
    for number in range(num_identities):
        peer = Identity(victim.address.endpoints[0], victim.layout, number)
        peer.sock.sendall(peer.aborts(number * num_aborts, num_aborts))
        held.append(peer.sock)
        if number % 200 == 0:
            victim.hand_over(number)
            for sock in held[: -2 * MAX_GUESTS]:
                sock.close()
    victim.hand_over(0)
    assert victim.honest.connected(victim.address)
    assert victim.ask("peers") <= MAX_GUESTS + 64
    assert victim.ask("memory")[2] <= MAX_GUESTS + 100
    for sock in held:
        sock.close()
    wait_until(lambda: victim.ask("peers") <= 64)
    assert victim.ask("memory")[2] < 100


@pytest.mark.full
def test_parts_of_long_frames_from_many(attacked: Callable[..., Victim]) -> None:
    many_descriptors()
    victim = attacked("tcp")
    for seed in range(3):
        peers = [Identity(victim.address.endpoints[0], victim.layout, (seed + 1) * 1000 + n) for n in range(200)]
        part = Header(MessageKind.FRAME, MIB).packed() + bytes(MIB - 1)
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.sock.sendall(part)
        victim.hand_over(seed)
        for peer in peers:
            peer.sock.close()


def test_anything_legal_from_a_welcome_peer(attacked: Callable[..., Victim]) -> None:
    """Seeded: messages of any size that are well formed, about rooms that are nobody's, read or not."""
    victim, rng = attacked("unix"), random.Random(12)
    for number in range(30):
        peer = Identity(victim.address.endpoints[0], victim.layout, number)
        peer.sock.setblocking(False)
        with contextlib.suppress(OSError):
            for _ in range(200):
                peer.sock.send(peer.said(_anything(rng, peer)))
                if rng.random() < 0.3:
                    peer.sock.recv(1 << 16)
        peer.sock.close()
        if number % 10 == 0:
            victim.hand_over(number)


def _anything(rng: random.Random, peer: Identity) -> wire.Message:
    room = rng.randbytes(16)
    error = wire.TransferError("x" * rng.choice([0, 1, 4096]))
    word = Handoff(room=room, writer=peer.address, status=HandoffStatus.ABORTED, error=error)
    return rng.choice([wire.Abort(room, error), wire.Finish(word), wire.Beat(rng.random() * 100)])


def _rooms_per_s(victim: Victim, seconds: float = 2.0) -> float:
    began, count = time.monotonic(), 0
    while time.monotonic() < began + seconds:
        victim.hand_over(count)
        count += 1
    return count / (time.monotonic() - began)
