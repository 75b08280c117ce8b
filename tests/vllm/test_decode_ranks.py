"""A decode of two workers: each has a cache of its own and gets every latent over a link of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pdinfer.adapters.vllm.messages import room_of
from tests.vllm.conftest import asks, prompts
from tests.vllm.engines import Engine, ready, role, until
from tests.vllm.runs import NUM_TOKENS, check_against_one, check_rest, check_watched

NUM_PROMPTS = 40


def test_one_worker_prefills_and_two_decode(
    start: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHED", str(tmp_path / "watched"))
    asked = prompts(NUM_PROMPTS, seed=14)
    names = {"kv_connector": "WatchedConnector", "kv_connector_module_path": "tests.vllm.watched"}
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    settings = {"transfer": {**role("kv_consumer", policy="fail"), **names}, "more": two}
    prefill = start("prefill", "kv_producer", listen="tcp://127.0.0.1:0")
    decode = start("decode", settings=settings)
    ready(prefill, decode)
    rooms = []
    for at, prompt in enumerate(asked):
        sends, loads, room = asks(prefill)
        rooms += [room_of(room, rank) for rank in range(2)]
        prefill.say(add=str(at), prompt=prompt, max_tokens=1, params=sends)
        decode.say(add=str(at), prompt=prompt, max_tokens=NUM_TOKENS, params=loads)
    until(lambda: len(decode.done) == len(prefill.done) == len(asked), [prefill, decode], 200)
    assert {done["reason"] for done in decode.done.values()} == {"length"}
    check_rest(prefill, decode)
    check_watched(tmp_path / "watched", rooms, prefill)
    together = [tuple(decode.done[str(at)]["tokens"]) for at in range(len(asked))]
    decode.close()
    check_against_one(start, asked, together)
