"""Real engines, channels, pools and a real Pairing in virtual time. Their steps compute nothing and take the seconds
that a function says: what `planning.simulate` has to agree with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs

import pdinfer as pd
from pdinfer import bench
from pdinfer.execution.drafting import Draft
from pdinfer.execution.sampling import Draw, Drawn
from pdinfer.kv.layout import KVComponent, KVLayout
from pdinfer.kv.memory import Memory
from pdinfer.model.batch import Row
from pdinfer.planning import StepRows
from pdinfer.planning.simulation import Cluster
from pdinfer.stats import DecodeLoad, PeerStats, PrefillLoad
from pdinfer.testing import NetworkFaults, SimChannel, SimNetwork, Simulation
from tests.sim.fakes import CellMemory, FakeConfig, FakeModel
from tests.sim.ranks import Fiber

NUM_LAYERS = 2
TOKEN = 5
VOCAB_SIZE = 1 << 15


class PlainModel(FakeModel):
    """A model of one byte per token and layer, of any context."""

    config: Any = FakeConfig(max_position_embeddings=1 << 20, fingerprint=b"plain")
    mtp: Any = None

    def kv_layout(self, cache: Any) -> KVLayout:
        part = KVComponent(
            name="cell", format="u8", dtype="uint8", width=1, token_bytes=1, layers=tuple(range(NUM_LAYERS))
        )
        model_id = self.config.fingerprint
        return KVLayout(model_id=model_id, weights_id=b"none", page_size=cache.page_size, components=(part,))

    def allocate_pages(self, layout: KVLayout, num_pages: int, memory: str = "auto") -> Memory:
        pages = CellMemory(layout, num_pages)
        pages.over = lambda: True
        return pages


class SameToken:
    """What runners have in common that compute nothing: every token is the same one, and nothing is drafted."""

    def first_tokens(self, rows: Sequence[int], draws: Sequence[Draw]) -> list[Drawn]:
        return [Drawn(token=TOKEN, logprob=-1.0) for _ in rows]

    def states(self, rows: Sequence[int]) -> list[tuple[Any, ...]]:
        return [() for _ in rows]

    def draft(self, states: Sequence[Any]) -> Draft:
        return Draft()

    def idle(self) -> None:
        """Do nothing."""

    def announce(self, *_: Any) -> None:
        """There are no other ranks."""

    def do_while_waiting(self, work: Any) -> None:
        """A step computes nothing that one could wait for."""


@attrs.define(eq=False)
class TimedRunner(SameToken):
    """A runner whose steps wait in virtual time."""

    simulation: Simulation
    fiber: Fiber
    step_s: Callable[[StepRows], float]
    speed: float = 1.0

    def _take(self, rows: Sequence[Row], share: float = 1.0) -> None:
        counts = [(row.start, len(row.tokens)) for row in rows]
        context = sum(start + count for start, count in counts)
        pairs = sum(start * count + count * (count + 1) // 2 for start, count in counts)
        took_s = self.step_s(StepRows(len(rows), sum(count for _, count in counts), context, pairs))
        self.simulation.later(took_s * share / self.speed, self.fiber.resume)
        self.fiber.wait()

    def prefill(self, rows: Sequence[Row]) -> Iterator[tuple[int, None]]:
        for layer in range(NUM_LAYERS):
            self._take(rows, 1 / NUM_LAYERS)
            yield layer, None

    def decode(self, rows: Sequence[Row], draws: Sequence[Draw], drafts: Sequence[Draft]) -> list[list[Drawn]]:
        self._take(rows)
        return [[Drawn(token=TOKEN, logprob=-1.0)] for _ in rows]


class TimedPort:
    """An engine on a node of its own. Its step begins as soon as there is something to do. The host has what came of it
    when it is over, and knows its load from before, with what was submitted since: as of an engine in another
    process."""

    def __init__(self, engine: Any, runner: TimedRunner) -> None:
        self.engine, self.runner = engine, runner
        self.role = engine.role
        self.connect, self.disconnect, self.cancel = engine.connect, engine.disconnect, engine.cancel
        self.load = engine.load
        self.key_scheme, self.count_known = engine.key_scheme, engine.count_known
        if engine.role == "decode":
            self.change_writers = engine.change_writers
        self.close = engine.close
        self._told: deque[Any] = deque()
        self._before: Any = None
        self._since: list[int] = []

    address = property(lambda self: self.engine.address)
    addresses = property(lambda self: self.engine.addresses)
    limits = property(lambda self: self.engine.limits)

    def run(self) -> bool:
        """Begin a step if it is time, and return whether one began."""
        if self.runner.fiber.busy or not self.engine.wait(0.0):
            return False
        self._before, self._since = self.engine.brief_load(), []
        self.runner.fiber.start(self.engine.step, self._told.extend)
        return True

    def submit(self, request: pd.Request, *args: Any, **more: Any) -> None:
        self.engine.submit(request, *args, **more)
        self._since.append(len(request.tokens))

    def peers(self) -> tuple[PeerStats, ...]:
        return self.engine.peers()

    def brief_load(self) -> PrefillLoad | DecodeLoad:
        if not self.runner.fiber.busy:
            return self.engine.brief_load()
        load, count, tokens = self._before, len(self._since), sum(self._since)
        if isinstance(load, DecodeLoad):
            return attrs.evolve(
                load,
                num_waiting_requests=load.num_waiting_requests + count,
                num_waiting_tokens=load.num_waiting_tokens + tokens,
            )
        return attrs.evolve(
            load,
            num_queued_requests=load.num_queued_requests + count,
            num_queued_tokens=load.num_queued_tokens + tokens,
            queued=load.queued.plus(self._since),
        )

    def step(self) -> list[Any]:
        told = list(self._told)
        self._told.clear()
        return told

    def wait(self, timeout_s: float) -> bool:
        return bool(self._told)

    def notify(self, listener: Callable[[], None]) -> None:
        """Do nothing: its host looks after every event."""


class Timed:
    """One run of a load through real engines."""

    def __init__(self, cluster: Cluster, load: bench.Load, *, policy: Any, seed: int = 0) -> None:
        self.simulation = Simulation(seed)
        self.simulation._random = lambda: 0.5  # what is due at once happens in order: no draw decides what is evicted
        flight_s = cluster.network.latency_s / 2
        network = SimNetwork(self.simulation, NetworkFaults(flight_s=(flight_s, flight_s)))
        self.ports: dict[str, TimedPort] = {}
        for side, count in (("P", cluster.num_prefills), ("D", cluster.num_decodes)):
            for at in range(count):
                self.ports[f"{side}{at}"] = self._port(f"{side}{at}", cluster, network)
        prefills = [port for name, port in self.ports.items() if name[0] == "P"]
        decodes = [port for name, port in self.ports.items() if name[0] == "D"]
        self.pairing = pd.Pairing(
            prefills,
            decodes,
            config=cluster.pairing,
            policy=policy,
            clock=self.simulation.clock,
            random_bytes=self.simulation.random_bytes,
        )
        self._began_s = self.simulation.clock()
        self.recorder = bench.Recorder(clock=self.simulation.clock)
        maker = bench.PromptMaker(VOCAB_SIZE, block_tokens=load.block_tokens, seed=load.seed)
        self._num_left = len(load.arrivals)
        for number, arrival in enumerate(load.arrivals):
            self.simulation.later(arrival.at_s, partial(self._send, number, arrival, maker))

    def _port(self, name: str, cluster: Cluster, network: SimNetwork) -> TimedPort:
        side = cluster.prefill if name[0] == "P" else cluster.decode
        model: Any = PlainModel()
        channel = SimChannel(pd.PagePool(model, side.cache), network, name)
        runner = TimedRunner(self.simulation, Fiber(), side.step_s)
        kind: Any = pd.PrefillEngine if name[0] == "P" else pd.DecodeEngine

        class Engine(kind):  # type: ignore[misc]
            def _make_runner(self) -> Any:
                return runner

        return TimedPort(Engine(model, channel, side.engine, clock=self.simulation.clock), runner)

    def _send(self, number: int, arrival: bench.Arrival, maker: bench.PromptMaker) -> None:
        sampling = pd.SamplingParams(max_new_tokens=arrival.output_tokens, ignore_eos=True, seed=0)
        request = pd.Request(
            request_id=str(number),
            prompt=maker.prompt(arrival),
            sampling=sampling,
            priority=arrival.priority,
            deadline_s=arrival.deadline_s,
        )
        self.pairing.submit(request)
        self.recorder.sent(str(number), prompt_tokens=arrival.prompt_tokens, intended_s=arrival.at_s)

    def _turn(self) -> None:
        """Let everybody do what there is to do now."""
        while True:
            told = self.recorder.read(self.pairing.step())
            self._num_left -= len(told)
            began = [port.run() for port in self.ports.values()]
            if not any(began) and not told and not any(port.wait(0.0) for port in self.ports.values()):
                return

    def run(self) -> tuple[bench.Record, ...]:
        """Return the records in the order of arrivals, with the names of engines."""
        while self._num_left:
            if not self.simulation.step():
                raise AssertionError("nothing happens any more, and requests are unfinished")
            self._turn()
        for port in self.ports.values():
            port.runner.fiber.kill()
        names = {port.address.engine_id.hex()[:8]: name for name, port in self.ports.items()}
        records = sorted(self.recorder.records(), key=lambda record: int(record.request_id))
        return tuple(
            attrs.evolve(record, prefill=names[str(record.prefill)], decode=names[str(record.decode)])
            for record in records
        )
