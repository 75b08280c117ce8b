"""A profile on demand: where the steps of an engine spend their time, for https://ui.perfetto.dev or chrome://tracing.

Each engine writes a file with one track. On it a step is a span, and its parts lie side by side:

    step  schedule │ batch │ embed │ attention │ mlp │ attention │ router │ experts │ … │ head │ sample │ emit
                                                                   (in prefill a push after every layer)

- schedule: what came, what landed, who may run; batch: the index tensors; push: pages given to the channel; emit:
  events, hand-offs, pages returned. These four, and the gaps between parts, are the host's time: a span's `host_us`.
- embed, attention (with both norms of the layer, and the indexer), router, experts (dispatch, routed and shared ones,
  combine), mlp (of a dense layer), head (final norm, logits) and sample are the model's time.
- "draft" is a span of its own inside a step, with parts of the MTP layer. "warm_up" is a span instead of a step.

Below it are the tracks of requests, on which a request is a slice with its id and its stages, and those of the channel,
on which a room is one. Slices that overlap lie on tracks of their own. An arrow leads from the step of prefill that
handed a request off to the step of decode that took it over. `join_traces` makes one file of those of many processes.

Times are those of the host. On a CUDA device ops run after it. A part then lasts as long as the launch of its work,
and only parts that wait for the device (the counts that experts need, sample) show the rest. With
CUDA_LAUNCH_BLOCKING=1 in the environment the host waits for every op, and everything is slower.

The format is Google's "Trace Event Format", as a JSON object: complete events ("X"), counters ("C"), arrows ("s", "f"),
metadata ("M"). `otherData` says which machine's clock the times are from, and how late it was by the wall clock."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, count, pairwise
from pathlib import Path
from typing import Any, TextIO

import attrs
import msgspec

from pdinfer.checks import typed
from pdinfer.errors import ConfigError
from pdinfer.log import log

STEP = "step"
ENGINE, REQUESTS, CHANNEL = "engine", "requests", "channel"
"""The categories of events. Requests, and what is on the channel, may overlap."""
HOST_PARTS = frozenset({"schedule", "batch", "push", "emit"})
MAX_EVENTS = 1 << 18
"""The most spans and parts that are kept. The newest stay: those of about 3000 steps of a model of 27 layers, in about
80 MB."""
MAX_SLICES = 1 << 16
"""The most requests, rooms and arrows that are kept, the newest of each."""
MAX_TRACKS = 1 << 32
MAX_PROCESSES = 1 << 22
"""One more than the numbers of tracks, and the largest number of a process (pid_max of Linux)."""
MAX_FILE_BYTES = 1 << 30
"""The largest file that is joined with others."""
IDLE_NS = 100_000
"""A shorter span in which no model ran is left out, because a host that polls would fill the file with them."""

Values = Mapping[str, float | str]
"""What is known of an event."""


@attrs.frozen
class _Event:
    name: str
    start_ns: int
    duration_ns: int
    values: Values

    def json(self, category: str, track: Mapping[str, int]) -> dict[str, object]:
        """Return it as a complete event on a track, in microseconds."""
        head = {"name": self.name, "cat": category, "ph": "X"}
        return {**head, "ts": self.start_ns / 1000, "dur": self.duration_ns / 1000, **track, "args": self.values}


class Trace:
    """The newest MAX_EVENTS spans and parts of one engine, with its newest requests, rooms and arrows, held in memory
    until `write`. Only the thread that steps uses it."""

    def __init__(
        self,
        file: Path,
        name: str,
        track: int,
        *,
        max_events: int = MAX_EVENTS,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.file = file
        self._name = name
        self._track = track
        self._clock_ns = clock_ns
        self._events: deque[_Event] = deque(maxlen=max_events)
        self._part: tuple[str, int, Mapping[str, float]] | None = None
        self._model_ns = 0
        self._slices: dict[str, deque[tuple[_Event, ...]]] = {
            kind: deque(maxlen=min(max_events, MAX_SLICES)) for kind in (REQUESTS, CHANNEL)
        }
        self._arrows: deque[tuple[str, str, int]] = deque(maxlen=min(max_events, MAX_SLICES))

    @classmethod
    def in_folder(cls, folder: str | os.PathLike[str], role: str, engine_id: bytes) -> Trace:
        """Return the trace of one engine, which will be `folder/<role>-<its id>.json`, or with a number behind where it
        had that role before. Makes the folder, and raises ConfigError when that is impossible."""
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"trace names a folder that cannot be made: {error}; name another one") from error
        short = engine_id[:4].hex()
        names = (f"{role}-{short}{number}.json" for number in chain([""], (f"-{number}" for number in count(2))))
        path = next(path for name in names if not (path := Path(folder) / name).exists())
        return cls(path, f"{role} {short}", int(short, 16))

    def mark(self, name: str, **values: int) -> None:
        """Mark that the innermost open span is at `name` from now on. The part it was at ends."""
        now = self._clock_ns()
        self._end_part(now)
        self._part = (name, now, values)

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Open a span around what is done inside, and end the part that it begins in."""
        start = self._clock_ns()
        self._end_part(start)
        model_before = self._model_ns
        arrow_before = self._arrows[-1] if self._arrows else None
        try:
            yield
        finally:
            end = self._clock_ns()
            self._end_part(end)
            model_ns = self._model_ns - model_before
            has_arrow = bool(self._arrows) and self._arrows[-1] is not arrow_before
            if model_ns or has_arrow or end - start >= IDLE_NS:
                self._events.append(_Event(name, start, end - start, {"host_us": (end - start - model_ns) / 1000}))
            else:
                while self._events and self._events[-1].start_ns >= start:
                    self._events.pop()

    def _end_part(self, now: int) -> None:
        if self._part is not None:
            name, start, values = self._part
            self._part = None
            self._events.append(_Event(name, start, now - start, values))
            if name not in HOST_PARTS:
                self._model_ns += now - start

    def show(
        self, kind: str, name: str, marks: Iterable[tuple[str, float | None]], values: Values, *, now: float
    ) -> None:
        """Show a slice, which others may overlap, on the tracks of that kind, REQUESTS or CHANNEL: from the first of
        `marks` to the last. A mark is the name of the stage that begins there, "" for none, and its time by the clock
        that says `now`, None where it is not known."""
        now_ns = self._clock_ns()
        known = [(stage, now_ns - round((now - at) * 1e9)) for stage, at in marks if at is not None]
        stages = [
            _Event(stage, began, max(0, ended - began), {}) for (stage, began), (_, ended) in pairwise(known) if stage
        ]
        (_, began), (_, ended) = known[0], known[-1]
        self._slices[kind].append((_Event(name, began, max(0, ended - began), values), *stages))

    def depart(self, key: str) -> None:
        """Begin an arrow in what is open now. Another trace ends it by the same key: 16 hexadecimal digits."""
        self._arrows.append(("s", key, self._clock_ns()))

    def arrive(self, key: str) -> None:
        """End an arrow in what is open now."""
        self._arrows.append(("f", key, self._clock_ns()))

    def write(self) -> None:
        """Write the file anew. A failure is logged and not raised, because the engine is being closed."""
        try:
            with self.file.open("w", encoding="utf-8") as file:
                _write_events(file, self._json_events(), attrs.asdict(_Clock.now(self._clock_ns)))
        except OSError as error:
            log.error("a trace could not be written: %s", error)

    def _json_events(self) -> Iterator[dict[str, object]]:
        """Yield the events as JSON objects. Times are microseconds of the machine's monotonic clock, so that files of
        several engines fit together."""
        track = {"pid": os.getpid(), "tid": self._track}
        yield {"name": "process_name", "ph": "M", **track, "args": {"name": f"pdinfer {track['pid']}"}}
        yield {"name": "thread_name", "ph": "M", **track, "args": {"name": self._name}}
        for event in self._events:
            yield event.json(ENGINE, track)
            if event.name == STEP:
                ts = event.start_ns / 1000
                yield {"name": f"host_us, {self._name}", "ph": "C", "ts": ts, **track, "args": event.values}
        for phase, key, at_ns in self._arrows:
            binding = {"bp": "e"} if phase == "f" else {}
            head = {"name": "hand-off", "cat": "hand-off", "ph": phase, "id": f"0x{key}"}
            yield {**head, "ts": at_ns / 1000, **track, **binding}
        tid = self._track
        for kind, slices in self._slices.items():
            for lane in _lanes(slices):
                tid = (tid + 1) % MAX_TRACKS
                track = {**track, "tid": tid}
                yield {"name": "thread_name", "ph": "M", **track, "args": {"name": f"{kind} {self._name}"}}
                for event in lane:
                    yield event.json(kind, track)


def _lanes(slices: Iterable[tuple[_Event, ...]]) -> list[list[_Event]]:
    """Divide slices, each followed by its stages, into as few tracks as they need for not overlapping."""
    lanes: list[list[_Event]] = []
    ends: list[int] = []
    for whole, *stages in sorted(slices, key=lambda parts: parts[0].start_ns):
        lane = next((at for at, end in enumerate(ends) if end <= whole.start_ns), len(lanes))
        if lane == len(lanes):
            lanes.append([])
            ends.append(0)
        lanes[lane] += [whole, *stages]
        ends[lane] = whole.start_ns + whole.duration_ns
    return lanes


def _write_events(file: TextIO, events: Iterable[object], clock: Mapping[str, object]) -> None:
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    file.write(",\n".join(json.dumps(event) for event in events))
    file.write('\n], "otherData": ' + json.dumps(clock) + "}\n")


@attrs.frozen
class _Clock:
    """Whose clock the times of a file are from, and how late it was at one moment by that clock and by the wall."""

    machine: str
    host: str
    monotonic_ns: int
    unix_ns: int

    @classmethod
    def now(cls, clock_ns: Callable[[], int]) -> _Clock:
        """Read both clocks. Processes of one boot of one machine share the first."""
        host = socket.gethostname()
        try:
            machine = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        except OSError:
            machine = host
        return cls(machine, host, clock_ns(), time.time_ns())


class _Placed(msgspec.Struct):
    """What joining needs of an event."""

    pid: int
    ts: float = 0.0


class _File(msgspec.Struct):
    traceEvents: list[dict[str, Any]]
    otherData: _Clock


@typed
def join_traces(files: Iterable[str | os.PathLike[str]], into: str | os.PathLike[str]) -> Path:
    """Join the traces of several engines in one file on one clock, that of the first, and return its path.

    Times of processes of one machine fit as they are. Those of another machine are shifted by what the wall clocks of
    both say, and are as good as these. Processes with the same number on different hosts get different ones.

    Raises ConfigError without files, for a file that no engine wrote, and when one cannot be read or written."""
    clock: _Clock | None = None
    joined: list[dict[str, Any]] = []
    numbers: dict[tuple[str, str, int], int] = {}
    for path in map(Path, files):
        read = _read(path)
        clock = clock or read.otherData
        ours, theirs = clock, read.otherData
        shift_us = 0.0
        if theirs.machine != ours.machine:
            shift_us = ((theirs.unix_ns - theirs.monotonic_ns) - (ours.unix_ns - ours.monotonic_ns)) / 1000
        for event in read.traceEvents:
            process = (theirs.machine, theirs.host, event["pid"])
            if process not in numbers:
                numbers[process] = _free(event["pid"], numbers.values())
            event["pid"] = numbers[process]
            if "ts" in event:
                event["ts"] += shift_us
            joined.append(event)
    if clock is None:
        raise ConfigError("there is no trace to join: name the files that engines wrote when they were closed")
    target = Path(into)
    try:
        with target.open("w", encoding="utf-8") as file:
            _write_events(file, joined, attrs.asdict(clock))
    except OSError as error:
        raise ConfigError(f"the joined trace cannot be written: {error}; name another file") from error
    return target


def _read(path: Path) -> _File:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes, too many for a trace to join")
        read = msgspec.json.decode(path.read_bytes(), type=_File)
        for event in read.traceEvents:
            msgspec.convert(event, _Placed)
        return read
    except OSError as error:
        raise ConfigError(f"a trace cannot be read: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a trace that an engine wrote: {error}") from error


def _free(number: int, taken: Iterable[int]) -> int:
    """Return the number if it is free, else one that no process has."""
    return number if number not in taken else max(MAX_PROCESSES, *taken) + 1


def mark(trace: Trace | None, name: str, **values: int) -> None:
    """Mark where a step is (`Trace.mark`). Does nothing without a trace."""
    if trace is not None:
        trace.mark(name, **values)


def span(trace: Trace | None, name: str) -> contextlib.AbstractContextManager[None]:
    """Open `trace.span(name)`. Does nothing without a trace."""
    return contextlib.nullcontext() if trace is None else trace.span(name)
