"""Tokens go to slots that hold their expert, as the rule says, and tables change in place."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
import torch

from pdinfer.kernels.resolve import explain_backends
from pdinfer.moe.placement.placement import ExpertPlacement
from pdinfer.moe.placement.replicas import DispatchRule, ReplicaTables
from pdinfer.testing import random_model

CPU = torch.device("cpu")
# four ranks of three slots; experts 0 and 1 have three copies
ROWS = [[0, 1, 2, 0, 1, 3, 0, 4, 5, 1, 6, 7], [1, 0, 7, 6, 0, 1, 5, 4, 1, 3, 2, 0]]
PLACEMENT = ExpertPlacement(physical_to_logical_map=ROWS, num_logical_experts=8, num_ranks=4)
IDS_TK = torch.rand(60, 8, generator=torch.Generator().manual_seed(0)).argsort(-1)[:, :3]


def tables(rule: DispatchRule, rank: int = 0, placement: ExpertPlacement = PLACEMENT) -> ReplicaTables:
    return ReplicaTables.build(placement, rule, rank=rank, ranks_per_node=2, device=CPU)


@pytest.mark.parametrize("rule", DispatchRule)
@pytest.mark.parametrize("rank", range(4))
def test_tokens_go_to_a_slot_of_their_expert(rule: DispatchRule, rank: int) -> None:
    for layer in range(2):
        slots_TK = tables(rule, rank).of_layer(layer)(IDS_TK)
        assert torch.equal(torch.tensor(ROWS[layer])[slots_TK], IDS_TK)
        none_TK = torch.rand(IDS_TK.shape, generator=torch.Generator().manual_seed(1)) < 0.3
        with_none_TK = tables(rule, rank).of_layer(layer)(IDS_TK.masked_fill(none_TK, -1))
        assert torch.equal(with_none_TK, slots_TK.masked_fill(none_TK, -1))


def test_static_takes_one_copy_and_dynamic_takes_turns() -> None:
    used = {
        rule: {slot for slot in tables(rule).of_layer(0)(IDS_TK).flatten().tolist() if ROWS[0][slot] == 0}
        for rule in (DispatchRule.STATIC, DispatchRule.DYNAMIC)
    }
    assert len(used[DispatchRule.STATIC]) == 1
    assert used[DispatchRule.DYNAMIC] == {0, 3, 6}


@pytest.mark.parametrize("stride", [1, 2, 3, 16])
@pytest.mark.parametrize("rank", [0, 3])
def test_copies_get_their_shares_whichever_tokens_choose_the_expert(stride: int, rank: int) -> None:
    shares = np.array([[1.0] * 12, [1.0] * 12])
    shares[0, [0, 3, 6]] = 0.5, 0.2, 0.3
    shares[0, [1, 4, 9]] = 0.0, 1.0, 0.0
    shares[1, [0, 5, 8]] = shares[1, [1, 4, 11]] = 0.25, 0.25, 0.5
    placement = attrs.evolve(PLACEMENT, slot_shares=shares)
    ids_TK = torch.full((2000, 2), 2)
    ids_TK[::stride] = torch.tensor([0, 1])
    slots_TK = tables(DispatchRule.DYNAMIC, rank, placement).of_layer(0)(ids_TK)[::stride]
    got = torch.bincount(slots_TK[:, 0], minlength=7)[[0, 3, 6]] / len(slots_TK)
    torch.testing.assert_close(got, torch.tensor([0.5, 0.2, 0.3]), rtol=0, atol=6 / len(slots_TK))
    assert slots_TK[:, 1].unique().tolist() == [4]


def test_both_copies_on_a_rank_get_their_shares() -> None:
    twins = ExpertPlacement(physical_to_logical_map=[[0, 0, 0, 1]], num_logical_experts=2, num_ranks=2)
    ids_TK = torch.zeros(600, 1, dtype=torch.int64)
    for rule, expected in ((DispatchRule.DYNAMIC, [200, 200, 200]), (DispatchRule.NEAREST, [300, 300])):
        slots_TK = ReplicaTables.build(twins, rule, rank=0, ranks_per_node=None, device=CPU).of_layer(0)(ids_TK)
        counts = torch.bincount(slots_TK.flatten())
        torch.testing.assert_close(counts, torch.tensor(expected), rtol=0, atol=6)


def test_a_model_tells_of_experts_that_are_twice_on_a_rank() -> None:
    model = random_model()
    assert "another slot" not in explain_backends(model)
    table = [[0, 1, 2, 0, 3, 4, 4, 4, 5, 6, 7, 1], ROWS[1]]
    model.experts.placement = attrs.evolve(PLACEMENT, physical_to_logical_map=table)
    assert model.remarks == ()  # on one rank slots are names
    model.experts.replicas = tables(DispatchRule.STATIC)
    assert explain_backends(model).splitlines()[-1].startswith("1 of 24 expert slots hold an expert that is in another")
    model.experts.placement = PLACEMENT
    assert model.remarks == ()


def test_ranks_with_one_token_each_use_all_copies() -> None:
    one_TK = torch.zeros(1, 1, dtype=torch.int64)
    used = {int(tables(DispatchRule.DYNAMIC, rank).of_layer(0)(one_TK)) for rank in range(4)}
    assert used == {0, 3, 6}


def test_nearest_stays_on_the_rank_then_on_the_node() -> None:
    ids_TK = torch.tensor([[0, 1]] * 4)
    assert tables(DispatchRule.NEAREST, 1).of_layer(0)(ids_TK).unique().tolist() == [3, 4]
    assert tables(DispatchRule.NEAREST, 3).of_layer(0)(ids_TK).unique().tolist() == [6, 9]  # expert 0 is on rank 2


@pytest.mark.parametrize("rule", DispatchRule)
def test_another_placement_is_put_in_place(rule: DispatchRule) -> None:
    held = tables(rule)
    layer, addresses = held.of_layer(0), (held.slots_LEX.data_ptr(), held.until_LEX.data_ptr())
    other = ExpertPlacement(
        physical_to_logical_map=np.roll(ROWS, 3, axis=1)[:, [2, 1, 0, *range(3, 12)]],
        num_logical_experts=8,
        num_ranks=4,
    )
    # as many copies of one expert as there can be at most
    most = ExpertPlacement(
        physical_to_logical_map=[[0, 1, 2, 3, 0, 4, 5, 3, 0, 6, 7, 3]] * 2, num_logical_experts=8, num_ranks=4
    )
    # and on one rank more of them than there are ranks
    heap = ExpertPlacement(
        physical_to_logical_map=[[0, 1, 2, 4, 5, 6, 7, 3, 3, 3, 3, 3]] * 2, num_logical_experts=8, num_ranks=4
    )
    for placement in (other, most, heap, PLACEMENT):
        held.put(placement)
        fresh = tables(rule, placement=placement)
        assert torch.equal(layer.slots_EX, fresh.slots_LEX[0])
        assert torch.equal(layer.until_EX, fresh.until_LEX[0])
        assert torch.equal(torch.tensor(placement.physical_to_logical_map[0])[layer(IDS_TK)], IDS_TK)
    assert (held.slots_LEX.data_ptr(), held.until_LEX.data_ptr()) == addresses
