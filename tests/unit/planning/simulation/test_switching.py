"""Engines that change their roles while traffic turns, by `planning.advise`."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

import pdinfer as pd
from pdinfer import bench, planning
from pdinfer.planning.calibration import Cost, StepCost
from pdinfer.planning.simulation import Cluster
from pdinfer.stats import PairingStats
from pdinfer.types import PeerAddress
from tests.unit.planning.simulation.test_policies import LIMITS
from tests.unit.planning.simulation.test_simulate import assert_nothing_is_left

SLO = bench.SLO(ttft_s=2.0, tpot_s=0.05)
COST = Cost(
    prefill=StepCost(prior=lambda rows: 0.03 + rows.num_tokens / 14_000),
    decode=StepCost(prior=lambda rows: 0.02 + 1e-4 * rows.num_rows + 2e-8 * rows.num_context_tokens),
    errors={},
    flat=(),
    at_bounds=(),
)
RATE, PHASE_S = 13.0, 100.0
"""Requests per second, and the seconds of each of two phases."""
LONG_PROMPTS, LONG_ANSWERS = (4096, 64), (512, 1024)
EVEN, FIXED = ("3P3D",), ("5P1D", "4P2D", "3P3D", "2P4D", "1P5D")
SPLITS = ((0, EVEN), *(pytest.param(seed, FIXED, marks=pytest.mark.full) for seed in (0, 1, 2)))


def cluster(shape: str, *, ranks: int = 1) -> Cluster:
    return planning.cluster(
        shape,
        prefill_s=COST.prefill,
        decode_s=COST.decode,
        prefill={"num_pages": 8000},
        decode={"num_pages": 400_000 // 256},
        ranks=ranks,
        **LIMITS,
    )


def drift(rate: float, seed: int, *phases: tuple[int, int], phase_s: float = PHASE_S) -> bench.Load:
    """Return a Poisson process of equal requests in each phase."""
    draw, at_s, arrivals = random.Random(seed), 0.0, list[bench.Arrival]()
    while (at_s := at_s + draw.expovariate(rate)) < phase_s * len(phases):
        prompt, output = phases[int(at_s / phase_s)]
        arrivals.append(bench.Arrival(at_s=at_s, prompt_tokens=prompt, output_tokens=output))
    return bench.Load(mode="open_loop", arrivals=tuple(arrivals), request_rate=rate, seed=seed)


def advise(stats: PairingStats) -> planning.advice.Advice | None:
    return planning.advise(stats, COST, SLO)


def keeping_two(stats: PairingStats) -> planning.advice.Advice | None:
    """Advise as a host does that keeps two prefills, of which one may be lost."""
    return advise(stats) if sum(isinstance(load, pd.policy.PrefillLoad) for load in stats.loads) > 2 else None


@pytest.mark.parametrize(("seed", "splits"), SPLITS)
def test_following_advice_bears_1_3_times_the_rate_of_every_fixed_split(seed: int, splits: tuple[str, ...]) -> None:
    """Goodput is the highest rate at which 90 % of the requests keep the SLO. None of the five splits of six engines
    bears RATE / 1.3, and engines that move bear RATE."""
    load = drift(RATE, seed, LONG_PROMPTS, LONG_ANSWERS)
    moving = planning.simulate(cluster("5P1D"), load, slo=SLO, adviser=keeping_two)
    moves = [note for note in moving.notes if "became" in note]
    assert moving.attainment is not None
    assert moving.attainment >= 0.9
    assert 1 <= len(moves) <= 3
    for shape in splits:
        load = drift(RATE / 1.3, seed, LONG_PROMPTS, LONG_ANSWERS)
        fixed = planning.simulate(cluster(shape), load, slo=SLO)
        assert fixed.attainment is not None
        assert fixed.attainment < 0.9, shape


def test_decodes_full_of_what_waits_for_prefills_are_given_away() -> None:
    """Long answers turn into long prompts, of which the one prefill computes three a second: those that it has not
    computed yet hold the pages of five decodes. 52 % keep the SLO where these count as decode's work."""
    load = drift(9.0, 0, LONG_ANSWERS, LONG_PROMPTS)
    moving = planning.simulate(cluster("1P5D"), load, slo=SLO, adviser=advise)
    assert moving.attainment is not None
    assert moving.attainment >= 0.85
    assert 1 <= sum("became" in note for note in moving.notes) <= 3


def move(load: pd.policy.PrefillLoad | pd.policy.DecodeLoad, role: str) -> planning.advice.Advice:
    return planning.advice.Advice(port=load.address, role=role, prefill_pressure=1.0, decode_pressure=1.0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_a_leaving_engine_does_is_done_elsewhere_and_nothing_is_lost(ranks: int) -> None:
    """Every five seconds an engine moves there and back, each with requests that take longer than it may drain."""
    num_asked = 0

    def turning(stats: PairingStats) -> planning.advice.Advice | None:
        nonlocal num_asked
        num_asked += 1
        decodes = [load for load in stats.loads if isinstance(load, pd.policy.DecodeLoad)]
        if num_asked % 5:
            return None
        return move(decodes[0], "prefill") if len(decodes) == 3 * ranks else move(stats.loads[0], "decode")

    load = drift(5.0 * ranks, 0, LONG_ANSWERS, LONG_PROMPTS, phase_s=20.0)
    simulator = planning.Simulator(cluster("2P3D", ranks=ranks), load, adviser=turning)
    records = simulator.run()
    assert [record.outcome for record in records] == ["length"] * len(load.arrivals)
    assert [len(record.token_s) for record in records] == [arrival.output_tokens for arrival in load.arrivals]
    assert simulator.moves[0].startswith("D0 became P2 after 7 s")
    assert simulator.moves[1].startswith("P0 became D3")
    assert len(simulator.moves) > 4
    assert any(record.num_retries for record in records)
    assert_nothing_is_left(simulator)


def test_without_a_reason_nobody_moves_and_the_simulation_is_the_same() -> None:
    load = drift(5.0, 0, LONG_PROMPTS, phase_s=20.0)
    alone = planning.simulate(cluster("3P3D"), load, slo=SLO)
    asked = planning.simulate(cluster("3P3D"), load, slo=SLO, adviser=advise)
    for name in ("notes", "mean_e2el_ms", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"):
        assert getattr(asked, name) == getattr(alone, name)


def test_an_adviser_sees_the_ports_that_serve() -> None:
    """One that always names the first prefill is asked again only when that has moved, and never sees it again."""
    seen: list[set[PeerAddress]] = []

    def first(stats: PairingStats) -> planning.advice.Advice | None:
        seen.append({load.address for load in stats.loads})
        prefills = [load for load in stats.loads if isinstance(load, pd.policy.PrefillLoad)]
        if len(prefills) == 1:
            return None
        return move(prefills[0], "decode")

    simulator = planning.Simulator(cluster("3P1D"), drift(2.0, 0, LONG_ANSWERS, phase_s=20.0), adviser=first)
    simulator.run()
    assert [move.split(" after ")[0] for move in simulator.moves] == ["P0 became D1", "P1 became D2"]
    assert {len(ports) for ports in seen} == {4}
    assert {address.engine_id for address in seen[-1]} == {b"P2", b"D0", b"D1", b"D2"}


@pytest.mark.parametrize("named", [7, SimpleNamespace(port=PeerAddress(b"P9", 0, 0))])
def test_an_adviser_names_a_port_that_it_was_shown(named: Any) -> None:
    with pytest.raises(pd.ConfigError, match="an adviser names the port of a load that it was shown, or None, got"):
        planning.simulate(cluster("2P2D"), drift(1.0, 0, LONG_PROMPTS, phase_s=5.0), adviser=lambda _: named)


def test_the_ranks_of_an_engine_move_together() -> None:
    """One of three prefills would do, and the decodes are late."""
    together = set[int]()

    def noting(stats: PairingStats) -> planning.advice.Advice | None:
        together.update(map(len, stats.together))
        return advise(stats)

    load = drift(24.0, 0, LONG_ANSWERS, phase_s=60.0)
    simulator = planning.Simulator(cluster("3P2D", ranks=2), load, adviser=noting)
    records = simulator.run()
    assert [record.outcome for record in records] == ["length"] * len(load.arrivals)
    assert [move.split(" after ")[0] for move in simulator.moves] == ["P0 became D2", "P2 became D3"]
    assert together == {2}
    joined = simulator.decodes[4:6]
    assert [rank.name for rank in joined] == ["D2.0", "D2.1"]
    assert joined[0].group is joined[1].group
    assert {record.decode for record in records} > {"D2.0", "D2.1"}
    assert_nothing_is_left(simulator)


@pytest.mark.parametrize("more", [{"colocated": True}, {"prefill": {"ranks": 2}}])
def test_engines_that_cannot_move_are_refused(more: dict[str, Any]) -> None:
    ranks = planning.cluster("2P2D", prefill_s=COST.prefill, decode_s=COST.decode, **more)
    with pytest.raises(pd.ConfigError, match="whose ranks have a device each, and as many in either role"):
        planning.simulate(ranks, drift(1.0, 0, LONG_PROMPTS, phase_s=5.0), adviser=advise)
