"""The plan of one simulated run, drawn from its seed: its nodes, its requests, and its faults."""

from __future__ import annotations

import random
from collections.abc import Mapping

import attrs

from pdinfer.config import CacheConfig, EngineConfig, PairingConfig
from pdinfer.testing import NetworkFaults, Placement
from pdinfer.types import Request, SamplingParams
from tests.sim.fakes import VOCAB_SIZE

MAX_PROMPT = 24
MAX_NEW = 10


@attrs.frozen(kw_only=True)
class Arrival:
    """A request, with its arrival time and, if it is cancelled, the time of its cancellation."""

    request: Request
    at_s: float
    cancel_s: float | None = None


@attrs.frozen(kw_only=True)
class Trouble:
    """An event that strikes nodes: its kind, when, how long it lasts, and which nodes (by number)."""

    kind: str
    at_s: float
    lasts_s: float
    one: int
    other: int


@attrs.frozen(kw_only=True)
class Plan:
    """One run. `ports` says where engines are: "piped", "local" to the pairing, or "shared", local and on one pool.
    `num_ranks` lists the ranks of each engine, prefills first: as many ranks write a room, and as many receive it."""

    ports: str
    prefills: tuple[CacheConfig, ...]
    decodes: tuple[CacheConfig, ...]
    num_ranks: tuple[int, ...]
    engine: EngineConfig
    pairing: PairingConfig
    placement: Placement
    faults: NetworkFaults
    arrivals: tuple[Arrival, ...]
    troubles: tuple[Trouble, ...]
    step_s: float
    prefill_slowness: int
    group_bytes: int
    key: bytes | None

    @property
    def quiet(self) -> bool:
        """Whether nothing is made to fail, so that every request must get its tokens."""
        return not self.troubles and self.faults == calm(self.faults)


FRAME_FAULTS = ("drop", "duplicate", "reorder", "truncate", "flip_frame")
DELAYS = ("slow", "late_read", "late_done", "pieces")
TROUBLES = ("cut", "partition", "freeze", "crash", "stall")


@attrs.frozen(kw_only=True)
class Focus:
    """The ranges from which a run is drawn; a search for one bug narrows them. `armed` gives the chance that a kind of
    fault is armed in a run; a kind that is not listed is armed in a quarter of them."""

    armed: Mapping[str, float] = attrs.field(factory=dict)
    ports: tuple[str, ...] = ("piped", "piped", "piped", "local", "shared")
    placements: tuple[Placement, ...] = (Placement.BY_RECEIVER, Placement.BY_RECEIVER, Placement.THROUGH_SLOT)
    max_requests: int = 40
    min_prefills: int = 1
    max_prefills: int = 4
    max_decodes: int = 4
    chunks: tuple[int, ...] = (-1, 3, 8, 64)
    slowness: tuple[int, ...] = (1, 1, 8)
    most_running: tuple[int, ...] = (1, 3, 8)
    steps_s: tuple[float, ...] = (0.001, 0.005, 0.02)
    cancel_share: float = 0.15
    deadline_share: float = 0.1
    tight: float = 0.5
    drafts: tuple[int, ...] = (0, 0, 1, 2, 3)
    max_new: int = MAX_NEW
    vocab_size: int = VOCAB_SIZE
    ranked: float = 0.2
    num_ranks: tuple[int, ...] = (1, 2, 2, 3)


STORM = Focus(
    armed={"cut": 0.9, "stall": 0.9, "freeze": 0.5, "slow": 0.9},
    ports=("piped",),
    min_prefills=2,
    max_decodes=2,
    chunks=(1, 3),
    slowness=(8, 30),
    most_running=(1, 1, 3),
    max_requests=12,
)
"""Prefills that hang over a prompt while decode has given them up."""
STORM_EVERY = 5


def focus_of(seed: int) -> Focus:
    """Return the ranges from which the run of a seed is drawn."""
    return STORM if seed % STORM_EVERY == STORM_EVERY - 1 else Focus()


def calm(faults: NetworkFaults) -> NetworkFaults:
    """Return the same network without faults that lose or change anything; delays stay."""
    return attrs.evolve(faults, **dict.fromkeys((*FRAME_FAULTS, "flip_payload", "late_landing"), 0.0))


def draw(rng: random.Random, focus: Focus) -> Plan:
    """Draw a plan; equal states of `rng` give equal plans."""
    ports = rng.choice(focus.ports)
    small = rng.random() < 0.7
    num_prefills = (
        1 if ports == "shared" else max(focus.min_prefills, min(focus.max_prefills, rng.randint(1, 2 if small else 4)))
    )
    num_decodes = 1 if ports == "shared" else min(focus.max_decodes, rng.randint(1, 2 if small else 4))
    tight = rng.random() < focus.tight
    prefills = tuple(_cache(rng, tight) for _ in range(num_prefills))
    decodes = tuple(_cache(rng, tight) for _ in range(num_decodes))
    room = min(max(cache.page_size * (cache.num_pages or 0) for cache in side) for side in (prefills, decodes))
    if ports == "shared":
        room = decodes[0].page_size * (decodes[0].num_pages or 0)
    horizon_s = rng.choice((0.05, 0.3, 1.0))
    arrivals = _arrivals(rng, focus, room, horizon_s)
    queued = rng.choice((1, 4, 64))
    # a decode that refuses a request is asked again in the next turn: seldom, and then in few turns
    overloads = ports == "piped" and len(arrivals) <= 10 and rng.random() < 0.1
    plan = Plan(
        ports=ports,
        prefills=prefills,
        decodes=decodes,
        num_ranks=(1,) * (num_prefills + num_decodes),
        engine=EngineConfig(
            max_running_requests=rng.choice(focus.most_running),
            max_queued_requests=1 if overloads else queued,
            chunked_prefill_size=rng.choice(focus.chunks),
            max_prefill_tokens=rng.choice((8, 64)),
            growth_watermark=rng.choice((0.0, 0.02, 0.2)),
            max_attempts=rng.choice((1, 2, 3, 3, 3)),
            send_window_bytes=rng.choice((1, 256, 1 << 20)),
            num_draft_tokens=rng.choice(focus.drafts),
            max_total_tokens=_most_tokens(rng, focus),
        ),
        placement=rng.choice(focus.placements),
        faults=_faults(rng, focus),
        arrivals=arrivals,
        troubles=_troubles(rng, focus, ports, horizon_s),
        pairing=PairingConfig(
            max_queued_requests=rng.choice((2, 1024, 1024, 1024)),
            max_queued_per_decode=queued,
            connect_timeout_s=0.3,
            continue_elsewhere=rng.random() < 0.8,
            fair_share=rng.random() < 0.3,
        ),
        step_s=0.02 if overloads else rng.choice(focus.steps_s),
        prefill_slowness=rng.choice(focus.slowness),
        group_bytes=rng.choice((1, 64, 1 << 20)),
        key=rng.randbytes(32) if rng.random() < 0.25 else None,
    )
    if ports == "piped" and rng.random() < focus.ranked:
        return attrs.evolve(plan, num_ranks=tuple(rng.choice(focus.num_ranks) for _ in plan.num_ranks))
    return plan


def _most_tokens(rng: random.Random, focus: Focus) -> int | None:
    """Return the tokens that fit at least one request of any length, in whole pages of any size."""
    return MAX_PROMPT + focus.max_new + 8 if rng.random() < 0.2 else None


def _cache(rng: random.Random, tight: bool) -> CacheConfig:
    page_size = rng.choice((1, 2, 3, 4, 8))
    most = max(8, min(64, -(-48 // page_size))) if tight else 64
    return CacheConfig(page_size=page_size, num_pages=rng.randint(8, most), prefix_cache=rng.random() < 0.8)


def _arrivals(rng: random.Random, focus: Focus, room: int, horizon_s: float) -> tuple[Arrival, ...]:
    count = rng.randint(5, focus.max_requests) if rng.random() < 0.15 else rng.randint(5, min(10, focus.max_requests))
    salts = [b"", b"one", b"two"][: rng.randint(1, 3)]
    stems = [tuple(rng.randrange(1, focus.vocab_size) for _ in range(MAX_PROMPT)) for _ in range(2)]
    arrivals = []
    for number in range(count):
        longest = max(1, min(room - 1, MAX_PROMPT))
        prompt = tuple(rng.randrange(1, focus.vocab_size) for _ in range(rng.randint(1, longest)))
        if rng.random() < 0.5:
            stem = rng.choice(stems)[: rng.randint(1, longest)]
            prompt = (stem + prompt)[: max(1, min(longest, len(stem) + rng.randint(0, 4)))]
        sampling = SamplingParams(
            max_new_tokens=rng.randint(1, max(1, min(focus.max_new, room - len(prompt)))),
            temperature=0.0,
            seed=rng.randrange(4),
            ignore_eos=rng.random() < 0.5,
        )
        at_s = rng.random() * horizon_s
        arrivals.append(
            Arrival(
                request=Request(
                    request_id=f"r{number}",
                    prompt=prompt,
                    sampling=sampling,
                    priority=rng.choice((0, 0, 0, 1, -1)),
                    deadline_s=rng.choice((0.0, 0.05, 0.5, 3.0)) if rng.random() < focus.deadline_share else None,
                    cache_salt=rng.choice(salts),
                ),
                at_s=at_s,
                cancel_s=at_s + rng.random() ** 3 * 0.5 if rng.random() < focus.cancel_share else None,
            )
        )
    return tuple(arrivals)


def _armed(rng: random.Random, focus: Focus, name: str) -> bool:
    return rng.random() < focus.armed.get(name, 0.25)


def _faults(rng: random.Random, focus: Focus) -> NetworkFaults:
    shares: dict[str, float] = {}
    for name in DELAYS:
        if _armed(rng, focus, name):
            shares[name] = rng.choice((0.05, 0.25, 0.6))
    for name in ("flip_payload", "late_landing"):
        if _armed(rng, focus, name):
            shares[name] = rng.choice((0.02, 0.1))
    for name in FRAME_FAULTS:
        if rng.random() < focus.armed.get(name, 0.1):
            shares[name] = rng.choice((0.005, 0.03))
    return NetworkFaults(slow_s=rng.choice((0.05, 0.5)), late_s=rng.choice((0.05, 0.5)), **shares)


def _troubles(rng: random.Random, focus: Focus, ports: str, horizon_s: float) -> tuple[Trouble, ...]:
    troubles = []
    for kind in TROUBLES:
        if ports != "piped" and kind in ("freeze", "crash", "stall"):
            continue  # engines and pairing are one process: it dies as one
        if _armed(rng, focus, kind):
            for _ in range(rng.randint(1, 3)):
                trouble = Trouble(
                    kind=kind,
                    at_s=rng.random() * (horizon_s + 0.3),
                    lasts_s=rng.choice((0.1, 1.0, 6.0)) * rng.random(),
                    one=rng.randrange(16),
                    other=rng.randrange(16),
                )
                troubles.append(trouble)
    return tuple(troubles)
