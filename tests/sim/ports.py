"""Hosts of a simulated world: loops that step, and engines behind a pipe that delays the messages to and from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs

from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import RankLost, TransferError
from pdinfer.stats import DecodeLoad, PrefillLoad
from pdinfer.testing import Simulation
from pdinfer.types import Event, PageGrant, PeerAddress, Request
from tests.sim.ranks import Fiber

LAG_S = 0.002
"""The longest time that a sleeping host takes to wake up."""
POLL_S = 0.1
BEAT_S = 0.4
SILENCE_S = 2.4
PIPE_S = (0.0002, 0.003)

Engine = PrefillEngine | DecodeEngine
Lost = Callable[[RankLost], None]


class Loop:
    """A host's loop on one node. `turn` does one round and returns the seconds until the next one is due, or None when
    only `wake` can start it. With a `fiber` a round may take time."""

    def __init__(
        self, simulation: Simulation, node: str, turn: Callable[[], float | None], fiber: Fiber | None = None
    ) -> None:
        self._simulation = simulation
        self._node = node
        self._turn = turn
        self._fiber = fiber
        self._woken = False
        self._due = float("inf")
        self._stalled_until = 0.0

    def stall(self, until_s: float) -> None:
        """Allow no turn before that time: the host hangs, while its process answers beats and moves bytes."""
        self._stalled_until = until_s

    def wake(self) -> None:
        if self._simulation.alive(self._node):
            self._at(self._simulation.clock.now_s + LAG_S * self._simulation.rng.random())

    def _at(self, due: float) -> None:
        if due < self._due:
            self._due = due
            self._simulation.later(due - self._simulation.clock.now_s, partial(self._run, due), node=self._node)

    def _run(self, due: float) -> None:
        if due == self._due:
            self._due = float("inf")
            if due < self._stalled_until:
                self._at(self._stalled_until)
                return
            if self._fiber is None:
                self._turned(self._turn())
            elif self._fiber.busy:
                self._woken = True
            else:
                self._fiber.start(self._turn, self._turned)

    def _turned(self, delay: float | None) -> None:
        if self._woken:
            self._woken = False
            self.wake()
        if delay is not None:
            self._at(self._simulation.clock.now_s + delay)


class Pipe:
    """An ordered stream of messages to a node, each after a delay of its own."""

    def __init__(self, simulation: Simulation, node: str, deliver: Callable[[Any], None]) -> None:
        self._simulation = simulation
        self._node = node
        self._deliver = deliver
        self._items: deque[Any] = deque()
        self._last = 0.0

    def send(self, item: Any) -> None:
        now = self._simulation.clock.now_s
        self._last = max(self._last, now + self._simulation.rng.uniform(*PIPE_S))
        self._items.append(item)
        self._simulation.later(self._last - now, self._arrive, node=self._node)

    def _arrive(self) -> None:
        self._deliver(self._items.popleft())


@attrs.frozen
class Report:
    """The message of a served engine after a step of a session; None in its place is a sign of life."""

    session: int
    num_seen: int
    load: Any
    events: list[Event]


class Served:
    """An engine in a process of its own, as `remote.serve` would host it. `after_step` is called after each step, and
    `lost` when the engine cannot go on because its other ranks are gone."""

    def __init__(
        self,
        simulation: Simulation,
        node: str,
        engine: Engine,
        step_s: float,
        after_step: Callable[[Engine], None],
        *,
        lost: Lost,
        fiber: Fiber | None = None,
    ) -> None:
        self.node = node
        self.engine = engine
        self.port: Port = Port(simulation, self)
        self.ended = False
        self._simulation = simulation
        self._step_s = step_s
        self._after_step = after_step
        self._lost = lost
        self._commands: deque[Callable[[], bool]] = deque()
        self._num_seen = 0
        self._session = 0
        self._next_session: int | None = None
        self.loop = Loop(simulation, node, self._turn, fiber)
        self._reports = Pipe(simulation, "host", self.port.hear)
        self.commands = Pipe(simulation, node, self._take)
        engine.notify(self.loop.wake)
        simulation.every(BEAT_S, self._beat, node=node)

    def _take(self, command: Callable[[], bool]) -> None:
        self._commands.append(command)
        self.loop.wake()

    def _beat(self) -> None:
        if not self.ended:
            self._reports.send(None)
            self.loop.wake()  # a host looks whether its load has changed: links come without a step

    def _turn(self) -> float | None:
        if self.ended:
            return None
        spoken = bool(self._commands)
        while self._commands:
            self._num_seen += self._commands.popleft()()
        if self._next_session is not None:
            spoken = self._begin(self._next_session)
        try:
            events = self.engine.step()
        except RankLost as error:
            self._lost(error)
            return self._die()
        if self.engine.closed and not self.ended:
            return self._die()
        self._after_step(self.engine)
        busy = self.engine.wait(0.0)
        if self._next_session is None and (events or spoken or not busy):
            self._reports.send(Report(self._session, self._num_seen, self.engine.load(), events))
        if busy:
            return self._step_s * (0.5 + self._simulation.rng.random())
        waits = self.engine.num_unfinished or self._next_session is not None
        return due_in_s(self.engine, POLL_S if waits else None)

    def renew(self, session: int) -> bool:
        """Take back the client, after it gave up what it had here."""
        self._next_session = session
        return False

    def _begin(self, session: int) -> bool:
        """Begin a session once nothing of the last one is left: its ids may come again."""
        for request_id in self.engine.request_ids:
            self.engine.cancel(request_id)
        if self.engine.num_unfinished:
            return False
        self._session, self._next_session, self._num_seen = session, None, 0
        return True

    def _die(self) -> None:
        """End the process though its client has not asked for it; its kernel reports the end."""
        self.end()
        self._simulation.later(PIPE_S[1], self.port.hang_up, node="host")

    def end(self) -> bool:
        """Close the engine, as a process does when its client is gone."""
        if not self.ended:
            self.ended = True
            self.engine.close()
            self._after_step(self.engine)
        return False


class Following:
    """A rank that no client talks to, in a process of its own."""

    def __init__(
        self, simulation: Simulation, node: str, engine: Engine, step_s: float, *, lost: Lost, fiber: Fiber
    ) -> None:
        self.engine = engine
        self.ended = False
        self._simulation = simulation
        self._step_s = step_s
        self._lost = lost
        self.loop = Loop(simulation, node, self._turn, fiber)
        engine.notify(self.loop.wake)
        self.loop.wake()

    def _turn(self) -> float | None:
        if self.ended:
            return None
        try:
            self.engine.step()
        except RankLost as error:
            self._lost(error)
            self.engine.close()
        if self.engine.closed:
            self.ended = True
            return None
        if self.engine.wait(0.0):
            return self._step_s * (0.5 + self._simulation.rng.random())
        return due_in_s(self.engine, None)


def due_in_s(engine: Engine, delay: float | None) -> float | None:
    """How long a host may sleep: `delay`, or less because of the other ranks."""
    due_s = engine.ranks.due_in_s()
    return delay if due_s == float("inf") else max(LAG_S, min(due_s, delay or POLL_S))


class Port:
    """The other end of a Served engine, in the place of `remote.PrefillClient` and `DecodeClient`."""

    def __init__(self, simulation: Simulation, served: Served) -> None:
        self._simulation = simulation
        self._served = served
        self.role = served.engine.role
        self.address = served.engine.address
        self.addresses = served.engine.addresses
        self.limits = served.engine.limits
        self._load = served.engine.load()
        self._events: list[Event] = []
        self._unseen: list[tuple[int, int]] = []
        self._num_submitted = 0
        self._listeners: list[Callable[[], None]] = []
        self._heard_at = simulation.clock.now_s
        self._session, self._given_up = 0, -1
        self._in_session = True
        self._lost = self._gone = self._closed = False

    def connect(self, peer: PeerAddress, *, timeout_s: float = 10.0) -> None:
        """Connect at once, like the handshake in a simulated network. A frozen process hears of it later."""
        if self._lost or not self._simulation.running(self._served.node):
            self._post(partial(self._served.engine.connect, peer, timeout_s=0.0))
            raise TransferError("the process at the other end of a port does not answer")
        self._served.engine.connect(peer, timeout_s=timeout_s)

    def cancel(self, request_id: str) -> None:
        self._post(partial(self._served.engine.cancel, request_id))

    def change_writers(self, request_id: str, *, writers: Sequence[PeerAddress]) -> None:
        engine = self._served.engine
        assert isinstance(engine, DecodeEngine)
        self._post(partial(engine.change_writers, request_id, writers=writers))

    def submit(self, request: Request, grant: PageGrant | None = None, *, writers: Sequence[PeerAddress] = ()) -> None:
        engine = self._served.engine
        if isinstance(engine, DecodeEngine):
            submit = partial(engine.submit, request, writers=writers)
        else:
            assert grant is not None
            submit = partial(engine.submit, request, grant)
        if self._in_session:
            self._num_submitted += 1
            self._unseen.append((self._num_submitted, len(request.tokens)))
            self._post(submit, seen=True)

    def disconnect(self, peer: PeerAddress) -> None:
        self._post(partial(self._served.engine.disconnect, peer))

    def _post(self, command: Callable[[], None], *, seen: bool = False) -> None:
        def obey() -> bool:
            command()
            return seen

        if not self._closed and self._in_session:
            self._served.commands.send(obey)

    def hear(self, report: Report | None) -> None:
        self._heard_at = self._simulation.clock.now_s
        if not self._in_session and self._session == self._given_up:
            self._session += 1
            self._served.commands.send(partial(self._served.renew, self._session))
        elif report is not None and report.session == self._session:
            if not self._in_session:
                self._in_session, self._num_submitted = True, 0
            self._load = report.load
            self._unseen = [unseen for unseen in self._unseen if unseen[0] > report.num_seen]
            self._events += report.events
            self.wake()

    def hang_up(self) -> None:
        """Report that the process is gone, as its kernel does."""
        self._lost = self._gone = True
        self.wake()

    def step(self) -> list[Event]:
        if self._in_session and self._simulation.clock.now_s - self._heard_at > SILENCE_S:
            self._lost, self._in_session, self._given_up = True, False, self._session
            self._unseen.clear()
        events, self._events = self._events, []
        if self._lost and not events:
            raise TransferError("the process at the other end of a port is gone")
        return events

    @property
    def computing(self) -> frozenset[str]:
        """What it was computing rows of: a process dies between two steps here, and has told of all before."""
        return self._served.engine.computing

    def recover(self) -> bool:
        """Return, after a loss, whether the engine is back, with nothing of what it had."""
        if self._gone:
            raise TransferError("the process at the other end of a port is gone")
        if self._in_session:
            self._lost = False
        return not self._lost

    def load(self) -> PrefillLoad | DecodeLoad:
        tokens = sum(tokens for _, tokens in self._unseen)
        if isinstance(self._load, PrefillLoad):
            return attrs.evolve(
                self._load,
                num_queued_requests=self._load.num_queued_requests + len(self._unseen),
                num_queued_tokens=self._load.num_queued_tokens + tokens,
            )
        return attrs.evolve(
            self._load,
            num_waiting_requests=self._load.num_waiting_requests + len(self._unseen),
            num_waiting_tokens=self._load.num_waiting_tokens + tokens,
        )

    def notify(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)

    def wake(self) -> None:
        for listener in self._listeners:
            listener()

    def wait(self, timeout_s: float) -> bool:
        return bool(self._events) or self._lost

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._served.commands.send(self._served.end)
