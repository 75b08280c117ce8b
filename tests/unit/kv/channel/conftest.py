"""Where channels of a test run: over each transport of one machine, or by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.engine.by_hand import HandNet
from tests.unit.kv.channel.channels import Case


@pytest.fixture(params=["shared", "loopback", "tcp"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """Ends in one process that share a pool or do not, and ends that speak TCP."""
    made = Case(request.param)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture(params=["loopback", "tcp"])
def two_pools(request: pytest.FixtureRequest) -> Iterator[Case]:
    """Ends with a pool each."""
    made = Case(request.param)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def net() -> HandNet:
    """A network whose messages and clock move when the test says so."""
    return HandNet()
