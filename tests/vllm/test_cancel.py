"""A request that is cancelled here is ended in vLLM, which has its prompt and has not come to it."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import torch

import pdinfer as pd
from tests.vllm.conftest import Serve, wait_healthy

URL, KV = "http://127.0.0.1:8100", "tcp://127.0.0.1:7100"
COMMAND = """vllm serve "$MODEL" --port 8100 --dtype float32 --enforce-eager --max-num-seqs 1 --kv-transfer-config '{
  "kv_connector": "PDInferConnector", "kv_connector_module_path": "pdinfer.adapters.vllm", "kv_role": "kv_producer",
  "kv_connector_extra_config": {"listen": "tcp://127.0.0.1:7100"}}'"""


def metric(name: str) -> float:
    with urllib.request.urlopen(f"{URL}/metrics", timeout=10) as answer:
        found = re.search(rf"^vllm:{name}\{{[^}}]*\}} ([\d.e+]+)", answer.read().decode(), re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def occupy(model: str) -> None:
    """Have the one sequence of vLLM's batch taken for a while."""
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 6000, "temperature": 0, "ignore_eos": True}
    post = urllib.request.Request(f"{URL}/v1/completions", json.dumps(body).encode())
    post.add_header("Content-Type", "application/json")

    def wait() -> None:
        with contextlib.suppress(OSError):  # the test is over before
            urllib.request.urlopen(post, timeout=300).close()

    threading.Thread(target=wait, daemon=True).start()


def test_a_cancelled_prompt_is_ended_in_vllm(serve: Serve, model: Path, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    server = serve(COMMAND, log)
    wait_healthy(8100, log, server)
    ours = pd.load_model(model, device="cpu", dtype=torch.float32)
    pool = pd.PagePool(ours, pd.CacheConfig(num_pages=64))
    decode = pd.DecodeEngine(ours, pd.KVChannel(pool, pd.kv.SocketTransport()))
    port = pd.adapters.vllm.connect(decode, kv=KV, server=URL)
    with pd.Pairing(port, decode) as pairing:
        prompted = metric("prompt_tokens_total")
        occupy(str(model))
        until(lambda: metric("num_requests_running") == 1)
        cancelled = pairing.submit(pd.Request(prompt=range(5, 105)))
        until(lambda: (pairing.step(), metric("num_requests_waiting"))[1] == 1)
        pairing.cancel(cancelled)
        until(lambda: (pairing.step(), metric("num_requests_waiting"))[1] == 0)
        assert metric("num_requests_running") == 1
        until(lambda: (pairing.step(), decode.pool.num_granted)[1] == 0)
    assert metric("prompt_tokens_total") - prompted <= 3
