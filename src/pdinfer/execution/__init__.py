"""One step on one rank: rows in, tokens out. Engines know no more of tensors than this room.

    runner.py     a step of the model over the pages of one pool
    resident.py   decode steps whose batch stays on the device
    graphs.py     decode steps that were captured, and run as one launch
    sampling.py   from logits to tokens
    drafting.py   tokens that the MTP layer proposes, and what becomes of them
    warm_up.py    runs every size of step once before requests come

May import: config, kernels, kv, model, process, the ground."""
