"""A simulated prefill that is lost takes its pages along, and leaves a device that it shared to its decode."""

from __future__ import annotations

import pytest

from pdinfer import bench
from pdinfer.bench.traces import Arrival
from pdinfer.planning import Change, Simulator
from pdinfer.planning.simulation.simulator import uses_of
from tests.unit.planning.simulation.test_simulate import assert_nothing_is_left, cluster


def test_pages_of_bytes_on_their_way_return_to_no_other_prefill() -> None:
    """P0 computes 480 tokens until 0.034 s, and their last byte crosses the link at 0.58 s or later."""
    slow = cluster(
        "2P1D",
        prefill={"num_pages": 400, "chunked_prefill_size": -1},
        bytes_per_s=1e6,
        token_bytes=1000,
        changes=(Change(engine="P0", at_s=0.2, speed=0.0),),
    )
    simulator = Simulator(slow, bench.burst(1, prompt_tokens=480, output_tokens=3))
    (record,) = simulator.run()
    assert (record.outcome, record.prefill) == ("length", "P1")
    assert_nothing_is_left(simulator)
    assert [use.max_pages for use in uses_of(simulator)[:2]] == [pytest.approx(30 / 400)] * 2


def test_one_that_is_lost_in_a_step_leaves_the_device_to_its_decode() -> None:
    """The prompt of 9000 tokens is computed in one step from about 0.2 s to 0.66 s, and P0 is lost in the middle."""
    shared = cluster(
        "1P1D",
        colocated=True,
        prefill={"num_pages": 1000, "chunked_prefill_size": -1},
        decode={"num_pages": 1000},
        changes=(Change(engine="P0", at_s=0.4, speed=0.0),),
    )
    arrivals = (
        Arrival(at_s=0.0, prompt_tokens=100, output_tokens=30),
        Arrival(at_s=0.2, prompt_tokens=9000, output_tokens=2),
    )
    simulator = Simulator(shared, bench.Load(mode="open_loop", arrivals=arrivals))
    running, computed = simulator.run()
    assert (running.outcome, computed.outcome) == ("length", "failed")
    assert_nothing_is_left(simulator)
    longest_s = max(after_s - at_s for at_s, after_s in zip(running.read_s, running.read_s[1:], strict=False))
    assert longest_s < 0.25  # the part of that step which was computed, and a step of its own
