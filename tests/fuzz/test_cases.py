"""Random models, engines, ops and steps do what they should, whatever a host has set. `tests.fuzz.sweep` runs more."""

from __future__ import annotations

import itertools

import pytest

from tests.conformance.native_builds import why_no_native
from tests.fuzz.cases import KINDS, run_case
from tests.fuzz.sweep import HOSTS
from tests.slices import one_in


@pytest.mark.parametrize(("setting", "kind"), one_in(17, itertools.product(HOSTS, KINDS)))
def test_random_cases(setting: str, kind: str) -> None:
    if kind == "ops" and (lacking := why_no_native()):
        pytest.skip(f"needs {lacking}")
    for number in range(2):
        run_case(kind, number, HOSTS[setting])
