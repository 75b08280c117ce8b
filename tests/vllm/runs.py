"""What one engine says to prompts, and what a pair says to them, one at a time and in batches of 8."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import asks
from tests.vllm.engines import Engine, ready, until
from tests.vllm.ties import Comparison, Said

NUM_TOKENS = 8
BATCH = 8


def handed_over(
    prefill: Engine, decode: Engine, name: str, prompt: list[int], first: int, landed: int | None = None
) -> dict[str, Any]:
    """Return what a pair says to a prompt whose first token is known. What landed must be prefill's: the prompt's own
    tokens, or `landed` where blocks move whole."""
    sends, loads, room = asks(prefill)
    prefill.say(add=name, prompt=prompt, max_tokens=1, params=sends)
    decode.say(add=name, prompt=[*prompt, first], max_tokens=NUM_TOKENS - 1, params=loads)
    until(lambda: name in prefill.done and name in decode.done, [prefill, decode], 60)
    until(lambda: room in prefill.moved and room in decode.moved, [prefill, decode], 10)
    ours, theirs = prefill.moved[room], decode.moved[room]
    assert theirs["tokens"] == ours["tokens"] == [0, landed or len(prompt)]
    assert theirs["digest"] == ours["digest"]
    return {what: prefill.done[name][what] + decode.done[name][what] for what in ("tokens", "logprobs")}


def check_rest(*engines: Engine) -> None:
    """See that every block is back, and that none was freed while a peer could write it."""
    for engine in engines:
        until(lambda one=engine: (stats := one.stats())["free"] == stats["all"], [engine], 10)  # type: ignore[misc]
        assert engine.stats()["bad_frees"] == 0


def alone(engine: Engine, asked: list[list[int]]) -> list[dict[str, Any]]:
    """Return what one engine says to prompts that it is all given at once."""
    for at, prompt in enumerate(asked):
        engine.say(add=str(at), prompt=prompt, max_tokens=NUM_TOKENS, params=None)
    until(lambda: len(engine.done) == len(asked), [engine], 600)
    return [engine.done[str(at)] for at in range(len(asked))]


def check_watched(watched: Path, rooms: Sequence[str], other: Engine) -> None:
    """See that the workers which wrote to `watched` moved what the other end moved, in each of these rooms once."""
    moved = [json.loads(line) for line in watched.read_text().splitlines()]
    assert sorted(said["moved"] for said in moved) == sorted(rooms) == sorted(other.moved)
    assert {said["moved"]: said["digest"] for said in moved} == {room: other.moved[room]["digest"] for room in rooms}


def check_against_one(
    start: Callable[..., Engine], asked: list[list[int]], together: Sequence[tuple[int, ...]]
) -> None:
    """See that one engine says the tokens `together` to these prompts, but where its best two are nearly equal."""
    one = start("one")
    ready(one)
    found = Comparison()
    for at, (tokens, done) in enumerate(zip(together, alone(one, asked), strict=True)):
        found.add(at, tokens, Said.of(done))
    print(found)
    assert found.far == []


def different_one_by_one(
    start: Callable[..., Engine],
    asked: list[list[int]],
    settings: dict[str, Any],
    *,
    listen: str = "shm://",
    block_size: int = 0,
    landed: Callable[[int], int] = int,
) -> list[int]:
    """Return the prompts to which a pair says another token, or gives another logprob, than one engine alone does.
    `block_size` is that of prefill, where it is another one than decode's. `landed` tells how many tokens leave for a
    prompt of some length."""
    one = start("alone", settings=settings)
    ready(one)
    ones = alone(one, asked)
    one.close()
    theirs = {**settings, "block_size": block_size} if block_size else settings
    prefill = start("prefill", "kv_producer", listen=listen, settings=theirs)
    decode = start("decode", "kv_consumer", listen=listen, settings=settings)
    ready(prefill, decode)
    for engine, asked_for in ((prefill, theirs), (decode, settings)):
        if engine.block_size != asked_for.get("block_size", engine.block_size):
            pytest.skip(f"vLLM has no blocks of {asked_for['block_size']} tokens for this dtype on this CPU")
    different = []
    for at, (prompt, done) in enumerate(zip(asked, ones, strict=True)):
        two = handed_over(prefill, decode, str(at), prompt, done["tokens"][0], landed(len(prompt)))
        if two != {what: done[what] for what in two}:
            different.append(at)
    check_rest(prefill, decode)
    return different


def in_batches(prefill: Engine, decode: Engine, asked: list[list[int]]) -> list[tuple[int, ...]]:
    """Return what a pair says to prompts that come 8 at a time, as a proxy gives them: nobody knows the first token,
    and the last one of the prompt is computed again. What landed must be prefill's."""
    rooms: dict[str, str] = {}
    began = time.monotonic()
    for at, prompt in enumerate(asked):
        until(lambda: len(rooms) - len(decode.done) < BATCH, [prefill, decode], 60)
        sends, loads, rooms[str(at)] = asks(prefill)
        prefill.say(add=str(at), prompt=prompt, max_tokens=1, params=sends)
        decode.say(add=str(at), prompt=prompt, max_tokens=NUM_TOKENS, params=loads)
    until(lambda: len(decode.done) == len(asked), [prefill, decode], 60)
    until(lambda: len(prefill.done) == len(asked), [prefill, decode], 60)
    check_rest(prefill, decode)
    assert {room: said["digest"] for room, said in decode.moved.items()} == {
        room: prefill.moved[room]["digest"] for room in rooms.values()
    }
    assert all(said["reason"] == "length" for said in decode.done.values())
    print(f"{len(asked)} prompts in {time.monotonic() - began:.1f} s")
    return [tuple(decode.done[str(at)]["tokens"]) for at in range(len(asked))]


def compare_in_batches(start: Callable[..., Engine], asked: list[list[int]], settings: dict[str, Any]) -> Comparison:
    """Compare a pair that is given batches with one engine alone, which is given batches of 8 and of 1 itself."""
    more = {**settings, "max_num_seqs": BATCH, "num_blocks": 512}
    pair = (
        start("prefill", "kv_producer", listen="tcp://127.0.0.1:0", settings=more),
        start("decode", "kv_consumer", settings=more),
    )
    ready(*pair)
    together = in_batches(*pair, asked)
    for engine in pair:
        engine.close()
    engines = start("one", settings=settings), start("eight", settings=more)
    ready(*engines)
    ones, eights = ([Said.of(done) for done in alone(engine, asked)] for engine in engines)
    found, noise = Comparison(), Comparison()
    for at, (tokens, one, eight) in enumerate(zip(together, ones, eights, strict=True)):
        found.add(at, tokens, one, eight)
        noise.add(at, eight.tokens, one)
    print("the pair in batches of 8:", found)
    print("one engine in batches of 8:", noise)
    return found
