"""Requests, rooms and arrows on the timelines of engines, and timelines of several processes on one clock."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.testing import random_model
from pdinfer.trace import CHANNEL, REQUESTS, Trace, join_traces
from tests.e2e.setups import greedy
from tests.unit.test_trace import ends

Event = dict[str, Any]
IDS = ["first", 'second "quoted"', "third"]


def read(file: Path) -> list[Event]:
    events: list[Event] = json.loads(file.read_text("utf-8"))["traceEvents"]
    return events


def tracks(events: list[Event]) -> dict[str, list[list[Event]]]:
    """The complete events of every track, in the order in which they began, by the name of the track."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    by_tid = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.get("ts", 0), -event.get("dur", 0))):
        if event["ph"] == "X":
            by_tid[event["tid"]].append(event)
    found = defaultdict(list)
    for tid, spans in by_tid.items():
        found[names[tid].rpartition(" ")[0]].append(spans)
    return found


def flat(lists: list[list[Event]]) -> list[Event]:
    return [each for some in lists for each in some]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of a prefill and a decode with pages of their own, so that bytes cross the channel."""
    folder, model = tmp_path_factory.mktemp("traces"), random_model()
    config = pd.EngineConfig(trace=folder)
    pools = [pd.PagePool(model, pd.CacheConfig(page_size=4, num_pages=64)) for _ in range(2)]
    prefill_end, decode_end = pd.KVChannel.loopback(*pools)
    engines = pd.PrefillEngine(model, prefill_end, config), pd.DecodeEngine(model, decode_end, config)
    with pd.Pairing(*engines) as pairing:
        requests = [pd.Request(request_id=name, prompt=(3, 5, 7, 9, 11), sampling=greedy(4)) for name in IDS]
        assert all(event.error is None for event in pairing.generate(requests))
    return {role: next(folder.glob(f"{role}-*.json")) for role in ("prefill", "decode")}


STAGES = {"prefill": ["queue", "prefill"], "decode": ["wait for pages", "wait for KV", "decode"]}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_is_a_slice_with_its_id_and_its_stages(files: dict[str, Path], role: str) -> None:
    lanes = tracks(read(files[role]))[f"requests {role}"]
    wholes = [event for event in flat(lanes) if event["name"] in IDS]
    assert sorted(event["name"] for event in wholes) == sorted(IDS)
    for lane in lanes:
        for whole in (event for event in lane if event["name"] in IDS):
            inside = [
                event for event in lane if event is not whole and ends(whole)[0] <= ends(event)[0] < ends(whole)[1]
            ]
            assert [event["name"] for event in inside] == STAGES[role]
            edges = [ends(event) for event in inside]
            assert (edges[0][0], edges[-1][1]) == ends(whole)
            assert all(before[1] == after[0] for before, after in pairwise(edges))
    assert {event["cat"] for event in flat(lanes)} == {"requests"}
    assert {event["args"]["end"] for event in wholes} == {"landed" if role == "prefill" else "length"}
    assert {event["args"]["tokens"] for event in wholes} == {5 if role == "prefill" else 9}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_every_room_is_on_the_track_of_the_channel(files: dict[str, Path], role: str) -> None:
    sent = flat(tracks(read(files[role]))[f"channel {role}"])
    assert sorted(event["name"] for event in sent) == sorted(IDS)
    assert len({event["args"]["room"] for event in sent}) == len(IDS)
    assert sum(event["args"]["tokens"] for event in sent) > 0


def test_an_arrow_leads_from_the_step_that_handed_off_to_the_step_that_took_over(files: dict[str, Path]) -> None:
    found: dict[str, dict[str, Event]] = {}
    for role, phase in (("prefill", "s"), ("decode", "f")):
        events = read(files[role])
        found[phase] = {event["id"]: event for event in events if event["ph"] == phase}
        assert len(found[phase]) == len(IDS)
        steps = [event for event in flat(tracks(events)[role]) if event["name"] == "step"]
        for arrow in found[phase].values():
            at = round(arrow["ts"] * 1000)
            assert [step for step in steps if ends(step)[0] < at < ends(step)[1] and step["tid"] == arrow["tid"]]
    assert found["s"].keys() == found["f"].keys()
    for key, start in found["s"].items():
        end = found["f"][key]
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])
        assert end["bp"] == "e"
        assert start["ts"] <= end["ts"]


def made(folder: Path) -> Trace:
    """Of an engine whose clock passes a nanosecond whenever it is read."""
    return Trace(folder / "a.json", "decode a", 7, clock_ns=count(10**10).__next__)


def test_slices_that_overlap_lie_on_tracks_of_their_own(tmp_path: Path) -> None:
    trace = made(tmp_path)
    for name, began, ended in (("a", 9, 5), ("b", 8, 6), ("c", 6, 4), ("d", 5, 3), ("e", 4, 4)):
        trace.show(REQUESTS, name, [("", -began), ("", -ended)], {}, now=0)
    trace.show(CHANNEL, "f", [("", -9), ("", -1)], {}, now=0)
    trace.write()
    found = tracks(read(tmp_path / "a.json"))
    assert [[event["name"] for event in lane] for lane in found["requests decode"]] == [["a", "d"], ["b", "c", "e"]]
    assert [[event["name"] for event in lane] for lane in found["channel decode"]] == [["f"]]


def test_a_short_step_with_an_arrow_is_kept(tmp_path: Path) -> None:
    trace = made(tmp_path)
    for arrow in (None, "00000000000000ff", None):
        with trace.span("step"):
            trace.mark("schedule")
            if arrow is not None:
                trace.arrive(arrow)
    trace.write()
    assert [event["name"] for event in flat(tracks(read(tmp_path / "a.json"))["decode"])] == ["step", "schedule"]


# ---- joined --------------------------------------------------------------------------------------------------------


def test_files_of_one_machine_are_joined_as_they_are(files: dict[str, Path], tmp_path: Path) -> None:
    both = join_traces(files.values(), tmp_path / "both.json")
    assert read(both) == [event for file in files.values() for event in read(file)]
    again = join_traces([both], tmp_path / "again.json")  # what was joined can be joined
    assert read(again) == read(both)


def write(file: Path, clock: dict[str, Any], *events: Event) -> Path:
    file.write_text(json.dumps({"traceEvents": events, "otherData": clock}), "utf-8")
    return file


def span(pid: int, ts: float) -> Event:
    return {"name": "step", "ph": "X", "ts": ts, "dur": 5.0, "pid": pid, "tid": 1, "args": {}}


def test_files_of_other_machines_are_shifted_to_the_first_ones_clock(tmp_path: Path) -> None:
    ours = {"machine": "m0", "host": "h0", "monotonic_ns": 1_000_000, "unix_ns": 70_000_000}
    theirs = {"machine": "m1", "host": "h1", "monotonic_ns": 500_000, "unix_ns": 69_000_000}
    pods = [{**ours, "host": f"pod{n}"} for n in (1, 2)]  # containers of our machine
    named = {"name": "process_name", "ph": "M", "pid": 1, "tid": 1, "args": {"name": "pdinfer 1"}}
    joined = read(
        join_traces(
            [
                write(tmp_path / "0.json", ours, named, span(1, 100.0)),
                write(tmp_path / "1.json", theirs, span(1, 100.0), span(2, 0.0)),
                *(write(tmp_path / f"{pod['host']}.json", pod, span(1, 200.0)) for pod in pods),
            ],
            tmp_path / "all.json",
        )
    )
    # their clock began 68.5 ms after the epoch and ours 69 ms
    assert [event.get("ts") for event in joined] == [None, 100.0, -400.0, -500.0, 200.0, 200.0]
    pids = [event["pid"] for event in joined]
    assert pids[0] == pids[1] == 1
    assert len(set(pids[1:])) == 5


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"traceEvents": []}', "is not a trace that an engine wrote"),
        ('{"traceEvents": [{"ph": "X"}], "otherData": {}}', "is not a trace that an engine wrote"),
        ("\xff", "is not a trace that an engine wrote"),
        ("[" * 100_000, "is not a trace that an engine wrote"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_no_engine_wrote_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    if text is not None:
        (tmp_path / "a.json").write_text(text, "latin-1")
    with pytest.raises(pd.ConfigError, match=reason):
        join_traces([tmp_path / "a.json"], tmp_path / "b.json")


def test_events_without_their_place_are_refused(tmp_path: Path) -> None:
    clock = {"machine": "m", "host": "h", "monotonic_ns": 0, "unix_ns": 0}
    for event in ({"ph": "X"}, {**span(1, 0.0), "ts": "now"}):
        with pytest.raises(pd.ConfigError, match="is not a trace that an engine wrote"):
            join_traces([write(tmp_path / "a.json", clock, event)], tmp_path / "b.json")
    with pytest.raises(pd.ConfigError, match="there is no trace to join"):
        join_traces([], tmp_path / "b.json")
    with pytest.raises(pd.ConfigError, match="cannot be written"):
        join_traces([write(tmp_path / "a.json", clock)], tmp_path / "gone" / "b.json")
