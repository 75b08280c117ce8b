"""Ops in C for bfloat16 models on x86 CPUs.

    ops.py        the provider: what it serves; what C cannot take goes to torch
    attention.py  attention over latents, in both forms
    products.py   products with weights in every format, and experts
    rows.py       what lies between products, also several of these in one call, and draws of tokens as far as all of
                  them go the same way
    build.py      families of sources: a library of each is compiled for this machine on first use, or says why not
    products.c    linear maps
    experts.c     gated MLPs of rows that are sorted by expert
    few_rows.h    products of few rows: pairs.c has them with AVX-512 BF16, floats.c without
    strips.c      products of many rows without, and with weights that lie in strips, as strips.h has them
    tiles.c       the same by AMX
    parts.c       experts of many rows, of bfloat16 or FP8
    int8.c        products and experts of INT8
    fp8.c         products of few rows with FP8, and its conversions
    fp8_strips.c  products and experts of FP8 in strips
    four_bits.c   the same of INT4 and MXFP4
    rows.c        what lies between products: routing, norms, rotations
    draws.c       the largest logit, and the normalizer
    decode.c      latent attention of few queries, over pages
    decode_tiles.c  the same by AMX; decode_body.h says what the two share
    prefill.c     latent attention of many queries
    attention.h   the softmax of both
    amx.h         the instructions of AMX
    thread_scratch.c  memory that threads keep from call to call
    vectors.h     bfloat16 and vectors of any width, for all sources
    sets.h        lanes and instruction sets, by what the compiler says

tests/c_order.py has the order in which sources in C use each other.

Tested by tests/conformance/test_ops.py. The suites beside it run on these kernels too; test_native_*.py are about them
alone. There native/avx512.h has the instructions of AVX-512 and AMX in plain C: every body runs on every x86 CPU.

May import: kernels.arguments, kernels.compositions, kernels.draws, kernels.formats, kernels.ops, kernels.reference,
kernels.spec, kernels.torch, process, the ground."""
