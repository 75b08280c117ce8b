"""What all policies have in common, and those that look at each side by itself."""

from __future__ import annotations

from collections import Counter

import pytest

from pdinfer.pairing import policy
from pdinfer.pairing.policy.by_load import least
from pdinfer.stats import DecodeLoad, PrefillLoad
from pdinfer.types import PeerAddress, RequestShape

ALL = [policy.round_robin, policy.least_tokens, policy.power_of_two, policy.cache_aware, policy.traffic_aware]


def test_every_policy_keeps_what_all_have_in_common() -> None:
    ours = [getattr(policy, name) for name in policy.__all__ if name.islower()]
    assert sorted(map(repr, ours)) == sorted(map(repr, ALL)), "ALL lacks a policy; docs/howto/policy.md lists them too"


def address(rank: int) -> PeerAddress:
    return PeerAddress(b"engine", 1, rank)


def prefill(rank: int, num_tokens: int = 0) -> PrefillLoad:
    return PrefillLoad(
        address=address(rank),
        num_free_pages=100,
        num_total_pages=100,
        page_size=16,
        num_queued_requests=num_tokens > 0,
        num_queued_tokens=num_tokens,
    )


def decode(rank: int, num_tokens: int = 0) -> DecodeLoad:
    return DecodeLoad(
        address=address(rank),
        num_free_pages=100,
        num_total_pages=100,
        page_size=16,
        num_waiting_requests=0,
        num_waiting_tokens=0,
        num_granted_requests=0,
        num_running_requests=num_tokens > 0,
        num_running_tokens=num_tokens,
    )


def shape(ordinal: int = 0) -> RequestShape:
    return RequestShape(ordinal=ordinal, num_prompt_tokens=50, num_output_tokens=0, max_new_tokens=5)


@pytest.mark.parametrize("chosen_by", ALL)
def test_without_a_side_a_request_waits(chosen_by: policy.Policy) -> None:
    assert chosen_by(shape(), [], [decode(0)]) is None
    assert chosen_by(shape(), [prefill(0)], []) is None


@pytest.mark.parametrize("chosen_by", ALL)
@pytest.mark.parametrize(("num_prefills", "num_decodes"), [(2, 2), (3, 5)])
def test_ports_that_are_as_good_as_each_other_have_their_turns(
    chosen_by: policy.Policy, num_prefills: int, num_decodes: int
) -> None:
    prefills, decodes = [prefill(rank) for rank in range(num_prefills)], [decode(rank) for rank in range(num_decodes)]
    turns = 10 * num_prefills * num_decodes
    choices = [chosen_by(shape(ordinal), prefills, decodes) for ordinal in range(turns)]
    assert choices == [chosen_by(shape(ordinal), prefills, decodes) for ordinal in range(turns)]  # nothing is drawn
    for side, count in (("prefill", num_prefills), ("decode", num_decodes)):
        taken = Counter(getattr(choice, side) for choice in choices)
        assert len(taken) == count
        slack = 0.35 if chosen_by is policy.power_of_two else 0.2
        assert all(abs(times - turns / count) <= slack * turns / count for times in taken.values()), taken


def test_the_better_of_two_is_never_the_worst_of_many() -> None:
    prefills, decodes = [prefill(rank, 100 * rank) for rank in range(5)], [decode(rank, 90 * rank) for rank in range(5)]
    choices = [policy.power_of_two(shape(ordinal), prefills, decodes) for ordinal in range(200)]
    taken = Counter(choice.prefill.rank for choice in choices if choice is not None)
    assert set(taken) == {0, 1, 2, 3}
    assert sorted(taken, key=taken.__getitem__, reverse=True) == [0, 1, 2, 3]
    assert [policy.PowerOfTwo(seed=1)(shape(at), prefills, decodes) for at in range(200)] != choices


def test_equal_scores_have_their_turns_and_others_do_not() -> None:
    loads = [prefill(rank) for rank in range(4)]
    assert [least(loads, [1.0, 0.0, 2.0, 0.0], turn).address.rank for turn in range(4)] == [1, 3, 1, 3]
