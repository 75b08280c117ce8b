"""Makes Triton's interpreter compute as GPUs and torch do.

It warns of NaN and infinity. Its own casts from float32 drop the digits of a bfloat16, and round an e4m3 half up
without a carry (Triton 3.6); it makes no bfloat16 of a number, and calculates with their bits as if they were integers.
Its loops end where a scalar says, which is an array of one number; numpy 2.4 makes no int of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

TORCH_DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}


def convert_float(numbers: Any, source: Any, target: Any, _rounding: object) -> Any:
    """Return the bits of `numbers`, whose bits are of Triton's dtype `source`, in `target`, rounded to even."""
    from_bits = torch.from_numpy(np.ascontiguousarray(numbers).view(f"u{source.primitive_bitwidth // 8}"))
    values = from_bits.view(TORCH_DTYPES[source.name]).to(TORCH_DTYPES[target.name])
    bits = values.view(getattr(torch, f"uint{target.primitive_bitwidth}"))
    return bits.numpy().reshape(numbers.shape)


def in_float32(calculate: Callable[..., Any], builder: Any, left: Any, right: Any, op: Any) -> Any:
    """Return what an operation on two tensors gives, of bfloat16 rounded once."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import TensorHandle

    if left.dtype.scalar != bfloat16:
        return calculate(builder, left, right, op)
    floats = [convert_float(each.data, bfloat16, float32, None).view(np.float32) for each in (left, right)]
    return TensorHandle(convert_float(op(*floats), float32, bfloat16, None), bfloat16)


def bfloat16_of(_builder: Any, number: float) -> Any:
    """Return a scalar."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import TensorHandle

    return TensorHandle(convert_float(np.array([number], np.float32), float32, bfloat16, None), bfloat16)


def _patch(patch: Callable[[Any, Any], None], tensor: Any, scope: Any) -> None:
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _patch_once(patch: Callable[[Any], Any], function: Any) -> Any:
    """Let a function that a kernel calls find the language as the kernel left it, which takes most of a call."""
    import triton.language as tl
    from triton.runtime import interpreter

    modules = [value for value in function.__globals__.values() if value is tl or value is tl.core]
    there = not any(tl.core.is_builtin(module.load) for module in modules)
    return interpreter._LangPatchScope() if there else patch(function)


@contextmanager
def as_a_gpu() -> Iterator[None]:
    """Let it do so in the block."""
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as monkeypatch, np.errstate(all="ignore"):
        monkeypatch.setattr(interpreter, "_convert_float", convert_float)
        monkeypatch.setattr(interpreter, "_patch_lang_tensor", partial(_patch, interpreter._patch_lang_tensor))
        monkeypatch.setattr(interpreter, "_patch_lang", partial(_patch_once, interpreter._patch_lang))
        builder = interpreter.InterpreterBuilder
        calculate = builder.binary_op
        monkeypatch.setattr(builder, "binary_op", lambda *given: in_float32(calculate, *given))
        monkeypatch.setattr(builder, "get_bf16", bfloat16_of, raising=False)
        # it asserts that each sum of integers fits, which takes as long as all else
        options = interpreter.InterpreterOptions(sanitize_overflow=False)
        monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
        monkeypatch.setattr(np, "nanmax", np.fmax.reduce)  # which does not warn of rows of NaN
        monkeypatch.setattr(np, "nanmin", np.fmin.reduce)
        yield
