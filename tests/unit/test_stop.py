"""The automaton that finds stops, against plain comparison of every end of a stream with every sequence."""

from __future__ import annotations

import random

import pytest

from pdinfer.stop import Automaton, StopSequences


def random_sequences(rng: random.Random) -> list[str]:
    return ["".join(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 6))]


@pytest.mark.parametrize("seed", range(4))
def test_every_state_says_what_plain_comparison_says(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        sequences = random_sequences(rng)
        stream = "".join(rng.choices("abcd", k=60))
        automaton, state = Automaton.of(sequences), 0
        for end in range(1, len(stream) + 1):
            state, seen = automaton.next(state, stream[end - 1]), stream[:end]
            assert automaton.found[state] == max((len(one) for one in sequences if seen.endswith(one)), default=0)
            begun = (one[:length] for one in sequences for length in range(len(one)))
            assert automaton.held[state] == max(len(part) for part in begun if seen.endswith(part))


def test_without_sequences_nothing_is_found_or_held() -> None:
    automaton = Automaton[str].of(())
    assert automaton.next(0, "a") == 0
    assert (automaton.found[0], automaton.held[0]) == (0, 0)


def test_requests_that_share_sequences_do_not_share_how_far_they_got() -> None:
    matcher = StopSequences(((1, 2),))
    one, other = matcher.begin(()), matcher.begin(())
    assert [one(1), other(2), one(2)] == [False, False, True]
