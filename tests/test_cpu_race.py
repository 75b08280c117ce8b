"""The arithmetic of the CPU race: the direction of a ratio, the traffic, and how latencies are read off it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import cpu_race

sys.path.append(str(Path(cpu_race.__file__).parent / "cpu_race"))
import common
import machine


def line(**fields: object) -> cpu_race.Line:
    return {"clock": "cpu", "threads": 1, "dtype": "bfloat16", "clean": [3, 4], "probe": None, **fields}


def speeds(ours: float, theirs: float) -> tuple[cpu_race.Line, cpu_race.Line]:
    return line(tok_s={"med": ours}), line(tok_s={"med": theirs})


def test_a_ratio_above_one_says_that_pdinfer_is_better_whichever_way_the_figure_goes():
    (rate,) = cpu_race.metrics_of("decode:8@4096", 1)
    (memory,) = cpu_race.metrics_of("memory:8", 1000)
    found = cpu_race.race_line(rate, "peer", [speeds(30, 10), speeds(20, 10), speeds(8, 10)])
    assert (found["ratio"], found["ratio_low"], found["ratio_high"], found["runs"]) == (2.0, 0.8, 3.0, 3)
    assert (found["value"], found["baseline_value"], len(found["rounds"])) == (20, 10, 3)
    less = cpu_race.race_line(memory, "peer", [(line(peak_bytes=1200), line(peak_bytes=2400))])
    assert (less["value"], less["baseline_value"], less["ratio"]) == (1.2, 2.4, 2.0)


def test_the_best_peer_is_the_fastest_or_the_smallest():
    (rate,) = cpu_race.metrics_of("prefill:512", 1)
    (memory,) = cpu_race.metrics_of("memory:8", 1)
    lines = [{"baseline": "a", "baseline_value": 5.0}, {"baseline": "b", "baseline_value": 7.0}]
    assert [one["baseline"] for one in cpu_race.marked([dict(one) for one in lines], rate) if "best_peer" in one] == [
        "b"
    ]
    assert [one["baseline"] for one in cpu_race.marked(lines, memory) if "best_peer" in one] == ["a"]


def test_a_line_names_the_cpu_and_the_flags_that_matter(capsys: pytest.CaptureFixture[str]):
    cpuinfo = "processor\t: 0\nmodel name\t: Some Xeon\nflags\t\t: fpu avx2 avx512f amx_bf16 sse\n"
    assert machine.cpu_of(cpuinfo, 2) == {"name": "Some Xeon", "flags": ["avx2", "avx512f", "amx_bf16"], "cores": 2}
    assert machine.cpu_of("", 1)["flags"] == []
    cpu_race.missing("decode:8", "peer", "it is not there")
    common.emit(case="decode:8")
    for printed in capsys.readouterr().out.splitlines():
        assert json.loads(printed)["cpu"] == machine.cpu_here()


def test_log_probabilities_are_compared_by_their_distance_from_the_best():
    ours = line(logits=[3.0, 2.5, 1.0])
    assert cpu_race.distance_of(ours, line(logits=[3.0, 2.25, 1.0])) == 0.25
    assert cpu_race.distance_of(ours, line(logprobs=[-1.0, -1.5, -3.0])) == 0.0


@pytest.mark.parametrize("text", ["prefill:512", "decode:8", "decode:8@4096", "mixed:64", "mixed:64@0.35", "memory:8"])
def test_a_case_reads_back_as_it_is_written(text: str):
    assert str(common.Case.parse(text)) == text


@pytest.mark.parametrize("text", ["", "prefill", "decode:x", "train:3"])
def test_what_is_no_case_ends_the_run(text: str):
    with pytest.raises(SystemExit, match="no case"):
        common.Case.parse(text)


def test_the_traffic_is_the_same_each_time_and_at_any_rate_within_its_bounds():
    burst, poisson = common.mixed_orders(64, 1024, 0.0), common.mixed_orders(64, 1024, 2.0)
    assert burst == common.mixed_orders(64, 1024, 0.0)
    assert [order[:2] for order in burst] == [order[:2] for order in poisson]
    assert all(16 <= len(order.prompt) <= 2048 and 8 <= order.num_new_tokens <= 256 for order in burst)
    assert {order.arrival_s for order in burst} == {0.0}
    assert 16 < poisson[-1].arrival_s < 64  # 63 gaps of half a second on average


class Script(common.Timeline):
    """A clock that advances by a second per step of the server."""

    now_s = 0.0

    def now(self) -> float:
        return self.now_s

    def wait_until(self, then_s: float) -> None:
        self.now_s = then_s


class OneEach:
    """A server that gives every request it holds a token per step."""

    def __init__(self, timeline: Script) -> None:
        self.timeline = timeline
        self.left: dict[int, int] = {}

    def submit(self, index: int, order: common.Order) -> None:
        self.left[index] = order.num_new_tokens

    def step(self) -> Iterator[int]:
        self.timeline.now_s += 1.0
        for index in [index for index, count in self.left.items() if count]:
            self.left[index] -= 1
            yield index


def test_latencies_count_from_arrival_and_time_without_work_is_skipped():
    timeline = Script()
    orders = [common.Order([1], 3, 0.0), common.Order([1], 2, 0.5), common.Order([1], 1, 10.0)]
    times = common.play(OneEach(timeline), orders, timeline)
    assert times == [[1.0, 2.0, 3.0], [2.0, 3.0], [11.0]]
    found = common.latencies(orders, times)
    assert (found["total_s"], found["ttft_p50_ms"], found["ttft_p99_ms"], found["itl_p99_ms"]) == (11, 1000, 1500, 1000)


def test_percentiles_are_values_that_were_measured():
    values = list(range(1, 101))
    assert [common.percentile(values, percent) for percent in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert common.percentile([7.0], 99) == 7.0
