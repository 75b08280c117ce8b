"""Ops in C for bfloat16 models on CPUs with AVX-512 BF16.

    ops.py        the provider: a function per op, which hands what C cannot take to `torch_ops`
    build.py      says what is compiled for this machine on first use, and why it cannot be
    native.c      products of few rows, experts, routing, norms
    attention.c   latent attention over pages
    vectors.h     bfloat16 and vectors of 16 lanes, for all sources

Tested by tests/conformance/test_ops.py. The suites beside it run on these kernels too; test_native_ops.py and
test_native_memory.py are about them alone.

May import: kernels.spec, kernels.torch_experts, kernels.torch_ops, process, the ground.
"""
