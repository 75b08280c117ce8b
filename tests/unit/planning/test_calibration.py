"""Factors that are found again, outliers that do not count, what rows do not tell, halves that disagree."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import attrs
import numpy as np
import pytest

from pdinfer import bench, planning
from pdinfer.config import PairingConfig
from pdinfer.errors import ConfigError
from pdinfer.execution.warm_up import WarmUp, WarmUpStep
from pdinfer.planning import MeasuredStep, StepRows
from pdinfer.planning.calibration import StepCost, _fitted, _predicted, _row
from pdinfer.planning.measured import of_burst, of_closed_loop
from pdinfer.stats import DecodeLoad, PairingStats, PrefillCost, PrefillLoad
from pdinfer.types import PeerAddress
from tests.unit.planning.published import V3, plan, prompts, running


def prefill_s(rows: StepRows) -> float:
    return 1e-4 * rows.num_tokens


def decode_s(rows: StepRows) -> Any:
    return 1e-3 + 1e-5 * rows.num_context_tokens


PRIOR = prefill_s, decode_s
SIZES = [50, 100, 200, 400, 800, 1200, 1600, 2400, 3200, 4800, 6400, 8000]


def steps(
    fixed_s: float = 0.05,
    scale: float = 3.0,
    *,
    sizes: Sequence[int] = SIZES,
    factor: Callable[[int], float] = lambda _: 1.0,
) -> list[MeasuredStep]:
    """Return prefill steps of prompts of these sizes."""
    return [
        MeasuredStep(kind="prefill", rows=prompts(1, size), seconds=(fixed_s + scale * 1e-4 * size) * factor(at))
        for at, size in enumerate(sizes)
    ]


def test_the_factors_are_found_again() -> None:
    contexts = [1000, 2000, 5000, 10_000, 20_000, 50_000]
    decode = [
        MeasuredStep(kind="decode", rows=running(1, context), seconds=0.01 + 0.5 * (1e-3 + 1e-5 * context))
        for context in contexts
    ]
    cost = planning.calibrate([*steps(), *decode], prior=PRIOR)
    assert (cost.prefill.fixed_s, cost.prefill.scale) == pytest.approx((0.05, 3.0))
    assert (cost.decode.fixed_s, cost.decode.scale) == pytest.approx((0.01, 0.5))
    assert cost.errors == pytest.approx({"prefill": 0.0, "decode": 0.0}, abs=1e-6)
    assert (cost.flat, cost.at_bounds) == ((), ())
    assert cost.decode(running(1, 3000)) == pytest.approx(0.01 + 0.5 * 0.031)


@pytest.mark.parametrize("seed", range(5))
def test_a_quarter_of_the_steps_may_be_late(seed: int) -> None:
    rng, count = np.random.default_rng(seed), 3 * len(SIZES)
    took = rng.lognormal(0.0, 0.01, count)
    took[rng.permutation(count)[: count // 4]] *= rng.choice([1.5, 2.0, 30.0], count // 4)
    cost = planning.calibrate(steps(sizes=SIZES * 3, factor=lambda at: took[at]), prior=PRIOR)
    for size in SIZES:
        assert cost.prefill(prompts(1, size)) == pytest.approx(0.05 + 3e-4 * size, rel=0.04)
    assert cost.errors["prefill"] < 0.05


def test_the_error_is_that_of_steps_that_were_not_seen() -> None:
    """Every second step by size is 10 % slower: one half fits itself, and is 9 to 10 % off the other."""
    cost = planning.calibrate(steps(factor=lambda at: 1.1 if at % 2 else 1.0), prior=PRIOR)
    assert cost.errors["prefill"] == pytest.approx(1 - 1 / 1.1, abs=1e-3)
    assert cost.prefill.scale == pytest.approx(3.0)


def test_halves_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the halves of the prefill rows disagree: .* 100% off the other"):
        planning.calibrate(steps(factor=lambda at: 2.0 if at % 2 else 1.0), prior=PRIOR)


def test_a_prior_of_another_shape_is_refused() -> None:
    """Steps take alternately, in pairs, a third and three times as long: both halves find the same wrong line."""
    with pytest.raises(
        ConfigError, match=r"held-out prefill rows are .* off what is predicted in the median, more than 25%"
    ):
        planning.calibrate(steps(factor=lambda at: 3.0 if at // 2 % 2 else 1 / 3), prior=PRIOR)


@pytest.mark.parametrize("times", [1e3, 1e-3])
def test_milliseconds_are_not_taken_for_seconds(times: float) -> None:
    with pytest.raises(
        ConfigError, match=r"prefill rows took .* times as long as their prior says, .*: is one in milli"
    ):
        planning.calibrate(steps(factor=lambda _: times), prior=PRIOR)
    fixed = planning.calibrate(steps(sizes=[1000] * 4), prior=(lambda _: 0.0, decode_s))
    assert fixed.prefill.scale == 0.0


def test_what_steps_do_not_tell_is_named() -> None:
    alike = planning.calibrate(steps(sizes=[1000] * 8), prior=PRIOR)
    assert set(alike.flat) | set(alike.at_bounds) >= {
        "prefill.scale",
        "prefill.fixed_s",
        "decode.scale",
        "decode.fixed_s",
    }
    assert (alike.prefill.fixed_s, alike.prefill.scale) == (0.0, pytest.approx(3.5))  # other sizes as the prior says
    assert [*alike.errors] == ["prefill"]
    free = planning.calibrate(steps(0.0), prior=PRIOR)
    assert free.at_bounds == ("prefill.fixed_s",)
    assert "prefill.scale" not in free.flat
    flat = planning.calibrate(steps(1.0, 0.0), prior=PRIOR)
    assert flat.at_bounds == ("prefill.scale",)


def test_nothing_is_faster_than_a_roofline() -> None:
    roofline = planning.roofline(plan(32), planning.hardware("H800"))
    rows = [prompts(1, size) for size in SIZES]
    fast = [MeasuredStep(kind="prefill", rows=each, seconds=0.11 * float(roofline(each))) for each in rows]
    with pytest.raises(ConfigError, match="held-out prefill rows are"):  # they are below the peak rates: a wrong part
        planning.calibrate(fast, prior=(roofline, decode_s))
    assert StepCost(prior=roofline, scale=0.01)(rows[0]) == roofline.floor_s(rows[0])
    slow = [MeasuredStep(kind="prefill", rows=each, seconds=1.5 * float(roofline(each))) for each in rows]
    cost = planning.calibrate(slow, prior=(roofline, decode_s))
    assert cost.prefill.scale == pytest.approx(1.5)
    for each in rows:
        assert cost.prefill(each) >= roofline.floor_s(each)


Load = PrefillLoad | DecodeLoad


def counted(kind: type[Load], num_tokens: int, busy_s: float, **more: Any) -> Load:
    """Return a load by what its engine has computed so far."""
    fields: dict[str, Any] = {"num_free_pages": 10, "num_total_pages": 10, "page_size": 64}
    fields |= {"num_queued_requests": 0, "num_queued_tokens": 0} if kind is PrefillLoad else {}
    for name in ("waiting_requests", "waiting_tokens", "granted_requests", "running_requests", "running_tokens"):
        fields |= {f"num_{name}": 0} if kind is DecodeLoad else {}
    address = PeerAddress(kind.__name__.encode(), 0, 0)
    return kind(address=address, num_tokens=num_tokens, busy_s=busy_s, **{**fields, **more})


def told(*loads: Load) -> PairingStats:
    return PairingStats(
        num_queued_requests=0,
        num_unfinished_requests=0,
        ended=(),
        num_retries=0,
        num_reroutes=0,
        num_moved=0,
        num_ports_lost=0,
        links_down=(),
        loads=loads,
    )


def test_stats_after_each_step_tell_the_steps_of_engines() -> None:
    """A prefill takes 0.05 s and 300 us a token, a decode 20 ms and 0.1 ms a sequence more than its prior."""
    looks, tokens, busy_s = [], [0, 0], [0.0, 0.0]
    for size in SIZES:
        batch = size // 50
        running = {"num_running_requests": batch, "num_running_tokens": 100 * batch}
        looks.append(
            told(counted(PrefillLoad, tokens[0], busy_s[0]), counted(DecodeLoad, tokens[1], busy_s[1], **running))
        )
        tokens, took = [tokens[0] + size, tokens[1] + batch], (0.05 + 3e-4 * size, 0.02 + decode_s(loaded(batch)))
        busy_s = [busy_s[0] + took[0], busy_s[1] + took[1]]
        looks.append(told(counted(PrefillLoad, tokens[0], busy_s[0]), counted(DecodeLoad, tokens[1], busy_s[1])))
        looks.append(looks[-1])  # nothing has happened
    cost = planning.calibrate(looks, prior=PRIOR)
    assert (cost.prefill.fixed_s, cost.prefill.scale) == pytest.approx((0.05, 3.0))
    assert (cost.decode.fixed_s, cost.decode.scale) == pytest.approx((0.02, 1.0))
    assert cost.errors == pytest.approx({"prefill": 0.0, "decode": 0.0}, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_steps_take_their_mean_where_some_take_twice_as_long(seed: int) -> None:
    """Three of ten decode steps run beside a prefill. One waits for minutes, which is no part of it."""
    draw, looks, tokens, busy_s, seen_s, rows = random.Random(seed), [], 0, 0.0, 0.0, list[StepRows]()
    for at in range(400):
        batch = draw.randint(1, 8)
        running = {"num_running_requests": batch, "num_running_tokens": 100 * batch}
        looks.append(told(counted(DecodeLoad, tokens, busy_s, **running)))
        took_s = decode_s(loaded(batch)) * (2.0 if draw.random() < 0.3 else 1.0)
        tokens, busy_s = tokens + batch, busy_s + took_s + (100.0 if at == 7 else 0.0)
        seen_s += took_s
        rows.append(loaded(batch))
    cost = planning.calibrate([*looks, told(counted(DecodeLoad, tokens, busy_s))], prior=PRIOR)
    assert sum(map(cost.decode, rows)) == pytest.approx(seen_s, rel=0.08)  # 0.77 by medians


def loaded(batch: int) -> StepRows:
    return StepRows(batch, batch, 100 * batch, 100 * batch)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((PrefillLoad, {}), {"cost": PrefillCost(chunk_tokens=7)}),
        ((DecodeLoad, {"num_running_requests": 7}), {}),
        ((DecodeLoad, {"num_running_requests": 8}), {"num_draft_tokens": 3}),
    ],
    ids=["more than a chunk", "more than a batch", "drafts"],
)
def test_what_may_be_several_steps_is_left_out(before: tuple[type[Load], Any], after: dict[str, Any]) -> None:
    """Eight tokens in a second."""
    kind, fields = before
    looks = [told(counted(kind, 0, 0.0, **fields)), told(counted(kind, 8, 1.0, **after))]
    with pytest.raises(ConfigError, match="got no step"):
        planning.calibrate(looks, prior=PRIOR)
    looks = [told(counted(kind, 0, 0.0, **fields | {"num_free_pages": 9})), told(counted(kind, 7, 1.0))]
    with pytest.raises(ConfigError, match="at least 4 rows of the kind"):
        planning.calibrate(looks, prior=PRIOR)


def test_a_warm_up_has_steps_of_both_sides() -> None:
    sizes = [1, 2, 4, 8, 16, 32]
    told = [WarmUpStep(kind="prefill", size=size, seconds=2e-4 * size) for size in (16, 4096)] * 2
    told += [WarmUpStep(kind="decode", size=size, seconds=2e-3 + 4e-5 * size) for size in sizes]
    told.append(WarmUpStep(kind="capture", size=8, seconds=9.0))
    cost = planning.calibrate([WarmUp(steps=tuple(told))], prior=PRIOR)
    assert (cost.prefill.scale, cost.decode.scale) == pytest.approx((2.0, 2.0))


def test_summaries_tell_decode_by_concurrency_and_prefill_when_alone() -> None:
    def summary(concurrency: int, prompt: int) -> bench.Summary:
        """Return a closed loop over two decodes, in which a request decodes for nine tenths of its time."""
        running = max(1, round(concurrency * 0.9 / 2))
        tpot_ms = 2 * (1 + 1e-2 * running * (prompt + 50))
        ttft_ms = 0.3 * prompt if concurrency == 1 else tpot_ms * 11
        return bench.Summary(
            mean_input_tokens=prompt,
            mean_output_tokens=100,
            concurrency=concurrency,
            median_tpot_ms=tpot_ms,
            mean_ttft_ms=ttft_ms,
            mean_e2el_ms=10 * ttft_ms,
            engines=tuple(bench.summary.EngineUse(name=name, role="decode") for name in "ab"),
        )

    runs = [*(summary(1, prompt) for prompt in (100, 200, 400, 800)), *(summary(size, 500) for size in (4, 8, 16, 32))]
    cost = planning.calibrate(runs, prior=PRIOR)
    assert cost.decode.scale == pytest.approx(2.0, rel=1e-3)
    assert cost.prefill.scale == pytest.approx(3.0, rel=1e-3)
    with pytest.raises(ConfigError, match=r"a summary to calibrate from needs mean_input_tokens, .*median_tpot_ms"):
        planning.calibrate([bench.Summary()], prior=PRIOR)


def test_too_few_rows_and_other_things_are_refused() -> None:
    with pytest.raises(ConfigError, match="calibrate needs at least 4 rows of the kind prefill, got 3"):
        planning.calibrate(steps()[:3], prior=PRIOR)
    with pytest.raises(ConfigError, match="calibrate got no step and no burst"):
        planning.calibrate([], prior=PRIOR)
    with pytest.raises(ConfigError, match=r"calibrate takes steps, bursts, closed loops, .*, got 7"):
        planning.calibrate(iter([7]), prior=PRIOR)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"holdout must be from 0.1 to 0.9, got 1"):
        planning.calibrate(steps(), prior=PRIOR, holdout=1)
    with pytest.raises(ConfigError, match="calibrate: rows must be"):
        planning.calibrate(None, prior=PRIOR)  # type: ignore[arg-type]


@pytest.mark.parametrize("kinds", [1, 2])
def test_some_rows_of_each_kind_are_held_out(kinds: int) -> None:
    """Or there is no error to tell: 9 * 0.1 is no row."""
    few = steps()[:9]
    many = [MeasuredStep(kind="decode", rows=loaded(1), seconds=0.1)] * 20 * (kinds - 1)
    with pytest.raises(ConfigError, match=r"holdout=0\.1 keeps none of 9 prefill rows for the error; raise it"):
        planning.calibrate(few + many, prior=PRIOR, holdout=0.1)


@pytest.mark.parametrize("told", [math.nan, math.inf, -1.0, "x", None])
def test_a_prior_gives_seconds(told: Any) -> None:
    with pytest.raises(ConfigError, match="the prior of prefill must return seconds, finite and at least 0; for"):
        planning.calibrate(steps(), prior=(lambda _: told, decode_s))
    for wrong in (None, (prefill_s,), (prefill_s, None)):
        with pytest.raises(ConfigError, match="prior must be "):
            planning.calibrate(steps(), prior=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", [None, (1, 2, 3, 4), StepRows(0, 0, 0, 0), StepRows(1, 1, math.nan, 1)])
def test_a_measured_step_has_rows(sizes: Any) -> None:
    with pytest.raises(ConfigError, match="rows must be StepRows of numbers of at least 1, got"):
        planning.MeasuredStep(kind="decode", rows=sizes, seconds=0.1)


@pytest.mark.parametrize("seconds", [math.nan, 0.0, -1.0, "7", None, True])
def test_a_measured_step_takes_seconds(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="seconds must be a finite number, greater than 0"):
        planning.MeasuredStep(kind="decode", rows=loaded(1), seconds=seconds)


KNEE = """256 128 128 31.64, 512 128 128 89.99, 1024 128 128 205.42, 2048 128 128 433.67, 256 128 64 17.35,
    256 128 32 10.94, 256 128 16 6.63, 256 128 8 4.82, 256 128 4 3.54, 256 128 2 2.92, 256 256 128 31.85,
    256 512 128 35.09, 256 1024 128 37.99, 512 256 128 90.91, 512 512 128 94.27, 512 1024 128 101.68,
    128 4096 128 49.17, 256 2048 128 48.80, 256 4096 128 132.22"""
"""Requests, tokens of prompts and answers, and the last TTFT of bursts that need more than one wave, of a study of
DeepSeek-V3 on 2 nodes of H800 that prefill and decode in turn with 128 slots."""


def study() -> tuple[list[planning.Burst], tuple[Any, Any]]:
    """Return its bursts, and the rooflines of its nodes, whose pages follow from the plan."""
    cluster = planning.profile("deepseek-v3-h800-P2D2").plan(V3)
    engine, pages = cluster.prefill[0], cluster.prefill[0].num_pages or 0
    bursts = []
    for text in KNEE.split(","):
        count, prompt, output, ttft_s = text.split()
        bursts.append(
            planning.Burst(
                num_requests=int(count),
                prompt_tokens=int(prompt),
                output_tokens=int(output),
                last_ttft_s=float(ttft_s),
                slots=128,
                kv_tokens=pages * engine.cache.page_size * 16,
                groups=16,
            )
        )
    hardware = planning.hardware("H800")
    return bursts, (planning.roofline(engine, hardware), planning.roofline(cluster.decode[0], hardware))


def test_the_knee_of_a_study_follows_from_half_of_its_bursts() -> None:
    """The median on the other half is at most 5 %, over orders of the bursts; a constant rate is 63 % off."""
    bursts, prior = study()
    errors = []
    for holdout in (0.4, 0.5, 0.6):
        cost = planning.calibrate(bursts, prior=prior, holdout=holdout)
        errors.append(cost.errors["burst"])
        assert cost.prefill.fixed_s == pytest.approx(0.9, abs=0.3)
        assert cost.decode(running(8, 192)) == pytest.approx(0.22, abs=0.03)
    assert np.median(errors) <= 0.05


def test_a_burst_that_fits_into_one_wave_decodes_nothing_before_its_last_prefill() -> None:
    prior = (lambda rows: 1.0 * rows.num_rows, lambda rows: 1000.0)
    made = {"prompt_tokens": 10, "output_tokens": 5, "kv_tokens": 15 * 6, "groups": 2}
    one, many = (
        _row(of_burst(planning.Burst(num_requests=count, last_ttft_s=1.0, slots=slots, **made)), prior)
        for count, slots in ((4, 4), (15, 100))
    )
    assert one.terms.tolist() == [1, 2, 0, 0]
    assert many.terms.tolist() == [3, 3 + 3 + 2, 2 * 4, 2 * 4 * 1000]  # waves of 6, 6 and 3
    with pytest.raises(ConfigError, match=r"kv_tokens 14 hold no request of 10 \+ 5 tokens"):
        of_burst(planning.Burst(num_requests=1, last_ttft_s=1.0, slots=1, **made | {"kv_tokens": 14}))


LOOPS = """1 200 98 901.13, 2 200 128 611.92, 8 200 128 159.26, 64 200 128 27.27, 128 200 128 18.64, 256 200 256 21.60,
    512 500 8211 522.8, 1024 500 10155 374.9"""
"""Clients, tokens of answers, requests and seconds of closed loops over P3x3D4, of the same study. Prompts had 1,975
tokens by its rates of input and output. Requests follow from rates and seconds, and so do the 159.26 seconds of 8
clients, where the study repeats a rate."""


def loops() -> tuple[list[planning.ClosedLoop], tuple[Any, Any]]:
    """Return its closed loops, and the rooflines of its engines, whose steps have as many tokens as plans say."""
    cluster = planning.profile("deepseek-v3-h800-P3x3D4").plan(V3)
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    seen = [
        planning.ClosedLoop(
            concurrency=int(clients),
            num_requests=int(requests),
            prompt_tokens=1975,
            output_tokens=int(output),
            duration_s=float(took),
            chunk_tokens=prefill.engine.chunked_prefill_size,
            prefills=3,
            prefill_groups=24,
            decode_groups=32,
        )
        for clients, output, requests, took in map(str.split, LOOPS.split(","))
    ]
    hardware = planning.hardware("H800")
    return seen, (planning.roofline(prefill, hardware), planning.roofline(decode, hardware))


def test_clients_that_sent_nothing_are_refused() -> None:
    """The form had fewer waves than one of them then."""
    seen, _ = loops()
    with pytest.raises(ConfigError, match=r"99 clients sent 98 requests: concurrency is .* at most 98"):
        attrs.evolve(seen[0], concurrency=99)


@pytest.mark.parametrize("holdout", [0.4, 0.5, 0.6])
def test_closed_loops_of_a_study_follow_from_half_of_them(holdout: float) -> None:
    """The median on the other half is at most 7 %."""
    seen, prior = loops()
    cost = planning.calibrate(seen, prior=prior, holdout=holdout)
    assert cost.errors["closed loop"] <= 0.07


def test_closed_loops_follow_from_most_halves() -> None:
    """The median over all 70 halves of 8 rows is at most 7 %, too."""
    seen, prior = loops()
    rows = [_row(of_closed_loop(loop), prior) for loop in seen]
    errors = []
    for kept in combinations(rows, 4):
        held = [row for row in rows if not any(row is other for other in kept)]
        errors.append(np.median(np.abs(_predicted(held, _fitted(kept)) - 1.0)))
    assert np.median(errors) <= 0.07


def test_no_prefill_is_busy_for_longer_than_its_run_took() -> None:
    """With 1,024 clients they may have no pauses at all; what fits the other rows as well keeps them busy for 1.7 times
    as long."""
    seen, prior = loops()
    cost = planning.calibrate(seen, prior=prior)
    for loop in seen:
        ((_, times, rows),) = of_closed_loop(loop).within
        assert times * float(cost.prefill(rows)) <= loop.duration_s * 1.001


@pytest.mark.parametrize(("clients", "apart"), [(1, 0.03), (8, 0.03), (256, 0.03), (1024, 0.06)])
def test_closed_loops_take_as_long_in_the_simulator(clients: int, apart: float) -> None:
    """With what half of the rows tell: nearly as long where prefills have no pauses, since prompts wait there."""
    seen, (prefill, decode) = loops()
    costs = StepCost(prior=prefill, fixed_s=0.23, scale=0.0), StepCost(prior=decode, fixed_s=0.032, scale=1.19)
    (loop,) = (loop for loop in seen if loop.concurrency == clients)

    def over(rows: StepRows, groups: int) -> StepRows:
        return StepRows(
            rows.num_rows / groups, rows.num_tokens / groups, rows.num_context_tokens / groups, rows.num_pairs / groups
        )

    cluster = planning.cluster(
        "P3x3D4",
        prefill_s=lambda rows: costs[0](over(rows, loop.prefill_groups)),
        decode_s=lambda rows: costs[1](over(rows, loop.decode_groups)),
        chunked_prefill_size=loop.chunk_tokens,
        decode={"max_running_requests": 4096},
        pairing=PairingConfig(max_queued_requests=1024),
    )
    loop = attrs.evolve(loop, num_requests=min(loop.num_requests, 2 * clients))
    load = bench.closed_loop(
        clients, loop.num_requests, prompt_tokens=loop.prompt_tokens, output_tokens=loop.output_tokens
    )
    took = sum(times * costs[side](rows) for side, times, rows in of_closed_loop(loop).steps)
    assert planning.simulate(cluster, load).duration_s == pytest.approx(took, rel=apart)
