"""The names of the adapters, as hosts write them."""

from __future__ import annotations

import sys

import pytest

import pdinfer as pd
from tests.forks import apart


def names_of_the_adapter() -> tuple[bool, str, str]:
    """Whether it was imported before its name was used, and two of its functions."""
    before = "pdinfer.adapters.vllm" in sys.modules
    return before, pd.adapters.vllm.connect.__name__, pd.adapters.vllm.connect_decode.__name__


def test_an_adapter_is_imported_when_its_name_is_used() -> None:
    assert apart(names_of_the_adapter) == (False, "connect", "connect_decode")
    with pytest.raises(AttributeError, match="has no attribute 'sglang'"):
        _ = pd.adapters.sglang  # type: ignore[attr-defined]
