"""Makes the simulated device for the tests that want it."""

from __future__ import annotations

import pytest

from tests.simulated.device import set_up, why_not


@pytest.fixture(autouse=True)
def simulated(request: pytest.FixtureRequest) -> None:
    """Where a test's `device` is "gpusim", let torch know that name, or skip the test."""
    if getattr(request.node, "callspec", None) and request.node.callspec.params.get("device") == "gpusim":
        if reason := why_not():
            pytest.skip(reason)
        set_up()
