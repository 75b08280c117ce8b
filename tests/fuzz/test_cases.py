"""Random models, engines, ops and steps do what they should, whatever a host has set. `tests.fuzz.sweep` runs more."""

from __future__ import annotations

import itertools

import pytest

from tests.conformance.native_builds import why_no_native
from tests.fuzz.cases import KINDS, run_case
from tests.fuzz.sweep import HOSTS
from tests.slices import one_in


@pytest.mark.parametrize(("setting", "kind"), one_in(17, itertools.product(HOSTS, KINDS)))
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.full)])
def test_random_cases(setting: str, kind: str, number: int) -> None:
    if kind == "ops" and (lacking := why_no_native()):
        pytest.skip(f"needs {lacking}")
    run_case(kind, number, HOSTS[setting])
