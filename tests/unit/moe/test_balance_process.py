"""The process that solves placements beside an engine."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import pdinfer as pd
from pdinfer.errors import ConfigError
from pdinfer.moe.balance.__main__ import serve
from pdinfer.moe.balance.process import FRAME, PackedPlacement, SolveAnswer, SolveRequest, SolverProcess
from pdinfer.testing import VirtualClock
from tests.forks import FAR_S

PREVIOUS = pd.ExpertPlacement.trivial(2, 8, 2, 2)
LOAD = np.array([[1, 1, 1, 1, 90, 80, 1, 1]] * 2)


def answers_to(*loads: Any) -> list[SolveAnswer]:
    """Return the answers of `serve`, run in this process."""
    requests, answers = io.BytesIO(), io.BytesIO()
    for load in loads:
        body = msgspec.msgpack.encode(SolveRequest(load, PackedPlacement.of(PREVIOUS)))
        requests.write(FRAME.pack(len(body)) + body)
    requests.seek(0)
    serve(requests, answers)
    answers.seek(0)
    found = []
    while head := answers.read(FRAME.size):
        found.append(msgspec.msgpack.decode(answers.read(*FRAME.unpack(head)), type=SolveAnswer))
    return found


def test_it_answers_one_load_after_the_other() -> None:
    wrong, right = answers_to([[1, 2], [3, 4]], LOAD.tolist())
    assert wrong.placement is None
    assert "num_logical_experts = 8" in wrong.error
    assert right.placement is not None
    placement = right.placement.unpack()
    assert placement.num_slots == PREVIOUS.num_slots
    assert placement != PREVIOUS


def test_a_process_that_does_not_answer_in_time_is_ended() -> None:
    clock = VirtualClock()
    solver = SolverProcess(clock, deadline_s=5.0)
    solver.ask(LOAD, PREVIOUS)
    assert solver.poll() == b""
    clock.advance(5.1)
    with pytest.raises(OSError, match="did not answer within 5 s"):
        solver.poll()
    assert (solver.pid, solver.is_asked) == (None, False)


def poll_until_it_raises(solver: SolverProcess) -> None:
    end = time.monotonic() + FAR_S
    while time.monotonic() < end:
        solver.poll()
        time.sleep(0.005)


def kill_before_it_reads(solver: SolverProcess) -> None:
    """Kill it so that the end shows when the request is written, as EPIPE."""
    os.kill(solver.pid, signal.SIGKILL)
    os.waitid(os.P_PID, solver.pid, os.WEXITED | os.WNOWAIT)


def kill_after_it_reads(solver: SolverProcess) -> None:
    """Kill it so that the end shows when the answer is read, as an end of file."""
    os.kill(solver.pid, signal.SIGSTOP)
    while not solver.has_written:
        solver.poll()
    os.kill(solver.pid, signal.SIGKILL)


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], SolverProcess]:
    """Return a function that makes a solver whose process answers any request with one frame."""

    def start(body: bytes) -> SolverProcess:
        python = tmp_path / "python"
        write = f"sys.stdout.buffer.write({FRAME.pack(len(body)) + body!r})"
        python.write_text(f"#!{sys.executable}\nimport sys\n{write}\nsys.stdout.flush()\nsys.stdin.read()\n")
        python.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(python))
        return SolverProcess(time.monotonic)

    return start


@pytest.mark.parametrize("kill", [kill_before_it_reads, kill_after_it_reads])
def test_one_that_is_killed_is_ended(kill: Callable[[SolverProcess], None]) -> None:
    solver = SolverProcess(time.monotonic)
    solver.ask(LOAD, PREVIOUS)
    kill(solver)
    with pytest.raises(OSError, match="the solver's process has ended"):
        poll_until_it_raises(solver)
    assert solver.pid is None
    solver.close()


def test_one_that_says_nonsense_is_ended(answering: Callable[[bytes], SolverProcess]) -> None:
    solver = answering(b"bad")
    solver.ask(LOAD, PREVIOUS)
    with pytest.raises(OSError, match="cannot be read"):
        poll_until_it_raises(solver)
    assert solver.pid is None
    solver.close()


def test_an_impossible_answer_is_an_error(answering: Callable[[bytes], SolverProcess]) -> None:
    solver = answering(msgspec.msgpack.encode(SolveAnswer(PackedPlacement([[0, 0]], 2, 1))))
    solver.ask(LOAD, PREVIOUS)
    with pytest.raises(ConfigError, match="no slot for expert 1"):
        poll_until_it_raises(solver)
    solver.close()
