"""Long work tells how far it is: to a function as it goes, or in a line that suits where it is read."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest

import pdinfer as pd
from pdinfer import bench, planning
from pdinfer.progress import telling
from pdinfer.testing import VirtualClock, random_model, tiny_config, tiny_config_dict, write_checkpoint
from tests.unit.bench.served import OneSlot
from tests.unit.planning.simulation.test_simulate import cluster, load


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class OutStream(io.StringIO):
    """Stands for the stderr of a notebook, which says that it is no terminal."""

    __module__ = "ipykernel.iostream"


def written(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, *, seconds: float, until: int = 1000) -> str:
    """Return what is written of 1000 parts that take so many seconds together."""
    clock = VirtualClock(7.0)
    monkeypatch.setattr(sys, "stderr", stream)
    with telling(True, "loading", "parts", clock) as tell:
        for done in range(1, until + 1):
            clock.advance(seconds / 1000)
            tell(done, 1000)
    return stream.getvalue()


@pytest.mark.parametrize("stream", [Terminal, OutStream])
def test_a_bar_is_drawn_again_at_most_ten_times_a_second(
    monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]
) -> None:
    text = written(monkeypatch, stream(), seconds=2.0)
    lines = text.split("\r")
    assert lines[0] == ""
    assert 18 <= len(lines) - 1 <= 22
    assert "loading [######                        ]  20 % of 1,000 parts" in lines
    assert lines[-1] == f"loading [{'#' * 30}] 100 % of 1,000 parts\n"
    assert len({len(line.rstrip()) for line in lines[1:]}) == 1  # none leaves the end of a longer one
    assert written(monkeypatch, stream(), seconds=500.0).count("\r") == 101  # nothing is drawn that shows nothing new


def test_a_log_has_one_line_of_short_work_and_ten_of_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, io.StringIO(), seconds=2.0) == "loading: 100 % of 1,000 parts\n"
    for seconds in (100.0, 5000.0):
        lines = written(monkeypatch, io.StringIO(), seconds=seconds).splitlines()
        assert 10 <= len(lines) <= 11
        assert lines[-1] == "loading: 100 % of 1,000 parts"
        assert "loading: 50 % of 1,000 parts" in lines


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_work_that_stops_leaves_a_whole_line(monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]) -> None:
    text = written(monkeypatch, stream(), seconds=0.01, until=345)
    assert text.endswith(" 34 % of 1,000 parts\n")
    assert text.count("\n") == 1


def test_bytes_are_megabytes_and_a_stderr_that_is_gone_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = io.StringIO(), io.StringIO(), None
    streams[1].close()
    for stream in streams:
        monkeypatch.setattr(sys, "stderr", stream)
        with telling(True, "loading", "bytes") as tell:
            tell(9, 1_250_000_000)
            tell(1_250_000_000, 1_250_000_000)
        with telling(True, "loading", "bytes") as tell:
            tell(0, 0)
    assert streams[0].getvalue() == "loading: 100 % of 1,250.0 MB\nloading: 100 % of 0.0 MB\n"


def test_a_function_is_called_as_it_is_and_what_is_neither_is_refused() -> None:
    def told(done: int, total: int) -> None:
        raise KeyError(done, total)

    with telling(told, "loading", "parts") as tell:
        assert tell is told
    for wrong in (1, "yes", [told]):
        with pytest.raises(pd.ConfigError, match="progress must be True, a function of"), telling(wrong, "", ""):  # type: ignore[arg-type]
            pytest.fail("it was taken")


def warm_up(role: type[Any], progress: Any, **config: Any) -> Any:
    model = random_model(tiny_config("v3"), mtp=True)
    (channel,) = pd.KVChannel.loopback(pd.PagePool(model, pd.CacheConfig(page_size=16, num_pages=64)))
    engine = role(model, channel, pd.EngineConfig(max_running_requests=5, **config))
    try:
        return engine.warm_up(progress=progress)
    finally:
        engine.close()


LONG = {
    "load": lambda folder, progress: pd.load_model(folder, progress=progress),
    "local": lambda folder, progress: pd.Pairing.local(folder, progress=progress).close(),
    "quantize": lambda folder, progress: pd.quantize_checkpoint(folder, folder / "fp8", progress=progress),
    "warm-up-of-prefill": lambda _, progress: warm_up(pd.PrefillEngine, progress),
    "warm-up-of-decode": lambda _, progress: warm_up(pd.DecodeEngine, progress, num_draft_tokens=1),
    "bench": lambda _, progress: bench.run(
        OneSlot(clock := VirtualClock()),
        bench.burst(8, prompt_tokens=4, output_tokens=2),
        clock=clock,
        progress=progress,
    ),
    "search": lambda _, progress: bench.find_goodput(
        lambda rate, _: bench.Summary(attainment=float(rate < 5.0)), 1.0, 9.0, num_steps=3, progress=progress
    ),
    "simulate": lambda _, progress: planning.simulate(cluster(), load(count=30), progress=progress),
}


@pytest.mark.parametrize("name", LONG)
def test_long_work_tells_each_part_and_all_of_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, tiny_config_dict("v3"))
    told: list[tuple[int, int]] = []
    LONG[name](tmp_path, lambda done, total: told.append((done, total)))
    dones, totals = [done for done, _ in told], {total for _, total in told}
    assert dones == sorted(dones)
    assert len(told) > 1
    assert totals == {dones[-1]}
    for again in (tmp_path / "fp8").glob("*"):
        again.unlink()
    monkeypatch.setattr(sys, "stderr", Terminal())
    LONG[name](tmp_path, True)
    assert sys.stderr.getvalue().count("\n") == 1
    assert "] 100 % of " in sys.stderr.getvalue()


def test_a_search_that_ends_early_is_over() -> None:
    told: list[tuple[int, int]] = []
    for attainment in (1.0, 0.0):
        bench.find_goodput(
            lambda _, seed, attainment=attainment: bench.Summary(attainment=attainment),  # type: ignore[misc]
            1.0,
            9.0,
            progress=lambda done, total: told.append((done, total)),
        )
    assert told == [(1, 1), (1, 8), (2, 2)]


def test_refused_requests_are_over_and_silent_ones_leave_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(OneSlot):
        def submit(self, request: pd.Request) -> str:
            raise pd.Overloaded("full")

    class Silent(OneSlot):
        def step(self) -> list[pd.TokenEvent]:
            events = super().step()
            return events if self.clock() < 0.5 else []

    told: list[tuple[int, int]] = []
    wanted = bench.burst(3, prompt_tokens=4, output_tokens=2)
    clock = VirtualClock()
    bench.run(Full(clock), wanted, clock=clock, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (3, 3)
    monkeypatch.setattr(sys, "stderr", Terminal())
    bench.run(Silent(clock := VirtualClock()), wanted, clock=clock, timeout_s=5.0, progress=True)
    assert sys.stderr.getvalue().endswith("]  66 % of 3 requests\n")


def test_a_warm_up_that_its_host_breaks_off_returns_its_pages() -> None:
    def told(done: int, total: int) -> None:
        raise ZeroDivisionError

    model = random_model(tiny_config("v3"))
    pool = pd.PagePool(model, pd.CacheConfig(page_size=16, num_pages=64))
    for role, channel in zip((pd.PrefillEngine, pd.DecodeEngine), pd.KVChannel.loopback(pool, pool), strict=True):
        with pytest.raises(ZeroDivisionError):
            role(model, channel).warm_up(progress=told)
        assert pool.num_free == 64
