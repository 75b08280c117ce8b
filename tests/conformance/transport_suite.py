"""What every Transport must do, as a class that any implementation can be put through.

class TestMine(ProcessTransportSuite):             # TransportSuite, when both ends are always in one process
    def make_pair(self) -> tuple[Transport, Transport]:
        return MyTransport(), MyTransport()        # not registered yet; each can connect to the other
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.transports.base import MAX_FRAME_BYTES, MAX_UNTRUSTED_FRAME_BYTES, TICK_S, Link, Transfer, Transport
from tests.conformance.transport_ends import BytesMemory, Call, End, Recorder, anywhere, closing, finished
from tests.waiting import check_ends, started, wait_until


def scattered(lengths: Sequence[int], chance: random.Random, num_bytes: int) -> Spans:
    """Return spans of these lengths, in this order, anywhere in a memory and without overlap."""
    slack = num_bytes - sum(lengths)
    starts, position = {}, 0
    for index in chance.sample(range(len(lengths)), len(lengths)):
        gap = chance.randint(0, slack // 4)
        slack -= gap
        starts[index] = position + gap
        position += gap + lengths[index]
    return [(starts[index], length) for index, length in enumerate(lengths)]


def cut(total: int, cuts: Sequence[float]) -> list[int]:
    """Return lengths that sum to `total`."""
    borders = sorted(int(total * place) for place in cuts)
    return [end - start for start, end in zip([0, *borders], [*borders, total], strict=True)]


@functools.cache
def noise(num_bytes: int) -> bytes:
    return random.Random(num_bytes).randbytes(num_bytes)


class TransportSuite:
    """Every check gets `left` and `right`, two ends that are registered and not connected."""

    keeps_connections = False
    """Whether a library below it may keep connections to a peer that is gone."""

    def make_pair(self) -> tuple[Transport, Transport]:
        raise NotImplementedError

    def make_memory(self, num_bytes: int, *, staged: bool = False) -> BytesMemory:
        return BytesMemory(num_bytes, staged=staged)

    @contextlib.contextmanager
    def ends(self, num_bytes: int = 1 << 18, *, trusts: bool = True, staged: bool = False) -> Iterator[tuple[End, End]]:
        with closing() as ends:
            for transport, trusting in zip(self.make_pair(), (True, trusts), strict=True):
                ends.append(End(transport, self.make_memory(num_bytes, staged=staged), Recorder(trusts=trusting)))
            left, right = ends
            left.memory.data[:] = noise(num_bytes)
            yield left, right

    @pytest.fixture
    def pair(self) -> Iterator[tuple[End, End]]:
        with self.ends() as ends:
            yield ends

    def test_frames_arrive_in_order(self, pair: tuple[End, End]) -> None:
        left, right = pair
        link, _ = left.connect(right)
        frames = [bytes([n % 256]) * (n * 37 % 5000 + 1) for n in range(300)] + [b"x" * MAX_FRAME_BYTES]
        for frame in frames:
            left.transport.send(link, frame)
        assert [c.frame for c in right.receiver.wait("received", len(frames))] == frames

    def test_frames_and_writes_keep_their_order(self, pair: tuple[End, End]) -> None:
        left, right = pair
        link, _ = left.connect(right)
        right.receiver.hooks["place"] = lambda _, frame, size: [(0, size)] if int(frame) % 3 else None
        for n in range(200):
            if n % 2:
                left.transport.send(link, b"%d" % n)
            else:
                left.transport.write(link, b"%d" % n, [(n, n * 10)])
        right.receiver.wait("received", 100)
        order = [int(c.frame) for c in right.receiver.calls if c.name in ("received", "place")]
        assert order == list(range(200))
        expected = [n for n in range(0, 200, 2) if n % 3]
        assert [int(c.frame) for c in right.receiver.of("placed")] == expected

    @pytest.mark.parametrize("staged", [False, True])
    def test_writes_are_placed_byte_for_byte(self, staged: bool) -> None:
        with self.ends(1 << 17, staged=staged) as (left, right):
            link, _ = left.connect(right)

            @settings(suppress_health_check=list(HealthCheck))
            @given(num_sources=st.integers(0, 40), num_cuts=st.integers(0, 40), seed=st.integers(0, 1 << 32))
            def check(num_sources: int, num_cuts: int, seed: int) -> None:
                chance = random.Random(seed)  # Hypothesis takes longer to draw so many numbers than they to arrive
                sizes = [chance.randint(0, chance.choice((2, 2000))) for _ in range(num_sources)]
                source = scattered(sizes, chance, left.memory.num_bytes)
                cuts = [chance.random() for _ in range(num_cuts)]
                target = scattered(cut(sum(sizes), cuts), chance, right.memory.num_bytes)
                self.check_write(left, right, link, source, target)

            check()

    def check_write(self, left: End, right: End, link: Link, source: Spans, target: Spans) -> None:
        """Check that one write arrives at `target`, and that nothing beside it changes."""
        count = len(right.receiver.of("placed"))
        right.memory.data[:] = bytes(right.memory.num_bytes)
        right.receiver.hooks["place"] = lambda *_: target
        transfer = finished(left.transport.write(link, b"w", source))
        assert transfer.error is None
        assert transfer.num_bytes == sum(length for _, length in source)
        assert right.receiver.wait("placed", count + 1)[count].error is None
        expected = BytesMemory(right.memory.num_bytes)
        expected.copy_from(target, left.memory, source)
        assert right.memory.data == expected.data

    def test_thousands_of_spans(self) -> None:
        chance = random.Random(5)
        with self.ends(1 << 18) as (left, right):
            link, _ = left.connect(right)
            source = scattered([1] * 3000 + [17] * 3000, chance, left.memory.num_bytes)
            target = scattered([25] * 2160, chance, right.memory.num_bytes)
            self.check_write(left, right, link, source, target)

    def test_payload_larger_than_any_socket_buffer(self) -> None:
        chance = random.Random(6)
        size = 12 << 20
        with self.ends(size + (1 << 20)) as (left, right):
            link, _ = left.connect(right)
            source = scattered([72 << 10] * 100, chance, left.memory.num_bytes)
            target = scattered([36 << 10] * 200, chance, right.memory.num_bytes)
            self.check_write(left, right, link, source, target)
            self.check_write(left, right, link, [(0, size)], [(1, size)])

    def test_discarded_payload_leaves_memory_and_link_alone(self) -> None:
        with self.ends(4 << 20) as (left, right):
            link, _ = left.connect(right)
            transfer = left.transport.write(link, b"nobody wants this", [(0, 4 << 20)])
            assert finished(transfer).error is None
            left.transport.send(link, b"after")
            right.receiver.wait("received")
            assert not right.receiver.of("placed")
            assert not any(right.memory.data)

    def test_both_directions_at_once(self, pair: tuple[End, End]) -> None:
        link, back = pair[0].connect(pair[1])
        sides = ((pair[0], link), (pair[1], back))
        for end, _ in sides:
            end.receiver.hooks["place"] = lambda _, frame, size: [(100_000 + size, size)]

        def talk(end: End, link: Link) -> None:
            for n in range(300):
                end.transport.send(link, b"%d" % n)
                end.transport.write(link, b"%d" % n, [(0, n)])

        check_ends(*[started(talk, *side) for side in sides])
        for end, _ in sides:
            end.receiver.wait("placed", 300)
            assert [int(c.frame) for c in end.receiver.of("received")] == list(range(300))
            assert [c.error for c in end.receiver.of("placed")] == [None] * 300

    def test_callbacks_may_send(self, pair: tuple[End, End]) -> None:
        left, right = pair

        def answer(end: End) -> Callable[[Link, bytes], None]:
            def received(link: Link, frame: bytes) -> None:
                if int(frame):
                    for _ in range(1 + (int(frame) == 100)):
                        end.transport.send(link, b"%d" % (int(frame) - 1))

            return received

        left.receiver.hooks["received"] = answer(left)
        right.receiver.hooks["received"] = answer(right)
        link, _ = left.connect(right)
        left.transport.send(link, b"100")
        left.receiver.wait("received", 100)
        right.receiver.wait("received", 101)
        assert [int(c.frame) for c in left.receiver.of("received")] == [n for n in range(99, 0, -2) for _ in "12"]

    def test_many_links_to_one_end(self, pair: tuple[End, End]) -> None:
        left, right = pair
        links = [left.connect(right) for _ in range(40)]
        for n in range(20):
            for index, (link, _) in enumerate(links):
                left.transport.send(link, b"%d of %d" % (n, index))
        right.receiver.wait("received", 800)
        for index, (_, theirs) in enumerate(links):
            frames = [c.frame for c in right.receiver.of("received", theirs)]
            assert frames == [b"%d of %d" % (n, index) for n in range(20)]
        left.transport.fence(links[0][0])
        right.receiver.wait("closed", 1, links[0][1])
        left.transport.send(links[1][0], b"still here")
        assert right.receiver.wait("received", 21, links[1][1])[-1].frame == b"still here"

    def test_an_untrusted_link_carries_small_frames_only(self) -> None:
        with self.ends(trusts=False) as (left, right):
            right.receiver.hooks["place"] = lambda *_: [(0, 1)]
            for forbidden in ("large frame", "write"):
                link, theirs = left.connect(right)
                left.transport.send(link, b"x" * MAX_UNTRUSTED_FRAME_BYTES)
                right.receiver.wait("received", 1, theirs)
                if forbidden == "write":
                    left.transport.write(link, b"w", [(0, 1)])
                else:
                    left.transport.send(link, b"x" * (MAX_UNTRUSTED_FRAME_BYTES + 1))
                assert right.receiver.wait("closed", 1, theirs)[0].error is not None
                assert left.receiver.wait("closed", 1, link)[0].error is not None
                assert len(right.receiver.of("received", theirs)) == 1
            assert not right.receiver.of("place")

    def test_what_cannot_be_sent_is_refused_where_it_is_made(self, pair: tuple[End, End]) -> None:
        left, right = pair
        link, _ = left.connect(right)
        for frame in (b"", b"x" * (MAX_FRAME_BYTES + 1)):
            with pytest.raises(ConfigError):
                left.transport.send(link, frame)
            with pytest.raises(ConfigError):
                left.transport.write(link, frame, [])
        for span in ((-1, 2), (0, -1), (left.memory.num_bytes, 1), (1, left.memory.num_bytes)):
            with pytest.raises(ConfigError):
                left.transport.write(link, b"w", [span])
        with pytest.raises(ConfigError):
            left.transport.register(left.memory, left.receiver)

    @pytest.mark.parametrize("spans", [[(0, 99)], [(0, 101)], [], [((1 << 18) - 1, 100)], [(-100, 100)]])
    def test_a_wrong_placement_closes_the_link_and_lands_nothing(self, pair: tuple[End, End], spans: Spans) -> None:
        left, right = pair
        right.receiver.hooks["place"] = lambda *_: spans
        link, theirs = left.connect(right)
        left.transport.write(link, b"w", [(0, 100)])
        assert right.receiver.wait("closed", 1, theirs)[0].error is not None
        assert not any(right.memory.data)
        assert not right.receiver.of("placed")

    def test_ready_is_called_before_the_payload_is_read(self, pair: tuple[End, End]) -> None:
        left, right = pair
        link, _ = left.connect(right)
        right.receiver.hooks["place"] = anywhere

        def ready() -> None:
            left.memory.data[:4] = b"late"

        transfer = left.transport.write(link, b"w", [(0, 4)], ready=ready)
        right.receiver.wait("placed")
        assert finished(transfer).error is None
        assert right.memory.data[:4] == b"late"

    def test_a_ready_that_fails_closes_the_link(self, pair: tuple[End, End]) -> None:
        left, right = pair
        link, theirs = left.connect(right)

        def ready() -> None:
            raise RuntimeError("device lost")

        transfer = left.transport.write(link, b"w", [(0, 4)], ready=ready)
        assert finished(transfer).error is not None
        left.transport.send(link, b"the handoff of what was lost")
        left.receiver.wait("closed", 1, link)
        right.receiver.wait("closed", 1, theirs)
        assert not right.receiver.of("placed") + right.receiver.of("received")

    @pytest.mark.parametrize("error", [TransferError("refused"), RuntimeError("bug")])
    @pytest.mark.parametrize("name", ["opened", "received", "place", "placed"])
    def test_an_exception_in_a_callback_closes_that_link(
        self, pair: tuple[End, End], name: str, error: Exception
    ) -> None:
        left, right = pair
        other, _ = left.connect(right)

        def fail(*_: object) -> None:
            raise error

        right.receiver.hooks["place"] = anywhere
        right.receiver.hooks[name] = fail
        link, theirs = left.connect(right)
        left.transport.send(link, b"f")
        left.transport.write(link, b"w", [(0, 4)])
        assert str(error) in str(right.receiver.wait("closed", 1, theirs)[0].error)
        assert left.receiver.wait("closed", 1, link)[0].error is not None
        right.receiver.hooks.clear()
        left.transport.send(other, b"still here")
        wait_until(lambda: right.receiver.of("received")[-1:] != [] and right.receiver.of("received")[-1].frame != b"f")

    def test_an_exception_in_closed_is_survived(self, pair: tuple[End, End]) -> None:
        left, right = pair

        def fail(*_: object) -> None:
            raise RuntimeError("bug")

        left.receiver.hooks["closed"] = fail
        link, theirs = left.connect(right)
        left.transport.fence(link)
        right.receiver.wait("closed", 1, theirs)
        other, _ = left.connect(right)
        left.transport.send(other, b"works")
        right.receiver.wait("received")

    def test_nothing_happens_after_a_fence(self) -> None:
        with self.ends(4 << 20) as (left, right):
            right.receiver.hooks["place"] = anywhere
            for delay in (0.0, 0.001, 0.005, 0.02):
                link, theirs = left.connect(right)
                stop = threading.Event()

                def push(link: Link = link, stop: threading.Event = stop) -> None:
                    while not stop.is_set():
                        finished(left.transport.write(link, b"w", [(0, 4 << 20)]))

                thread = started(push)
                time.sleep(delay)
                right.transport.fence(theirs)
                calls, data = len(right.receiver.calls), bytes(right.memory.data)
                assert right.receiver.calls[-1].name == "closed"
                assert right.receiver.of("closed", theirs)[0].error is None
                left.receiver.wait("closed", 1, link)
                time.sleep(0.02)
                assert len(right.receiver.calls) == calls
                assert right.memory.data == data
                stop.set()
                check_ends(thread)

    @pytest.mark.parametrize("name", ["opened", "received", "place", "placed"])
    def test_fence_from_inside_a_callback(self, pair: tuple[End, End], name: str) -> None:
        left, right = pair
        after: list[Call] = []

        def fence(link: Link, *_: object) -> Spans:
            right.transport.fence(link)
            after.extend(right.receiver.of("closed", link))
            return [(0, 4)]

        right.receiver.hooks["place"] = lambda *_: [(0, 4)]
        right.receiver.hooks[name] = fence
        link, theirs = left.connect(right)
        left.transport.send(link, b"f")
        left.transport.write(link, b"w", [(0, 4)])
        left.receiver.wait("closed", 1, link)
        wait_until(lambda: len(after) == 1)
        assert after[0].error is None
        assert right.receiver.calls[-1].name == "closed"
        if name != "placed":
            assert not any(right.memory.data)
        right.transport.fence(theirs)

    def test_fence_from_inside_ready(self, pair: tuple[End, End]) -> None:
        left, right = pair
        right.receiver.hooks["place"] = anywhere
        link, theirs = left.connect(right)
        transfer = left.transport.write(link, b"w", [(0, 4)], ready=lambda: left.transport.fence(link))
        assert finished(transfer).error is not None
        assert left.receiver.wait("closed", 1, link)[0].error is None
        right.receiver.wait("closed", 1, theirs)
        assert not right.receiver.of("placed")
        other, _ = left.connect(right)
        left.transport.write(other, b"w", [(0, 4)])
        right.receiver.wait("placed")

    def test_every_transfer_ends_when_its_link_does(self, pair: tuple[End, End]) -> None:
        left, right = pair
        transfers: list[Transfer] = []

        def fence(theirs: Link, _: bytes) -> None:
            transfers.extend(left.transport.write(link, b"w", [(0, 1 << 18)]) for _ in range(3))
            right.transport.fence(theirs)

        right.receiver.hooks["received"] = fence
        link, theirs = left.connect(right)
        left.transport.send(link, b"f")
        left.receiver.wait("closed", 1, link)
        assert len(transfers) == 3
        for transfer in transfers:
            finished(transfer)
        assert not right.receiver.of("place", theirs)

    def test_fences_from_many_threads_call_closed_once(self, pair: tuple[End, End]) -> None:
        left, right = pair
        link, theirs = left.connect(right)
        threads = [threading.Thread(target=left.transport.fence, args=(link,)) for _ in range(8)]
        threads += [threading.Thread(target=right.transport.fence, args=(theirs,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        check_ends(*threads)
        assert len(left.receiver.of("closed")) == len(right.receiver.of("closed")) == 1

    def test_a_closed_link_swallows_frames_and_fails_writes(self, pair: tuple[End, End]) -> None:
        left, right = pair
        link, theirs = left.connect(right)
        left.transport.fence(link)
        assert right.receiver.wait("closed", 1, theirs)[0].error is not None
        for transport, closed in ((left.transport, link), (right.transport, theirs)):
            transport.send(closed, b"f")
            transfer = transport.write(closed, b"w", [(0, 4)])
            assert transfer.done
            assert transfer.error is not None
            transport.fence(closed)
        assert not right.receiver.of("received") + right.receiver.of("place")

    def test_close_closes_links_and_can_be_repeated(self, pair: tuple[End, End]) -> None:
        left, right = pair
        links = [left.connect(right) for _ in range(3)]
        for _ in range(2):
            left.transport.close()
        assert [c.error for c in left.receiver.of("closed")] == [None] * 3
        for _, theirs in links:
            assert right.receiver.wait("closed", 1, theirs)[0].error is not None
        assert finished(left.transport.write(links[0][0], b"w", [])).error is not None
        with pytest.raises(TransferError):
            left.transport.connect(right.endpoints, timeout_s=1.0)
        with pytest.raises(TransferError):
            right.transport.connect(left.endpoints, timeout_s=1.0)

    def test_endpoints_of_others_are_refused(self, pair: tuple[End, End]) -> None:
        for endpoints in ([], ["carrier-pigeon://coop"]):
            with pytest.raises(TransferError):
                pair[0].transport.connect(endpoints, timeout_s=1.0)

    def test_nothing_leaks(self) -> None:
        def count() -> tuple[int, int]:
            gc.collect()
            descriptors = Path("/proc/self/fd")
            return threading.active_count(), len(os.listdir(descriptors)) if descriptors.exists() else 0

        def live() -> None:
            with self.ends() as (left, right):
                right.receiver.hooks["place"] = anywhere
                links = [left.connect(right) for _ in range(5)]
                for link, _ in links:
                    left.transport.write(link, b"w", [(0, 1000)])
                right.receiver.wait("placed", 5)
                left.transport.fence(links[0][0])
                right.transport.fence(links[1][1])

        gc.collect()
        gc.freeze()  # what others have made is no leak of this one, and would be looked through in each round
        counts = []
        for _ in range(5):
            live()
            counts.append(count())
        # what tests before have left may end meanwhile, and a leak grows with every round; a library that keeps one
        # connection more for a while does not
        for what, seen in zip(("threads", "descriptors"), zip(*counts, strict=True), strict=True):
            stays = [later <= earlier for earlier, later in itertools.pairwise(seen)]
            assert any(stays) if self.keeps_connections else all(stays), (what, seen)

    def test_connecting_without_waiting(self, pair: tuple[End, End]) -> None:
        left, right = pair
        right.receiver.hooks["place"] = anywhere
        link = left.transport.connect(right.endpoints, timeout_s=0)
        link.trusted = True
        for n in range(50):
            left.transport.send(link, b"%d" % n)
        transfer = left.transport.write(link, b"w", [(0, 1 << 16)])
        right.receiver.wait("placed")
        assert finished(transfer).error is None
        assert [c.frame for c in right.receiver.of("received")] == [b"%d" % n for n in range(50)]
        assert right.memory.data[: 1 << 16] == left.memory.data[: 1 << 16]

    def test_connecting_without_waiting_to_nobody(self, pair: tuple[End, End]) -> None:
        left, right = pair
        right.transport.close()
        try:
            link = left.transport.connect(right.endpoints, timeout_s=0)
        except TransferError:
            return
        left.transport.send(link, b"f")
        assert finished(left.transport.write(link, b"w", [(0, 4)])).error is not None
        assert left.receiver.wait("closed", 1, link)[0].error is not None


class ProcessTransportSuite(TransportSuite):
    """What a transport whose ends may be in different processes must also do: one process may die or stop alone."""

    tick_s = TICK_S
    """About how often it ticks."""

    def test_links_tell_when_their_peer_was_heard(self, pair: tuple[End, End]) -> None:
        left, right = pair
        before = time.monotonic()
        link, theirs = left.connect(right)
        assert min(link.heard_at, theirs.heard_at) >= before
        time.sleep(0.01)
        for sender, way, receiver, seen in ((left, link, right, theirs), (right, theirs, left, link)):
            sent_at = time.monotonic()
            assert seen.heard_at < sent_at
            sender.transport.send(way, b"f")
            receiver.receiver.wait("received", 1, seen)
            wait_until(lambda: seen.heard_at >= sent_at)  # noqa: B023 - its thread notes that behind the call
            assert seen.heard_at <= time.monotonic()

    def test_ticks_come_regularly(self) -> None:
        """However late some come, none comes early."""
        before = time.monotonic()
        with self.ends() as (left, right):
            stamps: list[float] = []
            left.receiver.hooks["tick"] = lambda: stamps.append(time.monotonic())
            wait_until(lambda: len(stamps) >= 4)
            assert all(stamp - before > number * self.tick_s / 2 for number, stamp in enumerate(stamps, 1))
            wait_until(lambda: right.receiver.num_ticks >= 2)

    def test_a_tick_comes_after_all_that_had_arrived(self, pair: tuple[End, End]) -> None:
        """An end that was stopped itself must not take its own silence for silence of its peers."""
        left, right = pair
        links = [left.connect(right) for _ in range(8)]
        awake = 0.0
        heard: list[float] = []

        def stop(link: Link, frame: bytes) -> None:
            nonlocal awake
            if frame == b"stop":
                ticks = left.receiver.num_ticks
                for other, _ in links:
                    left.transport.send(other, b"beat")
                time.sleep(3 * self.tick_s)
                wait_until(lambda: left.receiver.num_ticks >= ticks + 2)  # by then the other end has sent them all
                awake = time.monotonic()
                right.receiver.hooks["tick"] = lambda: heard.append(min(theirs.heard_at for _, theirs in links))

        right.receiver.hooks["received"] = stop
        left.transport.send(links[0][0], b"stop")
        wait_until(lambda: len(heard) >= 1)
        assert heard[0] >= awake

    def test_a_tick_may_fence_and_may_fail(self, pair: tuple[End, End]) -> None:
        left, right = pair
        link, theirs = left.connect(right)

        def tick() -> None:
            left.transport.fence(link)
            raise RuntimeError("bug")

        left.receiver.hooks["tick"] = tick
        assert left.receiver.wait("closed", 1, link)[0].error is None
        right.receiver.wait("closed", 1, theirs)
        count = left.receiver.num_ticks
        wait_until(lambda: left.receiver.num_ticks > count)
