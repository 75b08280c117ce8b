"""Split many similar cases, and many examples: a few run for a person and the rest for machines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def one_in(every: int, cases: Iterable[Any]) -> list[Any]:
    """Return all cases for `pytest.mark.parametrize`, of which the first of each `every` runs in `make test` too."""
    marked = []
    for number, case in enumerate(cases):
        values = case if isinstance(case, tuple) else (case,)
        marked.append(pytest.param(*values, marks=pytest.mark.full if number % every else []))
    return marked


def examples(number: int, **more: Any) -> settings:
    """Return the settings of a property that looks at so many examples, and in `make test` at no more than others."""
    profile = settings.get_current_profile_name()
    return settings(max_examples=number if profile == "whole" else min(number, settings.default.max_examples), **more)
