"""The conversation of all ranks with the solver: it gets the load that they recorded, they get its placement.

    all ranks   begin: add up the load    agree on the size of the answer    take: broadcast the answer
    rank 0         └─► solver process ─► listen

Rank 0 alone has the process. All ranks know from what they did together whether an answer is awaited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from pdinfer.errors import ConfigError
from pdinfer.moe.balance import unpack_placement
from pdinfer.moe.placement import ExpertLoadRecorder, ExpertPlacement, Ints
from pdinfer.parallel import Group


class Solver(Protocol):
    """What `SolverProcess` offers."""

    is_asked: bool

    def ask(self, load: Ints, previous: ExpertPlacement, *, max_moves: int | None = None) -> None: ...

    def poll(self) -> bytes: ...

    def close(self) -> None: ...


class Solving:
    """One rank's part. `report` is called on rank 0 with the reason why there will be no placement.

    `load` is what all ranks recorded when they last added it up, int64 [layers, experts]; None before.
    """

    def __init__(self, world: Group, solver: Solver, report: Callable[[str], None]) -> None:
        self.is_awaited = False
        self.load: Ints | None = None
        self.answer_bytes: int | None = None
        self._world = world
        self._solver = solver
        self._report = report
        self._answer = b""

    def sum_load(self, recorder: ExpertLoadRecorder) -> Ints:
        """Add up, on all ranks together, what each of them recorded."""
        self.load = self._world.all_reduce(recorder.device_counts()).cpu().numpy().astype(np.int64)
        return self.load

    def begin(self, recorder: ExpertLoadRecorder, previous: ExpertPlacement, *, max_moves: int | None) -> None:
        """Have a placement solved for the load of all ranks, and begin to record anew. All ranks call it together."""
        load = self.sum_load(recorder)
        if recorder.mode == "stat":
            recorder.reset()
        self.is_awaited = True
        if self._world.rank:
            return
        try:
            self._solver.ask(load, previous, max_moves=max_moves)
        except OSError as error:
            self._fail(f"the solver cannot be started: {error}")

    def listen(self) -> None:
        """Look for the solver's answer, without waiting. `answer_bytes` then says its size, 0 for no placement."""
        if not self._solver.is_asked:
            return
        try:
            answer = self._solver.poll()
        except (OSError, ConfigError) as error:
            self._fail(str(error))
            return
        if answer:
            self._answer, self.answer_bytes = answer, len(answer)

    def _fail(self, reason: str) -> None:
        self.answer_bytes = 0
        self._report(reason)

    def take(self, num_bytes: int) -> ExpertPlacement | None:
        """Return what rank 0's solver found, on all ranks together; None when it has no placement."""
        answer, self._answer = self._answer, b""
        self.answer_bytes, self.is_awaited = None, False
        if not num_bytes:
            return None
        packed = torch.empty(num_bytes, dtype=torch.uint8)
        if self._world.rank == 0:
            packed.copy_(torch.frombuffer(bytearray(answer), dtype=torch.uint8))
        return unpack_placement(self._world.broadcast(packed).numpy().tobytes())

    def close(self) -> None:
        """End the solver. A second call does nothing."""
        self._solver.close()
