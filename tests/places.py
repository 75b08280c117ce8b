"""Where planted bugs and the tests that they name are: by search, so that nothing is edited when a file moves."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

from tests.planted.mutant import Mutant

FOLDERS = ("src", "tests", "benchmarks", "docs", "examples")
DEFINED = re.compile(r"^((?:@.*\n(?:[ )\]].*\n)*)*)(?:async )?(?:def|class) (\w+)|^(\w+) = ", re.MULTILINE)
TEXTS = {".py", ".c", ".h", ".json", ".md", ".jinja", ".toml"}


class NotFoundOnce(ValueError):
    """A mutant names a text or a test that is nowhere, or in more than one place."""


@functools.cache
def texts(root: Path) -> Mapping[str, str]:
    """Return the files that bugs are planted in, by their path below `root`: not those that quote them."""
    files = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in TEXTS)
    found = {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in files}
    return {path: text for path, text in found.items() if not path.startswith("tests/planted/")}


def place(root: Path, mutant: Mutant) -> str:
    """Return the path of the file that has the mutant's text."""
    counts = {path: text.count(mutant.old) for path, text in texts(root).items() if mutant.where in path}
    found = {path: count for path, count in counts.items() if count}
    if sum(found.values()) != 1:
        raise NotFoundOnce(
            f"{mutant.name}: its text is to be once in the paths with {mutant.where!r}, and is in {found or 'none'}: "
            "change the text, or say `where`, such as the name of its file"
        )
    return next(iter(found))


@functools.cache
def defined_in(root: Path, path: str) -> Mapping[str, str]:
    """Return the names that the test file defines, with their decorators: functions, classes, and the state machines of
    hypothesis, which are assigned: `TestPool = Pool.TestCase`."""
    return {found[2] or found[3]: found[1] or "" for found in DEFINED.finditer(texts(root)[path])}


def file_of(root: Path, named: str) -> str:
    """Return the path of the file of a test that a mutant names, such as `test_pool.py::test_pages`."""
    file, _, test = named.partition("[")[0].partition("::")
    files = [path for path in texts(root) if path.startswith("tests/") and f"/{path}".endswith(f"/{file}")]
    found = [path for path in files if not test or test.partition("::")[0] in defined_in(root, path)]
    if len(found) != 1:
        raise NotFoundOnce(
            f"{named} is to be one test, and is in {found or f'none of {files}'}: name another, or put the folder that "
            "tells it apart before the file's name"
        )
    return found[0]
