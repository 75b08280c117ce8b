"""How long calls take on a device: in turns, over inputs that a cache cannot keep, without the time of launching."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from pdinfer.execution.graphs import DecodeGraphs
from pdinfer.process.streams import Graph, capture, new_stream

CACHE_BYTES = 60 << 20
"""The largest L2 of a Hopper card. What is read again after ten times this much comes from memory."""
MOST_INPUT_SETS = 8
LEAST_S = 2e-3
"""A measured stretch takes about this long, so that the resolution of events (half a microsecond) does not matter."""
MOST_CALLS = 64
MOST_S = 1.0
"""What takes longer is no rival, and would use up the time of the others."""

Call = Callable[[], object]


@attrs.frozen
class Times:
    """Seconds per call, one for each round. `captured` says whether launching is left out."""

    rounds: tuple[float, ...]
    captured: bool

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)


@attrs.frozen
class Missing:
    """Why there are no times."""

    reason: str


def num_input_sets(num_bytes: int, device: torch.device) -> int:
    """Return over how many sets of inputs of `num_bytes` calls must rotate."""
    return 1 if device.type == "cpu" else min(MOST_INPUT_SETS, -(-10 * CACHE_BYTES // num_bytes))


def race(
    contenders: Mapping[str, Sequence[Call]], device: torch.device, *, rounds: int = 7
) -> dict[str, Times | Missing]:
    """Time contenders in turns, A B A B. Each has one call per set of inputs; what it raises is its result."""
    ready: dict[str, _Stretch] = {}
    found: dict[str, Times | Missing] = {}
    for name, calls in contenders.items():
        try:
            ready[name] = _Stretch.of(calls, device)
        except Exception as error:  # noqa: BLE001 a rival from elsewhere may raise anything
            found[name] = Missing(sentence(error))
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(rounds):
        for name, stretch in ready.items():
            seconds[name].append(stretch.seconds())
    return found | {name: Times(tuple(seconds[name]), stretch.graph is not None) for name, stretch in ready.items()}


def watch(graphs: DecodeGraphs) -> list[tuple[Any, Any]]:
    """Return a list that gets the events around each replay of a captured step, from now on."""
    replay, replays = graphs.step, list[tuple[Any, Any]]()

    def step(*arguments: Any) -> Any:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        if (output := replay(*arguments)) is not None:
            after.record()
            replays.append((before, after))
        return output

    graphs.step = step  # type: ignore[method-assign]
    return replays


def numbers(text: str) -> list[int]:
    """Return the numbers of an argument of the command line, which commas separate."""
    return [int(each) for each in text.split(",")]


def sentence(error: Exception) -> str:
    """Return the first line of what was raised."""
    return f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0][:200]}"


@attrs.frozen
class _Stretch:
    """Calls that are timed as a whole: captured where that can be done."""

    calls: Sequence[Call]
    device: torch.device
    graph: Graph | None

    @classmethod
    def of(cls, calls: Sequence[Call], device: torch.device) -> _Stretch:
        for call in calls:  # a first use compiles
            call()
        plain_s = cls(calls, device, None).seconds() * len(calls)
        if plain_s > MOST_S:
            raise TimeoutError(f"{len(calls)} calls take {plain_s:.1f} s, more than {MOST_S:g}")
        repeated = [*calls] * max(1, min(MOST_CALLS // len(calls), int(LEAST_S / plain_s) + 1))
        if device.type == "cpu":
            return cls(repeated, device, None)
        stretch, stream = cls(repeated, device, None), new_stream(device)
        assert stream is not None
        try:
            graph = capture(stretch.run, stream)
        except RuntimeError:  # it waits for the device
            torch.cuda.synchronize(device)
            return stretch
        graph.replay()
        return cls(repeated, device, graph)

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            for call in self.calls:
                call()

    def seconds(self) -> float:
        """Run it once, and return the seconds per call."""
        return elapsed(self.run, self.device) / len(self.calls)


def elapsed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a device takes for what `run` queues; on a CPU, those of the clock."""
    if device.type == "cpu":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    run()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3
