"""Fixtures: channels over each transport of one machine, and a network moved by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.unit.engine.by_hand import HandNet
from tests.unit.kv.channel.channels import Case


@pytest.fixture(params=["shared", "loopback", "tcp"])
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    """Make ends in one process that share a pool, ends in one process that do not, and ends over TCP."""
    with closing(Case(request.param)) as made:
        yield made


@pytest.fixture(params=["loopback", "tcp"])
def two_pools(request: pytest.FixtureRequest) -> Iterator[Case]:
    """Make ends that have a pool each."""
    with closing(Case(request.param)) as made:
        yield made


@pytest.fixture
def net() -> HandNet:
    """Make a network whose messages and clock move only when the test says so."""
    return HandNet()
