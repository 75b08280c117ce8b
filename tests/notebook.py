"""Execute examples/notebook.ipynb and keep its outputs: `python -m tests.notebook`.

It needs nbclient and ipykernel, which no extra has.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.backends import ROOT, child_environment

NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
MEASURED = "measured"
"""The tag of a cell whose outputs are other ones each time."""
IMAGE = "image/png"


def code_cells(notebook: Any) -> list[Any]:
    """Return the cells that run."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest(notebook: Any) -> str:
    """Return what tells the sources of all cells from others."""
    sources = ["".join(cell["source"]) for cell in code_cells(notebook)]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def executed(folder: Path) -> Any:
    """Return the notebook with the outputs of a kernel of its own, which writes into `folder`. Skips a test where what
    it takes is not installed."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", coalesce_streams=True, record_timing=False
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in child_environment(IPYTHONDIR=str(folder), TMPDIR=str(folder)).items():
            patch.setenv(name, value)  # the kernel has the environment of this process
        client.execute(cwd=str(folder))
    return notebook


def shown(cell: Any) -> list[str]:
    """Return the texts below a cell as a reader sees them: a line that was drawn again is there once."""
    texts = []
    for output in cell["outputs"]:
        data = output.get("data", {})
        said = output.get("text") or data.get("text/html") or data.get("text/plain") or ""
        texts.append(re.sub(r"[^\n]*\r(?!\n)", "", "".join(said)))
    return texts


def main() -> None:
    """Write the notebook with new outputs."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = executed(Path(folder))
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "sources": digest(notebook),
    }
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n", "utf-8")


if __name__ == "__main__":
    main()
