"""Planted bugs are up to date: each bug's text is in its file once, and its tests exist."""

from __future__ import annotations

import ast
import functools

import pytest

from tests.mutants import ROOT, all_mutants
from tests.planted.mutant import Mutant


def test_there_are_enough_and_no_two_are_one() -> None:
    names = [mutant.name for mutant in all_mutants()]
    assert len(names) >= 60
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("mutant", all_mutants(), ids=lambda mutant: mutant.name)
def test_its_text_is_there_once(mutant: Mutant) -> None:
    assert mutant.new != mutant.old
    assert (ROOT / mutant.path).read_text("utf-8").count(mutant.old) == 1, f"in {mutant.path}"


@functools.cache
def tree_of(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text("utf-8"))


@pytest.mark.parametrize("named", sorted({name for mutant in all_mutants() for name in mutant.tests.split()}))
def test_its_tests_are_there_and_not_left_out_of_make_test(named: str) -> None:
    path, *inside = named.split("[", maxsplit=1)[0].split("::")
    if not inside:
        assert (ROOT / path).is_file()
        return
    found = [
        node for node in tree_of(path).body if getattr(node, "name", None) == inside[0] or _is_assigned(node, inside[0])
    ]
    assert found, f"{path} has no {inside[0]}"
    assert not any(
        "mark.full" in ast.unparse(mark)
        for mark in getattr(found[0], "decorator_list", ())
        if not isinstance(mark, ast.Call)
    )


def _is_assigned(node: ast.stmt, name: str) -> bool:
    """Return whether the name is assigned, as hypothesis's state machines are: `TestPool = Pool.TestCase`."""
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name
