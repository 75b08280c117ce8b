"""A profile on demand: where the steps of an engine spend their time, for https://ui.perfetto.dev or chrome://tracing.

Each engine writes a file with one track. On it a step is a span, and its parts lie side by side:

    step  schedule │ batch │ embed │ attention │ mlp │ attention │ router │ experts │ … │ head │ sample │ emit
                                                                   (in prefill a push after every layer)

- schedule: what came, what landed, who may run; batch: the index tensors; push: pages given to the channel; emit:
  events, hand-offs, pages returned. These four, and the gaps between parts, are the host's time: a span's `host_us`.
- embed, attention (with both norms of the layer, and the indexer), router, experts (dispatch, routed and shared ones,
  combine), mlp (of a dense layer), head (final norm, logits) and sample are the model's time.
- "draft" is a span of its own inside a step, with parts of the MTP layer. "warm_up" is a span instead of a step.

Times are those of the host. On a CUDA device ops run behind it. A part then lasts as long as the launch of its work,
and only parts that wait for the device (the counts that experts need, sample) show the rest. With
CUDA_LAUNCH_BLOCKING=1 in the environment the host waits for every op, and everything is slower.

The format is Google's "Trace Event Format", as a JSON object: complete events ("X"), counters ("C"), metadata ("M").
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import attrs

from pdinfer.errors import ConfigError

STEP = "step"
HOST_PARTS = frozenset({"schedule", "batch", "push", "emit"})
MAX_EVENTS = 1 << 18
"""The most spans and parts that are kept. The newest stay: those of about 3000 steps of a model of 27 layers, in about
80 MB."""
IDLE_NS = 100_000
"""A shorter span in which no model ran is left out, because a host that polls would fill the file with them."""

_log = logging.getLogger("pdinfer")


@attrs.frozen
class _Event:
    name: str
    start_ns: int
    duration_ns: int
    values: Mapping[str, float]


class Trace:
    """The newest MAX_EVENTS spans and parts of one engine, held in memory until `write`. Only the thread that steps
    uses it."""

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

    @classmethod
    def in_folder(cls, folder: str | os.PathLike[str], role: str, engine_id: bytes) -> Trace:
        """Return the trace of one engine, which will be `folder/<role>-<its id>.json`. Makes the folder, and raises
        ConfigError when that is impossible."""
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"trace names a folder that cannot be made: {error}; name another one") from error
        short = engine_id[:4].hex()
        return cls(Path(folder) / f"{role}-{short}.json", f"{role} {short}", int(short, 16))

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
        try:
            yield
        finally:
            end = self._clock_ns()
            self._end_part(end)
            model_ns = self._model_ns - model_before
            if model_ns or end - start >= IDLE_NS:
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

    def write(self) -> None:
        """Write the file anew. A failure is logged and not raised, because the engine is being closed."""
        try:
            with self.file.open("w", encoding="utf-8") as file:
                file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
                file.write(",\n".join(json.dumps(event) for event in self._json_events()))
                file.write("\n]}\n")
        except OSError as error:
            _log.error("a trace could not be written: %s", error)

    def _json_events(self) -> Iterator[dict[str, object]]:
        """Yield the events as JSON objects. Times are microseconds of the machine's monotonic clock, so that files of
        several engines fit together."""
        track = {"pid": os.getpid(), "tid": self._track}
        yield {"name": "process_name", "ph": "M", **track, "args": {"name": f"pdinfer {track['pid']}"}}
        yield {"name": "thread_name", "ph": "M", **track, "args": {"name": self._name}}
        for event in self._events:
            start_us, duration_us = event.start_ns / 1000, event.duration_ns / 1000
            yield {"name": event.name, "ph": "X", "ts": start_us, "dur": duration_us, **track, "args": event.values}
            if event.name == STEP:
                yield {"name": f"host_us, {self._name}", "ph": "C", "ts": start_us, **track, "args": event.values}


def mark(trace: Trace | None, name: str, **values: int) -> None:
    """Mark where a step is (`Trace.mark`). Does nothing without a trace."""
    if trace is not None:
        trace.mark(name, **values)


def span(trace: Trace | None, name: str) -> contextlib.AbstractContextManager[None]:
    """Open `trace.span(name)`. Does nothing without a trace."""
    return contextlib.nullcontext() if trace is None else trace.span(name)
