"""A dispatcher brings every token to its experts and sums what they return, however tokens are spread over them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pdinfer.kernels.formats.activations import INT8Rows
from pdinfer.moe.dispatchers.all_to_all import AllToAllDispatcher, Int8AllToAllDispatcher
from pdinfer.moe.dispatchers.base import LocalDispatcher, TokenDispatcher
from pdinfer.parallel.groups import Begun, Group
from tests.conformance.dispatch_kinds import KINDS
from tests.conformance.dispatch_suite import OPS, SUITE, summed
from tests.ranks import Ranks
from tests.slices import one_in

ONE_RANK = ("local", "local-fp8", "local-fp8-tiles", "all_to_all", "all_to_all-fp8")
ONE_RANK += ("all_to_all_int8", "all_to_all_int8-bfloat16")
SEVERAL_RANKS = [("all_to_all", 2), ("all_to_all", 4), ("all_to_all-bfloat16", 2)]
SEVERAL_RANKS += [("deep_ep-normal", 2), ("deep_ep-normal", 4), ("deep_ep-normal-tuned", 2)]
SEVERAL_RANKS += [("deep_ep-low_latency", 2), ("deep_ep-low_latency", 4)]
SEVERAL_RANKS += [("deep_ep-normal-fp8", 2), ("deep_ep-normal-fp8-tiles", 2)]
SEVERAL_RANKS += [("deep_ep-normal-cut-blocks", 2), ("deep_ep-low_latency-fp8", 2)]
SEVERAL_RANKS += [("deep_ep-elastic", 4), ("deep_ep-elastic-fp8", 2), ("deep_ep-elastic-cut-blocks", 2)]
SEVERAL_RANKS += [("all_to_all_int8", 2), ("all_to_all_int8", 4), ("all_to_all_int8-bfloat16", 2)]
SEEDS = 6


@pytest.mark.parametrize("check", SUITE, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", ONE_RANK)
@settings(max_examples=15)
@given(seed=st.integers(0, 10000))
def test_on_one_rank(name: str, check, seed: int) -> None:
    check(KINDS[name], Group("ep"), seed)


@pytest.mark.parametrize(("name", "world_size"), one_in(3, SEVERAL_RANKS))
def test_on_ranks(ranks: Ranks, name: str, world_size: int) -> None:
    calls = ranks.run("tests.conformance.dispatch_kinds:run_suite", world_size, name, SEEDS)
    assert all(of_rank == calls[0] for of_rank in calls)


def test_a_rank_that_is_lost_on_the_way_is_a_rank_lost(ranks: Ranks) -> None:
    outcomes = ranks.outcomes("tests.conformance.dispatch_kinds:lose", 3, 1)
    assert [outcome.error for outcome in outcomes] == ["RankLost", "Died", "RankLost"]
    assert "all_to_all of group ep (ranks 0, 1, 2) failed on rank 0" in outcomes[0].message


@pytest.mark.parametrize("dispatcher", [LocalDispatcher(2, OPS), AllToAllDispatcher(Group("ep"), 2, OPS)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_keep_their_dtype_and_the_sum_is_float32(dispatcher: TokenDispatcher, dtype: torch.dtype) -> None:
    """1 + 2^-12 is no bfloat16: a sum that was rounded on its way would lose the small part."""
    ids_TK, weights_TK = torch.tensor([[1, 0]]), torch.tensor([[1.0, 2**-12]])
    dispatched = dispatcher.dispatch_end(dispatcher.dispatch_begin(torch.ones(1, 1, dtype=dtype), ids_TK, weights_TK))
    assert dispatched.x_SD.dtype == dtype
    combined = summed(dispatcher.combine_end(dispatcher.combine_begin(dispatched.x_SD, dispatched)))
    assert combined.tolist() == [[1 + 2**-12]]


def test_a_row_in_int8_takes_a_byte_for_each_channel_and_four_for_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []
    begin = Group.all_to_all_begin

    def recorded(group: Group, x: Tensor, *counts: Sequence[int]) -> Begun:
        sent.append(x)
        return begin(group, x, *counts)

    monkeypatch.setattr(Group, "all_to_all_begin", recorded)
    dispatcher = Int8AllToAllDispatcher(AllToAllDispatcher(Group("ep"), 2, OPS))
    x_TD, ids_TK = torch.ones(3, 10, dtype=torch.bfloat16), torch.tensor([[0, 1], [1, -1], [-1, -1]])
    arrived = dispatcher.dispatch_end(dispatcher.dispatch_begin(x_TD, ids_TK, torch.ones(3, 2)))
    assert (sent[-1].dtype, sent[-1].shape) == (torch.uint8, (3, 14))
    assert isinstance(arrived.x_SD, INT8Rows)
    assert (arrived.x_SD.dtype, arrived.x_SD.shape, arrived.counts_E.tolist()) == (torch.bfloat16, (3, 10), [1, 2])
    back = dispatcher.combine_end(dispatcher.combine_begin(arrived.x_SD.floats(), arrived))
    assert summed(back).tolist() == [[2] * 10, [1] * 10, [0] * 10]
