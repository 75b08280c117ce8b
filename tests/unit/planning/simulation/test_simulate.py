"""A simulated cluster keeps to formulas of queues, loses nothing, and does what its host says happens to it."""

from __future__ import annotations

import math
from typing import Any

import attrs
import numpy as np
import pytest

import pdinfer as pd
from pdinfer import bench, planning
from pdinfer.bench.traces import Arrival
from pdinfer.errors import ConfigError
from pdinfer.planning import Change, Simulator, Stall, StepRows
from pdinfer.planning.simulation import Cluster
from pdinfer.types import Choice
from tests.unit.planning.simulation.queues import CV2, waited_s


@pytest.mark.parametrize("kind", CV2)
def test_waiting_follows_the_formula(kind: str) -> None:
    found_s, expected_s = waited_s(kind, 0.5, num_requests=4_000)
    assert found_s == pytest.approx(expected_s, rel=0.07)


@pytest.mark.full(minutes=4)
@pytest.mark.parametrize("kind", CV2)
def test_a_million_requests_wait_as_long_as_the_formula_says(kind: str) -> None:
    """`benchmarks/goodput.py queues` has other loads."""
    found_s, expected_s = waited_s(kind, 0.8, num_requests=200_000, num_seeds=5)
    assert found_s == pytest.approx(expected_s, rel=0.02)


def cluster(shape: str = "2P2D", **more: Any) -> Cluster:
    settings: dict[str, Any] = {
        "prefill_s": lambda rows: 0.01 + rows.num_tokens / 20_000,
        "decode_s": lambda rows: 0.01 + 1e-7 * rows.num_context_tokens + 1e-4 * rows.num_rows,
        "page_size": 16,
        "prefill": {"num_pages": 400, "chunked_prefill_size": 1024},
        "decode": {"num_pages": 600, "max_running_requests": 32},
        **more,
    }
    return planning.cluster(shape, **settings)


def load(rate: float = 20.0, count: int = 100, *, seed: int = 0, **lengths: Any) -> bench.Load:
    return bench.open_loop(
        rate, count, **{"prompt_tokens": (20, 1500), "output_tokens": (1, 120), **lengths}, seed=seed
    )


def assert_nothing_is_left(simulator: Simulator) -> None:
    for decode in simulator.decodes:
        assert not [*decode.scheduler.running, *decode.scheduler.granted, *decode.scheduler.waiting, *decode.landed]
        assert decode.context == 0
        assert decode.pages.num_used == 0
    for prefill in simulator.prefills:
        assert not prefill.scheduler.unfinished
        assert prefill.pages.num_used == 0


SETTINGS = {
    "roomy": cluster(decode={"num_pages": 4000}),
    "pressed": cluster(decode={"num_pages": 250, "max_running_requests": 32}),
    "linked": cluster(bytes_per_s=20e6, token_bytes=2048, num_pushes=8, latency_s=0.002),
    "colocated": cluster(colocated=True),
    "scattered": cluster(step_cv=0.3),
    "walked": cluster(decode_s=lambda rows: max(0.01, 1e-7 * rows.num_context_tokens)),
}


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_tokens_bytes_and_slots_are_neither_lost_nor_made(setting: str) -> None:
    wanted = load()
    simulator = Simulator(SETTINGS[setting], wanted)
    records = simulator.run()
    assert_nothing_is_left(simulator)
    assert [record.outcome for record in records] == ["length"] * len(records)
    for record, arrival in zip(records, wanted.arrivals, strict=True):
        assert record.output_tokens == len(record.token_s) == arrival.output_tokens
        assert list(record.read_s) == sorted(record.read_s)
        assert list(record.token_s) == sorted(record.token_s)
        assert all(made <= read for made, read in zip(record.token_s, record.read_s, strict=True))
        assert sum(record.stages().values()) == pytest.approx(record.ttft_s, abs=1e-9)
    made = sum(arrival.output_tokens for arrival in wanted.arrivals)
    landings = sum(1 + record.num_retries for record in records)
    assert sum(decode.scheduler.costs.num_tokens for decode in simulator.decodes) == made - landings
    assert simulator.links.pushed_tokens == simulator.landed_tokens
    slots = simulator.cluster.decode.engine.max_running_requests
    assert max(decode.most_slots for decode in simulator.decodes) <= slots
    assert not any(simulator.links.backlog.values())


def test_a_full_pool_retracts_and_the_stream_goes_on() -> None:
    simulator = Simulator(SETTINGS["pressed"], load())
    records = simulator.run()
    assert sum(record.num_retries for record in records) > 0
    assert_nothing_is_left(simulator)


def test_requests_in_flight_are_rate_times_time() -> None:
    wanted = load(count=600)
    records = Simulator(cluster(), wanted).run()
    last_s = wanted.arrivals[-1].at_s
    moments = np.linspace(0.0, last_s, 4000)
    spans = np.array([(record.sent_s, record.read_s[-1]) for record in records])
    held = np.mean([((spans[:, 0] <= at) & (at < spans[:, 1])).sum() for at in moments])
    in_time = np.minimum(spans[:, 1], last_s) - spans[:, 0]
    assert held == pytest.approx(in_time.sum() / last_s, rel=0.02)


def test_equal_seeds_give_equal_bytes() -> None:
    slo = pd.bench.SLO(ttft_s=1.0)
    first, second, other = (
        planning.simulate(SETTINGS["scattered"], load(), slo=slo, seed=seed).to_json() for seed in (3, 3, 4)
    )
    assert first == second
    assert first != other


def test_steps_scatter_around_their_time() -> None:
    steady, scattered = (
        planning.simulate(cluster(step_cv=cv, decode={"num_pages": 9000}), load(count=400, output_tokens=100))
        for cv in (0.0, 0.3)
    )
    assert scattered.mean_tpot_ms == pytest.approx(steady.mean_tpot_ms, rel=0.03)
    assert scattered.max_itl_ms > 1.5 * steady.max_itl_ms


def mean_ttft_ms(simulated: Cluster, wanted: bench.Load) -> float:
    found = planning.simulate(simulated, wanted).mean_ttft_ms
    assert found is not None
    return found


def test_more_load_waits_longer() -> None:
    waits = [mean_ttft_ms(cluster(), load(rate, 300)) for rate in (5.0, 10.0, 20.0, 40.0)]
    assert waits == sorted(waits)
    assert waits[-1] > 2 * waits[0]


def test_more_slots_wait_less() -> None:
    waits = [mean_ttft_ms(cluster(decode={"max_running_requests": slots}), load(40.0, 300)) for slots in (4, 8, 16, 64)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 2 * waits[-1]


def test_more_bandwidth_waits_less() -> None:
    waits = [
        mean_ttft_ms(cluster(bytes_per_s=rate, token_bytes=70_272, num_pushes=10), load(8.0, 200))
        for rate in (0.5e9, 1e9, 2e9, 25e9)
    ]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 1.2 * waits[-1]
    assert mean_ttft_ms(cluster(), load(8.0, 200)) == pytest.approx(waits[-1], rel=0.03)


def test_compute_hides_what_the_link_can_carry_meanwhile() -> None:
    alone = load(1.0, 1, prompt_tokens=1000, output_tokens=1)
    no_link, fast, slow = (
        mean_ttft_ms(cluster(latency_s=latency_s, bytes_per_s=rate, token_bytes=1000, num_pushes=10), alone)
        for rate, latency_s in ((None, 0.0), (1e8, 0.002), (1e6, 0.002))
    )
    assert fast == pytest.approx(no_link + 2 + 1000 * 1000 / 10 / 1e8 * 1e3)  # the last of ten pushes, and the flight
    assert slow == pytest.approx(2 + 1000 * 1000 / 1e6 * 1e3)


def test_a_slower_engine_takes_longer_from_then_on() -> None:
    slowed = cluster("1P1D", changes=(Change(engine="D0", at_s=5.0, speed=0.5),))
    records = Simulator(slowed, load(2.0, 40, output_tokens=50)).run()
    gaps = [(at, gap) for r in records for at, gap in zip(r.read_s[1:], r.itl_s(), strict=True) if gap]
    before = np.mean([gap for at, gap in gaps if at < 5.0])
    after = np.mean([gap for at, gap in gaps if at > 5.1])
    assert after == pytest.approx(2 * before, rel=0.1)


@pytest.mark.parametrize("engine", ["P0", "D0"])
def test_requests_of_an_engine_that_is_gone_end_elsewhere(engine: str) -> None:
    gone = cluster(changes=(Change(engine=engine, at_s=2.0, speed=0.0),))
    simulator = Simulator(gone, load(), policy=pd.policy.round_robin)
    records = simulator.run()
    assert {record.outcome for record in records} == {"length"}
    served = [record.prefill if engine[0] == "P" else record.decode for record in records]
    assert engine in served
    assert all(name != engine for record, name in zip(records, served, strict=True) if record.sent_s > 2.0)
    assert any(record.num_retries for record in records)
    assert all(record.output_tokens == a.output_tokens for record, a in zip(records, load().arrivals, strict=True))


def test_when_nobody_is_left_requests_fail() -> None:
    gone = cluster("1P1D", changes=(Change(engine="D0", at_s=1.0, speed=0.0),))
    summary = planning.simulate(gone, load(count=150))
    assert summary.completed + summary.failed == summary.num_requests
    assert summary.failed > 100


def test_a_host_that_stalls_shows_as_slip_and_delivery_and_not_as_speed() -> None:
    stalled = planning.simulate(cluster(stalls=(Stall(at_s=3.0, for_s=0.5),)), load())
    steady = planning.simulate(cluster(), load())
    assert stalled.max_slip_ms == pytest.approx(500.0, rel=0.2)
    assert steady.max_slip_ms == 0.0
    assert stalled.max_delivery_ms > 400.0
    assert stalled.fastest_step_ms == pytest.approx(steady.fastest_step_ms, rel=0.05)


def test_colocated_engines_take_turns() -> None:
    wanted = load(10.0, 200)
    apart, together = (planning.simulate(cluster(colocated=colocated), wanted) for colocated in (False, True))
    assert together.p99_tpot_ms > 1.3 * apart.p99_tpot_ms
    simulator = Simulator(cluster(colocated=True), wanted)
    for record in simulator.run():
        assert str(record.prefill)[1:] == str(record.decode)[1:]
    busy = [
        prefill.scheduler.costs.busy_s + decode.scheduler.costs.busy_s
        for prefill, decode in zip(simulator.prefills, simulator.decodes, strict=True)
    ]
    assert max(busy) <= max(decode.burst.ended_s[-1] for decode in simulator.decodes) + 1e-9


def test_what_lands_together_joins_one_step() -> None:
    one, other = Simulator(cluster("1P1D"), bench.burst(2, prompt_tokens=100, output_tokens=3)).run()
    assert one.prefill_ended_s == other.prefill_ended_s
    assert one.read_s == other.read_s


def test_a_closed_loop_keeps_its_clients_busy() -> None:
    wanted = bench.closed_loop(8, 100, prompt_tokens=200, output_tokens=40)
    records = Simulator(cluster(), wanted).run()
    for record in records:
        at_s = record.sent_s
        in_flight = sum(other.sent_s <= at_s < other.read_s[-1] for other in records)
        assert in_flight <= 8
    assert sum(record.intended_s == 0.0 for record in records) == 8
    assert planning.simulate(cluster(), wanted).findings == ()


def test_a_cap_on_concurrency_is_part_of_latency() -> None:
    rows = [Arrival(at_s=at / 10, prompt_tokens=1000, output_tokens=1) for at in range(8)]
    capped = bench.Load(mode="open_loop", arrivals=tuple(rows), max_concurrency=1)
    half_a_second = planning.cluster("1P1D", prefill_s=lambda rows: 0.5, decode_s=lambda rows: 0.0)
    summary = planning.simulate(half_a_second, capped)
    assert summary.mean_e2el_ms == pytest.approx(1900.0)


def test_a_queue_that_is_full_refuses() -> None:
    tight = cluster(
        "1P1D",
        pairing=pd.PairingConfig(max_queued_requests=4, max_queued_per_decode=2),
        decode={"max_running_requests": 2},
    )
    summary = planning.simulate(tight, bench.burst(50, prompt_tokens=500, output_tokens=20))
    assert summary.completed == 4
    assert summary.failed == 46
    assert summary.refusals == {"the queue already holds 4 requests (PairingConfig.max_queued_requests)": 46}
    assert "46 refused: the queue already holds 4 requests" in str(summary.findings[0])
    assert "refused 46: the queue already holds 4 requests (PairingConfig.max_queued_requests)" in str(summary)


def test_a_burst_beyond_the_default_queue_says_how_many_it_loses() -> None:
    large = bench.burst(1100, prompt_tokens=8, output_tokens=1)
    summary = planning.simulate(cluster("1P1D"), large)
    assert (summary.completed, sum(summary.refusals.values())) == (1024, 76)
    assert bench.merge([summary, summary]).refusals == {next(iter(summary.refusals)): 152}
    roomy = cluster("1P1D", pairing=pd.PairingConfig(max_queued_requests=5000))
    assert planning.simulate(roomy, large).refusals == {}


def test_a_request_that_no_pool_holds_is_refused() -> None:
    records = Simulator(cluster(), bench.burst(1, prompt_tokens=9000, output_tokens=10)).run()
    assert records[0].outcome == "refused"
    assert "prefill holds 6400" in str(records[0].error)


def test_a_policy_must_take_a_port_that_it_was_shown() -> None:
    def elsewhere(shape: Any, prefills: Any, decodes: Any) -> Choice:
        return Choice(prefill=decodes[0].address, decode=decodes[0].address)

    with pytest.raises(ConfigError, match="the policy chose a port that is not part of this pairing"):
        planning.simulate(cluster(), load(), policy=elsewhere)


def test_policies_see_what_pages_hold() -> None:
    rows = [Arrival(at_s=float(at), prompt_tokens=1024, output_tokens=2, hash_ids=(1, 2)) for at in range(12)]
    same = bench.Load(mode="replay", arrivals=tuple(rows))
    records = Simulator(cluster("4P1D"), same, policy=pd.policy.cache_aware).run()
    assert len({record.prefill for record in records}) == 1
    assert all(record.cached_tokens == 1008 for record in records[1:])
    shown = []

    def look(shape: Any, prefills: Any, decodes: Any) -> Choice:
        shown.append((dict(shape.found_tokens), [load.cost for load in decodes], shape.links[0].backlog_bytes))
        return Choice(prefill=prefills[0].address, decode=decodes[0].address)

    Simulator(cluster("1P1D", bytes_per_s=1e6, token_bytes=1000), same, policy=look).run()
    assert sorted(shown[-1][0].values()) == [1008, 1008]
    assert shown[-1][1][0].seconds(1, 1025) == pytest.approx(0.01 + 1025e-7 + 1e-4, rel=0.01)
    assert shown[1][2] == 1024 * 1000  # the first prompt takes 1.024 s to cross


def test_steps_that_are_no_seconds_are_refused() -> None:
    late = cluster(decode_s=lambda rows: np.where(np.asarray(rows.num_context_tokens) % 2048 == 999, np.nan, 0.01))
    with pytest.raises(ConfigError, match="decode_s must return seconds"):
        planning.simulate(late, load())
    with pytest.raises(ConfigError, match="prefill_s must return seconds"):
        cluster(prefill_s=lambda rows: 10**400)


def test_a_seed_is_not_negative() -> None:
    with pytest.raises(ConfigError, match="seed must be an int from 0"):
        planning.simulate(cluster(), load(), seed=-1)


def test_a_load_without_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request to send"):
        planning.simulate(cluster(), bench.Load(mode="burst", arrivals=()))


def test_bursts_are_the_steps_that_walking_gives() -> None:
    """A function that takes no arrays is asked for every step; the same seconds must come of both ways."""

    def walked_s(rows: StepRows) -> float:
        return 0.01 + 1e-7 * math.fsum([rows.num_context_tokens]) + 1e-4 * rows.num_rows

    for decode in ({"num_pages": 250}, {"num_pages": 4000}):
        at_once, walked = (
            Simulator(cluster(decode={**decode, "max_running_requests": 32}, **more), load()).run()
            for more in ({}, {"decode_s": walked_s})
        )
        for one, other in zip(at_once, walked, strict=True):
            assert one.read_s == pytest.approx(other.read_s, abs=1e-9)
            assert attrs.evolve(one, read_s=(), token_s=()).decode == other.decode


def test_a_summary_says_that_it_is_simulated() -> None:
    summary = planning.simulate(cluster(), load(), slo=pd.bench.SLO(ttft_s=1.0, tpot_s=0.05), name="mine")
    assert (summary.source, summary.mode, summary.name) == ("simulated", "open_loop", "mine")
    assert summary.environment["cluster"] == "2P2D"
    assert not any("nodes" in note for note in summary.notes)
    grouped = planning.simulate(cluster("P3x3D4"), load())
    assert "P3x3D4 has 3 x 3 nodes of prefill and 1 x 4 of decode; 3P4D has 3 prefills and 4 decodes" in grouped.notes
    assert {(use.role, use.name) for use in summary.engines} == {
        ("prefill", "P0"),
        ("prefill", "P1"),
        ("decode", "D0"),
        ("decode", "D1"),
    }
    assert bench.Summary.from_json(summary.to_json()) == summary
    assert summary.findings == ()


def asked(load: bench.Load, **each: Any) -> bench.Load:
    """Return the load with these fields of its arrivals, in turn."""
    fields = [dict(zip(each, values, strict=True)) for values in zip(*each.values(), strict=True)]
    arrivals = (attrs.evolve(arrival, **fields[at % len(fields)]) for at, arrival in enumerate(load.arrivals))
    return attrs.evolve(load, arrivals=tuple(arrivals))


@pytest.mark.parametrize("pages", [4000, 250])
def test_drafts_that_are_right_are_tokens_for_no_step(pages: int) -> None:
    wanted, steps = load(), {}
    for accept_rate in (0.0, 0.6, 1.0):
        simulator = Simulator(
            cluster(
                decode={"num_pages": pages, "max_running_requests": 32, "num_draft_tokens": 3}, accept_rate=accept_rate
            ),
            wanted,
        )
        records = simulator.run()
        assert_nothing_is_left(simulator)
        assert [len(record.token_s) for record in records] == [arrival.output_tokens for arrival in wanted.arrivals]
        steps[accept_rate] = sum(len(record.token_s) - record.num_accepted_tokens for record in records)
        accepted = [record for record in records if record.num_accepted_tokens]
        assert bool(accepted) == bool(accept_rate)
        assert all(record.num_accepted_tokens <= record.num_draft_tokens for record in records)
    assert steps[1.0] < 0.4 * steps[0.0]
    assert steps[1.0] < steps[0.6] < steps[0.0]


def test_deadlines_end_requests_wherever_they_are_and_leave_nothing_behind() -> None:
    setting = cluster(bytes_per_s=20e6, token_bytes=2048, decode={"num_pages": 250, "max_running_requests": 32})
    wanted = asked(load(40.0, 300), deadline_s=(None, 0.01, 0.08, 0.3, 1.0, 3.0))
    simulator = Simulator(setting, wanted)
    records = simulator.run()
    assert_nothing_is_left(simulator)
    assert {record.outcome for record in records} == {"length", "deadline"}
    late = [record for record in records if record.outcome == "deadline"]
    assert {(record.chosen_s is None, record.granted_s is None, not record.token_s) for record in late} >= {
        (False, True, True),
        (False, False, True),
        (False, False, False),
    }
    for record, arrival in zip(records, wanted.arrivals, strict=True):
        deadline_s = math.inf if arrival.deadline_s is None else arrival.at_s + arrival.deadline_s
        assert record.outcome == "length" or record.ended_s == pytest.approx(deadline_s, abs=0.1)


def test_a_higher_priority_waits_less() -> None:
    records = Simulator(SETTINGS["pressed"], asked(load(40.0, 300), priority=(0, 1))).run()
    waits = [np.mean([record.ttft_s for record in records[at::2]]) for at in (0, 1)]
    assert waits[1] < 0.7 * waits[0]
