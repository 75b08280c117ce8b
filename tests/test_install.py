"""The lines of docs/howto/install.md work, and what they install has every file of the library."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from tests.backends import ROOT

PAGE = (ROOT / "docs" / "howto" / "install.md").read_text("utf-8")
LINES = [
    line for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) for line in block.splitlines()
]
PROGRAM = """
import pdinfer as pd

print(pd.__file__)
with pd.Pairing.local("examples/tiny") as pairing:
    sampling = pd.SamplingParams(max_new_tokens=3, temperature=0)
    for event in pairing.generate([pd.Request(prompt=(256, *b"calc 47+38="), sampling=sampling)]):
        print(chr(event.token))
"""


def test_the_page_lists_every_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert sorted(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == sorted(project["optional-dependencies"])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the variables of a fresh virtual environment, to which the packages of this Python are installed already,
    pdinfer excepted: pip puts its own copy before them."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
    own = next((folder / "lib").glob("python*")) / "site-packages"
    (own / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return {**kept, "VIRTUAL_ENV": str(folder), "PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of what a build reads, so that nothing is left in this one."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("src", "pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        subprocess.run(["cp", "-r", str(ROOT / name), str(folder)], check=True)
    return folder


@pytest.mark.full(minutes=3)
def test_every_line_works_and_installs_every_file(environment: dict[str, str], checkout: Path) -> None:
    def run(*command: str, cwd: Path = checkout) -> str:
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        if "No matching distribution found for hatchling" in done.stderr:
            pytest.skip(f"could not find hatchling in a package index, which builds pdinfer: {command}")
        assert done.returncode == 0 or "doctor" in command[-1], done.stdout + done.stderr  # which judges the machine
        return done.stdout

    kinds = []
    for line in LINES:
        output = run("sh", "-c", line)
        kinds.append(re.findall("install|wheel|doctor", line)[0])
        if kinds[-1] == "install":
            (package,) = Path(environment["VIRTUAL_ENV"]).glob("lib/*/site-packages/pdinfer")
            assert files_of(package) == files_of(ROOT / "src" / "pdinfer")
            assert run("python", "-c", PROGRAM, cwd=ROOT).split() == [str(package / "__init__.py"), "8", "5", ";"]
        if kinds == ["install"]:  # or pip would take the wheel for installed
            run("python", "-m", "pip", "uninstall", "--yes", "pdinfer")
    assert kinds == ["install", "wheel", "install", "doctor"]
    assert re.search(r"^ +pdinfer +\d", output, re.MULTILINE)


def files_of(package: Path) -> set[str]:
    """Return the files of a package: its modules and what they read."""
    paths = {path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    return {str(path.relative_to(package)) for path in paths}
