"""What tests of plans share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pdinfer.planning import plan as plan_module
from pdinfer.planning.rank_memory import RankWeights


@pytest.fixture(autouse=True, scope="session")
def _counted_once() -> Iterator[None]:
    """Let engines that are alike count their weights once, for which a model of hundreds of experts is built."""
    count, counted = plan_module.rank_weights, dict[object, RankWeights]()

    def once(*sizes: Any, placement: Any, **more: Any) -> RankWeights:
        alike = (*sizes, *more.values())  # these give the placement too
        if alike not in counted:
            counted[alike] = count(*sizes, placement=placement, **more)
        return counted[alike]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "rank_weights", once)
        yield
