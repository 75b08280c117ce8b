"""What decode says after a hand-over is what one engine says alone, bit by bit, and what lands is what prefill has.

vLLM on a CPU gives other bits to the same request in another batch, and recomputes the last token of a prompt that was
loaded. So the exact comparison is one sequence at a time, with the first token of prefill behind decode's prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm.conftest import asks, prompts
from tests.vllm.engines import Engine, ready, until

NUM_PROMPTS = 500
NUM_TOKENS = 8


def answers(alone: Engine, prefill: Engine, decode: Engine, name: str, prompt: list[int]) -> tuple[Any, Any]:
    """Return what one engine alone says to a prompt, and what the pair says. What landed must be prefill's."""
    alone.say(add=name, prompt=prompt, max_tokens=NUM_TOKENS, params=None)
    until(lambda: name in alone.done, [alone], 60)
    one, (sends, loads, room) = alone.done[name], asks(prefill)
    prefill.say(add=name, prompt=prompt, max_tokens=1, params=sends)
    decode.say(add=name, prompt=[*prompt, one["tokens"][0]], max_tokens=NUM_TOKENS - 1, params=loads)
    until(lambda: name in prefill.done and name in decode.done, [prefill, decode], 60)
    until(lambda: room in prefill.moved and room in decode.moved, [prefill, decode], 10)
    ours, theirs = prefill.moved[room], decode.moved[room]
    assert (
        (theirs["digest"], theirs["tokens"]) == (ours["digest"], ours["tokens"]) == (ours["digest"], [0, len(prompt)])
    )
    both = prefill.done[name], decode.done[name]
    two = {what: both[0][what] + both[1][what] for what in ("tokens", "logprobs")}
    return {what: one[what] for what in two}, two


def check_rest(*engines: Engine) -> None:
    """See that every block is back, and that none was freed while a peer could write it."""
    for engine in engines:
        until(lambda one=engine: (stats := one.stats())["free"] == stats["all"], [engine], 10)  # type: ignore[misc]
        assert engine.stats()["bad_frees"] == 0


def test_tokens_and_logprobs_are_those_of_one_engine(trio: tuple[Engine, Engine, Engine]) -> None:
    different = []
    for at, prompt in enumerate(prompts(NUM_PROMPTS)):
        one, two = answers(*trio, str(at), prompt)
        if one != two:
            different.append(at)
    assert different == []
    check_rest(*trio[1:])


@pytest.mark.parametrize(("ours", "theirs"), [(32, 16), (16, 32)])
def test_block_sizes_may_differ(start: Callable[..., Engine], ours: int, theirs: int) -> None:
    engines = (
        start("alone", settings={"block_size": theirs}),
        start("prefill", "kv_producer", listen="tcp://127.0.0.1:0", settings={"block_size": ours}),
        start("decode", "kv_consumer", settings={"block_size": theirs}),
    )
    ready(*engines)
    if (engines[1].block_size, engines[2].block_size) != (ours, theirs):
        pytest.skip(f"vLLM has no blocks of {ours} and of {theirs} for this dtype on this CPU")
    for at, prompt in enumerate(prompts(20)):
        one, two = answers(*engines, str(at), prompt)
        assert one == two, at
    check_rest(*engines[1:])


def test_what_lands_in_batches_is_what_prefill_has(start: Callable[..., Engine]) -> None:
    """Batches of 8, as a proxy gives them: nobody knows the first token, and the last one is computed again."""
    more = {"max_num_seqs": 8, "num_blocks": 512}
    prefill = start("prefill", "kv_producer", listen="tcp://127.0.0.1:0", settings=more)
    decode = start("decode", "kv_consumer", settings=more)
    ready(prefill, decode)
    rooms: dict[str, str] = {}
    began = time.monotonic()
    for at, prompt in enumerate(prompts(NUM_PROMPTS, seed=2)):
        until(lambda: len(rooms) - len(decode.done) < 8, [prefill, decode], 60)
        sends, loads, rooms[str(at)] = asks(prefill)
        prefill.say(add=str(at), prompt=prompt, max_tokens=1, params=sends)
        decode.say(add=str(at), prompt=prompt, max_tokens=NUM_TOKENS, params=loads)
    until(lambda: len(decode.done) == NUM_PROMPTS, [prefill, decode], 60)
    until(lambda: len(prefill.done) == NUM_PROMPTS, [prefill, decode], 60)
    check_rest(prefill, decode)
    assert len(decode.moved) == NUM_PROMPTS
    assert {room: said["digest"] for room, said in decode.moved.items()} == {
        room: prefill.moved[room]["digest"] for room in decode.moved
    }
    assert all(said["reason"] == "length" for said in decode.done.values())
    print(f"{NUM_PROMPTS} prompts in {time.monotonic() - began:.1f} s")
