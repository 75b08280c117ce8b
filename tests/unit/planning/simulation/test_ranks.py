"""The data-parallel ranks of a simulated engine are ports of their own that take their steps together."""

from __future__ import annotations

import math
from typing import Any

import pytest

import pdinfer as pd
from pdinfer import bench, planning
from pdinfer.bench import Record
from pdinfer.bench.traces import Arrival
from pdinfer.planning import Change, Simulator, StepRows
from pdinfer.planning.simulation.simulator import uses_of
from tests.unit.planning.simulation.test_simulate import assert_nothing_is_left, cluster, load


def ran(shape: str, sizes: list[tuple[float, int, int]], **more: Any) -> tuple[Record, ...]:
    """Run requests of these times, prompts and outputs, in turn over the ports. Prefill and decode take no time unless
    `more` says so."""
    rows = tuple(Arrival(at_s=at_s, prompt_tokens=prompt, output_tokens=output) for at_s, prompt, output in sizes)
    given: dict[str, Any] = {"prefill_s": lambda rows: 0.0, "decode_s": lambda rows: 0.0, **more}
    made = planning.cluster(shape, **given)
    return Simulator(made, bench.Load(mode="replay", arrivals=rows), policy=pd.policy.round_robin).run()


def a_row_s(rows: StepRows) -> Any:
    return 0.01 * rows.num_rows + 0.0 * rows.num_context_tokens


def test_a_step_of_decode_lasts_as_long_as_its_fullest_rank() -> None:
    four = [(0.0, 100, 41), (0.0, 100, 41), (0.0, 100, 1), (0.0, 100, 41)]  # the third ends with its first token
    together = ran("1P1D", four, decode={"ranks": 2}, decode_s=a_row_s)
    assert [record.decode for record in together] == ["D0.0", "D0.1", "D0.0", "D0.1"]
    assert [record.step_s for record in together] == [
        pytest.approx(0.02),
        pytest.approx(0.02),
        None,
        pytest.approx(0.02),
    ]
    apart = ran("1P2D", four, decode_s=a_row_s)
    assert [record.step_s for record in apart] == [pytest.approx(0.01), pytest.approx(0.02), None, pytest.approx(0.02)]


def test_a_step_of_prefill_lasts_as_long_as_its_fullest_rank() -> None:
    given: dict[str, Any] = {"prefill": {"ranks": 2}, "prefill_s": lambda rows: rows.num_tokens / 1000}
    short, long = ran("1P1D", [(0.0, 100, 1), (0.0, 700, 1)], **given)
    assert (short.prefill, long.prefill) == ("P0.0", "P0.1")
    assert (short.prefill_ended_s, long.prefill_ended_s) == pytest.approx((0.7, 0.7))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_newcomer_on_an_idle_rank_waits_for_the_step_under_way(rank: int) -> None:
    outputs = [4, 4]
    outputs[rank] = 1  # it ends with its first token, and leaves its rank idle
    begun = [(0.0, 10, output) for output in outputs]
    skipped = [(0.1, 10, 1)] * rank  # takes the turn of rank 0
    *_, newcomer = ran("1P1D", [*begun, *skipped, (0.25, 10, 3)], decode={"ranks": 2}, decode_s=lambda rows: 1.0)
    assert newcomer.decode == f"D0.{rank}"
    assert (newcomer.granted_s, newcomer.committed_s) == (1.0, 3.0)  # it is told at 2.0, when the next step has begun
    assert newcomer.token_s == pytest.approx((3.0, 4.0, 5.0))
    *_, alone = ran("1P2D", [*begun, *skipped, (0.25, 10, 3)], decode_s=lambda rows: 1.0)
    assert alone.committed_s == 0.25


def test_engines_of_several_ranks_do_not_wait_for_each_other() -> None:
    records = ran("1P2D", [(0.0, 10, 11)] * 3, decode={"ranks": 2}, decode_s=a_row_s)
    assert {record.decode for record in records} == {"D0.0", "D0.1", "D1.0"}
    five = ran("1P2D", [(0.0, 10, 11)] * 5, decode={"ranks": 2}, decode_s=a_row_s)
    steps = {record.decode: record.step_s for record in five}
    assert steps == pytest.approx({"D0.0": 0.02, "D0.1": 0.02, "D1.0": 0.01, "D1.1": 0.01})


@pytest.mark.parametrize("pages", [110, 4000])
def test_tokens_and_pages_of_ranks_are_neither_lost_nor_made(pages: int) -> None:
    """Bursts that are cut, and steps that are walked one by one, are the same steps."""

    def walked_s(rows: StepRows) -> float:
        return 0.01 + 1e-7 * math.fsum([rows.num_context_tokens]) + 1e-4 * rows.num_rows

    runs = []
    for more in ({}, {"decode_s": walked_s}):
        limits = {"num_pages": pages, "max_running_requests": 8, "ranks": 4}
        prefill = {"num_pages": 200, "chunked_prefill_size": 1024, "ranks": 3}
        simulator = Simulator(cluster("P4D9", prefill=prefill, decode=limits, **more), load(40.0))
        runs.append(simulator.run())
        assert [len(record.token_s) for record in runs[-1]] == [each.output_tokens for each in simulator.load.arrivals]
        assert_nothing_is_left(simulator)
        assert {use.name for use in uses_of(simulator)} == {
            *(f"P0.{at}" for at in range(3)),
            *(f"D0.{at}" for at in range(4)),
        }
    for one, other in zip(*runs, strict=True):
        assert one.decode == other.decode
        assert one.read_s == pytest.approx(other.read_s, abs=1e-9)


def test_partial_load_is_slower_in_step_than_apart() -> None:
    """Few requests on many ranks: without the step in common, most of them would run as if they were alone."""
    given: dict[str, Any] = {"decode_s": lambda rows: 0.01 * rows.num_rows, "prefill_s": lambda rows: 0.0}
    some = bench.open_loop(60.0, 300, prompt_tokens=10, output_tokens=(10, 60), seed=1)
    in_step, apart = (
        planning.simulate(planning.cluster(shape, **given, **more), some, policy=pd.policy.round_robin).mean_tpot_ms
        for shape, more in (("1P1D", {"decode": {"ranks": 16}}), ("1P16D", {}))
    )
    assert in_step is not None
    assert apart is not None
    assert in_step > 1.3 * apart


@pytest.mark.parametrize("engine", ["P1", "D1"])
def test_all_ranks_of_an_engine_slow_down_and_go_together(engine: str) -> None:
    gone = cluster("2P2D", ranks=2, changes=(Change(engine=engine, at_s=2.0, speed=0.0),))
    simulator = Simulator(gone, load())
    records = simulator.run()
    assert all(record.is_completed for record in records)
    late = {getattr(record, "prefill" if engine == "P1" else "decode") for record in records if record.sent_s > 2.0}
    assert late == {f"{engine[0]}0.0", f"{engine[0]}0.1"}
    slow = ran(
        "1P1D",
        [(0.0, 10, 4)] * 2,
        ranks=2,
        decode_s=lambda rows: 1.0,
        changes=(Change(engine="D0", at_s=1.5, speed=0.5),),
    )
    assert [record.token_s for record in slow] == [pytest.approx((0.0, 1.0, 2.0, 4.0))] * 2
