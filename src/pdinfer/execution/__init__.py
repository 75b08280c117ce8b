"""One step on one rank: rows in, tokens out. All that engines know of tensors.

    runner.py     a step of the model over the pages of one pool
    sampling.py   from logits to tokens
    drafting.py   what the MTP layer proposes, and what becomes of it
    warm_up.py    every size of step once, before requests come

May import: config, kv, model, the ground.
"""
