"""The times of faults, and the requests: all of it drawn from the seed, and from nothing else."""

from __future__ import annotations

import random

import attrs

import pdinfer as pd
from pdinfer.testing import FAMILIES

ROUND_S = 10.0
"""The seconds during which faults strike; then everything is undone and inspected."""
FAULTS_PER_ROUND = 5
RESTARTS_PER_ROUND = 4
SEATS = ("prefill", "prefill", "decode", "decode")
"""The seats; a fault's `seat` is an index into them."""
MORTAL = (0, 2)
"""Only these are killed: the others live through a whole part of the run, so that their memory can be compared."""
SECONDS = {
    "kill": (0.0, 0.0),
    "freeze": (3.0, 5.0),
    "stall": (0.3, 1.5),
    "cut": (0.0, 0.0),
    "hang": (3.0, 6.0),
    "pause": (2.0, 4.0),
    "attack": (3.0, 6.0),
}
"""How long each kind of fault lasts. A cut ends all connections of a process. A freeze is longer than the silence that
counts as death, and a stall is shorter. A hang is longer than a step may take. A pause strikes the host."""
ATTACKS = ("silent", "dribble", "garbage", "deaf")
VOCAB = 97
MAX_PROMPT, MAX_NEW = 60, 24


@attrs.frozen(kw_only=True)
class Fault:
    """One fault, `at_s` after the beginning of its round. `attack` says which kind of stranger comes."""

    at_s: float
    kind: str
    seat: int
    seconds: float
    attack: str = ""


@attrs.frozen(kw_only=True)
class Case:
    """A request, and the time after which it is cancelled."""

    request: pd.Request
    cancel_after_s: float | None


def _rng(*of: object) -> random.Random:
    return random.Random("/".join(map(str, of)))


def _kind(seed: int, part: str, turn: int) -> str:
    """Deal the kinds like cards: each comes once before any comes again."""
    cycle, index = divmod(turn, len(SECONDS))
    deck = list(SECONDS)
    _rng(seed, part, "deck", cycle).shuffle(deck)
    return deck[index]


def timetable(seed: int, part: str, number: int) -> tuple[Fault, ...]:
    """Return the faults of a round, in order."""
    rng = _rng(seed, part, "round", number)
    faults = []
    for turn in range(FAULTS_PER_ROUND * number, FAULTS_PER_ROUND * (number + 1)):
        kind = _kind(seed, part, turn)
        seat = rng.choice(MORTAL) if kind == "kill" else rng.randrange(len(SEATS))
        at_s, seconds = rng.uniform(0.0, ROUND_S), rng.uniform(*SECONDS[kind])
        attack = rng.choice(ATTACKS) if kind == "attack" else ""
        faults.append(Fault(at_s=at_s, kind=kind, seat=seat, seconds=seconds, attack=attack))
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def restarts(seed: int, part: str, number: int) -> tuple[Fault, ...]:
    """Return the faults of a round in which any of the four is killed or freezes all the time."""
    rng = _rng(seed, part, "restarts", number)
    kinds = [(rng.choice(("kill", "kill", "freeze")), rng.randrange(len(SEATS))) for _ in range(RESTARTS_PER_ROUND)]
    return tuple(
        Fault(at_s=ROUND_S * turn / RESTARTS_PER_ROUND, kind=kind, seat=seat, seconds=rng.uniform(*SECONDS[kind]))
        for turn, (kind, seat) in enumerate(kinds)
    )


def is_slow(seed: int, part: str, number: int) -> bool:
    """Return whether engines are slow in this round, so that faults meet them in the middle of something."""
    return _rng(seed, part, "pace", number).random() < 0.7


def family_of(seed: int, part: str) -> str:
    return _rng(seed, part, "family").choice(FAMILIES)


def case(seed: int, part: str, number: int) -> Case:
    """Draw a request of any kind: prompts that share their beginnings, resumed ones, deadlines, priorities."""
    rng = _rng(seed, part, "request", number)
    prompt = _tokens(_rng(seed, part, "beginning", rng.randrange(4)), rng.choice([0, 0, 8, 21]))
    prompt += _tokens(rng, rng.randint(1, MAX_PROMPT - len(prompt)))
    count = rng.randint(1, MAX_NEW)
    request = pd.Request(
        request_id=f"{part}-{number}",
        prompt=prompt,
        output=_tokens(rng, rng.randrange(count)) if rng.random() < 0.15 else (),
        sampling=_sampling(rng, count),
        priority=rng.choice([0, 0, 0, 1, 5]),
        deadline_s=rng.uniform(0.2, 6.0) if rng.random() < 0.15 else None,
        cache_salt=rng.choice([b"", b"", b"tenant"]),
    )
    return Case(request=request, cancel_after_s=rng.uniform(0.0, 3.0) if rng.random() < 0.15 else None)


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(2, VOCAB) for _ in range(count))


def _sampling(rng: random.Random, count: int) -> pd.SamplingParams:
    ends = rng.random() < 0.3
    if rng.random() < 0.5:
        return pd.SamplingParams(temperature=0.0, max_new_tokens=count, ignore_eos=not ends)
    return pd.SamplingParams(
        temperature=rng.uniform(0.5, 1.5),
        top_k=rng.choice([0, 0, 8]),
        top_p=rng.choice([1.0, 1.0, 0.9]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.4]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        seed=rng.getrandbits(31),
        max_new_tokens=count,
        ignore_eos=not ends,
        stop_token_ids=tuple(rng.sample(range(2, VOCAB), 3)) if ends else (),
    )
