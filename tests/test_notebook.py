"""The notebook runs from the top in a kernel of its own, and its cells show what they promise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.backends import ROOT, child_environment

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
SHOWN = (
    "get abc=48213;",
    "calc 47+38=85;",
    "(1, 64) copy k3v9 > k3v9;",
    "Fit.REPAGE",
    "components.latent.dtype                    bfloat16            float32",
    "failed | prompt[1] is 70000",
    "page_size must be",
    "interrupted after",
    "set k=1; get k=1;",
    "TTFT",
)


def test_it_was_committed_without_outputs() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert not [cell for cell in cells if cell["outputs"] or cell["execution_count"] is not None]


@pytest.mark.full(minutes=2)
def test_it_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name, value in child_environment(IPYTHONDIR=str(tmp_path), TMPDIR=str(tmp_path)).items():
        monkeypatch.setenv(name, value)  # the kernel has the environment of this process
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "\n".join(map(shown, outputs))
    assert [part for part in SHOWN if part not in text] == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def shown(output: Any) -> str:
    return str(output.get("text") or output.get("data", {}).get("text/plain", ""))
