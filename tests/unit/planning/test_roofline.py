"""A roofline: published speeds within 15 %, nothing above the peak rates, more of a part never slower."""

from __future__ import annotations

import math
import re
import statistics
from functools import cache
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdinfer import planning
from pdinfer.config import ModelConfig
from pdinfer.errors import ConfigError
from pdinfer.planning import EnginePlan, StepRows
from pdinfer.planning.parts import Hardware, parts
from tests.unit.config import published_configs
from tests.unit.planning.published import V3, Point, plan, points, prompts, running

PARTS = {
    "H100": (989e12, 1978e12, 80e9, 3.35e12, 450e9, 50e9),
    "H800": (989e12, 1978e12, 80e9, 3.35e12, 200e9, 50e9),
    "H200": (989e12, 1978e12, 141e9, 4.8e12, 450e9, 50e9),
    "H20-96G": (148e12, 296e12, 96e9, 4.0e12, 450e9, 25e9),
    "H20-141G": (148e12, 294e12, 141e9, 4.0e12, 450e9, 25e9),
    "B200": (2250e12, 4500e12, 180e9, 7.7e12, 900e9, 100e9),
    "GB200": (2500e12, 5000e12, 185e9, 8.0e12, 900e9, 100e9),
    "A3": (376e12, 752e12, 64e9, 1.6e12, 196e9, 25e9),
}
"""BF16, FP8 or INT8, memory, its rate, scale-up, NIC: typed once more."""
H800 = planning.hardware("H800")
RATES = ("bf16_flops", "fp8_flops", "memory_bytes_per_s", "scale_up_bytes_per_s", "nic_bytes_per_s")
ACTIVE = 61 * 187.1e6 + 3 * 396.3e6 + 58 * 9 * 44.0e6
"""Parameters of DeepSeek-V3 that a token meets, without embedding and head."""


@cache
def plans() -> tuple[EnginePlan, ...]:
    """Return engines that differ in what is counted."""
    return (
        plan(8, overlap=False),
        plan(32),
        plan(32, tp_size=4, redundant=32),
        plan(64, mode="low_latency", drafts=1),
        plan(16, mode="low_latency", kv_format="fp8", overlap=False),
        plan(16, config=ModelConfig.from_dict(published_configs.V32), overlap=False),
        plan(8, stored="float"),
    )


STEPS = st.one_of(
    st.builds(prompts, st.integers(1, 16), st.sampled_from([1, 100, 2048, 30_000])),
    st.builds(running, st.integers(1, 256), st.sampled_from([1, 500, 4096, 100_000])),
)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_has_its_published_numbers(name: str) -> None:
    part = planning.hardware(name)
    assert (part.bf16_flops, part.fp8_flops, part.memory_bytes, *(getattr(part, rate) for rate in RATES[2:])) == PARTS[
        name
    ]


def test_every_number_has_a_source_and_a_date() -> None:
    read = parts()
    assert [part.name for part in read.parts] == list(PARTS)
    numbers = [*read.factors.values(), *(number for part in read.parts for number in part.numbers.values())]
    for number in [*numbers, read.normal, read.low_latency]:
        assert len(number.source) > 10
        assert re.fullmatch(r"20\d\d-\d\d(-\d\d)?", number.date)


def test_another_part_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"there is no part 'H900'; there are H100, H800, .*, A3"):
        planning.hardware("H900")


def predicted(point: Point) -> float:
    roofline = planning.roofline(
        point.plan, planning.hardware(point.part), imbalance=point.imbalance, fp8_attention=point.fp8_attention
    )
    return roofline.rate(point.rows, accept_rate=point.accept_rate)


@pytest.mark.parametrize("name", ["P1", "P3", "D2", "D4"])
def test_published_speeds_follow_from_the_config_within_15_percent(name: str) -> None:
    """No factor was fitted to them: docs/decisions/0071 says what was predicted first, and of the other points."""
    point = points()[name]
    assert predicted(point) == pytest.approx(point.seen, rel=0.15)


def test_published_speeds_of_hopper_are_within_12_percent_in_the_median_and_25_at_most() -> None:
    """Those of at least 32 sequences, and of prefills. Eight of them were compared when nothing was left to change."""
    off = {name: abs(predicted(point) / point.seen - 1) for name, point in points().items() if name != "D4 batch 8"}
    assert len(off) == 16
    assert statistics.median(off.values()) <= 0.12
    assert max(off.values()) <= 0.25


@given(rows=STEPS, at=st.integers(0, 6))
def test_no_step_is_faster_than_the_peak_rates(rows: StepRows, at: int) -> None:
    """Those of all its products, and of the latents that it reads, counted here once more."""
    engine = plans()[at]
    roofline = planning.roofline(engine, H800, imbalance=1.0)
    took_s = float(roofline(rows))
    assert took_s >= float(roofline.floor_s(rows))
    tokens = rows.num_tokens / engine.topology.tp_size
    peak = H800.fp8_flops if engine.stored == "fp8" else H800.bf16_flops
    assert took_s >= 2 * ACTIVE * tokens / peak
    if rows.num_tokens == rows.num_rows and not engine.config.is_sparse:
        kept = 656 if engine.cache.kv_format == "fp8" else 1152
        assert float(roofline.floor_s(rows)) >= 61 * kept * rows.num_context_tokens / H800.memory_bytes_per_s


@given(rows=STEPS, at=st.integers(0, 6), rate=st.sampled_from(RATES), times=st.floats(1.0, 10.0))
def test_a_better_part_is_never_slower(rows: StepRows, at: int, rate: str, times: float) -> None:
    better = attrs.evolve(H800, **{rate: getattr(H800, rate) * times})
    before_s, after_s = (float(planning.roofline(plans()[at], part)(rows)) for part in (H800, better))
    assert after_s <= before_s * (1 + 1e-12)


@given(rows=STEPS)
def test_more_ranks_serve_no_less(rows: StepRows) -> None:
    for few, many in zip((8, 16, 32), (16, 32, 64), strict=True):
        rates = [ranks * planning.roofline(_ranks(ranks), H800).rate(rows) for ranks in (few, many)]
        assert rates[0] <= rates[1]


@cache
def _ranks(count: int) -> EnginePlan:
    return plan(count)


def test_a_rate_is_of_one_rank() -> None:
    for engine in plans():
        roofline, rows = planning.roofline(engine, H800), prompts(4, 4096)
        assert roofline.rate(rows) * engine.topology.tp_size * float(roofline(rows)) == pytest.approx(4 * 4096)


def test_rates_of_many_contexts_are_arrays() -> None:
    roofline = planning.roofline(plan(64, mode="low_latency"), H800)
    contexts = [64 * 2000, 64 * 9000]
    rates = roofline.rate(StepRows(64, 64, np.array(contexts), np.array(contexts)))
    assert list(rates) == [roofline.rate(StepRows(64, 64, context, context)) for context in contexts]


def test_numbers_of_a_part_may_be_ints() -> None:
    assert attrs.evolve(H800, nic_bytes_per_s=25 * 10**9) == attrs.evolve(H800, nic_bytes_per_s=25e9)
    with pytest.raises(ConfigError, match="nic_bytes_per_s must be a finite number, greater than 0"):
        attrs.evolve(H800, nic_bytes_per_s=0)
    for name, kind in (("name", "str"), ("device", "str"), ("factors", "Factors")):
        with pytest.raises(ConfigError, match=f"{name} must be a {kind}, got None"):
            attrs.evolve(H800, **{name: None})


def test_drafts_that_are_right_count_once() -> None:
    engine = plan(64, mode="low_latency", drafts=2)
    roofline, rows = planning.roofline(engine, H800), running(32, 4096, 2)
    steps_per_s = 1 / float(roofline(rows))
    for accept_rate, tokens in ((0.0, 1.0), (0.6, 1.96), (1.0, 3.0)):
        assert roofline.rate(rows, accept_rate=accept_rate) == pytest.approx(32 * tokens * steps_per_s)


def test_the_cache_counts_in_its_own_format() -> None:
    rows, read = running(1, 100_000), []
    for kv_format in ("auto", "fp8"):
        roofline = planning.roofline(plan(16, kv_format=kv_format), H800)
        read.append(float(roofline.floor_s(rows)) * H800.memory_bytes_per_s)
    assert read[0] - read[1] == pytest.approx(61 * 100_000 * (1152 - 656))


@pytest.mark.parametrize(("stored", "bits"), [("int4", 4 + 16 / 32), ("mxfp4", 4 + 8 / 32)])
def test_four_bits_are_those_of_routed_experts(stored: str, bits: float) -> None:
    """8 tokens of a node reach each of its 32 experts with the chance 1 - (31/32)^8. One in four bits has these, and
    its part of a scale, for each of its 44 million weights, instead of 16 bits."""
    read = []
    for each in ("float", stored):
        roofline = planning.roofline(plan(8, stored=each, overlap=False), H800)
        read.append(float(roofline.floor_s(running(1, 1))) * H800.memory_bytes_per_s)
    touched = 32 * (1 - (31 / 32) ** 8)
    assert read[0] - read[1] == pytest.approx(58 * touched * 3 * 7168 * 2048 * (16 - bits) / 8, rel=1e-6)


def test_two_batches_hide_a_part_of_the_shorter() -> None:
    """30 % of it remains; in the other engine nothing is hidden."""
    rows = prompts(4, 4096)
    apart, hidden = (float(planning.roofline(plan(32, overlap=overlap), H800)(rows)) for overlap in (False, True))
    seconds = planning.roofline(plan(32), H800)
    compute = sum(seconds._compute_s(rows).values()) / (1 - 24 / 132)
    traffic = sum(seconds._traffic_s(rows).values())
    assert hidden == pytest.approx(max(compute, traffic) + 0.3 * min(compute, traffic), rel=1e-3)
    assert apart > hidden > max(compute, traffic) * 1.05


def test_what_binds_is_named() -> None:
    def bound(engine: EnginePlan, rows: StepRows, part: Hardware = H800) -> str:
        return planning.roofline(engine, part).bound(rows)

    assert bound(plan(32), prompts(4, 4096)) == "experts' FLOPs"
    assert bound(plan(32), prompts(1, 100_000)) == "attention FLOPs"
    assert bound(plan(32), prompts(4, 4096), attrs.evolve(H800, nic_bytes_per_s=5e9)) == "all-to-all"
    assert bound(plan(8, overlap=False), running(8, 500)) == "experts' bytes"
    slow = attrs.evolve(H800, memory_bytes_per_s=2e12)
    assert bound(plan(64, mode="low_latency", overlap=False), running(64, 30_000), slow) == "KV bytes"
    assert bound(plan(256, mode="low_latency", overlap=False), running(1, 1)) == "launches"
    slow = attrs.evolve(H800, scale_up_bytes_per_s=1e9)
    shared = plan(8, tp_size=8, overlap=False, moe_a2a_backend="auto")
    assert bound(shared, prompts(4, 4096), slow) == "all-reduce"


def test_imbalance_is_a_number_of_at_least_1() -> None:
    rows, engine = prompts(4, 4096), plans()[1]
    even, uneven = (float(planning.roofline(engine, H800, imbalance=value)(rows)) for value in (1, 2.0))
    assert uneven > 1.2 * even
    products = [planning.roofline(engine, H800, imbalance=value)._compute_s(rows)["experts' FLOPs"] for value in (1, 2)]
    assert products[1] / products[0] == pytest.approx((2 * 8 + 1) / (8 + 1))  # the shared expert is everybody's own
    for value in (0.9, 0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="imbalance must be at least 1, the fullest rank's rows over the mean"):
            planning.roofline(engine, H800, imbalance=value)


def test_imbalance_follows_from_counts_and_placement() -> None:
    """With one expert of 249 rows its rank has 256, and all 32 ranks have 504."""
    counts = np.ones((58, 256))
    assert planning.roofline(plans()[1], H800, imbalance=counts).imbalance == 1.0
    counts[:, 0] = 249
    assert planning.roofline(plans()[1], H800, imbalance=counts).imbalance == pytest.approx(256 / (504 / 32))
    twice = plan(32, redundant=256)  # each expert has two slots, on ranks 0 to 15 and 16 to 31
    assert planning.roofline(twice, H800, imbalance=counts).imbalance == pytest.approx(264 / 2 / (504 / 32))
    some = plan(32, redundant=32)  # experts 0 to 31 have two slots, so ranks 0 to 2 have half of the rows of others
    assert planning.roofline(some, H800, imbalance=np.ones((58, 256))).imbalance == pytest.approx(9 / (256 / 32))
    for wrong in (counts[:, 1:], counts[:0], np.ones((59, 256)), counts[0], counts[None]):
        shape = re.escape(str(list(wrong.shape)))
        with pytest.raises(ConfigError, match=rf"shape \[layers, 256\], got {shape}; there are 58 layers"):
            planning.roofline(plans()[1], H800, imbalance=wrong)
    for value in (-1.0, math.nan, math.inf, 0.0):
        with pytest.raises(ConfigError, match="finite, not negative, and not all 0 in a layer"):
            planning.roofline(plans()[1], H800, imbalance=np.where(np.arange(58)[:, None] == 7, value, counts))
    for words in ("even", [[1, 2], [3]]):
        with pytest.raises(ConfigError, match="imbalance must be a number or counts of experts"):
            planning.roofline(plans()[1], H800, imbalance=words)  # type: ignore[arg-type]


def test_sparse_attention_reads_what_its_indexer_chose() -> None:
    sparse, dense = plans()[5], plan(16, overlap=False)
    at_once = [float(planning.roofline(engine, H800)(running(16, 100_000))) for engine in (sparse, dense)]
    assert at_once[0] < 0.6 * at_once[1]
    near = [float(planning.roofline(engine, H800)(running(16, 1000))) for engine in (sparse, dense)]
    assert near[0] > near[1]  # the indexer comes on top, and saves nothing


def test_steps_at_once_are_those_one_by_one() -> None:
    roofline, contexts = planning.roofline(plans()[3], H800), np.array([128, 10_000, 1_000_000])
    at_once = roofline(StepRows(64, 64, contexts, contexts))
    assert at_once.tolist() == [float(roofline(StepRows(64, 64, int(each), int(each)))) for each in contexts]


@pytest.mark.parametrize(
    "rows",
    [
        StepRows(0, 0, 0, 0),
        StepRows(1, -5, -5, -5),
        StepRows(10, 5, 5, 5),
        StepRows(1, 100, 1, 100),
        StepRows(1, 100, 100, 1),
        StepRows(1, math.nan, 1, 1),
        StepRows(1, math.inf, math.inf, math.inf),
        StepRows(1, 1, np.array([1, 0]), np.array([1, 1])),
        StepRows("1", "1", "1", "1"),  # type: ignore[arg-type]
        None,
    ],
)
def test_rows_that_no_step_has_are_refused(rows: Any) -> None:
    roofline = planning.roofline(plans()[0], H800)
    for ask in (roofline, roofline.bound, roofline.floor_s, roofline.rate):
        with pytest.raises(ConfigError, match="rows must be "):
            ask(rows)


@pytest.mark.parametrize("accept_rate", [-0.1, 1.01, math.inf])
def test_no_more_drafts_are_right_than_there_are(accept_rate: float) -> None:
    with pytest.raises(ConfigError, match="accept_rate must be from 0 to 1"):
        planning.roofline(plans()[3], H800).rate(running(1, 1, 1), accept_rate=accept_rate)


@pytest.mark.parametrize(
    ("name", "ranks", "on_host", "uses_nics"),
    [
        ("GB200", 72, None, False),
        ("GB200", 96, None, True),
        ("GB200", 72, 8, False),
        ("GB200", 48, 4, False),
        ("A3", 32, 16, False),
        ("H800", 8, None, False),
        ("H800", 8, 8, False),
        ("H800", 8, 4, True),
        ("H800", 16, 8, True),
    ],
)
def test_ranks_beyond_one_scale_up_network_use_their_nics(
    name: str, ranks: int, on_host: int | None, uses_nics: bool
) -> None:
    """72 cards of GB200 reach each other over NVLink, on however many hosts; of 96 some do not. An H800 reaches
    those of its own host."""
    part = planning.hardware(name)
    engine = plan(ranks, mode="low_latency", redundant=-256 % ranks, ranks_per_node=on_host)
    nics = (attrs.evolve(part, nic_bytes_per_s=part.nic_bytes_per_s * times) for times in (1, 0.1))
    before_s, after_s = (float(planning.roofline(engine, each)(running(64, 4096))) for each in nics)
    assert (after_s > before_s) == uses_nics


def test_what_is_no_plan_is_refused() -> None:
    with pytest.raises(ConfigError, match="roofline: plan must be a EnginePlan"):
        planning.roofline(V3, H800)  # type: ignore[arg-type]
