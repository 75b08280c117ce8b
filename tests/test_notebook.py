"""The notebook shows what its cells print: its outputs were made from the sources that are there, and come again."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.notebook import IMAGE, MEASURED, NOTEBOOK, code_cells, digest, executed, shown
from tests.repository import MACHINE_PATH

STORED = json.loads(NOTEBOOK.read_text("utf-8"))
ELSEWHERE = ("spawn_", "SIGINT")
"""What a cell has that starts processes, or interrupts the one it is in."""
SHOWN = (
    "Model(deepseek_v3, 4 layers",
    "] 100 % of 3.9 MB\n",
    "get abc=48213;",
    '<table border="1"><tr><td>PairingStats</td></tr>',
    "calc 47+38=85;",
    "3 processes",
    "(1, 64) copy k3v9 > k3v9;",
    "cannot exchange pages",
    "components.latent.dtype                    bfloat16            float32",
    "failed | prompt[1] is 70000",
    "page_size must be",
    "interrupted among tokens: True",
    "set k=1; get k=1;",
    "<td>TTFT ms</td>",
)


def test_its_outputs_are_of_its_sources() -> None:
    cells = code_cells(STORED)
    assert STORED["metadata"]["sources"] == digest(STORED), "run `python -m tests.notebook`"
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "execute_result", "display_data"}
    assert sum(IMAGE in output.get("data", {}) for output in outputs) == 2
    text = "\n".join(part for cell in cells for part in shown(cell))
    assert [part for part in SHOWN if part not in text] == []
    assert not MACHINE_PATH.search(text)


def test_cells_print_what_is_below_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    names: dict[str, Any] = {}
    for cell in code_cells(STORED):
        source = "".join(cell["source"])
        if MEASURED in cell["metadata"].get("tags", ()) or any(word in source for word in ELSEWHERE):
            continue
        stdout = io.StringIO()
        with contextlib.redirect_stdout(stdout):
            exec(source, names)
        below = [output["text"] for output in cell["outputs"] if output.get("name") == "stdout"]
        assert stdout.getvalue() == "".join("".join(text) for text in below), source


@pytest.mark.full(minutes=2)
def test_a_kernel_shows_what_is_below_its_cells(tmp_path: Path) -> None:
    for cell, now in zip(code_cells(STORED), code_cells(executed(tmp_path)), strict=True):
        if MEASURED not in cell["metadata"].get("tags", ()):
            assert sorted(shown(now)) == sorted(shown(cell))
        assert [output["output_type"] for output in now["outputs"]].count("error") == 0
