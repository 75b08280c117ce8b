"""A CPU has neither streams nor events. How a device is asked for them is tested in tests/device."""

from __future__ import annotations

import torch

from pdinfer.process.memory import pinned_empty
from pdinfer.process.streams import current_stream, new_stream, on_stream, record_event

CPU = torch.device("cpu")


def test_a_cpu_never_lags_behind_the_host() -> None:
    assert record_event(CPU) is None
    assert new_stream(CPU) is None
    assert current_stream(CPU) is None
    with on_stream(None):
        assert torch.ones(3).sum() == 3


def test_memory_for_copies_of_a_cpu_is_plain() -> None:
    memory = pinned_empty(100, CPU)
    assert (memory.dtype, memory.shape, memory.device) == (torch.uint8, (100,), CPU)
    assert not memory.is_pinned()
