"""Fixtures of several files."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """A file: engines in other processes that are told of it take 50 ms for a token while it is there."""
    path = tmp_path / "slow"
    path.touch()
    return path
