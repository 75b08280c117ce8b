"""What waiting costs: vLLM steps all the time while a request waits for its grant or its pages."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.vllm.conftest import asks, prompts
from tests.vllm.engines import Engine, ready, until


def test_a_waiting_pair_hardly_uses_a_core(start: Callable[..., Engine]) -> None:
    """One request of either side waits for a peer that has none for it."""
    prefill = start("prefill", "kv_producer", listen="tcp://127.0.0.1:0", hold_s=30.0)
    decode = start("decode", "kv_consumer", lease_s=30.0)
    ready(prefill, decode)
    idle = shares_of(prefill, decode, 4.0)
    prompt = prompts(1)[0]
    sends, loads, _ = asks(prefill)
    prefill.say(add="a", prompt=prompt, max_tokens=1, params=sends)
    decode.say(add="b", prompt=prompt, max_tokens=8, params={**loads, "room": "ab" * 16})
    time.sleep(1.0)
    waiting = shares_of(prefill, decode, 8.0)
    print("shares of a core, prefill and decode, idle and waiting:", idle, waiting)
    # the threads of gloo in an idle vLLM poll, and take their own share of a slow core
    assert max(late - early for early, late in zip(idle, waiting, strict=True)) < 0.05


def shares_of(prefill: Engine, decode: Engine, seconds: float) -> list[float]:
    """Return how much of a core either engine uses for some seconds."""
    before, began = [engine.stats()["cpu_s"] for engine in (prefill, decode)], time.monotonic()
    time.sleep(seconds)
    after, took_s = [engine.stats()["cpu_s"] for engine in (prefill, decode)], time.monotonic() - began
    return [round((late - early) / took_s, 4) for early, late in zip(before, after, strict=True)]


def hurry(engine: Engine) -> None:
    """Let an engine go before everything else, where we may: what others compute would look like a wait."""
    for task in Path(f"/proc/{engine.child.pid}/task").iterdir():
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(task.name), -19)


def steps_beside_loads(prefill: Engine, decode: Engine, name: str, count: int) -> dict[str, Any]:
    """Return what steps of a running decode take while it is given loads, four a second."""
    decode.say(add=name, prompt=prompts(1)[0], max_tokens=8000, params=None)
    time.sleep(0.5)
    decode.stats()
    for at, prompt in enumerate(prompts(count, seed=5)):
        sends, loads, _ = asks(prefill)
        prefill.say(add=f"{name}{at}", prompt=prompt, max_tokens=1, params=sends)
        decode.say(add=f"{name}{at}", prompt=prompt, max_tokens=1, params=loads)
        time.sleep(0.25)
    stats = decode.stats()
    decode.say(abort=name)
    until(lambda: sum(each.startswith(name) for each in decode.done) >= count, [decode], 60)
    return stats


def test_a_frozen_prefill_does_not_hold_up_a_running_decode(start: Callable[..., Engine]) -> None:
    """Loads from a frozen prefill end in errors after their lease, so that nothing is computed for them."""
    settings = {"max_num_seqs": 40, "num_blocks": 2048, "max_model_len": 8192}
    prefill = start("prefill", "kv_producer", listen="tcp://127.0.0.1:0", settings=settings)
    decode = start("decode", "kv_consumer", lease_s=3.0, policy="fail", settings=settings)
    ready(prefill, decode)
    hurry(decode)
    steps_beside_loads(prefill, decode, "warm", 8)
    thawed = steps_beside_loads(prefill, decode, "thawed", 32)
    prefill.kill(signal.SIGSTOP)
    frozen = steps_beside_loads(prefill, decode, "frozen", 32)
    prefill.kill(signal.SIGCONT)
    for what in ("steps_ms", "hooks_ms"):
        print(what, "beside loads that land:", thawed[what], "beside a frozen prefill:", frozen[what])
    assert frozen["hooks_ms"]["longest"] < thawed["hooks_ms"]["longest"] + 5.0
