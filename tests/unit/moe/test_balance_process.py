"""The process that solves placements beside an engine."""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import pdinfer as pd
from pdinfer.errors import ConfigError
from pdinfer.moe import solve_placement
from pdinfer.moe.balance import process
from pdinfer.moe.balance.__main__ import answer_to
from pdinfer.moe.balance.messages import PackedPlacement, SolveAnswer, SolveRequest
from pdinfer.moe.balance.process import SolverProcess, unpack_placement
from pdinfer.testing import VirtualClock
from tests.forks import FAR_S

PREVIOUS = pd.ExpertPlacement.trivial(2, 8, 2, 2)
LOAD = np.array([[1, 1, 1, 1, 90, 80, 1, 1]] * 2)


def test_a_load_is_answered_with_a_placement_or_an_error() -> None:
    wrong = answer_to(SolveRequest([[1, 2], [3, 4]], PackedPlacement.of(PREVIOUS)))
    assert wrong.placement is None
    assert "num_logical_experts = 8" in wrong.error
    right = answer_to(SolveRequest(LOAD.tolist(), PackedPlacement.of(PREVIOUS)))
    assert right.placement is not None
    placement = right.placement.unpack()
    assert placement.num_slots == PREVIOUS.num_slots
    assert placement != PREVIOUS


def test_a_process_that_solves_imports_no_torch() -> None:
    code = "import sys, pdinfer.moe.balance.__main__; print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"


def test_its_modules_come_from_where_the_hosts_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pdinfer.py").write_text("raise ImportError('some file of the host')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    solver = SolverProcess(time.monotonic)
    solver.ask(LOAD, PREVIOUS)
    assert placement_of(solver).num_ranks == 2


def placement_of(solver: SolverProcess) -> pd.ExpertPlacement:
    end = time.monotonic() + FAR_S
    while not (answer := solver.poll()) and time.monotonic() < end:
        time.sleep(0.005)
    return unpack_placement(answer)


def test_every_request_has_a_process_of_its_own() -> None:
    solver = SolverProcess(time.monotonic)
    for _ in range(2):
        solver.ask(LOAD, PREVIOUS)
        answer = placement_of(solver)
        assert solver._process is None
        assert answer == solve_placement(LOAD, num_ranks=2, num_redundant=2, previous=PREVIOUS)


@pytest.fixture
def silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes of solvers answer nothing, however long they have."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec sleep {2 * FAR_S:.0f}\n")
    python.chmod(0o700)
    monkeypatch.setattr(process, "get_executable", lambda: str(python))


@pytest.mark.usefixtures("silent")
def test_a_process_that_does_not_answer_in_time_is_ended() -> None:
    clock = VirtualClock()
    solver = SolverProcess(clock, deadline_s=5.0)
    solver.ask(LOAD, PREVIOUS)
    assert solver.poll() == b""
    clock.advance(5.1)
    with pytest.raises(OSError, match="did not answer within 5 s"):
        solver.poll()
    assert solver._process is None


def poll_until_it_raises(solver: SolverProcess) -> None:
    end = time.monotonic() + FAR_S
    while time.monotonic() < end:
        solver.poll()
        time.sleep(0.005)


@pytest.fixture
def answering(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], SolverProcess]:
    """Return a function that makes a solver whose process answers any request with these bytes."""

    def start(body: bytes) -> SolverProcess:
        python, answer = tmp_path / "python", tmp_path / "answer"
        answer.write_bytes(body)
        python.write_text(f"#!/bin/sh\nexec cat {shlex.quote(str(answer))}\n")
        python.chmod(0o700)
        monkeypatch.setattr(process, "get_executable", lambda: str(python))
        return SolverProcess(time.monotonic)

    return start


def test_one_that_cannot_be_started_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "get_executable", lambda: "/there is no/python")
    solver = SolverProcess(time.monotonic)
    with pytest.raises(FileNotFoundError):
        solver.ask(LOAD, PREVIOUS)
    assert solver._answer.closed
    solver.close()


@pytest.mark.usefixtures("silent")
def test_one_that_is_killed_has_no_answer() -> None:
    solver = SolverProcess(time.monotonic)
    solver.ask(LOAD, PREVIOUS)
    assert solver._process is not None
    solver._process.kill()
    with pytest.raises(OSError, match="the solver's process has ended with -9"):
        poll_until_it_raises(solver)
    assert solver._process is None
    solver.close()


def test_one_that_says_nonsense_has_no_answer(answering: Callable[[bytes], SolverProcess]) -> None:
    solver = answering(b"bad")
    solver.ask(LOAD, PREVIOUS)
    with pytest.raises(OSError, match="cannot be read"):
        poll_until_it_raises(solver)
    assert solver._process is None
    solver.close()


def test_an_impossible_answer_is_an_error(answering: Callable[[bytes], SolverProcess]) -> None:
    solver = answering(msgspec.msgpack.encode(SolveAnswer(PackedPlacement([[0, 0]], 2, 1))))
    solver.ask(LOAD, PREVIOUS)
    with pytest.raises(ConfigError, match="no slot for expert 1"):
        poll_until_it_raises(solver)
    solver.close()
