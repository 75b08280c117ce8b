"""What computes: ops, their providers, and the choice between them. A new provider is a module here.

    ops.py              every op as a typed callable, in one frozen value
    compositions.py     ops that are sequences of others, of whatever ops were chosen
    page_parts.py       ops over pages whose rows lie in two parts, by joining them
    arguments.py        what several ops take, as values
    reference.py        every other op in plain torch: slow, and the specification
    torch/              fast eager torch
    native/             C for x86 CPUs
    triton/             Triton for GPUs from Hopper on
    hopper.py           whether a library for Hopper cards can be used
    deep_gemm.py        products in FP8 by the library DeepGEMM, where it is
    flash_mla.py        attention over latents by the library FlashMLA, where it is
    resolve.py          which provider serves each op, and why
    crossovers.py       which of several providers is faster for how many rows, as measured (crossovers.json)
    draws.py            draws of tokens in plain torch, and what they depend on, as a value
    spec.py             what ops are chosen for, as data
    formats/            how weights, activations and rows of cache pages are held in memory

Tested by tests/conformance/test_ops.py. Beside it stand the suites of quantized weights, attention, sparse attention,
routing, draws, values that are not finite, and libraries.

May import: process, the ground."""

from __future__ import annotations

from pdinfer.kernels.formats.activations import Rounded
from pdinfer.kernels.resolve import ResolvedOps, resolve_ops
from pdinfer.kernels.spec import DeviceSpec, OpSpec

__all__ = [
    "DeviceSpec",
    "OpSpec",
    "ResolvedOps",
    "Rounded",
    "resolve_ops",
]
