"""Split many similar cases: a few run for a person and the rest for machines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(every: int, cases: Iterable[Any]) -> list[Any]:
    """Return all cases for `pytest.mark.parametrize`, of which the first of each `every` runs in `make test` too."""
    marked = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=pytest.mark.full if number % every else []))
    return marked
