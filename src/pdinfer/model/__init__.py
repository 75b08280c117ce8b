"""The network. It reads and writes pages through a view, and knows of no channel, pool or request.

    model.py          embedding, blocks, head
    block.py          one layer, and two halves of a step that take turns in them
    attention.py      the seam between a layer and its attention
    mla.py            multi-head latent attention, and what its tokens leave in the cache
    dsa.py            the indexer of sparse attention
    mtp.py            the layer that drafts
    batch.py          the index tensors of one step, and what its layers share
    decode_rows.py    the decode batch that stays on the device from step to step
    cache.py          the components of a cache layout, plain and packed
    activations.py    hidden states and choices of routers, for who looks into a model
    load.py           from a checkpoint to a model: the request is checked, and the ranks meet
    load_plan.py      which tensors are read, what they become, which are refused, and what ranks agree they have read
    destinations.py   where each tensor goes

May import: checkpoint, config, kernels, kv, layers, moe, parallel, process, the ground."""
