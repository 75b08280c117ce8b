"""A process that solves placements while engines run. Nobody waits for it.

    we ── request ──► python -m pdinfer.moe.balance          each a frame: 4 bytes of length, MessagePack
    we ◄── answer ───

The first request starts the process, and it lives on. When it dies, hangs or sends nonsense, that costs one answer: the
next request starts another process.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable

import msgspec

from pdinfer.errors import ConfigError
from pdinfer.moe.placement.placement import ExpertPlacement, Ints
from pdinfer.process.forked import OfOneProcess

DEADLINE_S = 120.0
FRAME = struct.Struct("<I")
_CHUNK = 1 << 20


class PackedPlacement(msgspec.Struct):
    """An `ExpertPlacement` as lists."""

    physical_to_logical_map: list[list[int]]
    num_logical_experts: int
    num_ranks: int
    slot_shares: list[list[float]] | None = None

    @classmethod
    def of(cls, placement: ExpertPlacement) -> PackedPlacement:
        shares = placement.slot_shares
        return cls(
            placement.physical_to_logical_map.tolist(),
            placement.num_logical_experts,
            placement.num_ranks,
            None if shares is None else shares.tolist(),
        )

    def unpack(self) -> ExpertPlacement:
        """Return the placement. Raises ConfigError when the lists are not one."""
        return ExpertPlacement(
            physical_to_logical_map=self.physical_to_logical_map,
            num_logical_experts=self.num_logical_experts,
            num_ranks=self.num_ranks,
            slot_shares=self.slot_shares,
        )


class SolveRequest(msgspec.Struct):
    """A request: the load [layers][experts] that was recorded under `previous`."""

    load: list[list[int]]
    previous: PackedPlacement
    max_moves: int | None = None


class SolveAnswer(msgspec.Struct):
    """An answer: a placement, or the reason why there is none."""

    placement: PackedPlacement | None = None
    error: str = ""


def unpack_placement(data: bytes) -> ExpertPlacement:
    """Read what `SolverProcess.poll` returned. Raises ConfigError when it is not a placement."""
    return msgspec.msgpack.decode(data, type=PackedPlacement).unpack()


class SolverProcess(OfOneProcess):
    """A solver in a process of its own: at most one process, and at most one request under way."""

    def __init__(self, clock: Callable[[], float], *, deadline_s: float = DEADLINE_S) -> None:
        self.is_asked = False
        self._clock = clock
        self._deadline_s = deadline_s
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent = b""
        self._received = b""
        self._asked_at = 0.0

    @property
    def pid(self) -> int | None:
        """The number of the process, or None when there is no process."""
        return None if self._process is None else self._process.pid

    @property
    def has_written(self) -> bool:
        """Whether the whole request is in the pipe."""
        return not self._unsent

    def ask(self, load: Ints, previous: ExpertPlacement, *, max_moves: int | None = None) -> None:
        """Send a request, to which `poll` returns the answer. Raises OSError when no process can be started."""
        body = msgspec.msgpack.encode(SolveRequest(load.tolist(), PackedPlacement.of(previous), max_moves))
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pdinfer.moe.balance"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # a Ctrl-C is for the host, whose end ends the solver's input
            )
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
        self._unsent, self._received = FRAME.pack(len(body)) + body, b""
        self._asked_at = self._clock()
        self.is_asked = True

    def poll(self) -> bytes:
        """Return the answer, for `unpack_placement`, or b"" while there is none.

        Raises OSError when the process is gone, late, or sends nonsense; ConfigError, with its words, when it cannot
        solve the load.
        """
        try:
            data = self._poll()
            if data is None:
                return b""
            answer = msgspec.msgpack.decode(data, type=SolveAnswer)
        except OSError:
            self.close()
            raise
        except msgspec.MsgspecError as error:
            self.close()
            raise OSError(f"the solver's answer cannot be read: {error}") from error
        self.is_asked = False
        if answer.placement is None:
            raise ConfigError(answer.error)
        answer.placement.unpack()
        return msgspec.msgpack.encode(answer.placement)

    def _poll(self) -> bytes | None:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        if self._clock() > self._asked_at + self._deadline_s:
            raise TimeoutError(f"the solver did not answer within {self._deadline_s:g} s")
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(process.stdin.fileno(), self._unsent[:_CHUNK]) :]
            while True:
                more = os.read(process.stdout.fileno(), _CHUNK)
                if not more:
                    raise BrokenPipeError
                self._received += more
        except BlockingIOError:
            pass
        except BrokenPipeError:  # also raised by os.write, when the process ended before it had read everything
            raise BrokenPipeError("the solver's process has ended; the next request starts another one") from None
        if len(self._received) < FRAME.size:
            return None
        (size,) = FRAME.unpack_from(self._received)
        frame = self._received[FRAME.size : FRAME.size + size]
        return frame if len(frame) == size else None

    def close(self) -> None:
        """End the process. A second call does nothing."""
        process, self._process = self._process, None
        self.is_asked = False
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
