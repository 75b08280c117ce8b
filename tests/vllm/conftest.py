"""These tests run vLLM, in an environment of its own: `make test-vllm`. Elsewhere they are skipped."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import ROOT, Engine, ready, role

HAS_VLLM = importlib.util.find_spec("vllm") is not None


@pytest.fixture(autouse=True)
def needs_vllm() -> None:
    if not HAS_VLLM:
        pytest.skip("needs vLLM, in an environment of its own: make test-vllm")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a random checkpoint with YaRN: vLLM 0.32 rotates wrongly on a CPU without it."""
    if not HAS_VLLM:
        pytest.skip("needs vLLM, in an environment of its own: make test-vllm")
    folder = tmp_path_factory.mktemp("model")
    script = ROOT / "benchmarks" / "cpu_race" / "make_model.py"
    subprocess.run([sys.executable, str(script), str(folder), "--preset", "tiny", "--yarn"], check=True)
    return folder


Start = Callable[..., Engine]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Start engines, which end with the test: `start("decode", "kv_consumer", listen=…)`."""
    made: list[Engine] = []

    def start(name: str, kind: str | None = None, *, settings: dict[str, Any] | None = None, **extra: Any) -> Engine:
        transfer = None if kind is None else role(kind, **extra)
        made.append(Engine.start(tmp_path, name, **{"model": str(model), "transfer": transfer, **(settings or {})}))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


@pytest.fixture
def trio(start: Start) -> tuple[Engine, Engine, Engine]:
    """Return an engine alone, a prefill and a decode, one sequence at a time, over shared memory."""
    engines = (
        start("alone"),
        start("prefill", "kv_producer", listen="shm://"),
        start("decode", "kv_consumer", listen="shm://"),
    )
    ready(*engines)
    return engines


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Return prompts of 5 to 180 tokens."""
    rng = random.Random(seed)
    return [rng.choices(range(2, 1000), k=rng.randint(5, 180)) for _ in range(count)]


def asks(prefill: Engine) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return what a request asks of prefill and of decode, and their room."""
    room = os.urandom(16).hex()
    sends = {"do_remote_decode": True, "room": room}
    return sends, {"do_remote_prefill": True, "room": room, "prefill": prefill.address}, room
