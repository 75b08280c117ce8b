"""Which sequence gets pages next at decode: by order, now and then by age, and never without writers."""

from __future__ import annotations

import attrs

from pdinfer.engine.sequence import WRITER_GRACE_S, Sequence, SequenceState, WaitingQueue
from pdinfer.kv.prefix import PrefixChain
from pdinfer.scheduling.rules import OLDEST_EVERY, PATIENCE_S
from pdinfer.testing import VirtualClock
from pdinfer.types import PeerAddress, Request

HERE, GONE = PeerAddress(b"here", 1, 0), PeerAddress(b"gone", 1, 0)


@attrs.define
class Bench:
    """A queue, its clock, and the writers that are connected."""

    clock: VirtualClock = attrs.field(factory=VirtualClock)
    linked: set[PeerAddress] = attrs.field(factory=lambda: {HERE})
    queue: WaitingQueue = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.queue = WaitingQueue(lambda sequence: self.linked.issuperset(sequence.writers), self.clock)

    def add(self, name: str, *, priority: int = 0, writer: PeerAddress = HERE) -> Sequence:
        sequence = Sequence(
            request_id=name,
            request=Request(request_id=name, prompt=(1,), priority=priority),
            writers=(writer,),
            arrival=len(self.queue),
            submitted_at=self.clock(),
            deadline_at=None,
            output=[],
            chain=PrefixChain(4, b""),
            state=SequenceState.RUNNING,
        )
        self.queue.add(sequence)
        return sequence

    def turn(self) -> str:
        """Return the id of the sequence whose turn it is, and let it wait again at once."""
        sequence = self.queue.next()
        assert sequence is not None
        self.queue.take(sequence)
        self.queue.add(sequence)
        return sequence.request_id


def test_turns_go_by_priority_and_age() -> None:
    bench = Bench()
    old, urgent = bench.add("old"), bench.add("urgent", priority=1)
    assert old.state is SequenceState.WAITING
    assert list(bench.queue) == [urgent, old]
    assert bench.queue.next() is urgent
    bench.queue.discard(urgent)
    bench.queue.discard(urgent)
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
    assert lonely.ends_at == [bench.clock() + WRITER_GRACE_S]
    bench.clock.advance(WRITER_GRACE_S)
    assert bench.queue.deserted() == [lonely]
