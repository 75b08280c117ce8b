"""From one placement of experts to the next, while engines run.

    rebalancing.py   what follows from each agreement of the ranks
    migration.py     one staged placement, until it runs or is dropped
    transfer.py      the weights in transit

Tested by tests/e2e/test_rebalancing.py too.

May import: config, moe.balance, moe.layer, moe.parallel, moe.placement, parallel, process, the ground."""
