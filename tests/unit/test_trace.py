"""The step timeline: valid JSON, parts inside their spans, the promised names, and a bound."""

from __future__ import annotations

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.testing import random_model, tiny_config
from pdinfer.trace import HOST_PARTS, IDLE_NS, Trace

Event = dict[str, Any]

MODEL_PARTS = {"embed", "attention", "router", "experts", "mlp", "head", "sample"}


@attrs.define
class Clock:
    """Nanoseconds that pass when a test says so."""

    now: int = 5_000_000

    def __call__(self) -> int:
        return self.now

    def pass_us(self, us: int) -> None:
        self.now += us * 1000


def events_of(file: Path) -> list[Event]:
    """Those of the engine's own track."""
    events = all_events(file)
    assert len({event["pid"] for event in events}) == 1
    return [event for event in events if event["tid"] == events[0]["tid"]]


def all_events(file: Path) -> list[Event]:
    made = json.loads(file.read_text("utf-8"))
    assert set(made) == {"displayTimeUnit", "traceEvents", "otherData"}
    events: list[Event] = made["traceEvents"]
    return events


def spans(events: list[Event], *names: str) -> list[Event]:
    """Complete events of these names, or all of them, in the order in which they began."""
    found = [event for event in events if event["ph"] == "X" and (not names or event["name"] in names)]
    return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def ends(event: Event) -> tuple[int, int]:
    """In whole nanoseconds, which a float of microseconds does not always hold."""
    return round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)


def trace_of(folder: Path, pairing_of: pd.Model | Path, requests: list[pd.Request], **config: Any) -> list[list[Event]]:
    """Of a prefill and of a decode engine that have served `requests`."""
    engine = pd.EngineConfig(trace=folder, **config)
    with pd.Pairing.local(pairing_of, cache=pd.CacheConfig(page_size=4, num_pages=64), engine=engine) as pairing:
        assert all(event.error is None for event in pairing.generate(requests))
    names = sorted(file.name for file in folder.iterdir())
    assert [name.partition("-")[0] for name in names] == ["decode", "prefill"]
    decode, prefill = (events_of(folder / name) for name in names)
    return [prefill, decode]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[list[Event]]:
    sampling = pd.SamplingParams(max_new_tokens=4, ignore_eos=True)
    requests = [pd.Request(prompt=(3, 5, 7, 9, n), sampling=sampling) for n in range(2)]
    return trace_of(tmp_path_factory.mktemp("made") / "deep" / "er", random_model(), requests)


def test_a_step_shows_every_part_of_it(traces: list[list[Event]]) -> None:
    prefill, decode = traces
    assert {event["name"] for event in spans(prefill)} == {"step", "schedule", "batch", "push", "emit"} | MODEL_PARTS
    assert {event["name"] for event in spans(decode)} == {"step", "schedule", "batch", "emit"} | MODEL_PARTS


def test_layers_are_told_apart_and_follow_each_other(traces: list[list[Event]]) -> None:
    config, (prefill, decode) = tiny_config(), traces
    layers = list(range(config.num_hidden_layers))
    moe = [config.is_moe_layer(layer) for layer in layers]
    assert True in moe
    assert False in moe
    behind = [("router", "experts") if is_moe else ("mlp",) for is_moe in moe]
    for events, pushes in ((prefill, ("push",)), (decode, ())):
        run = spans(events, *MODEL_PARTS, "push")
        first = [event["name"] for event in run].index("embed")
        expected = [name for parts in behind for name in ("attention", *parts, *pushes)]
        assert [event["name"] for event in run[first + 1 :][: len(expected)]] == expected
        attention = spans(events, "attention")
        assert [event["args"]["layer"] for event in attention][: len(layers)] == layers
    assert spans(prefill, "embed")[0]["args"] == {"num_tokens": 10}
    assert spans(decode, "embed")[0]["args"] == {"num_tokens": 2}


def test_parts_lie_side_by_side_in_their_step(traces: list[list[Event]]) -> None:
    for events in traces:
        steps = spans(events, "step")
        assert len(steps) > 0
        parts = [event for event in spans(events) if event["name"] != "step"]
        for one, following in pairwise(parts):
            assert ends(one)[1] <= ends(following)[0]
        for part in parts:
            start, end = ends(part)
            assert sum(ends(step)[0] <= start and end <= ends(step)[1] for step in steps) == 1


def test_host_us_is_what_the_model_did_not_take(traces: list[list[Event]]) -> None:
    for events in traces:
        counted = [event["args"]["host_us"] for event in events if event["ph"] == "C"]
        assert counted == [step["args"]["host_us"] for step in spans(events, "step")]
        for step in spans(events, "step"):
            start, end = ends(step)
            inside = [event for event in spans(events, *MODEL_PARTS) if start <= ends(event)[0] < end]
            assert step["args"]["host_us"] == pytest.approx(step["dur"] - sum(event["dur"] for event in inside))


def test_each_engine_has_a_track_of_its_own(traces: list[list[Event]]) -> None:
    tracks = [(events[0]["pid"], events[0]["tid"]) for events in traces]
    assert len(set(tracks)) == 2
    for role, events in zip(("prefill", "decode"), traces, strict=True):
        named = {event["name"]: event["args"]["name"] for event in events if event["ph"] == "M"}
        assert named["process_name"].startswith("pdinfer ")
        assert named["thread_name"].startswith(f"{role} ")


def test_drafts_are_a_span_in_their_step(tmp_path: Path) -> None:
    model = random_model(tiny_config("v3"), mtp=True)
    sampling = pd.SamplingParams(max_new_tokens=8, ignore_eos=True, temperature=0.0)
    requests = [pd.Request(prompt=(3, 5, 7), sampling=sampling)]
    _, decode = trace_of(tmp_path, model, requests, num_draft_tokens=2)
    drafts, steps = spans(decode, "draft"), spans(decode, "step")
    assert drafts
    for draft in drafts:
        start, end = ends(draft)
        assert sum(ends(step)[0] <= start and end <= ends(step)[1] for step in steps) == 1
        inside = [event for event in spans(decode) if start <= ends(event)[0] and ends(event)[1] <= end]
        layers = {event["args"]["layer"] for event in inside if event["name"] == "attention"}
        assert layers == {model.config.num_hidden_layers}


def test_without_a_trace_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trace, "mark", lambda *_: pytest.fail("a part without a trace"))
    monkeypatch.chdir(tmp_path)
    with pd.Pairing.local(random_model(), cache=pd.CacheConfig(page_size=4, num_pages=16)) as pairing:
        events = list(pairing.generate([pd.Request(prompt=(3,), sampling=pd.SamplingParams(max_new_tokens=2))]))
    assert events[-1].error is None
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def clock() -> Clock:
    return Clock()


def make(folder: Path, clock: Clock, max_events: int = 100) -> Trace:
    return Trace(folder / "a.json", "decode a", 7, max_events=max_events, clock_ns=clock)


def run_step(trace: Trace, clock: Clock, *parts: str) -> None:
    with trace.span("step"):
        clock.pass_us(1)
        for name in parts:
            trace.mark(name)
            clock.pass_us(10)


def test_host_parts_and_gaps_are_the_hosts(tmp_path: Path, clock: Clock) -> None:
    trace = make(tmp_path, clock)
    with trace.span("step"):
        clock.pass_us(1)
        trace.mark("schedule")
        clock.pass_us(2)
        with trace.span("draft"):
            clock.pass_us(4)
            trace.mark("attention")
            clock.pass_us(8)
        clock.pass_us(16)
        trace.mark("head")
        clock.pass_us(32)
        trace.mark("emit")
        clock.pass_us(64)
    trace.write()
    events = events_of(tmp_path / "a.json")
    (step,), (draft,) = spans(events, "step"), spans(events, "draft")
    assert (step["ts"], step["dur"], step["args"]) == (5000, 127, {"host_us": 87})
    assert (draft["ts"], draft["dur"], draft["args"]) == (5003, 12, {"host_us": 4})
    assert [(e["name"], e["dur"]) for e in spans(events, "schedule", "attention", "head", "emit")] == [
        ("schedule", 2),
        ("attention", 8),
        ("head", 32),
        ("emit", 64),
    ]


def test_steps_that_run_no_model_are_kept_only_when_they_took_long(tmp_path: Path, clock: Clock) -> None:
    trace = make(tmp_path, clock)
    run_step(trace, clock, *sorted(HOST_PARTS))
    with trace.span("step"):
        clock.pass_us(1)
        trace.mark("schedule")
        clock.pass_us(IDLE_NS // 1000)
    run_step(trace, clock, *sorted(HOST_PARTS))
    run_step(trace, clock, "schedule", "embed")
    trace.write()
    events = spans(events_of(tmp_path / "a.json"))
    assert [event["name"] for event in events] == ["step", "schedule", "step", "schedule", "embed"]


def test_the_newest_events_are_kept(tmp_path: Path, clock: Clock) -> None:
    trace = make(tmp_path, clock, max_events=6)
    for _ in range(50):
        run_step(trace, clock, "embed", "head")
    trace.write()
    events = spans(events_of(tmp_path / "a.json"))
    assert [event["name"] for event in events] == ["step", "embed", "head"] * 2
    assert ends(events[-1])[1] == clock.now


def test_a_step_that_fails_ends_its_parts(tmp_path: Path, clock: Clock) -> None:
    trace = make(tmp_path, clock)

    def fail() -> None:
        with trace.span("step"):
            clock.pass_us(1)
            with trace.span("draft"):
                clock.pass_us(1)
                trace.mark("attention")
                clock.pass_us(3)
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    run_step(trace, clock, "embed")
    trace.write()
    events = spans(events_of(tmp_path / "a.json"))
    assert [(e["name"], e["dur"]) for e in events] == [
        ("step", 5),
        ("draft", 4),
        ("attention", 3),
        ("step", 11),
        ("embed", 10),
    ]


def test_a_folder_that_cannot_be_made_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(pd.ConfigError, match="trace names a folder that cannot be made"):
        pd.Pairing.local(random_model(), engine=pd.EngineConfig(trace=tmp_path / "file"))


def test_a_file_that_cannot_be_written_does_not_keep_an_engine_open(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    trace = make(tmp_path / "gone", clock)
    with caplog.at_level(logging.ERROR, "pdinfer"):
        trace.write()
    assert "a trace could not be written" in caplog.text
