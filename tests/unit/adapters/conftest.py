"""What the tests of the connector share: pairs of engines inside a stand-in for vLLM, and the tiny model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import pdinfer as pd
from tests.unit.adapters.fake_vllm import Pairs


@pytest.fixture
def pair() -> Iterator[Pairs]:
    pairs = Pairs()
    try:
        yield pairs
    finally:
        for engine in pairs.made:
            engine.close()


@pytest.fixture(scope="session")
def model() -> pd.Model:
    return pd.load_model("examples/tiny", device="cpu", dtype=torch.float32)
