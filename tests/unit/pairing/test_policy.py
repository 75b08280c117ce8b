"""Policies choose among the loads they are shown, by the scores they report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer.pairing import policy
from pdinfer.stats import ChannelStats, DecodeLoad, PrefillLoad
from pdinfer.testing import random_model
from pdinfer.types import Choice, PeerAddress, RequestShape
from tests.forks import FAR_S


def engine_load(rank: int, num_total_pages: int = 10, page_size: int = 4) -> dict[str, Any]:
    return {
        "address": PeerAddress(b"engine", 1, rank),
        "num_free_pages": num_total_pages,
        "num_total_pages": num_total_pages,
        "page_size": page_size,
        "num_tokens": 0,
        "busy_s": 0.0,
        "transport": "loopback",
        "providers": (),
        "kv": ChannelStats(),
    }


def prefill_load(rank: int, num_queued_tokens: int = 0) -> PrefillLoad:
    return PrefillLoad(**engine_load(rank), num_queued_requests=1, num_queued_tokens=num_queued_tokens, unsent_bytes=0)


def decode_load(rank: int, running: int = 0, waiting: int = 0, **pool: int) -> DecodeLoad:
    return DecodeLoad(
        **engine_load(rank, **pool),
        num_waiting_requests=1,
        num_waiting_tokens=waiting,
        num_granted_requests=0,
        num_running_requests=1,
        num_running_tokens=running,
    )


def shape(ordinal: int = 0) -> RequestShape:
    return RequestShape(ordinal=ordinal, num_prompt_tokens=5, num_output_tokens=0, max_new_tokens=5)


@pytest.mark.parametrize("choose", [policy.round_robin, policy.least_tokens])
def test_without_a_prefill_or_a_decode_a_request_waits(choose: policy.Policy) -> None:
    assert choose(shape(), [], [decode_load(0)]) is None
    assert choose(shape(), [prefill_load(0)], []) is None
    assert choose(shape(), [], []) is None


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 1000))
def test_round_robin_visits_every_port_equally_often(num_prefills: int, num_decodes: int, start: int) -> None:
    prefills = [prefill_load(rank, num_queued_tokens=rank) for rank in range(num_prefills)]
    decodes = [decode_load(rank, running=rank) for rank in range(num_decodes)]
    rounds = num_prefills * num_decodes
    choices = [policy.round_robin(shape(start + turn), prefills, decodes) for turn in range(rounds)]
    seen = [choice for choice in choices if choice is not None]
    assert len(seen) == rounds
    assert set(Counter(choice.prefill for choice in seen).values()) == {num_decodes}
    assert set(Counter(choice.decode for choice in seen).values()) == {num_prefills}


@given(st.lists(st.integers(0, 100), min_size=1, max_size=6), st.lists(st.integers(0, 100), min_size=1, max_size=6))
def test_least_tokens_takes_the_emptiest_of_each_kind(queued: list[int], held: list[int]) -> None:
    prefills = [prefill_load(rank, tokens) for rank, tokens in enumerate(queued)]
    decodes = [decode_load(rank, running=tokens // 2, waiting=tokens - tokens // 2) for rank, tokens in enumerate(held)]
    choice = policy.least_tokens(shape(), prefills, decodes)
    assert choice is not None
    assert choice.prefill.rank == queued.index(min(queued))
    assert choice.decode.rank == held.index(min(held))
    assert choice.score == (("prefill_queued_tokens", float(min(queued))), ("decode_held_share", min(held) / 40))


def test_a_large_pool_may_hold_more() -> None:
    decodes = [decode_load(0, running=8), decode_load(1, running=12, num_total_pages=20), decode_load(2, waiting=9)]
    choice = policy.least_tokens(shape(), [prefill_load(0)], decodes)
    assert choice is not None
    assert choice.decode.rank == 1
    assert dict(choice.score)["decode_held_share"] == 12 / 80


def test_a_policy_that_names_a_stranger_is_told_so_and_loses_nothing() -> None:
    """The request stays in the queue, and ends as usual once the policy is repaired."""
    stranger = PeerAddress(b"s" * 16, 1, 0)
    broken = [True]

    def chosen(shape: RequestShape, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]) -> Choice | None:
        choice = policy.least_tokens(shape, prefills, decodes)
        assert choice is not None
        return attrs.evolve(choice, decode=stranger) if broken else choice

    with pd.Pairing.local(random_model(), cache=pd.CacheConfig(page_size=4, num_pages=64), policy=chosen) as pairing:
        pairing.submit(pd.Request(prompt=(1, 2, 3), sampling=pd.SamplingParams(max_new_tokens=2, ignore_eos=True)))
        with pytest.raises(pd.ConfigError, match="not part of this pairing"):
            pairing.step()
        broken.clear()
        assert pairing.drain(FAR_S)
        assert [event.finish_reason for event in pairing.step()] == [None, pd.FinishReason.LENGTH]
