"""One prefill that requests know by two names of its host."""

from __future__ import annotations

from collections.abc import Callable

from tests.vllm.conftest import prompts
from tests.vllm.engines import Engine, ready
from tests.vllm.runs import check_rest, handed_over


def test_a_prefill_is_found_by_either_name(start: Callable[..., Engine]) -> None:
    prefill = start("prefill", "kv_producer", listen="tcp://127.0.0.1:0")
    decode = start("decode", "kv_consumer", policy="fail")
    ready(prefill, decode)
    there = prefill.address or ""
    for at, prompt in enumerate(prompts(6)):
        prefill.address = there if at % 2 else there.replace("127.0.0.1", "localhost")
        handed_over(prefill, decode, str(at), prompt, first=5)
    check_rest(prefill, decode)
