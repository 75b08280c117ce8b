"""The network. It reads and writes pages through a view, and knows of no channel, pool or request.

    model.py          embedding, blocks, head
    block.py          one layer
    mla.py            multi-head latent attention
    dsa.py            the indexer of sparse attention
    mtp.py            the layer that drafts
    batch.py          the index tensors of one step
    cache.py          what a token leaves in the cache
    load.py           from a checkpoint to a model, tensor by tensor
    destinations.py   where each tensor goes
    unread.py         tensors that no model reads: named, or refused

May import: checkpoint, config, kernels, kv, layers, moe, parallel, process, the ground.
"""
