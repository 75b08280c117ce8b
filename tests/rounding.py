"""How far floats may be from the exact result. The bounds follow from dtypes, from the lengths of sums and from the
sizes of the terms, whatever the order of a sum and whatever adds it up. They never follow from the results of a
particular machine.

Each op rounds its result to its dtype once, and intermediate values where this is said; everything else is float32.
Bounds are worst cases to first order: N. Higham, Accuracy and Stability of Numerical Algorithms (2nd edition), sections
2.2 (roundings), 3.1 (sums in any order, error gamma_n) and 3.3 (errors that are carried on). Tensors here are float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdinfer.config import ModelConfig

TINY = torch.finfo(torch.float32).tiny
"""The largest number that may be flushed to 0; bfloat16 has the same exponents."""


def unit(dtype: torch.dtype) -> float:
    """Return the largest relative change that rounding makes to a number."""
    return torch.finfo(dtype).eps / 2


def gamma(count: int, dtype: torch.dtype = torch.float32) -> float:
    """Return the largest relative error of `count` roundings."""
    return count * unit(dtype) / (1 - count * unit(dtype))


def error_of_products(x_TN: Tensor, weight_ON: Tensor) -> Tensor:
    """Return the error of x @ weight.T [T, O] summed in float32."""
    length = x_TN.shape[-1]
    return gamma(length + 1) * (x_TN.abs() @ weight_ON.abs().mT) + length * TINY


def rounded(exact: Tensor, error: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return the error of a value that is `error` away from `exact`, once it is rounded to `dtype`."""
    return error + unit(dtype) * (exact.abs() + error) + TINY


def error_of_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """Return the error of an RMS norm; with a bias, of a layer norm, whose rows are centred first."""
    length = x_TD.shape[-1]
    centred_TD, error_TD = x_TD, torch.zeros_like(x_TD)
    if bias_D is not None:
        centred_TD = x_TD - x_TD.mean(-1, keepdim=True)
        error_TD = gamma(length + 2) * (x_TD.abs() + x_TD.abs().mean(-1, keepdim=True))
    square_T1 = centred_TD.square().mean(-1, keepdim=True) + eps
    # error of the mean of squares; a root halves relative errors
    off_T1 = gamma(length + 4) * square_T1 + (2 * centred_TD.abs() * error_TD + error_TD.square()).mean(
        -1, keepdim=True
    )
    scaled_TD = centred_TD / square_T1.sqrt() * weight_D
    relative_T1 = off_T1 / (2 * square_T1) + gamma(8)
    error_TD = scaled_TD.abs() * relative_T1 + error_TD / square_T1.sqrt() * weight_D.abs()
    return error_TD if bias_D is None else error_TD + gamma(2) * (scaled_TD.abs() + bias_D.abs())


def error_of_silu(gate: Tensor, up: Tensor) -> Tensor:
    """Return the error of silu(gate) * up. An exponential is off by a few roundings and by one of its argument, times
    the argument."""
    exact = torch.nn.functional.silu(gate) * up
    return exact.abs() * (8 + 2 * gate.abs()) * unit(torch.float32) + 2 * TINY * (1 + gate.abs()) * (1 + up.abs())


def error_of_mlp(x_TD: Tensor, gate_up_JD: Tensor, down_DI: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the error of down . (silu(gate . x) * (up . x)); both products and the activation are rounded to
    `dtype`."""
    wide_TJ = x_TD @ gate_up_JD.T
    gate, up = wide_TJ.chunk(2, -1)
    off_gate, off_up = rounded(wide_TJ, error_of_products(x_TD, gate_up_JD), dtype).chunk(2, -1)
    hidden = torch.nn.functional.silu(gate) * up
    # the slope of silu is at most 1.1
    carried = 1.1 * off_gate * (up.abs() + off_up) + torch.nn.functional.silu(gate).abs() * off_up
    off_hidden = rounded(hidden, error_of_silu(gate, up) + carried, dtype)
    return error_of_products(hidden.abs() + off_hidden, down_DI) + off_hidden @ down_DI.abs().T


def error_of_attention(
    q_THN: Tensor,
    k_SHN: Tensor,
    v_SHV: Tensor,
    visible_TS: Tensor,
    scale: float,
    dtype: torch.dtype,
    off_k_SHN: Tensor | float = 0.0,
    off_v_SHV: Tensor | float = 0.0,
) -> Tensor:
    """Return the error of softmax(scale * q . k) . v [T, H, V] in any number of blocks. Scores, weights and the sums of
    blocks are rounded to `dtype`; keys and values are off by the given errors."""
    length, width = len(k_SHN), q_THN.shape[-1]
    scores_THS = torch.einsum("thn,shn->ths", q_THN, k_SHN)
    off_THS = gamma(width + 3) * torch.einsum("thn,shn->ths", q_THN.abs(), k_SHN.abs() + off_k_SHN) + width * TINY
    off_THS = off_THS + torch.einsum("thn,shn->ths", q_THN.abs(), k_SHN.abs() * 0 + off_k_SHN)
    off_THS = scale * rounded(scores_THS, off_THS, dtype)
    hidden = ~visible_TS[:, None, :]
    scores_THS = (scale * scores_THS).masked_fill(hidden, -torch.inf)
    least = scores_THS.masked_fill(hidden, torch.inf).amin(-1, keepdim=True)
    spread_TH1 = scores_THS.amax(-1, keepdim=True) - least
    # a weight is an exponential over a sum of them, each off by the largest error of a score
    exponent_TH1 = 2 * off_THS.masked_fill(hidden, 0).amax(-1, keepdim=True)
    exponent_TH1 = exponent_TH1 + 2 * (8 + 4 * spread_TH1) * unit(torch.float32)
    relative_TH1 = exponent_TH1.expm1() + gamma(4 * length + 16) + 3 * unit(dtype)
    weights_THS = scores_THS.softmax(-1)
    size_THV = torch.einsum("ths,shv->thv", weights_THS, v_SHV.abs() + off_v_SHV)
    carried_THV = torch.einsum("ths,shv->thv", weights_THS, v_SHV * 0 + off_v_SHV)
    return relative_TH1 * size_THV + carried_THV + length * TINY


def difference_of_models(config: ModelConfig, context: int, size: float, dtype: torch.dtype = torch.float32) -> float:
    """Return the difference of logits up to `size` that were computed in two ways: the error that the sums on the way
    from one value to the logits, one after the other, may each add.

    This is no proof, because a worst case through layers says nothing: norms bring values back to size one, so that
    errors add up and do not grow, and a sum whose roundings are independent is off by the root of what gamma allows.
    """
    attention = 2 * config.hidden_size + 2 * (config.q_lora_rank or 0) + 3 * config.kv_lora_rank + config.qk_head_dim
    attention += context + config.num_attention_heads * config.v_head_dim
    experts = config.moe_intermediate_size * (config.n_shared_experts or 0) + config.num_experts_per_tok
    mlp = 3 * config.hidden_size + max(config.intermediate_size, experts)
    return 2 * gamma(config.num_hidden_layers * (attention + mlp) + 2 * config.hidden_size, dtype) * size


def assert_within(got: Tensor, exact: Tensor, error: Tensor | float, dtype: torch.dtype) -> None:
    """Assert that the tensor is finite, of this dtype, and within `error` of the exact value before rounding to that
    dtype."""
    assert (got.dtype, got.shape) == (dtype, exact.shape)
    assert got.isfinite().all()
    over = (got.cpu().double() - exact).abs() - rounded(exact, error, dtype)
    assert (over <= 0).all(), f"{int((over > 0).sum())} of {over.numel()} are too far off, at most by {over.max():.3g}"
