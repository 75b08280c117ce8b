"""Turns events and loads of a Pairing into metrics: `read` what `step` returns, `render` when a scraper asks."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from pdinfer.checks import clip, typed
from pdinfer.errors import ConfigError, PDInferError
from pdinfer.metrics import names
from pdinfer.metrics.series import Counters, Histogram, Labels, render
from pdinfer.stats import DecodeLoad, EngineLoad, PairingStats, PrefillLoad, name_of
from pdinfer.types import TokenEvent

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""The Content-Type of an answer with the text."""

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)


class MeteredPort(Protocol):
    """The part of a port that metrics need."""

    @property
    def role(self) -> str: ...
    def load(self) -> EngineLoad: ...


class Observed(Protocol):
    """The part of a Pairing that metrics need."""

    @property
    def stats(self) -> PairingStats: ...
    @property
    def ports(self) -> Sequence[MeteredPort]: ...


class Recorder:
    """The metrics of one Pairing, or of one after the other.

    Times are those of events, as decode reports them. Counters never fall, also when an engine starts again or a link
    is opened again. Those of engines that have left stay. `labels` stand on every sample, for example the model's name.
    Any thread may call any method. Raises ConfigError for labels that cannot be such, or are pdinfer's."""

    def __init__(self, *, labels: Mapping[str, str] | None = None) -> None:
        self._labels = dict(labels or {})
        taken = {"le", *(label for metric in names.METRICS for label in metric.labels)}
        for name, value in self._labels.items():
            if not isinstance(name, str) or not isinstance(value, str) or not _LABEL.fullmatch(name) or name in taken:
                raise ConfigError(
                    f"a label is a name of letters, digits and _ with a text, and none of {', '.join(sorted(taken))}; "
                    f"got {clip(name)}: {clip(value)}"
                )
        self._lock = threading.Lock()
        self._counters = Counters()
        self._histograms = {metric: Histogram() for metric in names.METRICS if metric.kind == names.HISTOGRAM}
        self._token_s: dict[str, float | None] = {}
        # a rate needs a first sample: without it the first request would not count
        for metric in (names.PROMPT_TOKENS, names.CACHED_TOKENS, names.OUTPUT_TOKENS):
            self._counters.add(metric, 0)

    def __repr__(self) -> str:
        return f"Recorder({len(self._token_s)} requests stream, labels={clip(self._labels)})"

    @typed
    def read(self, events: Iterable[TokenEvent]) -> list[str]:
        """Note events that were just read, and return the ids of requests that ended."""
        with self._lock:
            return [event.request_id for event in events if self._note(event)]

    @typed
    def refused(self, error: PDInferError) -> None:
        """Note a request that `submit` did not take."""
        with self._lock:
            self._counters.add(names.REFUSED, 1, error.code)

    @typed
    def render(self, pairing: Observed) -> str:
        """Return what was read and what the Pairing and its ports report now, in Prometheus's text format. Serve it
        with CONTENT_TYPE. Never blocks."""
        # outside the lock, so that a slow port holds up no reader of events
        stats, loads = pairing.stats, [(port.role, port.load()) for port in pairing.ports]
        samples = [*_of_pairing(stats, [role for role, _ in loads])]
        for role, load in loads:
            samples += _of_engine(role, load)
        with self._lock:
            for metric, labels, value in samples:
                if metric.kind == names.COUNTER:
                    self._counters.set(metric, value, *labels)
            gauges = [sample for sample in samples if sample[0].kind == names.GAUGE]
            return render(names.METRICS, [*self._counters.values(), *gauges], self._histograms, self._labels)

    def _note(self, event: TokenEvent) -> bool:
        """Note one event, and return whether its request ended."""
        at_s, last_s = event.at_s, self._token_s.get(event.request_id)
        if event.token is not None:
            self._counters.add(names.OUTPUT_TOKENS, 1)
            if at_s is not None and event.request_id not in self._token_s:
                self._histograms[names.TTFT].add(at_s)
            elif at_s is not None and last_s is not None:
                self._histograms[names.ITL].add(at_s - last_s)
            self._token_s[event.request_id] = at_s
        if event.finish_reason is None:
            return False
        self._token_s.pop(event.request_id, None)
        if at_s is not None:
            self._histograms[names.DURATION].add(at_s)
        if event.usage is not None:
            self._histograms[names.QUEUE_TIME].add(event.usage.queue_s)
            self._counters.add(names.PROMPT_TOKENS, event.usage.prompt_tokens)
            self._counters.add(names.CACHED_TOKENS, event.usage.cached_tokens)
        return True


Samples = Iterator[tuple[names.Metric, Labels, float]]


def _of_pairing(stats: PairingStats, roles: Sequence[str]) -> Samples:
    yield from ((names.ENDED, (reason.value,), count) for reason, count in stats.ended)
    yield names.RETRIES, (), stats.num_retries
    yield names.REROUTES, (), stats.num_reroutes
    yield names.MOVED, (), stats.num_moved
    yield names.PORTS_LOST, (), stats.num_ports_lost
    yield names.QUEUED, (), stats.num_queued_requests
    yield names.UNFINISHED, (), stats.num_unfinished_requests
    yield from ((names.PORTS, (role,), roles.count(role)) for role in ("prefill", "decode"))
    yield names.PORTS_AWAY, (), len(stats.ports_away)
    yield names.LINKS_DOWN, (), len(stats.links_down)


def _of_engine(role: str, load: EngineLoad) -> Samples:
    engine = (name_of(load.address), role)
    yield names.INFO, (*engine, load.transport), 1
    used = load.num_total_pages - load.num_available_pages
    states = (("free", load.num_free_pages), ("cached", load.num_cached_pages), ("used", used))
    yield from ((names.PAGES, (*engine, state), count) for state, count in states)
    yield names.TOKENS, engine, load.num_tokens
    yield names.BUSY, engine, load.busy_s
    yield names.PREFIX_LOOKED_UP, engine, load.prefix_query_tokens
    yield names.PREFIX_FOUND, engine, load.prefix_hit_tokens
    if isinstance(load, PrefillLoad):
        yield names.REQUESTS, (*engine, "queued"), load.num_queued_requests
        yield names.QUEUED_TOKENS, engine, load.num_queued_tokens
    if isinstance(load, DecodeLoad):
        yield names.REQUESTS, (*engine, "waiting"), load.num_waiting_requests
        yield names.REQUESTS, (*engine, "granted"), load.num_granted_requests
        yield names.REQUESTS, (*engine, "running"), load.num_running_requests
        yield names.QUEUED_TOKENS, engine, load.num_waiting_tokens
        yield names.RUNNING_TOKENS, engine, load.num_running_tokens
        yield names.DRAFTED, engine, load.num_draft_tokens
        yield names.ACCEPTED, engine, load.num_accepted_tokens
    if load.step_age_s is not None:
        yield names.STEP_AGE, engine, load.step_age_s
    yield names.DAMAGED, engine, load.kv.writes_damaged
    for peer in load.kv.peers:
        between = (name_of(load.address), name_of(peer.address))
        yield names.SENT, between, peer.bytes_sent
        yield names.RECEIVED, between, peer.bytes_received
        yield names.SPEED, between, peer.mb_per_s * 1e6
        yield names.INFLIGHT, between, peer.inflight_bytes
        yield names.RELINKS, between, peer.retries
        yield names.DROPPED, between, peer.frames_dropped
        yield names.LINKED, between, peer.connected
