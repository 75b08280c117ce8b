"""What simulated engines ask of the simulation that they are in, and what a decode tells of itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from pdinfer.planning.simulation.chance import Chance
from pdinfer.planning.simulation.job import Job


class SimEngine(Protocol):
    """An engine of either side. `due_s` is when the step or burst under way ends, infinity without one."""

    number: int
    speed: float
    due_s: float

    def wake(self, now_s: float) -> None:
        """Go on after a step, if one ends now."""

    def begin(self, now_s: float) -> None:
        """Begin a step if there is something to do and none is under way."""


class World(Protocol):
    """The time, the device and the host of engines."""

    now_s: float
    chance: Chance

    def wake(self, engine: SimEngine, at_s: float) -> None:
        """Call `engine.wake` then. Its device is busy until then."""

    def soon(self, engine: SimEngine) -> None:
        """Call `engine.begin` once everything has happened that happens now."""

    def tell(self, at_s: float, granted: Sequence[Job], ended: Sequence[Job]) -> None:
        """Let the host learn then what a decode has granted, and what has ended."""

    def abort(self, job: Job, now_s: float) -> None:
        """Let the prefill of a granted request stop. `Decode.settle` is called when it has."""

    def may_begin(self, engine: SimEngine, now_s: float) -> bool:
        """Return whether the engine's device is free. If it is not, the engine begins when it is."""

    def is_alone(self, engine: SimEngine) -> bool:
        """Return whether nobody else has work for the engine's device."""


@attrs.define
class DecodeState:
    """What an engine tells of itself: its pages and its requests."""

    num_free: int
    num_cached: int
    num_waiting: int
    waiting_tokens: int
    num_granted: int
    num_running: int
    held_tokens: int
