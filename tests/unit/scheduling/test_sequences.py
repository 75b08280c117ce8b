"""Which sequence gets pages next at decode: by order, now and then by age, and never without writers."""

from __future__ import annotations

import attrs

from pdinfer.config import EngineConfig
from pdinfer.engine.sequence import Sequence
from pdinfer.kv.prefix import PrefixChain
from pdinfer.scheduling.decode import WRITER_GRACE_S, DecodeScheduler, SequenceState
from pdinfer.scheduling.rules import OLDEST_EVERY, PATIENCE_S
from pdinfer.testing import VirtualClock
from pdinfer.types import PeerAddress, Request

HERE, GONE = PeerAddress(b"here", 1, 0), PeerAddress(b"gone", 1, 0)


class NoPages:
    """Pages that nobody asks for."""

    num_available = num_orphans = 0

    def num_in_use(self, sequence: Sequence, /) -> int:
        return 0

    def extend(self, sequence: Sequence, num_drafts: int = 0, /) -> bool:
        return False

    def release(self, sequence: Sequence, /) -> None:
        """Do nothing."""


@attrs.define
class Bench:
    """A queue, its clock, and the writers that are connected."""

    clock: VirtualClock = attrs.field(factory=VirtualClock)
    linked: set[PeerAddress] = attrs.field(factory=lambda: {HERE})
    queue: DecodeScheduler[Sequence] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.queue = DecodeScheduler(
            NoPages(),
            EngineConfig(),
            self.clock,
            num_pages=8,
            page_size=4,
            has_writers=lambda sequence: self.linked.issuperset(sequence.writers),
        )

    def add(self, name: str, *, priority: int = 0, writer: PeerAddress = HERE) -> Sequence:
        request = Request(request_id=name, prompt=(1,), priority=priority)
        sequence = Sequence.of(
            request,
            (writer,),
            len(self.queue.waiting),
            self.clock(),
            PrefixChain(4, b""),
            eos_token_ids=(),
            processor=None,
        )
        sequence.state = SequenceState.RUNNING
        self.queue.wait(sequence)
        return sequence

    def turn(self) -> str:
        """Return the id of the sequence whose turn it is, and let it wait again at once."""
        sequence = self.queue.next()
        assert sequence is not None
        self.queue.grant(sequence)
        sequence.attempts = 0
        self.queue.leave(sequence)
        self.queue.wait(sequence)
        return sequence.request_id


def test_turns_go_by_priority_and_age() -> None:
    bench = Bench()
    old, urgent = bench.add("old"), bench.add("urgent", priority=1)
    assert old.state is SequenceState.WAITING
    assert bench.queue.waiting == [urgent, old]
    assert bench.queue.next() is urgent
    bench.queue.leave(urgent)
    assert bench.queue.next() is old
    bench.queue.clear()
    assert bench.queue.next() is None


def test_one_turn_in_so_many_goes_to_the_one_that_has_waited_longest() -> None:
    bench = Bench()
    bench.add("old")
    bench.clock.advance(PATIENCE_S + 1)
    bench.add("urgent", priority=1)
    assert [bench.turn() for _ in range(OLDEST_EVERY)] == ["urgent"] * (OLDEST_EVERY - 1) + ["old"]


def test_a_sequence_without_its_writers_is_passed_over_for_a_while() -> None:
    bench = Bench()
    lonely, other = bench.add("lonely", priority=1, writer=GONE), bench.add("other")
    assert bench.queue.next() is other
    assert bench.queue.deserted() == []
    bench.clock.advance(WRITER_GRACE_S / 2)
    bench.linked.add(GONE)
    assert bench.queue.deserted() == []
    assert bench.queue.next() is lonely
    bench.linked.clear()
    bench.linked.add(HERE)
    assert bench.queue.deserted() == []
    assert lonely.ends_at == bench.queue.next_end() == bench.clock() + WRITER_GRACE_S
    bench.clock.advance(WRITER_GRACE_S)
    assert bench.queue.deserted() == [lonely]


def test_those_that_come_back_here_or_from_elsewhere_are_first_and_the_others_go_by_age() -> None:
    bench = Bench()
    names = ["new", "newer", "back", "moved"]
    new, newer, back, moved = (bench.add(name) for name in names)
    for sequence in (new, newer, back, moved):
        bench.queue.leave(sequence)
    newer.submitted_at, back.submitted_at, moved.submitted_at = 1.0, 2.0, 3.0
    new.arrival, back.attempts, moved.is_resumed = 9, 1, True
    for sequence in (newer, moved, new, back):
        bench.queue.wait(sequence)
    assert bench.queue.waiting == [back, moved, new, newer]
