"""What attention kernels share: products of tiles, and a softmax with a running maximum, block by block of what is read
(arXiv 1805.02867, algorithm 3).

A kernel keeps for each row the sum of values, the sum of weights, and the largest and the smallest score. The smallest
is there because a score of -inf has no weight: times 0 it is 0, or NaN where a score was not finite."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def upcasts(x: Tensor) -> bool:
    """Return whether products of x must be those of float32 numbers: x is float32, or lies on a CPU, where Triton's
    interpreter multiplies nothing else."""
    return x.dtype == torch.float32 or x.device.type == "cpu"


@triton.jit
def dot(a, b, sums, UPCAST: tl.constexpr):
    """Return a . b, added to `sums` unless these are None, in float32."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit
def weigh(scores, values, out, total, highest, UPCAST: tl.constexpr):
    """Add the values of a block, weighed by 2^scores, to what a kernel keeps: (out, total, highest). Scores are -inf
    where a row sees nothing, and each row has seen something by then, or has a finite `highest`."""
    above = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - above[:, None])
    kept = tl.exp2(highest - above)
    total = total * kept + tl.sum(weights, 1)
    out = dot(weights.to(values.dtype) if not UPCAST else weights, values, out * kept[:, None], UPCAST)
    return out, total, above
