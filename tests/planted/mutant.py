"""The form of a planted bug."""

from __future__ import annotations

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
