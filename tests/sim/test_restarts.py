"""Both sides restart all the time: no request is lost, or waits for long, beside ports that live."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product

import attrs
import pytest

from pdinfer.config import CacheConfig, EngineConfig, PairingConfig
from pdinfer.testing import NetworkFaults, Placement
from pdinfer.types import FinishReason, Request, SamplingParams, TokenEvent
from tests.each_time import others_in_full
from tests.sim.fakes import Violation
from tests.sim.plan import Arrival, Focus, Trouble
from tests.sim.world import World

LASTS_S = 60.0
EVERY_S = 1.5
CUT_S = 75.0
"""Longer than channels dial a peer that they do not reach, and than a request waits for a link."""
SETTLED_S = 5.0
"""A pair counts as alive once both of its ports have lived, and could reach each other, for so long."""
WAITS_S = 60.0
LOOK_S = 0.5


def strikes(rng: random.Random, *, freezes: float) -> Iterator[Trouble]:
    """Yield troubles of two prefills and two decodes: one of the four dies or freezes every EVERY_S."""
    for number in range(1, int(LASTS_S / EVERY_S)):
        kind = "freeze" if rng.random() < freezes else "crash"
        lasts_s, one = rng.uniform(1.0, 8.0), rng.randrange(4)
        yield Trouble(kind=kind, at_s=EVERY_S * number, lasts_s=lasts_s, one=one, other=0)


def cuts() -> Iterator[Trouble]:
    """Yield a cut of all pairs at once."""
    for one, other in product(range(2), repeat=2):
        yield Trouble(kind="partition", at_s=5.0, lasts_s=CUT_S, one=one, other=other)


class Restarts(World):
    """Two prefills and two decodes that meet with `troubles`, and a request every `every_s`. A watcher counts how long
    requests wait while some pair is alive."""

    def __init__(self, seed: int, troubles: Callable[[random.Random], Iterable[Trouble]], *, every_s: float) -> None:
        super().__init__(seed, Focus(ports=("piped",), armed={}))
        rng = self.simulation.rng
        cache = CacheConfig(page_size=4, num_pages=24)
        struck = tuple(troubles(rng))
        last_s = max(trouble.at_s + trouble.lasts_s for trouble in struck)
        arrivals = tuple(
            Arrival(
                request=Request(
                    request_id=f"r{number}",
                    prompt=tuple(rng.randrange(1, 999) for _ in range(rng.randint(4, 24))),
                    sampling=SamplingParams(max_new_tokens=8, seed=number),
                ),
                at_s=number * every_s,
            )
            for number in range(int((last_s + 2 * SETTLED_S) / every_s))
        )
        self.plan = attrs.evolve(
            self.plan,
            ports="piped",
            prefills=(cache, cache),
            decodes=(cache, cache),
            num_ranks=(1,) * 4,
            engine=EngineConfig(max_running_requests=3, chunked_prefill_size=8),
            pairing=PairingConfig(connect_timeout_s=0.3, max_queued_per_decode=8),
            placement=Placement.BY_RECEIVER,
            faults=NetworkFaults(),
            arrivals=arrivals,
            troubles=struck,
            step_s=0.01,
            prefill_slowness=1,
            key=None,
        )
        self.network.faults = self.plan.faults
        self.waited: dict[str, float] = {}
        self.longest_s = 0.0
        self._pairs: dict[tuple[object, object], float] = {}
        self.simulation.later(LOOK_S, self._look)

    def _look(self) -> None:
        now = self.simulation.clock.now_s
        lives = {
            name: served.engine.address
            for name, served in self.served.items()
            if self.simulation.running(name) and not served.ended and served.port in self.pairing.ports
        }
        pairs = {
            (lives[one], lives[two])
            for one in lives
            for two in lives
            if one[0] == "p" and two[0] == "d" and not self.network.blocked(one, two)
        }
        self._pairs = {pair: self._pairs.get(pair, now) for pair in pairs}
        for name, stream in self.streams.items():
            if stream.end is None and self.is_settled:
                self.waited[name] = self.waited.get(name, 0.0) + LOOK_S
                self.longest_s = max(self.longest_s, self.waited[name])
                if self.waited[name] > WAITS_S:
                    raise Violation(f"{name} has waited for {WAITS_S:g} s beside ports that live")
        self.simulation.later(LOOK_S, self._look)

    @property
    def is_settled(self) -> bool:
        now = self.simulation.clock.now_s
        return any(now - since >= SETTLED_S for since in self._pairs.values())

    def _hear(self, event: TokenEvent) -> None:
        super()._hear(event)
        self.waited.pop(event.request_id, None)
        if event.finish_reason is FinishReason.FAILED and event.index == 0 and self.is_settled:
            raise Violation(f"{event.request_id} is lost beside ports that live: {event.error}")


@pytest.mark.parametrize("freezes", others_in_full([0.0, 0.5, 1.0], each_time=[0.5]))
def test_no_request_is_lost_or_waits_long_beside_ports_that_live(freezes: float) -> None:
    world = Restarts(int(2 * freezes), partial(strikes, freezes=freezes), every_s=0.5).run()
    assert world.counts["crash"] + world.counts["freeze"] >= LASTS_S / EVERY_S / 2
    assert world.counts["moved"] > 0
    assert world.longest_s < 2 * SETTLED_S


def test_ports_that_were_cut_for_longer_than_channels_dial_find_each_other() -> None:
    world = Restarts(0, lambda _: cuts(), every_s=2.0).run()
    assert world.counts["end failed"] > 0, "while nothing could reach anything"
    assert world.counts["end length"] + world.counts["end stop"] > 2
    assert world.longest_s < 2 * SETTLED_S
