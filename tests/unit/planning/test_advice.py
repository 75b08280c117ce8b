"""Which port should change its role, and that no advice is taken back while traffic stays the same."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer import bench, planning
from pdinfer.errors import ConfigError
from pdinfer.planning.calibration import Cost, StepCost
from pdinfer.stats import DecodeLoad, PairingStats, PrefillLoad
from pdinfer.testing import random_model
from tests.unit.planning.test_calibration import told

SLO = bench.SLO(ttft_s=1.0, tpot_s=0.05)
COST = Cost(
    prefill=StepCost(prior=lambda rows: 1e-4 * rows.num_tokens),
    decode=StepCost(prior=lambda rows: 1e-3 * rows.num_rows),
    errors={},
    flat=(),
    at_bounds=(),
)


def address(number: int) -> pd.PeerAddress:
    return pd.PeerAddress(engine_id=bytes([number]) * 16, epoch=0, rank=0, endpoints=())


def prefill(number: int, queued: float) -> PrefillLoad:
    """Return a prefill with prompts of 1000 tokens in its queue: a tenth of the limit each."""
    count = round(10 * queued)
    return PrefillLoad(
        address=address(number),
        num_free_pages=100,
        num_total_pages=100,
        page_size=64,
        num_queued_requests=count,
        num_queued_tokens=1000 * count,
    )


def decode(number: int, running: float) -> DecodeLoad:
    """Return a decode with sequences of which 50 take as long as they may."""
    return DecodeLoad(
        address=address(number),
        num_free_pages=100,
        num_total_pages=100,
        page_size=64,
        num_waiting_requests=0,
        num_waiting_tokens=0,
        num_granted_requests=0,
        num_running_requests=round(50 * running),
        num_running_tokens=0,
    )


def stats(prefills: list[float], decodes: list[float], **changes: float) -> PairingStats:
    loads = [prefill(at, queued) for at, queued in enumerate(prefills)]
    loads += [attrs.evolve(decode(100 + at, running), **changes) for at, running in enumerate(decodes)]  # type: ignore[misc]
    return told(*loads)


def test_the_late_side_gets_the_idlest_port_of_the_other() -> None:
    to_decode = planning.advise(stats([0.3, 0.1, 0.2], [1.2, 1.0]), COST, SLO)
    assert to_decode is not None
    assert (to_decode.port, to_decode.role) == (address(1), "decode")
    assert str(to_decode).endswith("pressure is 0.20 at prefill and 1.10 at decode, 1 is at the limit")
    to_prefill = planning.advise(stats([1.5, 1.3], [0.3, 0.2]), COST, SLO)
    assert to_prefill is not None
    assert (to_prefill.port, to_prefill.role) == (address(101), "prefill")


def test_an_engine_of_several_ports_moves_as_a_whole() -> None:
    """Of prefills 0 and 1, 2 and 3 the latter have less to do, though 1 is the idlest; the last engine stays."""
    of_two = (address(0), address(1)), (address(2), address(3))
    found = attrs.evolve(stats([0.5, 0.1, 0.2, 0.2], [1.2]), together=of_two)
    advice = planning.advise(found, COST, SLO)
    assert advice is not None
    assert advice.port == address(2)
    assert planning.advise(attrs.evolve(stats([0.4, 0.4, 0.3, 0.3], [1.2]), together=of_two), COST, SLO) is None
    assert planning.advise(attrs.evolve(stats([0.1, 0.1], [1.2]), together=of_two[:1]), COST, SLO) is None


@pytest.mark.parametrize(
    ("prefills", "decodes"),
    [([0.3, 0.1], [0.9, 0.9]), ([1.2, 1.4], [1.3, 1.0]), ([0.3], [1.5]), ([1.5], [0.2]), ([0.5, 0.4], [1.1])],
    ids=["nobody is late", "both are late", "the last prefill", "the last decode", "it could not be spared"],
)
def test_no_port_moves_without_a_reason(prefills: list[float], decodes: list[float]) -> None:
    assert planning.advise(stats(prefills, decodes), COST, SLO) is None


def test_slots_pages_and_who_waits_are_pressure_too() -> None:
    idle = [0.1, 0.1, 0.1], [0.2, 0.2]
    assert planning.advise(stats(*idle), COST, SLO) is None
    for late in (
        {"num_waiting_requests": 90, "max_running_requests": 100},
        {"num_free_pages": 0},
        {"num_free_pages": 50, "num_waiting_tokens": 32 * 100},
    ):
        advice = planning.advise(stats(*idle, **late), COST, SLO)
        assert advice is not None
        assert advice.role == "decode"
    assert planning.advise(stats(*idle, num_free_pages=0, num_cached_pages=90), COST, SLO) is None


@pytest.mark.parametrize(("running", "moves"), [(0.2, True), (0.9, False)])
def test_requests_that_wait_for_a_prefill_keep_no_decode(running: float, moves: bool) -> None:
    """They hold all the pages that decodes have, and would be computed at once with another prefill."""
    late = stats([1.5, 1.3], [running] * 3, num_free_pages=0, num_granted_requests=90, max_running_requests=100)
    advice = planning.advise(late, COST, SLO)
    assert (advice is not None) == moves
    assert advice is None or advice.role == "prefill"


def test_what_a_step_costs_alone_is_no_more_with_one_port_fewer() -> None:
    """A step takes 0.5 of its limit, or 0.55 with all sequences over two ports: not three halves of 0.5."""
    cost = attrs.evolve(COST, decode=StepCost(prior=lambda rows: 0.02 + 1e-3 * rows.num_rows))
    assert planning.advise(stats([1.5], [0.1] * 3), cost, SLO) is not None


@given(
    work=st.tuples(st.floats(0.0, 6.0), st.floats(0.0, 6.0)),
    ports=st.tuples(st.integers(1, 6), st.integers(1, 6)),
)
def test_an_advice_is_not_taken_back(work: tuple[float, float], ports: tuple[int, int]) -> None:
    """The same work over the ports of each side: after at most as many moves as there are ports nothing is advised, and
    all of them were to the same side."""
    count, roles = list(ports), set()
    for _ in range(sum(ports)):
        advice = planning.advise(stats(*([each / n] * n for each, n in zip(work, count, strict=True))), COST, SLO)
        if advice is None:
            break
        roles.add(advice.role)
        to_decode = advice.role == "decode"
        count = [count[0] - 1, count[1] + 1] if to_decode else [count[0] + 1, count[1] - 1]
    else:
        pytest.fail("it never ends")
    assert len(roles) <= 1


def test_a_pairing_tells_the_loads_of_its_ports() -> None:
    with pd.Pairing.local(random_model(), cache=pd.CacheConfig(page_size=4, num_pages=16)) as pairing:
        loads = pairing.stats.loads
        assert [type(load) for load in loads] == [PrefillLoad, DecodeLoad]
        assert {load.address for load in loads} == {port.address for port in pairing.ports}
        assert planning.advise(pairing.stats, COST, SLO) is None


def test_it_needs_loads_and_both_limits() -> None:
    with pytest.raises(ConfigError, match="advise needs loads of both sides, got 0 prefill and 1 decode"):
        planning.advise(stats([], [0.1]), COST, SLO)
    with pytest.raises(ConfigError, match="advise needs an SLO with ttft_s and tpot_s"):
        planning.advise(stats([0.1], [0.1]), COST, bench.SLO(ttft_s=1.0))


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_cost_that_is_no_seconds_is_refused(side: str) -> None:
    """Nothing is greater or less than NaN: there would be no advice, whatever the load."""
    cost = attrs.evolve(COST, **{side: StepCost(prior=lambda rows: float("nan"))})
    with pytest.raises(ConfigError, match=rf"cost\.{side} must return seconds, finite and at least 0; for StepRows"):
        planning.advise(stats([1.5, 1.3], [0.3, 0.2]), cost, SLO)
