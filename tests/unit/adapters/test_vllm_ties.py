"""What counts as a difference between two runs of vLLM, for the tests in tests/vllm."""

from __future__ import annotations

import pytest

from tests.vllm.ties import Comparison, Said, some_of

ONE = Said((1, 2, 3), (1.0, 0.099, 0.1))


def compared(tokens: tuple[int, ...], again: Said | None = None) -> Comparison:
    found = Comparison()
    found.add(7, tokens, ONE, again)
    return found


def test_a_difference_counts_where_it_begins() -> None:
    assert compared((1, 2, 3)) == Comparison(num_prompts=1)
    assert compared((1, 5, 5)) == Comparison(1, num_different=1, greatest_near=0.099)
    assert compared((1, 2, 5)) == Comparison(1, num_different=1, far=[(7, 2, 0.1)])
    assert compared((5, 2, 3)) == Comparison(1, num_different=1, num_first=1, far=[(7, 0, 1.0)])
    assert compared((5, 2, 3), Said((1, 2, 4), ONE.margins)) == Comparison(1, 1, num_first=1, num_noisy=1)
    assert compared((5, 2, 3), ONE).far == [(7, 0, 1.0)]
    with pytest.raises(ValueError, match="zip"):
        compared((1, 2))


def test_margins_are_read_from_what_a_child_says() -> None:
    done = {"tokens": [4, 5], "logprobs": [{"4": -0.1, "9": -2.5}, {"3": -1.25, "5": -1.0, "8": -7.0}]}
    assert Said.of(done) == Said((4, 5), (2.4, 0.25))


def test_all_prompts_are_given_when_so_many_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMPTS", raising=False)
    assert (some_of(500, 40), some_of(20, 40)) == (40, 20)
    monkeypatch.setenv("PROMPTS", "400")
    assert (some_of(500, 40), some_of(200, 40)) == (400, 200)
