"""Prefixes first, while the queues are balanced."""

from __future__ import annotations

import attrs
import pytest

import pdinfer as pd
from pdinfer.pairing import policy
from pdinfer.stats import PrefillLoad
from pdinfer.types import RequestShape
from tests.unit.pairing.policy.test_by_load import address, decode, prefill


def queued(*requests: int) -> list[PrefillLoad]:
    return [attrs.evolve(prefill(rank), num_queued_requests=count) for rank, count in enumerate(requests)]


def chosen(prefills: list[PrefillLoad], found: dict[int, int], **parameters: float) -> int:
    shape = RequestShape(
        ordinal=0,
        num_prompt_tokens=100,
        num_output_tokens=0,
        max_new_tokens=5,
        found_tokens={address(rank): count for rank, count in found.items()},
    )
    choice = policy.CacheAware(**parameters)(shape, prefills, [decode(0)])  # type: ignore[arg-type]
    assert choice is not None
    assert dict(choice.score)["prefill_queued_requests"] == prefills[choice.prefill.rank].num_queued_requests
    return choice.prefill.rank


def test_the_longest_match_wins_while_queues_are_balanced() -> None:
    assert chosen(queued(0, 8, 4), {1: 64, 2: 48}) == 1
    assert chosen(queued(40, 59, 50), {1: 64, 2: 48}) == 1  # 19 more, but less than 1.5 times as many
    assert chosen(queued(0, 9, 4), {1: 64, 2: 48}) == 0  # out of balance: the shortest queue
    assert chosen(queued(0, 9, 4), {1: 64, 2: 48}, balance_requests=9) == 1


def test_a_short_match_does_not_count() -> None:
    """The block that begins every prompt must not send all of them to one prefill."""
    assert chosen(queued(3, 2, 1), {0: 30}) == 2
    assert chosen(queued(3, 2, 1), {0: 31}) == 0
    assert chosen(queued(3, 2, 1), {0: 30}, min_match=0.2) == 0


@pytest.mark.parametrize("wrong", [{"min_match": -1.0}, {"balance_ratio": float("nan")}, {"balance_requests": 0.5}])
def test_parameters_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(pd.ConfigError, match=next(iter(wrong))):
        policy.CacheAware(**wrong)  # type: ignore[arg-type]
