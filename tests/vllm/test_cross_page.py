"""The section of docs/howto/inside-vllm.md about one engine in vLLM and one here, as it is written there."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from tests.vllm.conftest import Serve, wait_healthy
from tests.vllm.engines import ROOT

PAGE = (ROOT / "docs" / "howto" / "inside-vllm.md").read_text("utf-8")


def commands(language: str) -> list[str]:
    """Return the commands of the page's blocks in a language."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [command.strip() for block in blocks for command in block.split("\n\n")]


def said(serve: Serve, command: str, out: Path) -> list[str]:
    """Return the tokens that a command prints."""
    child = serve(command, out)
    assert child.wait(300) == 0, out.read_text()[-4000:]
    lines = [line.split() for line in out.read_text().splitlines() if line[:1].isdigit()]
    assert lines[-1][1:] == ["length"]
    return [line[0] for line in lines]


def test_the_section_works_as_written(serve: Serve, tmp_path: Path) -> None:
    there, reverse_there, reverse = commands("bash")
    runs = []
    for port, command, run in ((8100, commands("sh")[0], there), (8300, reverse_there, reverse)):
        log = tmp_path / f"{port}.log"
        server = serve(command, log)
        wait_healthy(port, log, server)
        runs.append(said(serve, run, tmp_path / f"{port}.out"))
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(30)
    assert len(runs[0]) == 8
    assert runs[0] == runs[1]
