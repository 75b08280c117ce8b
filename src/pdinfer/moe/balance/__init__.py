"""From the load of experts to their placement: arithmetic in numpy, no tensor.

    deepseek.py     DeepSeek's EPLB under its own names
    solver.py       a solver that finds more even placements
    assignment.py   experts in the slots of ranks
    exchange.py     relieves the fullest rank, one exchange at a time
    messages.py     a request to a solver, and its answer
    process.py      the solver in a process of its own, where `__main__.py` runs

May import: moe.placement, process, the ground."""
