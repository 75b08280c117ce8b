"""From the load of experts to their placement: arithmetic in numpy, no tensor.

    deepseek.py     DeepSeek's EPLB by its own names
    solver.py       a solver that goes further
    assignment.py   experts in the slots of ranks
    exchange.py     relieves the fullest rank, one exchange at a time
    process.py      the solver in a process of its own; `__main__.py` is what runs there

May import: moe.placement, process, the ground.
"""
