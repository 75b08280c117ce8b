"""What a decision costs the Pairing: microseconds for each request that it sends on, at several sizes."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

import pdinfer as pd
from pdinfer.config import SLO
from pdinfer.kv.prefix import KeyScheme, count_known
from pdinfer.stats import DecodeCost, DecodeLoad, PrefillCost, PrefillLoad, QueuedSizes
from pdinfer.types import PeerAddress, RequestLimits

Line = dict[str, Any]

SCHEME = KeyScheme(layout_id=bytes(32), page_size=64)
WAITING = 1000
ROUNDS = 7


class StandIn:
    """A port that takes requests and does nothing with them: what is left is the work of the Pairing."""

    def __init__(self, role: str, rank: int, keys: set[bytes]) -> None:
        self.role = role
        self.address = PeerAddress(role.encode() + rank.to_bytes(2, "big"), 1, 0)
        self.addresses = (self.address,)
        self.limits = RequestLimits(name=role, vocab_size=2**31, max_tokens=1 << 20)
        self.key_scheme = SCHEME
        self.num_waiting = 0
        self._keys = keys
        self._random = random.Random(f"{role} {rank}")
        self._load = self._make_load()

    def _make_load(self) -> PrefillLoad | DecodeLoad:
        draw = self._random
        pages = {"num_free_pages": 50_000, "num_total_pages": 100_000, "page_size": 64, "token_bytes": 70_272}
        if self.role == "prefill":
            sizes = [draw.randrange(16, 16_000) for _ in range(8)]
            return PrefillLoad(
                address=self.address,
                num_queued_requests=len(sizes),
                num_queued_tokens=sum(sizes),
                queued=QueuedSizes.of(sizes),
                cost=PrefillCost(step_s=0.03, token_s=draw.uniform(0.9, 1.1) / 14_000, chunk_tokens=8192),
                **pages,
            )
        running = draw.randrange(100)
        return DecodeLoad(
            address=self.address,
            num_waiting_requests=0,
            num_waiting_tokens=0,
            num_granted_requests=2,
            num_running_requests=running,
            num_running_tokens=2000 * running,
            max_running_requests=128,
            cost=DecodeCost(step_s=0.02, sequence_s=1e-4, token_s=2e-8),
            **pages,
        )

    def load(self) -> PrefillLoad | DecodeLoad:
        return self.brief_load()

    def brief_load(self) -> PrefillLoad | DecodeLoad:
        load = self._load
        if isinstance(load, DecodeLoad) and load.num_waiting_requests != self.num_waiting:
            self._load = load = attrs.evolve(load, num_waiting_requests=self.num_waiting)
        return load

    def count_known(self, keys: Sequence[bytes]) -> int:
        return count_known(keys, self._keys)

    def submit(self, *_: object, **__: object) -> None:
        self.num_waiting += 1

    def step(self) -> list[object]:
        return []

    def wait(self, timeout_s: float) -> bool:
        return False

    def connect(self, *_: object, **__: object) -> None: ...

    disconnect = cancel = notify = change_writers = close = connect


def fleet(num_prefills: int, num_decodes: int, prompt: tuple[int, ...], cached_pages: int) -> list[list[StandIn]]:
    """Return the ports of both sides. Each holds so many pages, some of them the beginning of the prompt."""
    draw = random.Random(0)
    others = [draw.randbytes(32) for _ in range(cached_pages)]
    chain = SCHEME.chain(b"")
    chain.extend(prompt)

    def port(role: str, rank: int) -> StandIn:
        return StandIn(role, rank, {*others, *chain.keys[: draw.randrange(len(chain.keys) + 1)]})

    return [
        [port("prefill", rank) for rank in range(num_prefills)],
        [port("decode", rank) for rank in range(num_decodes)],
    ]


def microseconds(size: tuple[int, int, int], prompt: tuple[int, ...], policy: pd.policy.Policy) -> Line:
    """Time a step that sends on all waiting requests, and steps that send one of them on while the others wait."""
    num_prefills, num_decodes, cached_pages = size
    sampling = pd.SamplingParams(max_new_tokens=64, seed=0)
    at_once, one_by_one = [], []
    for _ in range(ROUNDS):
        prefills, decodes = fleet(num_prefills, num_decodes, prompt, cached_pages)
        most = WAITING // len(decodes) + 1
        config = pd.PairingConfig(max_queued_requests=WAITING, max_queued_per_decode=most)
        pairing = pd.Pairing(prefills, decodes, policy=policy, config=config)
        for number in range(WAITING):
            pairing.submit(pd.Request(request_id=str(number), prompt=prompt, sampling=sampling))
        for port in decodes:
            port.num_waiting = most
        pairing.step()
        for number in range(20):
            decodes[number % len(decodes)].num_waiting = most - 1
            began = time.thread_time()
            pairing.step()
            one_by_one.append(time.thread_time() - began)
        for port in decodes:
            port.num_waiting = 0
        left = pairing.stats.num_queued_requests
        began = time.thread_time()
        pairing.step()
        at_once.append((time.thread_time() - began) / (left - pairing.stats.num_queued_requests))
    return {
        "us_per_request": round(statistics.median(at_once) * 1e6, 1),
        "us_per_step_with_one": round(statistics.median(one_by_one) * 1e6, 1),
    }


def submits(num_ports: int, prompt: tuple[int, ...]) -> Iterator[Line]:
    """What `submit` takes with so many ports on a side, without a promise and with one that all keep, in turns. Without
    collections of garbage, which take as long as a submit of all requests and would fall to the same one each time."""
    took: dict[SLO | None, list[float]] = {None: [], SLO(ttft_s=1e5, tpot_s=10.0): []}
    sampling = pd.SamplingParams(max_new_tokens=64, seed=0)
    requests = [pd.Request(request_id=str(number), prompt=prompt, sampling=sampling) for number in range(300)]
    for _ in range(3 * ROUNDS):
        for slo, seconds in took.items():
            config = pd.PairingConfig(max_queued_requests=len(requests), slo=slo)
            pairing = pd.Pairing(*fleet(num_ports, num_ports, prompt, 1000), config=config)
            pairing.step()
            gc.collect()
            gc.disable()
            began = time.thread_time()
            for request in requests:
                pairing.submit(request)
            seconds.append((time.thread_time() - began) / len(requests))
            gc.enable()
    for slo, seconds in took.items():
        yield {
            "ports": f"{num_ports}P{num_ports}D",
            "prompt_tokens": len(prompt),
            "cached_pages": 1000,
            "policy": "submit with a promise" if slo else "submit",
            "us_per_request": round(statistics.median(seconds) * 1e6, 1),
        }


def decisions() -> Iterator[Line]:
    """What a request costs the Pairing, with 1000 waiting, and what it costs to take one."""
    draw = random.Random(1)
    sizes = ((2, 2, 1000, 1000), (8, 8, 1000, 1000), (16, 32, 1000, 1000), (16, 32, 32_768, 100_000))
    for num_prefills, num_decodes, num_tokens, cached_pages in sizes:
        prompt = tuple(draw.randrange(100_000) for _ in range(num_tokens))
        for name in ("round_robin", "least_tokens", "power_of_two", "cache_aware", "traffic_aware"):
            yield {
                "ports": f"{num_prefills}P{num_decodes}D",
                "prompt_tokens": num_tokens,
                "cached_pages": cached_pages,
                "policy": name,
                **microseconds((num_prefills, num_decodes, cached_pages), prompt, getattr(pd.policy, name)),
            }
    for num_ports, num_tokens in ((4, 1000), (8, 20)):
        yield from submits(num_ports, tuple(draw.randrange(100_000) for _ in range(num_tokens)))
