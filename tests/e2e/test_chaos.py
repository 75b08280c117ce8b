"""Two prefills and two decodes in processes of their own; one is killed, frozen or paused, in every phase of a request.

What it held goes to another, soon, with the tokens it would have had; what others held does not notice; no page is
missing in the end, and it is used again, or a new process in its place.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.stats import DecodeLoad, PrefillLoad
from pdinfer.types import Choice, RequestShape
from tests.backends import need_mooncake
from tests.e2e.setups import by_request, greedy, judged, prompt_of, tokens_of
from tests.e2e.worker import TRANSPORTS, Worker, Workers
from tests.waiting import TIMEOUT_S

PAUSE_S = 0.5
"""A pause that is none: much shorter than the silence of the dead."""
NUM_TOKENS = 20
PROMPT_TOKENS = 24
ROLES = ("prefill", "decode")
SIGNALS = ("kill", "freeze", "pause")
PHASES = ("idle", "queued", "prefill", "transfer", "decode")
CONFIG = pd.EngineConfig(chunked_prefill_size=8, max_running_requests=2)


def in_turn(shape: RequestShape, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]) -> Choice | None:
    if not prefills or not decodes:
        return None
    turn = shape.ordinal
    return Choice(
        prefill=prefills[turn % len(prefills)].address,
        decode=decodes[turn // len(prefills) % len(decodes)].address,
    )


def request(number: int) -> pd.Request:
    sampling = greedy(NUM_TOKENS, ignore_eos=True)
    return pd.Request(request_id=str(number), prompt=prompt_of(PROMPT_TOKENS, seed=number % 8), sampling=sampling)


def is_right(name: str, stream: Sequence[pd.TokenEvent]) -> bool:
    """Whether the whole answer came, and is what the model says in one piece."""
    tokens = tokens_of(stream)
    right = judged("v3", prompt_of(PROMPT_TOKENS, seed=int(name) % 8), tokens).tokens
    return len(tokens) == NUM_TOKENS and tuple(tokens) == right


@attrs.define
class Fleet:
    """Two of each, and what their requests said so far. They are slow until `hurry`."""

    workers: Workers
    transport: str
    hosts: dict[str, list[Worker]]
    ports: dict[str, list[Any]]
    pairing: pd.Pairing
    events: list[pd.TokenEvent] = attrs.field(factory=list)

    @classmethod
    def of(cls, workers: Workers, transport: str) -> Fleet:
        slow = workers.folder / "slow"
        slow.touch()
        taken = iter(workers.take(4))
        hosts = {role: [next(taken), next(taken)] for role in ROLES}
        ports = {
            role: [host.serve(role, transport=transport, config=CONFIG, slow_while=slow) for host in hosts[role]]
            for role in ROLES
        }
        return cls(workers, transport, hosts, ports, pd.Pairing(*ports.values(), policy=in_turn))

    def hurry(self) -> None:
        (self.workers.folder / "slow").unlink(missing_ok=True)

    def step(self) -> None:
        self.events += self.pairing.step()
        self.pairing.wait(0.01)

    def step_until(self, condition: Callable[[], object], what: str) -> None:
        """How soon a loss is known is held by tests with clocks of their own."""
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < end, f"{what} did not happen within {TIMEOUT_S} s"
            self.step()

    @property
    def streams(self) -> dict[str, list[pd.TokenEvent]]:
        return by_request(self.events)

    def is_in(self, phase: str, role: str) -> bool:
        """Whether the first port of `role` is in the middle of that phase with some request."""
        load = self.ports[role][0].load()
        has_tokens = len(self.events) >= 4
        if isinstance(load, PrefillLoad):
            return {
                "idle": True,
                "queued": load.num_queued_requests >= 2,
                "prefill": load.num_queued_requests > 0 and not load.kv.bytes_sent,
                "transfer": load.num_queued_requests > 0 and load.kv.bytes_sent > 0,
                "decode": load.num_tokens > 0 and has_tokens,
            }[phase]
        return {
            "idle": True,
            "queued": load.num_waiting_requests > 0,
            "prefill": load.num_granted_requests > 0 and not load.kv.bytes_received,
            "transfer": load.num_granted_requests > 0 and load.kv.bytes_received > 0,
            "decode": load.num_running_requests > 0 and has_tokens,
        }[phase]

    def replace(self, role: str) -> None:
        """A new process in the place of the first one."""
        (host,) = self.workers.take(1)
        port = host.serve(role, transport=self.transport, config=CONFIG)
        self.pairing.add(port)
        self.hosts[role][0], self.ports[role][0] = host, port

    def serve_more(self, numbers: Sequence[int]) -> None:
        """All of them end well, and every port has a part in it."""
        before = {role: [port.load().num_tokens for port in ports] for role, ports in self.ports.items()}
        for number in numbers:
            self.pairing.submit(request(number))
        self.step_until(lambda: not self.pairing.num_unfinished, "the end of all requests")
        for number in numbers:
            assert is_right(str(number), self.streams[str(number)])
        for role, ports in self.ports.items():
            after = [port.load().num_tokens for port in ports]
            assert all(new > old for new, old in zip(after, before[role], strict=True)), (role, before, after)

    def check_whole(self) -> None:
        """Every page of every engine can be had again, and nothing is left of any request."""

        def whole(load: Any) -> bool:
            pages = load.num_free_pages + load.num_cached_pages == load.num_total_pages
            if isinstance(load, PrefillLoad):
                return bool(pages and not load.num_queued_requests and not load.unsent_bytes)
            return bool(pages and not load.num_waiting_requests + load.num_granted_requests + load.num_running_requests)

        for ports in self.ports.values():
            for port in ports:
                self.step_until(lambda port=port: whole(port.load()), "that every page is free")  # type: ignore[misc]

    def close(self) -> None:
        """The processes have closed their engines whole, and can be used again."""
        self.pairing.close()
        for host in [*self.hosts["prefill"], *self.hosts["decode"]]:
            assert host.stopped() == (0, 0)


def strike(victim: Worker, signal: str) -> None:
    """What happens to a process; a pause is over when this returns."""
    if signal == "kill":
        victim.kill()
    else:
        victim.freeze()
    if signal == "pause":
        time.sleep(PAUSE_S)
        victim.thaw()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with closing(Workers(5)) as made:
        yield made


FACTORS = (tuple(TRANSPORTS), ROLES, PHASES, SIGNALS)
SLICE = [
    (tuple(TRANSPORTS)[turn % len(TRANSPORTS)], ROLES[(turn % 5 + turn // 5) % 2], PHASES[turn % 5], SIGNALS[turn % 3])
    for turn in range(6)
]
"""Both roles in every phase; transports and signals in turn."""


@pytest.mark.parametrize(
    ("transport", "role", "phase", "signal"),
    [pytest.param(*row, marks=() if row in SLICE else pytest.mark.full) for row in itertools.product(*FACTORS)],
)
def test_a_slice(workers: Workers, transport: str, role: str, phase: str, signal: str) -> None:
    if transport == "mooncake":
        need_mooncake()
    fleet = Fleet.of(workers, transport)
    victim, address = fleet.hosts[role][0], fleet.ports[role][0].address
    if phase != "idle":
        for number in range(8):
            fleet.pairing.submit(request(number))
    fleet.step_until(lambda: fleet.is_in(phase, role), f"the phase {phase}")
    held = {
        name for name, tracked in fleet.pairing._broker.requests.items() if getattr(tracked.attempt, role) == address
    }
    assert held or phase == "idle"
    strike(victim, signal)
    fleet.hurry()
    if signal != "pause":
        fleet.step_until(lambda: fleet.pairing.stats.num_ports_lost == 1, "the loss")
        if role == "decode":
            assert all(tracked.attempt.decode != address for tracked in fleet.pairing._broker.requests.values())
    fleet.step_until(lambda: not fleet.pairing.num_unfinished, "the end")
    streams = fleet.streams
    for name, stream in streams.items():  # what the lost port had went to the other one
        assert is_right(name, stream), f"request {name} has wrong tokens"
        assert stream[-1].finish_reason is pd.FinishReason.LENGTH
        assert [event.index for event in stream] == list(range(NUM_TOKENS))
    assert len(streams) == (0 if phase == "idle" else 8)
    if signal == "freeze":
        victim.thaw()  # it finds itself given up, whatever it was about to say, and is used again
        fleet.step_until(lambda: fleet.pairing.stats.ports_lost[0].is_back, "the return")
    elif signal == "kill":
        fleet.replace(role)
    fleet.step_until(lambda: not fleet.pairing.stats.links_down, "the return of links")
    assert fleet.pairing.stats.num_ports_lost == (signal != "pause")
    fleet.serve_more(range(8, 12))
    fleet.check_whole()
    fleet.close()
