"""The form of a planted bug."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A bug: `old`, which `path` has once, becomes `new`; the `tests`, pytest ids separated by spaces, must fail on
    it."""

    name: str
    path: str
    old: str
    new: str
    tests: str
