"""Weights lie on huge pages where the kernel has some."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdinfer.model.destinations import Destinations
from pdinfer.process.memory import LEAST_HUGE_BYTES, ask_huge_pages

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="needs Linux with huge pages"
)


def is_asked(tensor: Tensor) -> bool:
    """Return whether the kernel was asked for huge pages in the middle of a tensor."""
    middle = tensor.data_ptr() + tensor.nbytes // 2
    maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    for text in filter(None, maps):
        first, last = (int(part, 16) for part in text.split(" ", 1)[0].split("-"))
        if first <= middle < last:
            return " hg" in text.rpartition("VmFlags:")[2]
    raise AssertionError("the tensor lies in no mapping")


@needs_huge_pages
def test_weights_are_on_huge_pages() -> None:
    stack = Destinations(torch.device("cpu"), torch.bfloat16).stack([("a", "b"), ("c", "d")], 1024, 1024)
    assert isinstance(stack, Tensor)
    assert is_asked(stack)


def test_small_tensors_and_those_elsewhere_are_not() -> None:
    assert not ask_huge_pages(torch.empty(LEAST_HUGE_BYTES - 1, dtype=torch.uint8))
    assert not ask_huge_pages(torch.empty(LEAST_HUGE_BYTES, dtype=torch.uint8, device="meta"))
