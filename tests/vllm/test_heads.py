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
from tests.vllm.runs import compare_in_batches, different_one_by_one
from tests.vllm.ties import some_of

NUM_PROMPTS = 200
BLOCK = 32
Start = Callable[..., Engine]


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


@pytest.mark.parametrize(("listen", "more"), [("shm://", {}), ("tcp://127.0.0.1:0", {"max_num_batched_tokens": 64})])
def test_tokens_and_logprobs_are_those_of_one_engine(
    start: Start, llama: Path, listen: str, more: dict[str, Any]
) -> None:
    """Over shared memory, and over TCP with prompts in chunks that end inside of blocks."""
    asked = prompts(NUM_PROMPTS if listen == "shm://" else 40, seed=3)
    settings = {"model": str(llama), "block_size": BLOCK, "more": more}
    assert different_one_by_one(start, asked, settings, listen=listen, landed=whole) == []


def test_bfloat16_is_as_exact(start: Start, llama: Path) -> None:
    asked = prompts(some_of(NUM_PROMPTS, 60), seed=8)
    settings = {"model": str(llama), "block_size": BLOCK, "dtype": "bfloat16"}
    assert different_one_by_one(start, asked, settings, landed=whole) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_lands_in_batches_is_what_prefill_has(start: Start, llama: Path, dtype: str) -> None:
    asked = prompts(some_of(NUM_PROMPTS, 60), seed=9)
    settings = {"model": str(llama), "block_size": BLOCK, "dtype": dtype}
    assert compare_in_batches(start, asked, settings).far == []


def test_other_block_sizes_are_refused_by_name(start: Start, llama: Path) -> None:
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
