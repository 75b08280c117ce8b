"""The program that hosts a simulated Pairing: when it sends the requests of its load, and when it does nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from pdinfer.bench.load import Load
from pdinfer.bench.traces import Arrival
from pdinfer.planning.simulation.deployment import Stall
from pdinfer.planning.simulation.world import World


@attrs.define(eq=False, repr=False)
class Host:
    """Calls `send(arrival, intended_s)` for each request of a load: at its time or, in a closed loop, when another has
    ended. Those that `max_concurrency` holds back are due. It calls `dispatch` when it has sent what it may."""

    _load: Load
    _stalls: tuple[Stall, ...]
    _world: World
    _send: Callable[[Arrival, float], None]
    _dispatch: Callable[[], None]
    _due: deque[tuple[Arrival, float]] = attrs.field(factory=deque)
    _num_arrived: int = 0
    _num_in_flight: int = 0

    def at(self, at_s: float, action: Callable[..., None], *args: Any) -> None:
        """Do something then, or when a stall at that time is over."""
        self._world.at(at_s, self._unless_stalled, action, *args)

    def begin(self) -> None:
        """Plan the first arrivals."""
        arrivals, most = self._load.arrivals, self._load.max_concurrency
        if self._load.mode == "closed_loop" and most is not None:
            for arrival in arrivals[:most]:
                self.at(arrival.at_s, self._start_client)
        else:
            self.at(arrivals[0].at_s, self._arrive)

    @property
    def has_due(self) -> bool:
        """Whether requests are due."""
        return bool(self._due)

    def send_due(self) -> None:
        """Send what is due, as far as `max_concurrency` allows."""
        most = self._load.max_concurrency or math.inf
        while self._due and self._num_in_flight < most:
            self._num_in_flight += 1
            self._send(*self._due.popleft())
        self._dispatch()

    def ended(self) -> None:
        """Note the end of a request."""
        self._num_in_flight -= 1
        if self._load.mode == "closed_loop":
            self.at(self._world.now_s, self._start_client)

    def _unless_stalled(self, action: Callable[..., None], *args: Any) -> None:
        now_s = self._world.now_s
        for stall in self._stalls:
            if stall.at_s <= now_s < stall.at_s + stall.for_s:
                self.at(stall.at_s + stall.for_s, action, *args)
                return
        action(*args)

    def _arrive(self) -> None:
        arrivals = self._load.arrivals
        while self._num_arrived < len(arrivals) and arrivals[self._num_arrived].at_s <= self._world.now_s:
            arrival = arrivals[self._num_arrived]
            self._num_arrived += 1
            self._due.append((arrival, arrival.at_s))
        if self._num_arrived < len(arrivals):
            self.at(arrivals[self._num_arrived].at_s, self._arrive)
        self.send_due()

    def _start_client(self) -> None:
        """Send the next request of a closed loop."""
        if self._num_arrived < len(self._load.arrivals):
            self._due.append((self._load.arrivals[self._num_arrived], self._world.now_s))
            self._num_arrived += 1
            self.send_due()
