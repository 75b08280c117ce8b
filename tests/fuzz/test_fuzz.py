"""A short fuzz of every parser: mutated seeds give a value or a typed error, in bounded memory."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from pdinfer.kv.memfd import CAN_SHARE
from tests.fuzz.run import NAMES
from tests.fuzz.targets import survives, targets

NUM_INPUTS = 400
NUM_MEASURED = 60
HERE = tuple(name for name in NAMES if CAN_SHARE or name != "mapped")


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return `data` with a few flips, cuts, repeats and borrowed lengths."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(6):
            case 0 if changed:
                changed[at % len(changed)] ^= 1 << chance.randrange(8)
            case 1:
                del changed[at : at + chance.randrange(16)]
            case 2:
                changed[at:at] = chance.randbytes(chance.randrange(8))
            case 3:
                changed[at : at + 4] = chance.choice((b"\xff\xff\xff\xff", b"\xc6\xff\xff\xff", b"\xdd\xff\xff\xff"))
            case 4:
                changed[at:at] = changed[: chance.randrange(64)]
            case _:
                changed[at:] = b""
    return bytes(changed)


@pytest.mark.parametrize("name", HERE)
def test_any_bytes_give_a_value_or_a_typed_error(name: str) -> None:
    target = targets()[name]
    chance = random.Random(name)
    for seed in target.seeds:
        survives(target, seed)
    for _ in range(NUM_INPUTS):
        survives(target, mutated(chance.choice(target.seeds), chance))


@pytest.mark.parametrize("name", HERE)
def test_no_input_costs_more_than_its_bound(name: str) -> None:
    target = targets()[name]
    chance = random.Random(f"{name} in memory")
    inputs = [mutated(chance.choice(target.seeds), chance) for _ in range(NUM_MEASURED)]
    survives(target, inputs[0])
    tracemalloc.start()
    try:
        for data in inputs:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            survives(target, data)
            used = tracemalloc.get_traced_memory()[1] - before
            assert used <= 2 * len(data) + target.slack_bytes, f"{len(data)} bytes cost {used}"
    finally:
        tracemalloc.stop()


def test_the_list_of_targets_is_whole() -> None:
    assert tuple(targets()) == NAMES
