"""A process that solves a placement while engines run. Nobody waits for it.

    request ──file──► pdinfer.moe.balance.__main__ ──file──► answer

Every request has a process of its own, which keeps no memory afterwards. When it dies, hangs or writes nonsense, that
costs one answer."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.spawn import get_executable

import msgspec

from pdinfer.errors import ConfigError
from pdinfer.moe.balance.messages import PackedPlacement, SolveAnswer, SolveRequest
from pdinfer.moe.placement.placement import ExpertPlacement, Ints
from pdinfer.process.forked import OfOneProcess

DEADLINE_S = 120.0
CODE = "import sys; sys.path[:] = sys.argv[1:]; import runpy; runpy.run_module('pdinfer.moe.balance', None, '__main__')"
"""The code of the process. Its arguments are `sys.path`: with `-m`, a folder in which the host happens to be would come
first, and what the host has added would be missing."""


def unpack_placement(data: bytes) -> ExpertPlacement:
    """Read what `SolverProcess.poll` returned. Raises ConfigError when it is not a placement."""
    return msgspec.msgpack.decode(data, type=PackedPlacement).unpack()


class SolverProcess(OfOneProcess):
    """A solver in a process of its own, with at most one request under way."""

    def __init__(self, clock: Callable[[], float], *, deadline_s: float = DEADLINE_S) -> None:
        self._clock = clock
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_at = 0.0

    def ask(self, load: Ints, previous: ExpertPlacement, *, max_moves: int | None = None) -> None:
        """Start a request, to which `poll` returns the answer. Raises OSError when no process can be started."""
        self._asked_at = self._clock()
        with tempfile.TemporaryFile() as request, contextlib.ExitStack() as until_started:
            self._answer = until_started.enter_context(tempfile.TemporaryFile())
            request.write(msgspec.msgpack.encode(SolveRequest(load.tolist(), PackedPlacement.of(previous), max_moves)))
            request.seek(0)
            self._process = subprocess.Popen(  # noqa: S603 - this Python, with arguments that are our own
                [get_executable(), "-c", CODE, *sys.path],
                stdin=request,
                stdout=self._answer,
                start_new_session=True,  # a Ctrl-C is for the host
            )
            until_started.pop_all()  # `close` closes the answer

    def poll(self) -> bytes:
        """Return the answer, for `unpack_placement`, or b"" while there is none.

        Raises OSError when the process is gone, late, or wrote nonsense; ConfigError, with its words, when it cannot
        solve the load."""
        assert self._process is not None
        code = self._process.poll()
        if code is None and self._clock() <= self._asked_at + self._deadline_s:
            return b""
        self._answer.seek(0)
        data = self._answer.read()
        self.close()
        if code is None:
            raise TimeoutError(f"the solver did not answer within {self._deadline_s:g} s")
        if code:
            raise ChildProcessError(f"the solver's process has ended with {code}; the next request starts another one")
        try:
            answer = msgspec.msgpack.decode(data, type=SolveAnswer)
        except msgspec.MsgspecError as error:
            raise OSError(f"the solver's answer cannot be read: {error}") from error
        if answer.placement is None:
            raise ConfigError(answer.error)
        answer.placement.unpack()
        return msgspec.msgpack.encode(answer.placement)

    def close(self) -> None:
        """End the process. A second call does nothing."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            self._answer.close()
