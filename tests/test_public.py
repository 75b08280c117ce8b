"""The public names that hosts use are unchanged."""

from __future__ import annotations

import ast
import importlib
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import pdinfer
from tests.public import SNAPSHOT, surface


def test_the_public_surface_is_the_one_that_was_committed():
    committed, now = SNAPSHOT.read_text().splitlines(), surface()
    gone = [f"- {line}" for line in committed if line not in now]
    come = [f"+ {line}" for line in now if line not in committed]
    assert not gone + come, "\n".join(["run `python -m tests.public` if this is meant:", *gone, *come])


def test_names_of_every_kind_are_in_it():
    text = SNAPSHOT.read_text()
    for part in ("pd.PagePool.grant(self", "pd.policy.", "pd.remote.serve(", "pd.RequestError: class(PDInferError)"):
        assert part in text


def test_names_are_where_type_checkers_find_them():
    """`import pdinfer` finds a name when it is used, type checkers find it by the imports that they alone see."""
    tree = ast.parse(Path(pdinfer.__file__).read_text("utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "pdinfer" in (node.module or "")]
    homes = {alias.name: node.module for node in imports for alias in node.names}
    assert sorted(homes) == list(pdinfer.__all__)
    for name, home in homes.items():
        value = getattr(pdinfer, name)
        module = importlib.import_module(home)
        assert value is getattr(module, name, None) or value is importlib.import_module(f"{home}.{name}"), name


def test_every_room_is_found_and_nothing_else():
    assert pdinfer.planning.simulate is not None
    with pytest.raises(AttributeError, match=r"^module 'pdinfer' has no attribute 'nosuch'$"):
        pdinfer.nosuch  # noqa: B018
    assert not hasattr(pdinfer, "_private")


def test_the_version_is_that_of_the_package(monkeypatch):
    declared = tomllib.loads((SNAPSHOT.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    assert pdinfer.__version__ == metadata.version("pdinfer") == declared

    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.delitem(vars(pdinfer), "__version__")
    assert pdinfer.__version__ == "0+checkout"
    monkeypatch.delitem(vars(pdinfer), "__version__")
