"""Arithmetic that is not rounded to the dtype of a model, for the ops in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def exact(x: Tensor) -> Tensor:
    """Return x in float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def not_finite(x: Tensor) -> Tensor:
    """Return NaN for rows (of the last axis, which stays with one element) that hold NaN or infinity, and 0 for the
    others. It is added to what cannot show them itself: integers, or a softmax, which gives a score of -inf no
    weight."""
    return (0 * exact(x)).sum(-1, keepdim=True)
