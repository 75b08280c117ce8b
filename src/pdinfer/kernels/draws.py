"""Tokens drawn from logits: what a draw depends on beside them, as values on the device, and `draw` in plain torch.

Drawing uses the Gumbel-max trick: every token id gets noise that is a hash of (seed, position, id), and the largest sum
of logit and noise wins. Rounding in the logits can change a token only where the two best sums are as close as the
rounding, however large the vocabulary is. A draw from the cumulative distribution would have a border at every token.
"""

from __future__ import annotations

import enum

import attrs
import torch
from torch import Tensor


class DrawKind(enum.IntEnum):
    """What a batch of draws has to compute, each kind including the ones before it. Rows that ask for less get what
    they would get alone."""

    GREEDY = 0
    RANDOM = 1
    FILTERED = 2


@attrs.frozen(kw_only=True)
class Controls:
    """The parameters of a draw as tensors [B] on the device of the logits: float64, and int64 from `top_k_B` on.

    `min_logit_B` is log(min_p), or -inf; `top_k_B` of 0 keeps all. A row of temperature 0 is greedy. `seed_B` are the
    64 bits of a seed, and `position_B` is the index of the drawn token in its sequence."""

    temperature_B: Tensor
    top_p_B: Tensor
    min_logit_B: Tensor
    top_k_B: Tensor
    seed_B: Tensor
    position_B: Tensor

    def later(self, num_tokens: int) -> Controls:
        """Return the parameters for the tokens so much further on."""
        return attrs.evolve(self, position_B=self.position_B + num_tokens) if num_tokens else self

    def repeated(self, num_queries: int) -> Controls:
        """Return the parameters of Q tokens per row that follow each other, row by row."""
        columns = {field.name: getattr(self, field.name) for field in attrs.fields(Controls)}
        each = {name: column_B.repeat_interleave(num_queries) for name, column_B in columns.items()}
        steps_Q = torch.arange(num_queries, device=self.position_B.device, dtype=torch.int64)
        each["position_B"] = (self.position_B[:, None] + steps_Q).view(-1)
        return Controls(**each)


def draw(logits_BV: Tensor, changed_BV: Tensor, controls: Controls, kind: DrawKind) -> Tensor:
    """Draw one token per row, as `Ops.draw` says."""
    tokens_B = drawn_tokens(changed_BV, changed_BV.argmax(-1), controls, kind)
    normalizers_B = logits_BV.logsumexp(-1)
    logprobs_B = logprobs(logits_BV, tokens_B, normalizers_B)
    return torch.stack((tokens_B.int(), logprobs_B.view(torch.int32), normalizers_B.view(torch.int32)))


def drawn_tokens(changed_BV: Tensor, greedy_B: Tensor, controls: Controls, kind: DrawKind) -> Tensor:
    """Return a token per row: that of `greedy_B` where the temperature is 0, elsewhere one that is drawn."""
    if kind is DrawKind.GREEDY:
        return greedy_B
    return torch.where(controls.temperature_B > 0, _drawn(changed_BV, controls, kind), greedy_B)


def logprobs(logits_BV: Tensor, tokens_B: Tensor, normalizers_B: Tensor) -> Tensor:
    """Return the log-probability of each row's token, float32 [B]."""
    return logits_BV.gather(1, tokens_B[:, None])[:, 0] - normalizers_B


def _drawn(changed_BV: Tensor, controls: Controls, kind: DrawKind) -> Tensor:
    """Return a token per row, drawn. Rows of temperature 0 get some token."""
    temperature_B = controls.temperature_B
    divisor_B = torch.where(temperature_B > 0, temperature_B, 1).to(changed_BV.dtype)
    scaled_BV = (changed_BV - changed_BV.amax(-1, keepdim=True)) / divisor_B[:, None]
    if kind is DrawKind.FILTERED:
        scaled_BV = _keep_top(scaled_BV, controls)
    # min_p is relative to the best token, whose scaled logit is 0
    scaled_BV = scaled_BV.masked_fill(scaled_BV < controls.min_logit_B.to(changed_BV.dtype)[:, None], -torch.inf)
    return (scaled_BV + gumbel_noise(controls.seed_B, controls.position_B, scaled_BV.shape[1])).argmax(-1)


def _keep_top(scaled_BV: Tensor, controls: Controls) -> Tensor:
    """Apply top_k, and then top_p to what is left. Tokens tied with the last one that is kept are kept too."""
    vocab = scaled_BV.shape[1]
    ordered_BV = scaled_BV.sort(-1, descending=True).values
    top_k_B = torch.where(controls.top_k_B > 0, controls.top_k_B, vocab)
    ranks_V = torch.arange(vocab, device=scaled_BV.device, dtype=torch.int64)
    ordered_BV = ordered_BV.masked_fill(ranks_V >= top_k_B[:, None], -torch.inf)
    shares_BV = ordered_BV.softmax(-1, dtype=torch.float64)
    before_BV = shares_BV.cumsum(-1) - shares_BV
    kept_BV = (before_BV < controls.top_p_B[:, None]) & (ordered_BV > -torch.inf)
    last_B1 = ordered_BV.masked_fill(~kept_BV, torch.inf).amin(-1, keepdim=True)
    return scaled_BV.masked_fill(scaled_BV < last_B1, -torch.inf)


def gumbel_noise(seed_B: Tensor, position_B: Tensor, vocab_size: int) -> Tensor:
    """Return [B, vocab] float32 standard Gumbel noise, which depends on (seed, position, token id) alone. Seeds and
    positions are int64, a seed of 2**63 or more with its bits as they are.

    Seed and position become two 32-bit keys (SplitMix64: Steele, Lea, Flood 2014), which enter an integer hash of the
    token id (the two-multiply finalizer "lowbias32" of C. Wellons' hash-prospector)."""
    keys_B = _mix(_mix(seed_B) + position_B * _GOLDEN_64 + _GOLDEN_64)
    first_B1, second_B1 = keys_B.view(torch.int32).view(-1, 2, 1).unbind(1)
    x_BV = torch.arange(vocab_size, dtype=torch.int32, device=seed_B.device) * _GOLDEN_32 + first_B1
    x_BV = (x_BV ^ (x_BV >> 16 & 0xFFFF)) * 0x7FEB352D ^ second_B1
    x_BV = (x_BV ^ (x_BV >> 15 & 0x1FFFF)) * _LOWBIAS_2
    x_BV = x_BV ^ (x_BV >> 16 & 0xFFFF)
    # winners have small u, and small ints become floats exactly: the resolution is fine where it decides
    uniform_BV = (x_BV & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform_BV.neg_().log1p_().neg_().log_().neg_()


_GOLDEN_32 = -1640531527
"""2**32 / golden ratio, as a signed word."""
_LOWBIAS_2 = 0x846CA68B - 2**32
_GOLDEN_64 = 0x9E3779B97F4A7C15 - 2**64
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


def _mix(x: Tensor) -> Tensor:
    """Return 64 well mixed bits. Products wrap around; a shift to the right brings in zeros."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _MIX_1
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _MIX_2
    return x ^ (x >> 31 & (1 << 33) - 1)
