"""Which cases of a test run each time, and which are left to `make test-all`."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def others_in_full(cases: Iterable[Any], each_time: Container[Any], **options: float) -> list[Any]:
    """Return the cases as parameters. Those that do not run each time have the marker `full` with these options."""
    full = pytest.mark.full(**options)
    return [case if case in each_time else pytest.param(case, marks=full) for case in cases]
