"""A prefill of two workers: each has every latent of an MLA model, and the first one sends them."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.conftest import asks, prompts
from tests.vllm.engines import Engine, ready, role, until
from tests.vllm.runs import NUM_TOKENS, check_against_one, check_rest, check_watched

NUM_PROMPTS = 60


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def test_two_workers_prefill_and_one_decodes(
    start: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHED", str(tmp_path / "watched"))
    asked = prompts(NUM_PROMPTS, seed=11)
    listen = f"tcp://127.0.0.1:{free_port()}"
    names = {"kv_connector": "WatchedConnector", "kv_connector_module_path": "tests.vllm.watched"}
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    settings = {"transfer": {**role("kv_producer", listen=listen), **names}, "more": two}
    prefill = start("prefill", settings=settings)
    decode = start("decode", "kv_consumer", policy="fail")
    ready(prefill, decode)
    prefill.address = listen
    rooms = []
    for at, prompt in enumerate(asked):
        sends, loads, room = asks(prefill)
        rooms.append(room)
        prefill.say(add=str(at), prompt=prompt, max_tokens=1, params=sends)
        decode.say(add=str(at), prompt=prompt, max_tokens=NUM_TOKENS, params=loads)
    until(lambda: len(decode.done) == len(prefill.done) == len(asked), [prefill, decode], 120)
    check_rest(prefill, decode)
    check_watched(tmp_path / "watched", rooms, decode)
    together = [tuple(decode.done[str(at)]["tokens"]) for at in range(len(asked))]
    prefill.close()
    check_against_one(start, asked, together)
