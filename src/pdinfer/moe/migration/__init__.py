"""From one placement of experts to the next, while engines run.

    rebalancing.py   what follows from each agreement of the ranks
    migration.py     one staged placement, until it runs or is dropped
    transfer.py      the weights in transit
    status.py        what ranks tell each other

Tested by tests/e2e/test_rebalancing.py too.

May import: config, moe.balance, moe.layer, moe.parallel, moe.placement, parallel, process, the ground.
"""

from __future__ import annotations

from pdinfer.moe.migration.rebalancing import Rebalancing
from pdinfer.moe.migration.status import ExpertStatus

__all__ = [
    "ExpertStatus",
    "Rebalancing",
]
