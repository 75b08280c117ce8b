"""Engines change their roles all the time, under faults: no token is wrong and no request is lost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import combinations
from typing import Any

import attrs
import pytest

from pdinfer.config import CacheConfig, EngineConfig, PairingConfig
from pdinfer.engine import roles
from pdinfer.errors import ConfigError, PDInferError, TransferError
from pdinfer.testing import NetworkFaults, Placement
from pdinfer.types import FinishReason, Request, SamplingParams, TokenEvent
from tests.sim.fakes import CellDecode, CellPrefill, Violation
from tests.sim.plan import Arrival, Focus
from tests.sim.world import World

LASTS_S = 20.0
REQUEST_S = 0.1
SWITCH_S = 0.15
TROUBLE_S = 0.4
NAMES = ("p0", "p1", "p2", "d0", "d1")
FAULTS = NetworkFaults(slow=0.05, slow_s=0.1, late_read=0.1, late_done=0.1, late_s=0.1, pieces=0.2)
DRAINED_S = 1e9
"""The host's own clock, which the time of a removal is, does not matter: a port is drained, or not at all."""


class Broken(RuntimeError):
    """What a device does."""


class Switching(World):
    """Five engines, one of which changes its role every SWITCH_S. Links between any two break, and engines die and are
    replaced, in a role by chance. Prompts begin alike, so that pages are found in either role. Odd seeds draft."""

    def __init__(self, seed: int, *, deaths: bool) -> None:
        super().__init__(seed, Focus(ports=("local",), armed={}))
        rng, cache = self.simulation.rng, CacheConfig(page_size=4, num_pages=40)
        self._deaths = deaths
        self._switching: Iterator[float] | None = None
        beginnings = [tuple(rng.randrange(1, 999) for _ in range(24)) for _ in range(3)]
        arrivals = tuple(
            Arrival(
                request=Request(
                    request_id=f"r{number}",
                    prompt=(*rng.choice(beginnings)[: rng.randrange(0, 25)], *range(1, 1 + rng.randint(1, 12))),
                    sampling=SamplingParams(max_new_tokens=rng.randint(1, 12), seed=number),
                ),
                at_s=number * REQUEST_S,
            )
            for number in range(int(LASTS_S / REQUEST_S))
        )
        self.plan = attrs.evolve(
            self.plan,
            ports="local",
            prefills=(cache,) * 3,
            decodes=(cache,) * 2,
            num_ranks=(1,) * len(NAMES),
            engine=EngineConfig(max_running_requests=4, chunked_prefill_size=8, num_draft_tokens=2 * (seed % 2)),
            pairing=PairingConfig(connect_timeout_s=0.5, max_queued_per_decode=8, port_wait_s=30.0),
            placement=Placement.BY_RECEIVER,
            faults=FAULTS,
            arrivals=arrivals,
            troubles=(),
            step_s=0.01,
            prefill_slowness=1,
            key=None,
        )
        self.network.faults = FAULTS

    def _build(self) -> None:
        super()._build()
        later = self.simulation.later
        for at in range(1, int(LASTS_S / TROUBLE_S)):
            later(at * TROUBLE_S, self._trouble)
        later(SWITCH_S, self._switch)

    def _trouble(self) -> None:
        rng = self.simulation.rng
        one, other = rng.choice(list(combinations(NAMES, 2)))
        kind = rng.choice(["cut", "cut", "partition", "death" if self._deaths else "cut"])
        if kind == "cut":
            self.network.cut(one, other)
        elif kind == "partition":
            self.network.partition(one, other)
            self.simulation.later(rng.uniform(0.05, 0.5), self.network.heal)
        elif self.engines[one] in self.pairing.ports:
            self.counts["death"] += 1
            self._die(one)

    def _die(self, name: str) -> None:
        """Let an engine break in its next step, and replace it."""

        def broken() -> list[object]:
            raise Broken

        self.engines[name].step = broken  # type: ignore[method-assign]
        self.simulation.later(0.5, partial(self._replace, name))

    def _replace(self, name: str) -> None:
        if not self.engines[name].closed:  # it was being switched, or no step has come
            self.simulation.later(0.5, partial(self._replace, name))
            return
        engine = self._engine(name, self._pool(self._caches[name]))
        if self.simulation.rng.random() < 0.5:
            engine = roles.become(engine, "decode" if engine.role == "prefill" else "prefill") or engine
        self.engines[name] = engine
        self._join(engine)

    def _switch(self) -> None:
        """Begin to switch some port, which goes on in the host's turns."""
        if self._healed:
            return
        rng = self.simulation.rng
        self.simulation.later(SWITCH_S * rng.uniform(0.5, 1.5), self._switch)
        port: Any = rng.choice(self.pairing.ports or [None])
        if self._switching is None and port is not None:
            role = "decode" if port.role == "prefill" else "prefill"
            name = next(name for name, engine in self.engines.items() if engine is port)
            self._switching = self._switched(name, role, drain_s=rng.choice([0.0, DRAINED_S]))
            self._host.wake()

    def _switched(self, name: str, role: str, *, drain_s: float) -> Iterator[float]:
        old = self.engines[name]
        joining = self.pairing._joining
        beside = joining.beside
        joining.beside = partial(self._joined, name)  # type: ignore[method-assign,assignment]
        try:
            new = yield from self.pairing.switching(old, role, drain_s=drain_s)
        except ConfigError:
            self.counts["refused"] += 1
        except TransferError:
            self.counts["lost while it drained"] += 1
        else:
            assert new is self.engines[name]
            assert new.address == old.address
            self.counts["switch"] += 1
            self.counts[f"pages kept as a {role}"] += new.pool.num_cached > 0
        finally:
            joining.beside = beside  # type: ignore[method-assign]

    def _joined(self, name: str, port: Any) -> Iterator[float]:
        """Join until it succeeds, without a thread beside this one, in which no time would pass."""
        self.engines[name] = port
        while True:
            try:
                self.pairing._joining.add(port)
                return
            except PDInferError:
                self.counts["join again"] += 1
                yield 0.1

    def _host_turn(self) -> float | None:
        pause_s = super()._host_turn()
        if self._switching is None:
            return pause_s
        try:
            next(self._switching)
        except StopIteration:
            self._switching = None
        return min(pause_s or 0.05, 0.05)

    def _hear(self, event: TokenEvent) -> None:
        super()._hear(event)
        if event.finish_reason is FinishReason.FAILED:
            raise Violation(f"{event.request_id} is lost: {event.error}")

    def _idle(self) -> bool:
        return self._switching is None and super()._idle()


def run(monkeypatch: pytest.MonkeyPatch, seeds: range, *, deaths: bool) -> int:
    """Run these worlds, and return how many switches there were."""
    monkeypatch.setattr(roles, "ENGINES", {"prefill": CellPrefill, "decode": CellDecode})
    num_switches = 0
    for seed in seeds:
        world = Switching(seed, deaths=deaths).run()
        assert world.counts["end stop"] + world.counts["end length"] == len(world.plan.arrivals)
        assert (world.counts["death"] > 0) == deaths
        assert world.counts["pages kept as a decode"] > 0
        assert world.counts["pages kept as a prefill"] > 0
        num_switches += world.counts["switch"]
    return num_switches


@pytest.mark.parametrize("deaths", [pytest.param(False, marks=pytest.mark.full), True])
def test_no_token_is_wrong_and_no_request_lost_while_roles_change(
    monkeypatch: pytest.MonkeyPatch, deaths: bool
) -> None:
    assert run(monkeypatch, range(deaths, deaths + 1), deaths=deaths) > 80


@pytest.mark.full
@pytest.mark.parametrize("deaths", [False, True])
def test_ten_thousand_switches_under_faults(monkeypatch: pytest.MonkeyPatch, deaths: bool) -> None:
    assert run(monkeypatch, range(100, 148), deaths=deaths) > 5_000
