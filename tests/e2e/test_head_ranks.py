"""Ranks of other numbers on the two sides, over gloo: pages with heads arrive whole in every order of axes."""

from __future__ import annotations

import pytest

from pdinfer.kv.shapes import AxisOrder
from tests.ranks import Ranks


@pytest.mark.parametrize("num_prefills", [1, 2], ids=["1 to 2", "2 to 1"])
def test_every_byte_lands_when_ranks_hold_other_heads(ranks: Ranks, num_prefills: int) -> None:
    said = ranks.run("tests.e2e.head_jobs:hand_over", 3, num_prefills, "6b" * 32)
    landed = [["landed"] * num_prefills] * len(AxisOrder)
    assert said == [[[]] * len(AxisOrder)] * num_prefills + [landed] * (3 - num_prefills)
