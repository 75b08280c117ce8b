"""Every example runs, and so does every Python snippet of the README and the docs."""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.backends import ROOT, child_environment, need_mooncake
from tests.forks import check_ended, fork

QUICK = ("README.md-0", "02_two_processes.py")
"""The examples that run for a person too: one in this process and one in two. Each of the others takes seconds."""


def _case(*values: object, id: str) -> Any:  # noqa: A002 - as pytest calls it
    return pytest.param(*values, id=id, marks=[] if id in QUICK else pytest.mark.full)


SNIPPET = re.compile(r"^```python\n(.*?)^```(?:\n\nIt prints:\n\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
EXAMPLES = [_case(path.name, id=path.name) for path in sorted((ROOT / "examples").glob("0*.py"))]
SNIPPETS = [
    _case(text, shown, id=f"{page.relative_to(ROOT)}-{number}")
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    for number, (text, shown) in enumerate(SNIPPET.findall(page.read_text()))
]


Environment = dict[str, str]


@pytest.fixture(params=["as it is", pytest.param("without kernels in C", marks=pytest.mark.full)])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    """What the machine has, or the same without a compiler and without what one has left."""
    if request.param == "as it is":
        return {}
    return {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}


def _run(*command: str, environment: Environment | None = None, timeout_s: float = 300) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=child_environment(**(environment or {})),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _printed(path: Path, environment: Environment, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Return what a program prints. In `make test` it runs in a copy of this process, which has imported torch; what is
    `full` has a new process, and so has to import all that it uses."""
    if request.node.get_closest_marker("full"):
        return _run(str(path), environment=environment)

    def run() -> None:
        os.chdir(ROOT)
        sys.path.insert(0, str(path.parent))
        sys.argv = [str(path)]
        with (tmp_path / "printed").open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
            runpy.run_path(str(path), run_name="__main__")
        for thread in {*threading.enumerate()} - {threading.current_thread()}:  # as Python waits for them at its end
            thread.join()

    check_ended(fork(run))
    return (tmp_path / "printed").read_text("utf-8")


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs(name: str, environment: Environment, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    expected = {
        "01_one_process.py": "get abc=48213;",
        "02_two_processes.py": "get zoe=314159;",
        "03_xpyd.py": "24 requests ended",
        "04_custom_transport.py": "get key=31337;",
        "05_asyncio_host.py": "calc 8+8=16;",
        "06_ranks.py": "done: experts were placed anew while requests ran",
    }
    plain = re.sub(r"\033\[\d+m", "", _printed(ROOT / "examples" / name, environment, tmp_path, request))
    assert expected[name] in plain
    if name == "02_two_processes.py":
        in_c, none = r"in C: .*linear.*mla_decode", "none in C, .*says how to mend it: "
        assert re.match(rf"  ops +({none if environment else f'{in_c}|{none}'})", plain.splitlines()[-1])


def test_there_are_snippets() -> None:
    assert len(SNIPPETS) >= 2


@pytest.mark.parametrize(("text", "shown"), SNIPPETS)
def test_snippet_runs(
    text: str, shown: str, environment: Environment, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "MooncakeTransport(" in text:
        need_mooncake()
    if ".draw(" in text:
        pytest.importorskip("matplotlib")
    snippet = tmp_path / "snippet.py"  # a file, so that the snippet may start processes of its own
    snippet.write_text(text)
    printed = _printed(snippet, environment, tmp_path, request)
    assert printed == (shown or printed) != ""


@pytest.mark.full(minutes=3)
def test_actors_of_ray_are_killed_and_replaced() -> None:
    pytest.importorskip("ray", reason="examples/ray_actors.py needs Ray: pip install ray")
    assert "1 prefill was killed and replaced" in _run("examples/ray_actors.py", timeout_s=900)


@pytest.mark.full(minutes=5)
def test_ranks_of_ray_are_killed_replaced_and_removed() -> None:
    pytest.importorskip("ray", reason="examples/ray_ranks.py needs Ray: pip install ray")
    assert "1 prefill lost a rank and was replaced, and 1 was removed" in _run("examples/ray_ranks.py", timeout_s=900)


@pytest.mark.full(minutes=5)
def test_decodes_are_scaled_by_ray_serve() -> None:
    pytest.importorskip("ray.serve", reason="examples/ray_serve.py needs Ray Serve: pip install 'ray[serve]'")
    assert "requests, and 1 was left after" in _run("examples/ray_serve.py", timeout_s=900)


@pytest.mark.full(minutes=5)
def test_training_takes_its_first_steps(tmp_path: Path) -> None:
    _run(
        "examples/train_tiny.py",
        "--steps",
        "7",  # the fewest that come to every phase
        "--eval-rows",
        "1",
        "--min-recall",
        "0",
        "--no-compile",
        "--out",
        str(tmp_path / "model"),
        timeout_s=900,
    )
    assert (tmp_path / "model" / "model.safetensors").stat().st_size < 10 << 20
    _run("examples/01_one_process.py", str(tmp_path / "model"))
