"""The names of the adapters, as hosts write them."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pdinfer as pd


def test_an_adapter_is_imported_when_its_name_is_used() -> None:
    code = "import pdinfer as pd; print(pd.adapters.vllm.connect.__name__, pd.adapters.vllm.connect_decode.__name__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "connect connect_decode\n"
    with pytest.raises(AttributeError, match="has no attribute 'sglang'"):
        _ = pd.adapters.sglang  # type: ignore[attr-defined]
