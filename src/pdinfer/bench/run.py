"""Sends a load to a Pairing and returns the summary. Requests are due on an absolute schedule, and latency counts from
when they were due."""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

from pdinfer.bench.load import Load, PromptMaker
from pdinfer.bench.record import Record, Recorder
from pdinfer.bench.summarize import check_gpus, check_said, summarize
from pdinfer.bench.summary import EngineUse, Summary
from pdinfer.bench.traces import Arrival
from pdinfer.checks import typed
from pdinfer.config import SLO
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import ConfigError, PDInferError
from pdinfer.progress import Progress, Tell, nobody, telling
from pdinfer.stats import DecodeLoad, EngineLoad, name_of
from pdinfer.types import Request, SamplingParams, TokenEvent

SAMPLE_S = 1.0
"""Seconds between two looks at loads, for the use of slots and pages."""
WAIT_S = 0.05
MOST_STILL = 100
"""A clock that has not gone on in so many waits in a row, which nothing cut short, never will."""
VERSIONS = ("pdinfer", "torch", "numpy", "msgspec")


class Serving(Protocol):
    """The part of a Pairing that `run` needs."""

    @property
    def ports(self) -> Sequence[Any]: ...
    def submit(self, request: Request) -> str: ...
    def cancel(self, request_id: str) -> None: ...
    def step(self) -> list[TokenEvent]: ...
    def wait(self, timeout_s: float) -> bool: ...


@typed
def run(
    pairing: Serving,
    load: Load,
    *,
    slo: SLO | None = None,
    vocab_size: int | None = None,
    num_gpus: int | None = None,
    timeout_s: float = 600.0,
    name: str = "",
    on_record: Callable[[Record], None] | None = None,
    progress: Progress = None,
    clock: Callable[[], float] = time.monotonic,
) -> Summary:
    """Send every request of `load`, read every token, and return the summary with its findings.

    Warm the engines up before (`engine.warm_up()`): the first request of each size is tagged, since it may pay for what
    was cold. `timeout_s` bounds the silence after which what is unfinished counts as a miss; it is cancelled. Use the
    Pairing for nothing else meanwhile. `on_record` gets the record of every request when the run is over, in the order
    of intended sends: `on_record=records.append` keeps them for plots. `progress(ended, requests)` is called
    when requests have ended; True draws a line on stderr. `clock` must be that of the Pairing. Raises ConfigError for
    an empty load, for `num_gpus` below 1, for text that JSON cannot have, and when the clock does not go on."""
    check_gpus(num_gpus)
    check_said(name=name or load.name, notes=load.notes, environment=dict(load.environment))
    sender = Sender(pairing, load, vocab_size=vocab_size, clock=clock)
    with telling(progress, "measuring", "requests", clock) as tell:
        records = sender.run(timeout_s, tell)
    if on_record is not None:
        for record in records:
            on_record(record)
    return summarize(
        records,
        slo=slo,
        num_gpus=num_gpus,
        max_concurrency=load.max_concurrency,
        environment={**environment(), **dict(load.environment)},
        engines=sender.engines,
        max_step_ms=None if sender.max_step_s is None else sender.max_step_s * 1e3,
        mode=load.mode,
        request_rate=load.request_rate,
        speed=load.speed,
        seed=load.seed,
        name=name or load.name,
        notes=load.notes,
    )


class Sender:
    """One run: the requests that are still to be sent, and the recorder of those that were."""

    def __init__(
        self, pairing: Serving, load: Load, *, vocab_size: int | None = None, clock: Callable[[], float]
    ) -> None:
        if not load.arrivals:
            raise ConfigError("the load has no request to send")
        self._pairing, self._load = pairing, load
        vocab_size = vocab_size or min((port.limits.vocab_size for port in pairing.ports), default=256)
        maker = PromptMaker(vocab_size, block_tokens=load.block_tokens, seed=load.seed)
        self._source = _requests(load, maker)
        self._next: tuple[Arrival, Request] | None = next(self._source)
        self._unfinished: set[str] = set()
        self._num_sent = 0
        self._free_at: list[float] = []
        self._recorder = Recorder(clock=clock)
        self._loads: dict[str, list[EngineLoad]] = {}
        self._computes_here = any(isinstance(port, PrefillEngine | DecodeEngine) for port in pairing.ports)
        self._waited_s, self._num_still = -math.inf, 0
        self.max_step_s: float | None = None

    @property
    def engines(self) -> tuple[EngineUse, ...]:
        """The use of slots and pages that loads reported, one value per engine."""
        return tuple(map(_use, self._loads.values()))

    def run(self, timeout_s: float, tell: Tell = nobody) -> tuple[Record, ...]:
        """Send and read until nothing is left, or nothing came for `timeout_s` after the last request, and then cancel
        what is unfinished: also when something is raised, so that nothing is computed for nobody."""
        try:
            self._serve(timeout_s, tell)
        finally:
            for request_id in self._unfinished:
                self._pairing.cancel(request_id)
        return self._recorder.records()

    def _serve(self, timeout_s: float, tell: Tell) -> None:
        num_over, heard_s = 0, self._recorder.now_s
        sampled_s = heard_s
        while self._next is not None or self._unfinished:
            self._send_due()
            now_s = self._recorder.now_s
            if now_s - sampled_s >= SAMPLE_S:
                sampled_s = now_s
                self._sample()
            began_s = self._recorder.now_s
            events = self._pairing.step()
            # a step of a client computes nothing: its time says nothing about the engine
            if self._computes_here:
                self.max_step_s = max(self.max_step_s or 0.0, self._recorder.now_s - began_s)
            ended = self._recorder.read(events)
            self._unfinished.difference_update(ended)
            self._free_at += [self._recorder.now_s] * len(ended)
            if (now_over := self._num_sent - len(self._unfinished)) > num_over:
                num_over = now_over
                tell(num_over, len(self._load.arrivals))
            # silence counts only while something is owed
            if events or (self._next is not None and self._may_send()):
                heard_s = self._recorder.now_s
            elif self._recorder.now_s - heard_s > timeout_s and self._unfinished:
                break
            if not events:
                self._wait()

    def _wait(self) -> None:
        """Wait until something comes or is due. Raise ConfigError when the clock stands still: nothing more would be
        due, and no silence too long."""
        now_s = self._recorder.now_s
        goes_on, self._waited_s = now_s > self._waited_s, now_s
        is_woken = self._pairing.wait(max(0.0, min(self._due_s() - now_s, WAIT_S)))
        self._num_still = 0 if goes_on or is_woken else self._num_still + 1
        if self._num_still == MOST_STILL:
            raise ConfigError(
                f"the clock did not go on in {MOST_STILL} waits, {now_s:g} s after the run began, so it would never "
                "end: give the clock of the Pairing, which has to go on while the Pairing waits"
            )

    def _may_send(self) -> bool:
        most = self._load.max_concurrency
        return most is None or len(self._unfinished) < most

    def _due_s(self) -> float:
        """Seconds since the run began at which the next request can be sent."""
        if self._next is None or not self._may_send():
            return float("inf")
        is_closed = self._load.mode == "closed_loop" and self._num_sent >= (self._load.max_concurrency or 0)
        return self._free_at[0] if is_closed and self._free_at else self._next[0].at_s

    def _send_due(self) -> None:
        """Send what is due. The next prompt is made after a send, so that making it delays nothing that is due now."""
        while self._next is not None and self._may_send() and self._due_s() <= self._recorder.now_s:
            due_s, (arrival, request) = self._due_s(), self._next
            if self._load.mode == "closed_loop" and self._num_sent >= (self._load.max_concurrency or 0):
                self._free_at.pop(0)
            sent_s, refused = self._recorder.now_s, None
            try:
                self._pairing.submit(request)
            except PDInferError as error:
                refused = f"{error.code}: {error}"
            self._recorder.sent(
                str(request.request_id),
                prompt_tokens=arrival.prompt_tokens,
                sent_s=sent_s,
                intended_s=due_s,
                refused=refused,
            )
            if refused is None:
                self._unfinished.add(str(request.request_id))
            else:
                # a refused request frees its place at once, or a closed loop would stand still
                self._free_at.append(sent_s)
            self._num_sent += 1
            # made after the send, and before the next one is due
            self._next = next(self._source, None)

    def _sample(self) -> None:
        for port in self._pairing.ports:
            if hasattr(port, "load"):
                load = port.load()
                self._loads.setdefault(name_of(load.address), []).append(load)


def _use(loads: Sequence[EngineLoad]) -> EngineUse:
    pages = [1.0 - load.num_available_pages / load.num_total_pages for load in loads]
    slots = [
        (load.num_running_requests + load.num_granted_requests) / load.max_running_requests
        for load in loads
        if isinstance(load, DecodeLoad) and load.max_running_requests
    ]
    return EngineUse(
        name=name_of(loads[0].address),
        role="decode" if isinstance(loads[0], DecodeLoad) else "prefill",
        mean_slots=sum(slots) / len(slots) if slots else None,
        max_slots=max(slots, default=None),
        mean_pages=sum(pages) / len(pages),
        max_pages=max(pages),
        max_inflight_bytes=max((peer.inflight_bytes for load in loads for peer in load.kv.peers), default=0),
    )


def _requests(load: Load, maker: PromptMaker) -> Iterator[tuple[Arrival, Request]]:
    """Make the requests one by one, each when it is the next, so that a long trace fits in memory."""
    run_id = os.urandom(4).hex()
    for at, arrival in enumerate(load.arrivals):
        sampling = SamplingParams(max_new_tokens=arrival.output_tokens, ignore_eos=True, seed=at)
        yield (
            arrival,
            Request(
                request_id=f"bench-{run_id}-{at}",
                prompt=maker.prompt(arrival),
                sampling=sampling,
                priority=arrival.priority,
                deadline_s=arrival.deadline_s,
            ),
        )


def environment() -> dict[str, str]:
    """Return versions and hardware, as text."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "cpus": str(os.cpu_count())}
    for package in VERSIONS:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        named = getattr(torch.get_device_module(device), "get_device_name", None)
        found["gpu"] = device.type if named is None else named(0)
        found["gpus"] = str(torch.accelerator.device_count())
    return found
