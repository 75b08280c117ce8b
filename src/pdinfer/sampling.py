"""Logits to tokens. A token depends on its row's logits, its request's parameters, its seed and its position: on
nothing else, so batch, engine and re-prefill do not change it.

One uniform number per token, drawn from (seed, position), is looked up in the cumulative distribution in order of token
id. No sorting enters the draw: two nearly equal logits may swap ranks without changing the token.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from pdinfer.types import SamplingParams


@attrs.frozen
class Sampled:
    """One token per row with the log-softmax of the raw logits at it; a row with NaN logits has a NaN log-probability
    and its token means nothing."""

    tokens: list[int]
    logprobs: list[float]


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """One number in (0, 1) per (seed, position): SplitMix64 of both, its upper 53 bits (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seeds, dtype=np.uint64)) + _GOLDEN * np.asarray(positions, dtype=np.uint64)
        bits = _mix(state + _GOLDEN) >> np.uint64(11)
    return (bits.astype(np.float64) + 0.5) * 2.0**-53


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits_BV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Sampled:
    """Draws one token per row of float32 `logits_BV`. `positions[b]` is the index of the drawn token in its sequence.

    Reading the result on the host syncs the device, once.
    """
    if not params:
        return Sampled([], [])
    tokens_B = logits_BV.argmax(-1)
    drawn = [row for row, param in enumerate(params) if param.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits_BV.device)
        chosen = logits_BV if len(drawn) == len(params) else logits_BV[rows]
        tokens_B[rows] = _draw(chosen, [params[row] for row in drawn], [positions[row] for row in drawn])
    logprobs_B = logits_BV.gather(1, tokens_B[:, None])[:, 0] - logits_BV.logsumexp(-1)
    return Sampled(tokens_B.tolist(), logprobs_B.tolist())


def _draw(logits_BV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).to(logits_BV)[:, None]

    scaled_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    scaled_BV = scaled_BV / column([param.temperature for param in params])
    if any(param.top_k or param.top_p < 1 for param in params):
        scaled_BV = _keep_top(scaled_BV, params)
    if any(param.min_p > 0 for param in params):
        # relative to the best token, whose scaled logit is 0
        floor = column([np.log(param.min_p) if param.min_p > 0 else -np.inf for param in params])
        scaled_BV = scaled_BV.masked_fill(scaled_BV < floor, -torch.inf)
    cumulative_BV = scaled_BV.double().exp().cumsum(-1)
    draws = uniforms([param.seed or 0 for param in params], positions)
    targets_B1 = torch.from_numpy(draws).to(cumulative_BV.device)[:, None] * cumulative_BV[:, -1:]
    found_B = torch.searchsorted(cumulative_BV, targets_B1, right=True)[:, 0]
    return found_B.clamp_(max=logits_BV.shape[1] - 1)


def _keep_top(scaled_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """top_k, then top_p of what is left; tokens tied with the last one kept are kept too."""
    vocab = scaled_BV.shape[1]
    ordered_BV = scaled_BV.sort(-1, descending=True).values
    top_k = torch.tensor([param.top_k or vocab for param in params], device=scaled_BV.device).clamp_(max=vocab)
    ranks_V = torch.arange(vocab, device=scaled_BV.device)
    ordered_BV = ordered_BV.masked_fill(ranks_V >= top_k[:, None], -torch.inf)
    shares_BV = ordered_BV.softmax(-1, dtype=torch.float64)
    before_BV = shares_BV.cumsum(-1) - shares_BV
    top_p = torch.tensor([param.top_p for param in params], dtype=torch.float64, device=scaled_BV.device)[:, None]
    kept_BV = (before_BV < top_p) & (ordered_BV > -torch.inf)
    last_B1 = ordered_BV.masked_fill(~kept_BV, torch.inf).amin(-1, keepdim=True)
    return scaled_BV.masked_fill(scaled_BV < last_B1, -torch.inf)
