"""Ops that are a sequence of others, so that one kernel can do what they do between two large products.

A provider may have any of them. Where none has, the op is the function of that name in `compositions.py`, which calls
the ops that were chosen and is the specification.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows, Rounded
from pdinfer.kernels.formats.format import Rounding


class FusedOps(Protocol):
    """The part of `ops.Ops` that is made of the other part."""

    def add_rms_norm(
        self, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm of the sum, the sum), where the sum is residual + x rounded to x's dtype, or x itself
        without a residual."""

    def add_rms_norm_fp8(
        self, x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, eps: float, *, ue8m0: bool
    ) -> tuple[Rounded, Tensor]:
        """Do as `add_rms_norm`, and `quantize_fp8` the norm as it is returned, in x's dtype."""

    def gated_silu_fp8(self, x_TJ: Tensor, *, ue8m0: bool) -> FP8Rows:
        """`quantize_fp8` what `gated_silu` returns, in x's dtype."""

    def norm_rotate_store(
        self,
        c_TC: Tensor,
        k_TR: Tensor,
        weight_C: Tensor,
        eps: float,
        cos_TF: Tensor,
        sin_TF: Tensor,
        pages_PGW: Tensor,
        slots_T: Tensor,
        *,
        rounding: Rounding | None,
    ) -> None:
        """Write token t's latent c after `rms_norm`, and its key k after `rotate` (of interleaved pairs), to its slot
        as `store_latent` does. With a `rounding` the normed latent is rounded so first, by `round_fp8` or `round_int8`.
        c and k may be views of wider rows. Mutates `pages_PGW` alone."""

    def combine_experts(
        self,
        y_SD: Tensor,
        row_TK: Tensor | None,
        weights_TK: Tensor | None,
        shared_TD: Tensor | None,
        residual_TD: Tensor | None,
    ) -> Tensor:
        """Return residual + (combine_rows(y, row, weights) + shared) -> [T, D] in y's dtype. The inner sum is float32,
        and rounded to that dtype before the residual is added in it. None adds nothing; without `row_TK` and
        `weights_TK` y has the sum of each token already, S = T."""
