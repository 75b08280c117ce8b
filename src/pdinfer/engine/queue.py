"""Which sequences wait for pages at decode, and whose turn it is."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter

from pdinfer.engine.schedule import by_age
from pdinfer.engine.sequence import WRITER_GRACE_S, Sequence, SequenceState


class WaitingQueue:
    """The sequences that wait for pages, in the order of their turns. A sequence has a turn only while its writers are
    connected, which `has_writers` tells."""

    def __init__(self, has_writers: Callable[[Sequence], bool], clock: Callable[[], float]) -> None:
        self._has_writers = has_writers
        self._clock = clock
        self._sequences: list[Sequence] = []
        self._num_turns = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the sequences that wait now. They may leave the queue meanwhile."""
        return iter(list(self._sequences))

    def add(self, sequence: Sequence) -> None:
        sequence.state = SequenceState.WAITING
        sequence.waiting_since = self._clock()
        insort(self._sequences, sequence, key=lambda waiting: waiting.order)

    def next(self) -> Sequence | None:
        """Return the sequence whose turn it is: every OLDEST_EVERY-th time the one that has waited longest."""
        able, now = partial(filter, self._has_writers, self._sequences), self._clock()
        return by_age(able(), attrgetter("waiting_since"), num_turns=self._num_turns, now=now) or next(able(), None)

    def take(self, sequence: Sequence) -> None:
        """Remove a sequence that has had its turn."""
        self._sequences.remove(sequence)
        self._num_turns += 1

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence for any other reason, if it waits."""
        if sequence in self._sequences:
            self._sequences.remove(sequence)

    def deserted(self) -> list[Sequence]:
        """Return the sequences whose writers have been gone for WRITER_GRACE_S. Their host should have named others by
        then, and will not."""
        now = self._clock()
        return [s for s in self if s.missing_s(now, connected=self._has_writers(s)) >= WRITER_GRACE_S]

    def clear(self) -> None:
        self._sequences = []
