"""Kernels in Triton for GPUs from Hopper on: one file per family, where the op stands beside its kernels.

    provider.py        which family has each op, and why nothing or not all of it can run
    norms.py           norms of rows, also with what stands before and behind them
    activations.py     gated activations, and activations that are rounded
    cache.py           rotary positions, what is written into pages, and copies of parts of a pool
    routing.py         the router
    experts.py         rows of experts: sorting tokens into them, summing what they return
    products.py        products with quantized matrices, and experts, as grouped products
    tile_products.py   what they multiply, as values
    product_kernel.py  the kernel of all of them; weights of four bits as bfloat16
    mla_decode.py      attention of a decode step over latents
    latent_parts.py    how a block of threads attends to a part of a context
    mla_prefill.py     attention of many queries per sequence
    mla_sparse.py      attention to chosen positions
    index_topk.py      what an indexer chooses
    tiles.py           tiles of queries of all sequences, their contexts out of pages, products of tiles, and a softmax
                       block by block
    draws.py           draws of tokens
    filters.py         what top_k and top_p leave of a vocabulary
    rounding.py        what kernels share that round to FP8 and INT8
    launch.py          starts kernels; tensors as rows that they read and write, and what is wrong with them
    configs.py         sizes of tiles, warps and stages, as data

Tested by tests/conformance/test_triton_interpreter.py without a GPU, and by tests/unit/kernels/test_aot.py, which
compiles for one. docs/kernels.md has what the compiler made, and how a family is added.

May import: kernels.arguments, kernels.draws, kernels.formats, kernels.ops, kernels.spec, kernels.torch, the ground."""
