"""Engines that change their roles when an adviser says so, as a host does that calls `advise` and `Pairing.switch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import attrs

from pdinfer.bench.load import Load
from pdinfer.checks import clip
from pdinfer.errors import ConfigError
from pdinfer.planning.simulation.decode import Decode
from pdinfer.planning.simulation.deployment import Cluster
from pdinfer.planning.simulation.engine import Lockstep
from pdinfer.planning.simulation.job import Job
from pdinfer.planning.simulation.prefill import Prefill
from pdinfer.planning.simulation.view import View
from pdinfer.planning.simulation.world import World
from pdinfer.stats import PairingStats
from pdinfer.types import PeerAddress

ASK_EVERY_S = 1.0
"""How often the adviser is asked, and a leaving engine looked at."""
DRAIN_S = 2.0
"""Requests that a leaving engine has after so long go to others, as with `Pairing.switch(drain_s=2)`."""


class Move(Protocol):
    """A port that should change its role, such as a `planning.Advice`."""

    @property
    def port(self) -> PeerAddress: ...


Adviser = Callable[[PairingStats], Move | None]


class Run(Protocol):
    """What is simulated, all requests that were sent, and who moved so far, and when."""

    cluster: Cluster
    load: Load
    world: World
    jobs: list[Job]
    moves: list[str]


@attrs.define(eq=False, repr=False)
class Switching:
    """Asks an adviser as long as a run has requests to serve. The ranks of the port that it names get no more of them,
    and `lose` gives to others what they still have after DRAIN_S. Then `make` gives for each the one of the other role
    that takes its place, with an empty pool, and `joined` is called. One engine moves at a time. Raises ConfigError for
    engines that cannot move."""

    _adviser: Adviser
    _run: Run
    _view: View
    _make: Callable[[str], Prefill | Decode]
    _lose: Callable[[Prefill | Decode], None]
    _joined: Callable[[], None]
    _leaving: Sequence[Prefill | Decode] = ()
    _drained_at: float = 0.0

    def __attrs_post_init__(self) -> None:
        cluster = self._run.cluster
        if cluster.colocated or cluster.prefill.ranks != cluster.decode.ranks:
            raise ConfigError(
                f"{cluster.name}: an adviser moves engines whose ranks have a device each, and as many in either role; "
                "simulate it without one"
            )
        self._run.world.at(ASK_EVERY_S, self._ask)

    def _ask(self) -> None:
        unfinished = [job for job in self._run.jobs if job.ended_s is None]
        if not unfinished and len(self._run.jobs) == len(self._run.load.arrivals):
            return
        if not self._leaving:
            stats = self._view.stats()
            advice = self._adviser(stats)
            if advice is not None:
                if getattr(advice, "port", None) not in [load.address for load in stats.loads]:
                    raise ConfigError(
                        f"an adviser names the port of a load that it was shown, or None, got {clip(advice)}"
                    )
                self._leaving, self._drained_at = self._view.ranks(advice.port), self._run.world.now_s + DRAIN_S
                for rank in self._leaving:
                    self._view.drop(rank)
        if self._leaving:
            self._drain(self._leaving, unfinished)
        self._run.world.at(self._run.world.now_s + ASK_EVERY_S, self._ask)

    def _drain(self, old: Sequence[Prefill | Decode], jobs: Sequence[Job]) -> None:
        """Let another engine take the place of one that has nothing to do, or had its time."""
        now_s = self._run.world.now_s
        if now_s < self._drained_at and any(_uses(job, rank) for job in jobs for rank in old):
            return
        self._leaving = ()
        new = [self._make("decode" if isinstance(rank, Prefill) else "prefill") for rank in old]
        Lockstep(new, self._run.world)
        for rank in new:
            self._view.join(rank)
        for rank in old:
            self._lose(rank)
        name, becomes = (ranks[0].name.partition(".")[0] for ranks in (old, new))
        self._run.moves.append(f"{name} became {becomes} after {now_s:.0f} s")
        self._joined()


def _uses(job: Job, engine: Prefill | Decode) -> bool:
    """Return whether a request needs an engine still. One that runs needs its prefill no more."""
    if job.chosen_s is None:
        return False
    return job.decode == engine.number if isinstance(engine, Decode) else job.prefill == engine.number and not job.runs
