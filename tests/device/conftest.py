"""A device for every test of this folder, or a sentence that says why there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from pdinfer.process import memory
from tests.simulated import order
from tests.simulated.device import DEVICE, set_up, why_not


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The simulated device. Whatever was out of order on it, in any thread, fails the test that did it."""
    if reason := why_not():
        pytest.skip(reason)
    set_up()
    monkeypatch.setattr(memory, "_page_locked", order.page_locked)
    yield DEVICE
    assert order.faults() == []
