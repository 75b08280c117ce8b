"""Virtual time: events of many nodes in one thread, in an order drawn from a seed.

    simulation = Simulation(seed=7)
    simulation.later(0.1, action, node="prefill")
    simulation.freeze("prefill")                    # as SIGSTOP: its events wait until `thaw`
    simulation.crash("prefill")                     # as SIGKILL: its events never happen, nothing cleans up
    simulation.run(until=lambda: done, timeout_s=60)

An action takes no time unless it says so; what it starts goes through `later` again. A node is a process of the
simulated world, known by a name and made by naming it. Faults between them are plain values."""

from __future__ import annotations

import enum
import heapq
import random
import struct
from collections.abc import Callable

import attrs
import xxhash


@attrs.frozen(kw_only=True)
class NetworkFaults:
    """The faults of a network: chances from 0 to 1 per message, and how long things take at most.

    A message flies for `flight_s` (least, most), a `slow` one for up to `slow_s`. With `late_read`, a write's source is
    read late, by up to `late_s`; with `late_done`, its sender learns late that it is done. With `pieces`, a payload
    lands in pieces, with other events in between. `late_landing` is for one-sided transports: the sender hears that a
    write failed, and it lands all the same. The others change what arrives: no message, two, the wrong order, half of
    it, or a flipped bit. A transport over TCP does none of these; a wrong implementation of one might."""

    flight_s: tuple[float, float] = (0.0001, 0.002)
    slow: float = 0.0
    slow_s: float = 0.5
    late_read: float = 0.0
    late_done: float = 0.0
    late_s: float = 0.5
    pieces: float = 0.0
    late_landing: float = 0.0
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    truncate: float = 0.0
    flip_frame: float = 0.0
    flip_payload: float = 0.0


class Placement(enum.Enum):
    """The writer of a payload into the receiver's memory, and the way: the receiver itself; in two steps, through a
    landing slot that the sender writes; or the sender. The last breaks page rule 0, and is there to show what that rule
    prevents."""

    BY_RECEIVER = "two-sided"
    THROUGH_SLOT = "one-sided"
    BY_SENDER = "one-sided, straight into pages"


Action = Callable[[], None]

_STAMP = struct.Struct("<dI")
WAKING_S = 0.005
"""Everything that came due while a node was frozen happens within this time after its thaw."""


@attrs.define
class VirtualClock:
    """A clock for engines and pairings that moves only on demand."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@attrs.define(eq=False)
class _Process:
    """One life of a node. `held` came due while it was frozen."""

    name: str
    alive: bool = True
    frozen: bool = False
    held: list[Action] = attrs.field(factory=list)


class Simulation:
    """A world of nodes over one clock and one source of randomness. Equal seeds and equal calls give equal runs.

    `clock`, `random_bytes` and `rng` are for everything that takes part: any other clock or source of randomness makes
    runs differ. Of events that are due at once, the seed picks the next."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.rng = random.Random(seed)  # noqa: S311 - the point is that it can be repeated
        self.clock = VirtualClock()
        self.num_events = 0
        self.crash_listeners: list[Callable[[str], None]] = []
        self._random = self.rng.random
        self._events: list[tuple[float, float, int, _Process | None, Action]] = []
        self._num_scheduled = 0
        self._processes: dict[str, _Process] = {}
        self._trace = xxhash.xxh3_64()

    def random_bytes(self, count: int) -> bytes:
        """Return random bytes. Stands in for `os.urandom`."""
        return self.rng.randbytes(count)

    @property
    def trace(self) -> str:
        """A hash of everything that has happened: two runs with equal traces were the same."""
        return self._trace.hexdigest()

    def note(self, what: bytes) -> None:
        """Make `what` part of the trace."""
        self._trace.update(what)

    def later(self, delay_s: float, action: Action, *, node: str | None = None) -> None:
        """Run `action` after `delay_s`, as part of `node` when one is named: not while it is frozen, and never if it
        has crashed meanwhile."""
        self._put(self.clock.now_s + delay_s, None if node is None else self._process(node), action)

    def every(self, period_s: float, action: Action, *, node: str) -> None:
        """Run `action` about every `period_s` for as long as the node lives, as a host's loop does."""

        def turn() -> None:
            action()
            self._put(self.clock.now_s + period_s * (0.9 + 0.2 * self._random()), process, turn)

        process = self._process(node)
        self._put(self.clock.now_s + period_s * self._random(), process, turn)

    # -- nodes ------------------------------------------------------------------------------------------------------

    def alive(self, node: str) -> bool:
        """Return whether the node has not crashed, or was started again since."""
        return self._process(node).alive

    def running(self, node: str) -> bool:
        """Return whether the node is alive and not frozen."""
        process = self._process(node)
        return process.alive and not process.frozen

    def freeze(self, node: str) -> None:
        """Stop a node as SIGSTOP does: nothing of it runs, and what comes for it waits."""
        self._process(node).frozen = True

    def thaw(self, node: str) -> None:
        """Let a frozen node go on. Everything that waited happens soon, in any order."""
        process = self._process(node)
        if not process.frozen:
            return
        process.frozen = False
        held, process.held = process.held, []
        for action in held:
            self._put(self.clock.now_s + WAKING_S * self._random(), process, action)

    def crash(self, node: str) -> None:
        """End a node as SIGKILL does: nothing of it runs any more, not even cleanup."""
        process = self._process(node)
        if process.alive:
            process.alive = False
            process.held.clear()
            for listener in self.crash_listeners:
                listener(node)

    def restart(self, node: str) -> None:
        """Make the name of a crashed node usable again. What ran there must be built anew."""
        if not self._process(node).alive:
            self._processes[node] = _Process(node)

    # -- time -------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Move the clock to the next event and let it happen. Return False when there is none. Exceptions of the event
        propagate."""
        if not self._events:
            return False
        due_s, _, number, process, action = heapq.heappop(self._events)
        self.clock.now_s = due_s
        if process is not None and not process.alive:
            return True
        if process is not None and process.frozen:
            process.held.append(action)
            return True
        self.num_events += 1
        self._trace.update(_STAMP.pack(due_s, number))
        action()
        return True

    def run(self, until: Callable[[], bool] = lambda: False, *, timeout_s: float) -> bool:
        """Step until `until` is true, `timeout_s` of virtual time are over, or nothing can happen. Return whether
        `until` is true."""
        end_s = self.clock.now_s + timeout_s
        while not until():
            if not self._events or self._events[0][0] > end_s:
                self.clock.now_s = end_s
                return until()
            self.step()
        return True

    def _put(self, due_s: float, process: _Process | None, action: Action) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._events, (due_s, self._random(), self._num_scheduled, process, action))

    def _process(self, node: str) -> _Process:
        process = self._processes.get(node)
        if process is None:
            process = self._processes[node] = _Process(node)
        return process
