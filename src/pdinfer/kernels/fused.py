"""Ops that are a sequence of others, so that one kernel can do what they do between two large products.

A provider may have any of them. Where none has, the op is the function of that name in `compositions.py`, which calls
the ops that were chosen and is the specification.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows, Rounded
from pdinfer.kernels.formats.format import Rounding


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


class GatedSiluFP8(Protocol):
    """The activation of an MLP whose output map is in FP8."""

    def __call__(self, x_TJ: Tensor, *, ue8m0: bool) -> FP8Rows:
        """`quantize_fp8` what `gated_silu` returns, in x's dtype."""


class NormRotateStore(Protocol):
    """Writes the cache from what kv_a_proj returns."""

    def __call__(
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


class MLAAbsorbed(Protocol):
    """Attends with the queries of a decode step."""

    def __call__(
        self,
        q_THQ: Tensor,
        cos_TF: Tensor,
        sin_TF: Tensor,
        pages_PGW: Tensor,
        page_table_BM: Tensor,
        context_lens_B: Tensor,
        k_b_HNC: Tensor,
        v_b_HVC: Tensor,
        *,
        scale: float,
    ) -> Tensor:
        """Return heads_out(o, v_b) -> [T, H, V], where o is `mla_decode` of the last T / B tokens of each sequence. Of
        each query the first N values come into the latent space by heads_in(q, k_b), and the others are rotated."""


class GatedMLP(Protocol):
    """Runs an MLP whose weights have one format of floats."""

    def __call__(self, x_TD: Tensor, gate_up: Any, down: Any) -> Tensor:
        """Return linear(gated_silu(linear(x, gate_up)), down) -> [T, D]. gate_up is [2I, D] in two parts, down is
        [D, I]."""


class ChooseExperts(Protocol):
    """Is a router."""

    def __call__(
        self,
        x_TD: Tensor,
        weight_ED: Tensor,
        bias_E: Tensor | None,
        *,
        sigmoid: bool,
        top_k: int,
        num_groups: int,
        top_k_groups: int,
        normalize: bool,
        scaling_factor: float,
    ) -> tuple[Tensor, Tensor]:
        """Return what `route` makes of the logits x @ weight.T, computed in float32. Weights are float32."""


class SortRows(Protocol):
    """Sorts rows by expert."""

    def __call__(self, x_TD: Tensor, ids_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return (x_SD, counts_E, row_TK): the rows in the order that `group_rows` assigns, how many each expert has,
        and the row of each choice."""


class CombineExperts(Protocol):
    """Ends a layer with experts."""

    def __call__(
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
