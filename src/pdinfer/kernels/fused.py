"""Ops that are a sequence of others, so that one kernel can do what they do between two large products.

A provider may have any of them. Where none has, the op is the function of that name in `compositions.py`, which calls
the ops that were chosen and is the specification.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pdinfer.kernels.activations import Rounded


class AddRMSNorm(Protocol):
    """Adds to the residual stream and normalises."""

    def __call__(self, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (rms_norm of the sum, the sum), where the sum is residual + x rounded to x's dtype, or x itself
        without a residual."""


class AddRMSNormFP8(Protocol):
    """Does so for products in FP8."""

    def __call__(
        self, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, *, ue8m0: bool
    ) -> tuple[Rounded, Tensor]:
        """Do as `add_rms_norm`, and `quantize_fp8` the norm as it is returned, in x's dtype."""
