"""The form of a planted bug, and how the files of this folder write it. A file says what its bugs break; then, below
the tests that must see them, each bug with its name and its change:

    test_pool.py::test_pages test_pool.py::test_a_page_is_free_once
      a page is free twice
    -        self._free.remove(page)
      only one file has this text @ pool.py
    <page = free[index]
    >page = free[0]

As in a diff, lines with `-` become those with `+`. `<` and `>` are the same for a part of a line, which ends without a
line break.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import NamedTuple


class Mutant(NamedTuple):
    """A bug: `old`, which the files whose path contains `where` have once, becomes `new`, and the `tests` must fail.

    The tests are pytest ids separated by spaces, without folders: tests/places.py searches for them. The name of a file
    that is there twice keeps as much of its path as tells it apart.
    """

    name: str
    old: str
    new: str
    tests: str
    where: str = "src/"

    @property
    def digest(self) -> str:
        """What was judged: it stays when files move or the bug gets another name."""
        return sha256("\0".join(self[1:]).encode()).hexdigest()[:16]


def parsed(text: str) -> Iterator[Mutant]:
    """Yield the bugs that a file of this folder has. Raises ValueError for a line that is none of the above."""
    for group in text.split("\n\n")[1:]:
        tests, _, bugs = group.partition("\n")
        for bug in f"\n{bugs}".split("\n  ")[1:]:
            head, *change = bug.splitlines()
            name, _, where = head.partition(" @ ")
            if strange := [line for line in change if line[0] not in "-+<>"]:
                raise ValueError(f"{name}: {strange[0]!r} does not begin with -, +, < or >")
            yield Mutant(name, _side(change, "-<"), _side(change, "+>"), tests, where or "src/")


def _side(change: list[str], marks: str) -> str:
    """Return the old or the new text of a change."""
    lines = [line for line in change if line[0] in marks]
    text = "\n".join(line[1:] for line in lines)
    return f"{text}\n" if lines and lines[-1][0] == marks[0] else text
