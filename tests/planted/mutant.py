"""What a planted bug is."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """`old`, which `path` has once, becomes `new`; the `tests`, pytest ids apart by spaces, must fail on it."""

    name: str
    path: str
    old: str
    new: str
    tests: str
