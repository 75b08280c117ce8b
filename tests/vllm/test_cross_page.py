"""The section of docs/howto/inside-vllm.md about one engine in vLLM and one here, as it is written there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vllm.engines import ENVIRONMENT, ROOT, START_S

PAGE = (ROOT / "docs" / "howto" / "inside-vllm.md").read_text("utf-8")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
Start = Callable[[str, Path], "subprocess.Popen[bytes]"]


def commands(language: str) -> list[str]:
    """Return the commands of the page's blocks in a language."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [command.strip() for block in blocks for command in block.split("\n\n")]


@pytest.fixture
def start(model: Path, tmp_path: Path) -> Iterator[Start]:
    """Start commands, which end with the test."""
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
        "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{tmp_path}",
    }
    children = []

    def start(command: str, out: Path) -> subprocess.Popen[bytes]:
        with out.open("w") as log:
            child = subprocess.Popen(
                ["bash", "-c", command], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        children.append(child)
        return child

    yield start
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


def said(start: Start, command: str, out: Path) -> list[str]:
    """Return the tokens that a command prints."""
    child = start(command, out)
    assert child.wait(300) == 0, out.read_text()[-4000:]
    lines = [line.split() for line in out.read_text().splitlines() if line[:1].isdigit()]
    assert lines[-1][1:] == ["length"]
    return [line[0] for line in lines]


def test_the_section_works_as_written(start: Start, tmp_path: Path) -> None:
    there, reverse_there, reverse = commands("bash")
    runs = []
    for port, serve, run in ((8100, commands("sh")[0], there), (8300, reverse_there, reverse)):
        log = tmp_path / f"{port}.log"
        server = start(serve, log)
        wait_healthy(port, log, server)
        runs.append(said(start, run, tmp_path / f"{port}.out"))
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)
    assert len(runs[0]) == 8
    assert runs[0] == runs[1]
