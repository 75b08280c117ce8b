"""Ranks change to another placement together or not at all, whatever happens meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import pdinfer as pd
from pdinfer.errors import ConfigError
from pdinfer.moe.balance.messages import PackedPlacement
from pdinfer.moe.balance.process import unpack_placement
from pdinfer.moe.migration.rebalancing import Rebalancing
from pdinfer.moe.placement.recorder import ExpertLoadRecorder
from pdinfer.testing import random_model
from tests.e2e.rebalance_jobs import scattered
from tests.e2e.setups import model_of
from tests.unit.parallel.thread_groups import groups_of

LAYERS, EXPERTS, REDUNDANT, RANKS = 2, 4, 2, 3
SIZE = 8


@attrs.define
class Slots:
    """The experts of a rank in one layer. The bytes of an expert are its number. When `fails`, one read raises."""

    data: Tensor
    fails: bool = False
    slot_bytes: int = SIZE
    device: torch.device = attrs.field(factory=lambda: torch.device("cpu"))

    def read_slot(self, slot: int) -> Tensor:
        if self.fails:
            self.fails = False
            raise MemoryError(f"slot {slot}: a test's fault")
        return self.data[slot].clone()

    def write_slot(self, slot: int, data: Tensor) -> None:
        self.data[slot] = data


class FakeSolver:
    """A solver that answers with any other placement, at the second look."""

    def __init__(self) -> None:
        self.asked = 0
        self.error: Exception | None = None
        self.loads: list[Any] = []
        self.budgets: list[int | None] = []

    def ask(self, load: Any, previous: pd.ExpertPlacement, *, max_moves: int | None = None) -> None:
        self.looks, self.previous = 0, previous
        self.asked += 1
        self.loads.append(load.tolist())
        self.budgets.append(max_moves)

    def poll(self) -> bytes:
        self.looks += 1
        if self.looks < 2:
            return b""
        if self.error is not None:
            raise self.error
        return msgspec.msgpack.encode(PackedPlacement.of(scattered(self.previous, 100 + self.asked)))

    def close(self) -> None:
        """There is nothing to end."""


class World:
    """RANKS ranks that all take part in every agreement."""

    def __init__(self, pool: ThreadPoolExecutor, **options: Any) -> None:
        self.pool = pool
        self.layers: list[list[Slots]] = []
        self.experts: list[Any] = []
        self.ranks: list[Rebalancing] = []
        self.solvers: list[FakeSolver] = []
        first = pd.ExpertPlacement.trivial(LAYERS, EXPERTS, RANKS, REDUNDANT)
        for rank, groups in enumerate(groups_of(dp_size=RANKS)):
            slots = first.slots_of(rank)
            layers = [
                Slots(torch.tensor(row[list(slots)], dtype=torch.uint8)[:, None].repeat(1, SIZE))
                for row in first.physical_to_logical_map
            ]
            recorder = ExpertLoadRecorder(LAYERS, EXPERTS, device="cpu", mode="stat")
            tables = SimpleNamespace(ranks_per_node=None, placement=first)
            tables.put = lambda placement, tables=tables: setattr(tables, "placement", placement)
            experts = SimpleNamespace(placement=first, epoch=0, replicas=tables, group=groups.world, recorder=recorder)
            moe: Any = [SimpleNamespace(experts=slots) for slots in layers]
            self.layers.append(layers)
            self.experts.append(experts)
            config = pd.EngineConfig(rebalance_bytes_per_step=2 * SIZE, **options)
            self.solvers.append(FakeSolver())
            self.ranks.append(Rebalancing(experts, moe, groups, config, solver=self.solvers[-1]))

    def agree(self, *, runs: bool = False) -> None:
        """Agree once, and check that all ranks use the same placement and hold what it says."""
        statuses = [rank.status() for rank in self.ranks]
        moves = list(self.pool.map(lambda rank: rank.agreed(statuses, runs=runs), self.ranks))
        assert len(set(moves)) == 1
        placement, epoch = self.experts[0].placement, self.ranks[0].epoch
        for rank, (experts, layers) in enumerate(zip(self.experts, self.layers, strict=True)):
            assert (experts.placement, self.ranks[rank].epoch) == (placement, epoch)
            assert experts.replicas.placement == placement
            held = np.array([slots.data[:, 0].tolist() for slots in layers])
            assert np.array_equal(held, placement.physical_to_logical_map[:, list(placement.slots_of(rank))])

    def settle(self) -> None:
        """Agree as long as a rank has news."""
        for _ in range(100):
            if not any(rank.has_news or rank._solving.is_awaited for rank in self.ranks):
                return
            self.agree()
        raise AssertionError("there is always news")

    def break_rank(self, rank: int) -> None:
        """Make the next read of weights on this rank fail."""
        self.layers[rank][0].fails = True


@contextmanager
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(RANKS) as pool:
        yield pool


def other(world: World, seed: int) -> pd.ExpertPlacement:
    return scattered(world.experts[0].placement, seed)


ACTIONS = st.one_of(
    st.tuples(st.just("stage"), st.integers(0, RANKS - 1), st.integers(0, 2)),
    st.tuples(st.just("stage all"), st.just(0), st.integers(0, 2)),
    st.tuples(st.sampled_from(["cancel", "break", "rebalance"]), st.integers(0, RANKS - 1), st.just(0)),
    st.tuples(st.sampled_from(["agree", "run"]), st.just(0), st.just(0)),
)


@settings(max_examples=50)
@given(st.lists(ACTIONS, max_size=30))
def test_ranks_change_together_or_not_at_all(actions: list[tuple[str, int, int]]) -> None:
    with threads() as pool:
        world = World(pool, eplb_rebalance_num_iterations=5)
        for what, rank, seed in actions:
            if what.startswith("stage"):
                for each in range(RANKS) if what == "stage all" else [rank]:
                    try:
                        world.ranks[each].stage(other(world, seed))
                    except ConfigError as error:
                        assert "another placement is staged already" in str(error)  # noqa: PT017
            elif what == "break":
                world.break_rank(rank)
            elif what == "cancel":
                world.ranks[rank].cancel()
            elif what == "rebalance":
                world.ranks[rank].request_rebalance()
            else:
                world.agree(runs=what == "run")
        world.settle()
        for layers in world.layers:
            layers[0].fails = False
        world.ranks[0].cancel()
        world.settle()
        assert not any(rank.is_staged for rank in world.ranks)
        epoch, new = world.ranks[0].epoch, other(world, 50)
        for each in world.ranks:
            each.stage(new)
        world.settle()
        assert [each.epoch for each in world.ranks] == [epoch + 1] * RANKS
        assert world.experts[0].placement == new


def test_an_error_on_one_rank_is_told_on_all() -> None:
    with threads() as pool:
        world = World(pool)
        new = other(world, 1)
        for rank in world.ranks:
            rank.stage(new)
        world.break_rank(1)
        world.settle()
        assert [rank.epoch for rank in world.ranks] == [0] * RANKS
        assert world.ranks[1].error.startswith("MemoryError: slot ")
        assert world.ranks[0].error == world.ranks[2].error == "rank 1 could not go on with it; its log says why"


def test_every_so_many_steps_the_summed_load_is_solved() -> None:
    with threads() as pool:
        world = World(pool, eplb_rebalance_num_iterations=3)
        world.agree()  # no step
        for _ in range(3):
            for number, experts in enumerate(world.experts):
                experts.recorder.record(0, torch.tensor([[number]]))
                experts.recorder.end_step()
            world.agree(runs=True)
        assert [solver.asked for solver in world.solvers] == [1, 0, 0]
        assert world.solvers[0].loads == [[[3, 3, 3, 0], [0] * 4]]
        world.ranks[2].request_rebalance()  # one is under way
        world.settle()
        assert [rank.epoch for rank in world.ranks] == [1] * RANKS
        assert world.solvers[0].asked == 1
        assert not world.experts[1].recorder.counts().any()


def test_nothing_is_solved_beside_a_placement_that_is_staged() -> None:
    with threads() as pool:
        world = World(pool)
        solver = world.solvers[0]
        world.ranks[2].stage(other(world, 1))
        world.ranks[1].request_rebalance()
        world.settle()
        assert (solver.asked, world.ranks[0].epoch) == (0, 0)
        world.ranks[1].cancel()
        world.settle()
        world.ranks[1].request_rebalance()
        world.settle()
        assert (solver.asked, world.ranks[0].epoch) == (1, 1)


def test_an_answer_is_not_used_when_a_placement_was_staged_meanwhile() -> None:
    with threads() as pool:
        world = World(pool)
        world.ranks[1].request_rebalance()
        world.agree()
        hosts = other(world, 1)
        for rank in world.ranks:
            rank.stage(hosts)
        world.settle()
        assert world.experts[0].placement == hosts
        assert (world.ranks[0]._solving.is_awaited, world.ranks[0].error) == (False, "")


def test_an_answer_that_one_rank_refuses_is_dropped_by_the_others() -> None:
    with threads() as pool:
        world = World(pool)
        world.ranks[1].request_rebalance()
        world.agree()
        world.agree()
        statuses = [rank.status() for rank in world.ranks]
        assert statuses[0].answer_bytes
        world.ranks[1].stage(other(world, 1))  # a host, after all have said that nothing is staged
        list(pool.map(lambda rank: rank.agreed(statuses, runs=False), world.ranks))
        assert [rank.is_staged for rank in world.ranks] == [True] * RANKS
        world.settle()
        assert [rank.is_staged for rank in world.ranks] == [False, True, False]
        assert "another placement is staged already" in world.ranks[1].error
        assert world.ranks[1].status().failed is None  # said once
        world.ranks[1].cancel()
        world.settle()
        assert [(rank.epoch, rank.is_staged) for rank in world.ranks] == [(0, False)] * RANKS


def test_placements_that_differ_in_shares_are_different_ones() -> None:
    with threads() as pool:
        world = World(pool)
        hosts = other(world, 1)
        shares = np.zeros(hosts.physical_to_logical_map.shape)  # all of an expert's tokens go to its first copy
        for layer, row in enumerate(hosts.physical_to_logical_map.tolist()):
            shares[layer, [row.index(expert) for expert in range(EXPERTS)]] = 1.0
        for rank, slot_shares in zip(world.ranks, (None, None, shares), strict=True):
            rank.stage(attrs.evolve(hosts, slot_shares=slot_shares))
        world.settle()
        assert [(rank.epoch, rank.is_staged) for rank in world.ranks] == [(0, True)] * RANKS


@pytest.mark.parametrize(("config", "max_moves"), [({}, None), ({"rebalance_max_bytes": 3 * SIZE + 1}, 3)])
def test_the_solver_may_move_so_many_bytes(config: dict[str, Any], max_moves: int | None) -> None:
    with threads() as pool:
        world = World(pool, **config)
        world.ranks[1].request_rebalance()
        world.agree()
        assert world.solvers[0].budgets == [max_moves]


@pytest.mark.parametrize("error", [BrokenPipeError("it has ended"), ConfigError("no load")])
def test_a_solver_that_fails_changes_nothing_and_is_asked_again(error: Exception) -> None:
    with threads() as pool:
        world = World(pool)
        solver = world.solvers[0]
        solver.error = error
        world.ranks[1].request_rebalance()
        world.settle()
        assert (world.ranks[0].epoch, world.ranks[0].error) == (0, str(error))
        solver.error = None
        world.ranks[1].request_rebalance()
        world.settle()
        assert [rank.epoch for rank in world.ranks] == [1] * RANKS


def engine() -> pd.DecodeEngine:
    model = random_model()  # no other test's: placements change it
    pool = pd.PagePool(model, pd.CacheConfig(page_size=4, num_pages=4))
    (channel,) = pd.KVChannel.loopback(pool)
    return pd.DecodeEngine(model, channel)


def test_bad_and_stale_placements_are_refused_with_the_values() -> None:
    with engine() as one:
        placement = one.model.experts.placement
        assert placement is not None
        table = placement.physical_to_logical_map
        for map_, experts, ranks, told in (
            (table[:1], 8, 1, "num_layers = 1, the model runs with 2"),
            (np.arange(9)[None].repeat(2, 0), 9, 1, "num_logical_experts = 9, the model runs with 8"),
            (table, 8, 2, "num_ranks = 2, the model runs with 1"),
            (table, 8, 1, "the one that runs already, as epoch 0"),
        ):
            with pytest.raises(ConfigError, match=told):
                one.experts.stage(
                    pd.ExpertPlacement(physical_to_logical_map=map_, num_logical_experts=experts, num_ranks=ranks)
                )
        new = attrs.evolve(placement, physical_to_logical_map=table[:, ::-1])
        for epoch in (0, -1, True, "2"):
            with pytest.raises(ConfigError, match=r"is stale: its epoch is .*, and epoch 0 runs already"):
                one.experts.stage(new, epoch=epoch)  # type: ignore[arg-type]
        one.experts.stage(new, epoch=7)
        one.experts.stage(new, epoch=7)
        with pytest.raises(ConfigError, match="another placement is staged already, as epoch 7"):
            one.experts.stage(new, epoch=8)
        assert one.load().is_placement_staged
        while one.wait(0.0):
            one.step()
        assert (one.load().placement_epoch, one.load().is_placement_staged) == (7, False)
        with pytest.raises(ConfigError, match="its epoch is 7, and epoch 7 runs already"):
            one.experts.stage(placement, epoch=7)
        for ask in (one.experts.rebalance, one.experts.sum_load):
            with pytest.raises(ConfigError, match='needs expert_distribution_recorder_mode "stat" or "window"'):
                ask()


def test_one_rank_says_the_same_whatever_is_staged() -> None:
    with engine() as one:
        before = one.model.logits([3, 1, 4])
        placement = one.model.experts.placement
        assert placement is not None
        one.stage_placement(scattered(placement, 1))
        while one.wait(0.0):
            one.step()
        assert one.load().placement_epoch == 1
        assert torch.equal(one.model.logits([3, 1, 4]), before)


def test_what_is_recorded_is_told_without_the_warm_up() -> None:
    model = random_model(experts=pd.moe.ExpertConfig(expert_distribution_recorder_mode="stat"))
    pool = pd.PagePool(model, pd.CacheConfig(page_size=4, num_pages=16))
    prefill_end, decode_end = pd.KVChannel.loopback(pool, pool)
    with pd.PrefillEngine(model, prefill_end) as prefill, pd.DecodeEngine(model, decode_end) as decode:
        prefill.warm_up()
        sampling = pd.SamplingParams(max_new_tokens=4, ignore_eos=True)
        with pd.Pairing(prefill, decode) as pairing:
            list(pairing.generate([pd.Request(prompt=(1, 2, 3, 4, 5), sampling=sampling)]))
            assert decode.experts.load is None
            decode.experts.sum_load()
            decode.step()
            assert decode.experts.load is not None
            # three of the four tokens were run, behind the five of the prompt
            assert decode.experts.load.sum(1).tolist() == [(5 + 3) * model.config.num_experts_per_tok] * 2
        with pytest.raises(ConfigError, match=r"rebalance\(\): all experts are on one rank"):
            decode.experts.rebalance()


def test_rebalancing_without_counts_is_refused() -> None:
    pool = pd.PagePool(model_of(), pd.CacheConfig(page_size=4, num_pages=4))
    (channel,) = pd.KVChannel.loopback(pool)
    with pytest.raises(ConfigError, match="eplb_rebalance_num_iterations = 9 needs expert_distribution_recorder_mode"):
        pd.DecodeEngine(model_of(), channel, pd.EngineConfig(eplb_rebalance_num_iterations=9))


def test_a_packed_placement_is_itself_again() -> None:
    shares = np.array([[0.25, 1.0, 0.75]])
    placement = pd.ExpertPlacement(
        physical_to_logical_map=[[0, 1, 0]], num_logical_experts=2, num_ranks=3, slot_shares=shares
    )
    assert unpack_placement(msgspec.msgpack.encode(PackedPlacement.of(placement))) == placement
    wrong = PackedPlacement([[0, 0]], 2, 1)
    with pytest.raises(ConfigError, match="no slot for expert 1"):
        unpack_placement(msgspec.msgpack.encode(wrong))
