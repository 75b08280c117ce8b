"""What decode says after a hand-over is what one engine says alone, bit by bit, and what lands is what prefill has.

vLLM on a CPU gives other bits to the same request in another batch, and recomputes the last token of a prompt that was
loaded. So the exact comparison is one sequence at a time, with the first token of prefill behind decode's prompt. In
batches tokens may differ at near ties, and where one engine in batches of 8 and of 1 says different things too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.vllm.conftest import prompts
from tests.vllm.engines import Engine
from tests.vllm.runs import compare_in_batches, different_one_by_one
from tests.vllm.ties import some_of

NUM_PROMPTS = 500
BFLOAT16 = {"dtype": "bfloat16"}
Start = Callable[..., Engine]


def test_tokens_and_logprobs_are_those_of_one_engine(start: Start) -> None:
    assert different_one_by_one(start, prompts(NUM_PROMPTS), {}) == []


@pytest.mark.parametrize(("ours", "theirs"), [(32, 16), (16, 32)])
def test_block_sizes_may_differ(start: Start, ours: int, theirs: int) -> None:
    more = {"listen": "tcp://127.0.0.1:0", "block_size": ours}
    assert different_one_by_one(start, prompts(20), {"block_size": theirs}, **more) == []


def test_what_lands_in_batches_is_what_prefill_has(start: Start) -> None:
    assert compare_in_batches(start, prompts(NUM_PROMPTS, seed=2), {}).far == []


def test_bfloat16_is_as_exact(start: Start) -> None:
    assert different_one_by_one(start, prompts(some_of(NUM_PROMPTS, 100), seed=6), BFLOAT16) == []


def test_bfloat16_in_batches(start: Start) -> None:
    assert compare_in_batches(start, prompts(some_of(NUM_PROMPTS, 100), seed=7), BFLOAT16).far == []
