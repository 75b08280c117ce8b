"""Hosts and engines that stand still for a while: what was under way goes on or fails by name, and what comes after is
answered, by the same processes."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import pdinfer as pd
from tests.e2e.setups import PROMPT, by_request, collect, reference, request, tokens_of
from tests.e2e.test_processes import Fleet, check_streams, fleet
from tests.e2e.worker import Workers

SOON_S = 5.0
LENGTH = 60
QUICK = pd.RemoteConfig(silent_s=1.0)
"""Silence that is found within less than two seconds."""


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    pool = Workers(2)
    yield pool
    pool.close()


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """Engines that are told of this file take 20 ms for a token."""
    path = tmp_path / "slow"
    path.touch()
    return path


def hold_the_interpreter(seconds: float) -> None:
    """No other thread of this process runs meanwhile, as in an extension that does not let go of the lock."""
    ctypes.PyDLL(None).usleep(round(seconds * 1e6))


def stop_this_process(seconds: float) -> None:
    """As a debugger or the owner of a virtual machine does."""
    pid = os.getpid()
    with subprocess.Popen(["/bin/sh", "-c", f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"]):
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("pause", "seconds"),
    [
        (hold_the_interpreter, 4.0),
        pytest.param(hold_the_interpreter, 2.0, marks=pytest.mark.full),
        pytest.param(hold_the_interpreter, 20.0, marks=pytest.mark.full),
        pytest.param(stop_this_process, 2.0, marks=pytest.mark.full),
        pytest.param(stop_this_process, 4.0, marks=pytest.mark.full),
        pytest.param(stop_this_process, 20.0, marks=pytest.mark.full),
    ],
)
def test_a_host_that_pauses_loses_nothing(
    workers: Workers, slow: Path, pause: Callable[[float], None], seconds: float
) -> None:
    with fleet(workers, slow_while=slow) as processes:
        for name in "abc":
            processes.pairing.submit(request(name, LENGTH))
        events = processes.step_until(3)
        pause(seconds)
        processes.pairing.submit(request("after"))
        started = time.monotonic()
        events += collect(processes.pairing)
        assert time.monotonic() - started < SOON_S
        check_streams(events, *"abc", count=LENGTH)
        check_streams(events, "after")
        assert processes.pairing.stats.num_ports_lost == 0
        assert sum(event.finish_reason is not None for event in events) == 4


def step_until_lost(processes: Fleet) -> list[pd.TokenEvent]:
    events: list[pd.TokenEvent] = []
    end = time.monotonic() + 30.0
    while not processes.pairing.stats.num_ports_lost:
        assert time.monotonic() < end
        processes.pairing.wait(0.05)
        events += processes.pairing.step()
    return events


def step_until_back(processes: Fleet) -> list[pd.TokenEvent]:
    events: list[pd.TokenEvent] = []
    end = time.monotonic() + 30.0
    while not all(lost.is_back for lost in processes.pairing.stats.ports_lost):
        assert time.monotonic() < end
        processes.pairing.wait(0.05)
        events += processes.pairing.step()
    return events


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_pauses_comes_back_and_is_used_again(workers: Workers, slow: Path, role: str) -> None:
    with fleet(workers, client_config=QUICK, slow_while=slow) as processes:
        (worker,) = processes.prefills if role == "prefill" else processes.decodes
        for name in "ab":
            processes.pairing.submit(request(name, LENGTH))
        events = processes.step_until(2)
        with worker.frozen():
            events += step_until_lost(processes)
            (lost,) = processes.pairing.stats.ports_lost
            port = processes.ports[role == "decode"]
            assert (lost.address, lost.role, lost.is_back) == (port.address, role, False)
            assert "was silent for 1 s" in lost.reason
            assert lost.age_s < SOON_S
        events += step_until_back(processes)
        started = time.monotonic()
        for name in ("after", "a2"):
            processes.pairing.submit(request(name))
        events += collect(processes.pairing)
        assert time.monotonic() - started < SOON_S
        check_streams(events, "after", "a2")
        streams = by_request(events)
        for name in "ab":
            last = streams[name][-1]
            tokens = tuple(tokens_of(streams[name]))
            assert tokens == reference("v3", PROMPT, LENGTH).tokens[: len(tokens)]
            assert sum(event.finish_reason is not None for event in streams[name]) == 1
            if role == "decode":
                assert last.finish_reason is pd.FinishReason.FAILED
                assert "was silent" in str(last.error)
            else:
                assert last.finish_reason is pd.FinishReason.LENGTH
        assert processes.pairing.stats.num_ports_lost == 1
