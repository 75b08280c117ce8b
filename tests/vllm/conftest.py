"""These tests run vLLM, in an environment of its own: `make test-vllm`. Elsewhere they are skipped."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import ENVIRONMENT, ROOT, START_S, Engine, role

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


Serve = Callable[[str, Path], "subprocess.Popen[bytes]"]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Serve]:
    """Start commands that know $MODEL, which end with the test."""
    for name in TOKENIZER:
        shutil.copy(ROOT / "examples" / "tiny" / name, model)
    named = tmp_path / "vllm-0.32.0+cpu.dist-info"  # what `vllm serve` looks for, and the build for CPUs does not have
    named.mkdir()
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    environment = {
        **os.environ,
        **{name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"},
        "MODEL": str(model),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join((f"{ROOT / 'src'}", f"{ROOT}", f"{tmp_path}")),
    }
    children = []

    def serve(command: str, out: Path) -> subprocess.Popen[bytes]:
        with out.open("w") as log:
            child = subprocess.Popen(
                ["bash", "-c", command], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        children.append(child)
        return child

    yield serve
    for child in children:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait(30)


def wait_healthy(port: int, log: Path, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except OSError:
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.5)


def prompts(count: int, seed: int = 1) -> list[list[int]]:
    """Return prompts of 5 to 180 tokens."""
    rng = random.Random(seed)
    return [rng.choices(range(2, 1000), k=rng.randint(5, 180)) for _ in range(count)]


def asks(prefill: Engine) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return what a request asks of prefill and of decode, and their room."""
    room = os.urandom(16).hex()
    sends = {"do_remote_decode": True, "room": room}
    return sends, {"do_remote_prefill": True, "room": room, "prefill": prefill.address}, room
