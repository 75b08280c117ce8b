"""Logits to tokens. A token depends on its row's logits, its request's parameters, its seed and its position: on
nothing else, so batch, engine and re-prefill do not change it.

Drawing is Gumbel-max: every token id gets noise that is a hash of (seed, position, id), and the largest sum of logit
and noise wins. Rounding in the logits can only change a token where the two best sums are as close as the rounding,
however large the vocabulary; a draw from the cumulative distribution would have a border for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from pdinfer.errors import PDInferError
from pdinfer.types import SamplingParams, TopLogprobs

LogitsProcessor = Callable[[Sequence[int], Sequence[int], Tensor], Tensor]
"""`(prompt, output, logits_V) -> logits_V`, float32 [vocab]: a pure function of the tokens so far and their logits."""


@attrs.frozen(kw_only=True)
class Draw:
    """What a row's next token depends on beside its logits: the request's parameters and its tokens so far.
    `eos_token_ids` are the model's."""

    sampling: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    eos_token_ids: Sequence[int] = ()
    processor: LogitsProcessor | None = None

    @property
    def position(self) -> int:
        """The index of the drawn token in its sequence."""
        return len(self.prompt) + len(self.output)


@attrs.frozen(kw_only=True)
class Drawn:
    """A token, the log-softmax of the raw logits at it and at the best others; with an `error` the token means
    nothing."""

    token: int
    logprob: float
    top_logprobs: TopLogprobs = ()
    error: PDInferError | None = None


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """[B, vocab] float32 standard Gumbel noise, a function of (seed, position, token id) alone.

    Seed and position become two 32-bit keys (SplitMix64: Steele, Lea, Flood 2014), which enter an integer hash of the
    token id (the two-multiply finalizer "lowbias32" of C. Wellons' hash-prospector).
    """
    keys_B2 = _keys(seeds, positions).view(np.int32)
    first_B1, second_B1 = torch.from_numpy(keys_B2).to(device)[:, :, None].unbind(1)
    x_BV = torch.arange(vocab_size, dtype=torch.int32, device=device) * _GOLDEN_32 + first_B1
    x_BV = (x_BV ^ (x_BV >> 16 & 0xFFFF)) * 0x7FEB352D ^ second_B1
    x_BV = (x_BV ^ (x_BV >> 15 & 0x1FFFF)) * _LOWBIAS_2
    x_BV = x_BV ^ (x_BV >> 16 & 0xFFFF)
    # winners have small u, and small ints become floats exactly: the resolution is where it decides
    uniform_BV = (x_BV & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform_BV.neg_().log1p_().neg_().log_().neg_()


_GOLDEN_32 = -1640531527
"""2**32 / golden ratio, as a signed word."""
_LOWBIAS_2 = 0x846CA68B - 2**32
_GOLDEN_64 = np.uint64(0x9E3779B97F4A7C15)


def _keys(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
    """[B, 2] words: 64 well mixed bits for each (seed, position)."""
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seeds, dtype=np.uint64)) + _GOLDEN_64 * np.asarray(positions, dtype=np.uint64)
        return _mix(state + _GOLDEN_64).view(np.uint32).reshape(-1, 2)


def _mix(x: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits_BV: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """Draws one token per row of float32 `logits_BV`.

    Reading the result on the host syncs the device, once.
    """
    if not draws:
        return []
    tokens_B = logits_BV.argmax(-1)
    drawn = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits_BV.device)
        chosen = logits_BV if len(drawn) == len(draws) else logits_BV[rows]
        tokens_B[rows] = _draw(chosen, [draws[row] for row in drawn])
    logprobs_B = logits_BV.gather(1, tokens_B[:, None])[:, 0] - logits_BV.logsumexp(-1)
    return [_drawn(*pair) for pair in zip(tokens_B.tolist(), logprobs_B.tolist(), strict=True)]


def _drawn(token: int, logprob: float) -> Drawn:
    error = None if logprob == logprob else PDInferError("the model's logits are not finite")
    return Drawn(token=token, logprob=logprob, error=error)


def _draw(logits_BV: Tensor, draws: Sequence[Draw]) -> Tensor:
    params = [draw.sampling for draw in draws]

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
    seeds, positions = [param.seed or 0 for param in params], [draw.position for draw in draws]
    return (scaled_BV + gumbel_noise(seeds, positions, scaled_BV.shape[1], scaled_BV.device)).argmax(-1)


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
