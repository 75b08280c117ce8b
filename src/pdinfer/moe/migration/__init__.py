"""From one placement of experts to the next, while engines run.

    rebalancing.py   what all ranks agree on, and when
    transfer.py      the weights on their way

May import: config, moe.balance, moe.layer, moe.parallel, moe.placement, parallel, process, the ground.
"""
