"""A Llama with keys and values per head: blocks move packed and whole, and the pair says what one engine says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.conftest import HAS_VLLM, asks, prompts
from tests.vllm.engines import ROOT, Engine, ready, until
from tests.vllm.test_equal import check_rest

NUM_PROMPTS = 200
NUM_TOKENS = 8
BLOCK = 32


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a random Llama with 8 heads, 2 of keys and values."""
    if not HAS_VLLM:
        pytest.skip("needs vLLM, in an environment of its own: make test-vllm")
    folder = tmp_path_factory.mktemp("llama")
    subprocess.run([sys.executable, "-m", "tests.vllm.llama", str(folder)], check=True, cwd=ROOT)
    return folder


def whole(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK) * BLOCK


def answers(alone: Engine, prefill: Engine, decode: Engine, name: str, prompt: list[int]) -> tuple[Any, Any]:
    """Return what one engine alone says to a prompt, and what the pair says. The blocks that landed are prefill's."""
    alone.say(add=name, prompt=prompt, max_tokens=NUM_TOKENS, params=None)
    until(lambda: name in alone.done, [alone], 60)
    one, (sends, loads, room) = alone.done[name], asks(prefill)
    prefill.say(add=name, prompt=prompt, max_tokens=1, params=sends)
    decode.say(add=name, prompt=[*prompt, one["tokens"][0]], max_tokens=NUM_TOKENS - 1, params=loads)
    until(lambda: name in prefill.done and name in decode.done, [prefill, decode], 60)
    until(lambda: room in prefill.moved and room in decode.moved, [prefill, decode], 10)
    ours, theirs = prefill.moved[room], decode.moved[room]
    assert theirs["tokens"] == ours["tokens"] == [0, whole(len(prompt))]
    assert theirs["digest"] == ours["digest"]
    both = prefill.done[name], decode.done[name]
    return one, {what: both[0][what] + both[1][what] for what in ("tokens", "logprobs")}


@pytest.mark.parametrize(("listen", "more"), [("shm://", {}), ("tcp://127.0.0.1:0", {"max_num_batched_tokens": 64})])
def test_tokens_and_logprobs_are_those_of_one_engine(
    start: Callable[..., Engine], llama: Path, listen: str, more: dict[str, Any]
) -> None:
    """Over shared memory, and over TCP with prompts in chunks that end inside of blocks."""
    settings = {"model": str(llama), "block_size": BLOCK, "more": more}
    engines = (
        start("alone", settings=settings),
        start("prefill", "kv_producer", listen=listen, settings=settings),
        start("decode", "kv_consumer", listen=listen, settings=settings),
    )
    ready(*engines)
    assert {engine.block_size for engine in engines} == {BLOCK}
    different = []
    for at, prompt in enumerate(prompts(NUM_PROMPTS if listen == "shm://" else 40, seed=3)):
        one, two = answers(*engines, str(at), prompt)
        if {what: one[what] for what in two} != two:
            different.append(at)
    assert different == []
    check_rest(*engines[1:])


def test_other_block_sizes_are_refused_by_name(start: Callable[..., Engine], llama: Path) -> None:
    sizes = {"prefill": 2 * BLOCK, "decode": BLOCK}
    settings = {name: {"model": str(llama), "block_size": size} for name, size in sizes.items()}
    prefill = start("prefill", "kv_producer", listen="tcp://127.0.0.1:0", settings=settings["prefill"], hold_s=1)
    decode = start("decode", "kv_consumer", settings=settings["decode"], policy="fail")
    ready(prefill, decode)
    _, loads, _ = asks(prefill)
    decode.say(add="a", prompt=list(range(2, 90)), max_tokens=4, params=loads)
    until(lambda: "a" in decode.done, [decode], 30)
    assert decode.done["a"]["reason"] == "error"
    assert f"page_size: ours {BLOCK}, theirs {2 * BLOCK}" in decode.log.read_text()
