"""A prefill of two data-parallel ranks that share experts: each has a scheduler and a cache of its own, and listens at
the port of the first one plus its rank."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.vllm.conftest import Serve, prompts, wait_healthy
from tests.vllm.engines import Engine, role
from tests.vllm.runs import NUM_TOKENS, check_against_one

NUM_PROMPTS = 40
SIDES = ("prefill", "decode")
AT_ONCE = 4
PREFILL, DECODE, KV = 8400, 8500, 7400
SERVE = (
    "vllm serve $MODEL --served-model-name m --dtype float32 --enforce-eager --max-model-len 512 --block-size 16 "
    "--max-num-seqs 4 --num-gpu-blocks-override 256"
)


def command(watched: Path, port: int, kind: str, *more: str, **extra: Any) -> str:
    names = {"kv_connector": "WatchedConnector", "kv_connector_module_path": "tests.vllm.in_step"}
    transfer = json.dumps({**role(kind, **extra), **names})
    return f"WATCHED={watched} {SERVE} --port {port} --kv-transfer-config '{transfer}' {' '.join(more)}"


def complete(port: int, rank: int, prompt: list[int], max_tokens: int, params: dict[str, Any]) -> tuple[int, ...]:
    """Return the tokens that a rank of a server says to a prompt."""
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": params,
    }
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=120) as answer:
        return tuple(json.loads(answer.read())["choices"][0]["token_ids"])


def test_prompts_land_from_either_rank(serve: Serve, start: Callable[..., Engine], tmp_path: Path) -> None:
    asked, rooms = prompts(NUM_PROMPTS, seed=13), [os.urandom(16).hex() for _ in range(NUM_PROMPTS)]
    watched, logs = tmp_path / "watched", (tmp_path / "prefill.log", tmp_path / "decode.log")
    listen = f"tcp://127.0.0.1:{KV}"
    servers = (
        serve(command(watched, PREFILL, "kv_producer", "--data-parallel-size 2", listen=listen, hold_s=60), logs[0]),
        serve(command(watched, DECODE, "kv_consumer", policy="fail", lease_s=100), logs[1]),
    )
    for port, log, server in zip((PREFILL, DECODE), logs, servers, strict=True):
        wait_healthy(port, log, server)

    def hand_over(at: int) -> tuple[int, ...]:
        rank = at % 2
        loads = {"do_remote_prefill": True, "room": rooms[at], "prefill": f"tcp://127.0.0.1:{KV + rank}"}
        sends = {"do_remote_decode": True, "room": rooms[at]}
        with ThreadPoolExecutor(1) as other:
            first = other.submit(complete, PREFILL, rank, asked[at], 1, sends)
            tokens = complete(DECODE, 0, asked[at], NUM_TOKENS, loads)
            assert len(first.result()) == 1
        return tokens

    with ThreadPoolExecutor(AT_ONCE) as pool:
        together = list(pool.map(hand_over, range(NUM_PROMPTS)))
    moved = [json.loads(line) for line in watched.read_text().splitlines()]
    left, landed = ({one["moved"]: one["digest"] for one in moved if one["side"] == side} for side in SIDES)
    assert left == landed
    assert sorted(left) == sorted(rooms)
    check_against_one(start, asked, together)
