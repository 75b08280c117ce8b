"""Nobody computes while Python ends, and a forked child waits for no thread of its parent."""

from __future__ import annotations

import threading

import pytest
import torch

import pdinfer as pd
from pdinfer.process import modes
from pdinfer.process.modes import own_modes
from tests.forks import FAR_S, check_ended, fork
from tests.hosts import precision
from tests.waiting import check_ends, started, wait_until


def is_shut() -> bool:
    """Whether another thread keeps the door."""
    door = modes._EXACT.door
    if is_open := door.acquire(blocking=False):
        door.release()
    return not is_open


def test_the_end_of_python_waits_for_steps_and_lets_none_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "_EXACT", modes._Exact())
    monkeypatch.setattr(modes, "EXIT_S", FAR_S)
    inside, leaves = threading.Event(), threading.Event()

    def step() -> None:
        with own_modes():
            inside.set()
            leaves.wait(FAR_S)

    stepping, ending = threading.Thread(target=step), threading.Thread(target=modes._end)
    stepping.start()
    inside.wait(FAR_S)
    ending.start()
    wait_until(is_shut)
    ending.join(0.05)
    assert ending.is_alive()
    leaves.set()
    check_ends(stepping)
    check_ends(ending)
    assert is_shut()


def test_a_forked_child_waits_for_no_thread_of_its_parent() -> None:
    inside, leaves = threading.Event(), threading.Event()

    def step() -> None:
        with precision("medium"), own_modes(), modes._EXACT.door:
            inside.set()
            leaves.wait(FAR_S)

    def compute() -> None:
        assert modes._EXACT.is_empty
        assert torch.get_float32_matmul_precision() == "medium"
        with own_modes():
            assert torch.get_float32_matmul_precision() == "highest"

    stepping = started(step)
    inside.wait(FAR_S)
    check_ended(fork(compute))
    leaves.set()
    check_ends(stepping)


@pytest.mark.parametrize("transform", ["grad", "functionalize"])
def test_transforms_in_which_tensors_have_no_memory_are_refused(transform: str) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(pd.ConfigError, match=r"tensors are shadows.*leave the mode before this call"):
            modes.check_tensors_are_real()
        return x.sum()

    getattr(torch.func, transform)(loss)(torch.ones(3, dtype=torch.float32, device="cpu"))
    modes.check_tensors_are_real()
