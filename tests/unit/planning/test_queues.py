"""Sizes in closed form: the day of a published service, queues against Lindley's recursion, the limits of a decode."""

from __future__ import annotations

import numpy as np
import pytest

from pdinfer import planning
from pdinfer.errors import ConfigError

DAY = {"input_per_day": 608e9, "output_per_day": 168e9, "prefill_rate": 73.7e3, "decode_rate": 14.8e3}


def test_a_published_day_needs_its_published_nodes() -> None:
    """226.75 on average; a study took 955 and 1314."""
    found = planning.nodes(**DAY)
    assert (round(found.prefill, 1), round(found.decode, 1)) == (95.5, 131.4)
    assert found.total == pytest.approx(226.75, abs=0.25)
    assert str(found) == "95.5 prefill + 131.4 decode = 226.9 nodes"


def lindley_s(services_s: np.ndarray, gaps_s: np.ndarray) -> float:
    """Return the mean time in a queue with one server: W' = max(0, W + S - gap)."""
    waited_s, total_s = 0.0, 0.0
    for service_s, gap_s in zip(services_s.tolist(), gaps_s.tolist(), strict=True):
        total_s += waited_s + service_s
        waited_s = max(0.0, waited_s + service_s - gap_s)
    return total_s / len(services_s)


@pytest.mark.parametrize("cv", [0.0, 1.0, 3**-0.5])
def test_waiting_is_that_of_a_queue_step_by_step(cv: float) -> None:
    rng, count, rho = np.random.default_rng(0), 200_000, 0.6
    draws = {0.0: np.ones(count), 1.0: rng.exponential(1.0, count)}.get(cv, rng.uniform(0.0, 2.0, count))
    seen_s = lindley_s(draws, rng.exponential(1 / rho, count))
    assert planning.queue_s(1.0, rho, cv=cv) == pytest.approx(seen_s, rel=0.02)


def test_the_utilization_is_the_inverse() -> None:
    for mean_s in (1.1, 1.5, 4.0):
        assert planning.queue_s(1.0, planning.utilization(1.0, mean_s)) == pytest.approx(mean_s)


@pytest.mark.parametrize("mean_s", [1.0, 0.9, 0.5, 0.4, 1e-9])
def test_no_utilization_makes_a_queue_faster_than_its_service(mean_s: float) -> None:
    """Below half of the service time the formula is positive again, and at the half it divides by 0."""
    assert planning.utilization(1.0, mean_s) == 0.0


def test_a_decode_is_bound_by_tokens_by_slots_or_by_kv() -> None:
    load = {
        "prompt_tokens": 4000,
        "output_tokens": 1000,
        "tpot_s": 0.05,
        "rate": 2000,
        "slots": 100,
        "kv_tokens": 900_000,
    }
    found = planning.decodes(10.0, **load)
    assert (found.rate, found.slots, found.kv_tokens) == pytest.approx((5.0, 5.0, 2.5))
    assert planning.decodes(10.0, **load | {"rate": 1000}).binding == "rate"
    assert planning.decodes(10.0, **load | {"slots": 50}).binding == "slots"
    longer = planning.decodes(10.0, **load | {"prompt_tokens": 40_000})
    assert (longer.binding, longer.most) == ("kv_tokens", pytest.approx(22.5))


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), "7", True, 10**400, 1e300, 1e-300])
def test_what_is_no_positive_number_is_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match=r"nodes: prefill_rate must be a number from 1e-30 to 1e.30, got"):
        planning.nodes(**DAY | {"prefill_rate": value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="queue_s: service_s"):
        planning.queue_s(value, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="decodes: slots"):
        planning.decodes(1, prompt_tokens=1, output_tokens=1, tpot_s=1, rate=1, slots=value, kv_tokens=1)  # type: ignore[arg-type]


def test_a_full_queue_has_no_mean() -> None:
    for utilization in (1.0, 1.2):
        with pytest.raises(ConfigError, match="utilization must be a number greater than 0 and less than 1"):
            planning.queue_s(1.0, utilization)


@pytest.mark.parametrize("cv", [-1.0, float("nan"), 1e200, 10**400])
def test_service_times_scatter_by_a_number(cv: float) -> None:
    with pytest.raises(ConfigError, match="queue_s: cv must be a number from 0 to"):
        planning.queue_s(1.0, 0.5, cv=cv)
