"""From logits to tokens. A token depends only on its row and its `Draw` (the request's parameters and its tokens so
far), so batch, engine and re-prefill do not change it.

The parameters of a request are applied in the order of vLLM's sampler: logit bias; repetition, frequency and presence
penalties; `min_new_tokens`; the logits processor. Greedy decoding takes the largest logit that is left. Otherwise the
temperature follows, then top_k, top_p and min_p, in the order of SGLang's sampler. Log-probabilities are those of the
raw logits.

Drawing uses the Gumbel-max trick: every token id gets noise that is a hash of (seed, position, id), and the largest sum
of logit and noise wins. Rounding in the logits can change a token only where the two best sums are as close as the
rounding, however large the vocabulary is. A draw from the cumulative distribution would have a border at every token.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from pdinfer.bounds import TopLogprobs
from pdinfer.checks import clip
from pdinfer.errors import PDInferError, RequestError
from pdinfer.types import SamplingParams

_log = logging.getLogger("pdinfer")

LogitsProcessor = Callable[[tuple[int, ...], tuple[int, ...], Tensor], Tensor]
"""`(prompt, output, logits_V) -> logits_V`: changes the float32 [vocab] logits of one request's next token. Tokens that
must not come get -inf. It may change its argument in place. It must be a pure function of all three arguments:
prefill calls it for the first token, decode for the others, and both again after a re-prefill. `output` may be a guess
of speculative decoding. If the guess is wrong, what the processor returns or raises is not used."""
LogitsProcessorFactory = Callable[[str], LogitsProcessor]
"""Makes the processor of a request from its `SamplingParams.logits_processor_argument`, once per engine and attempt."""


@attrs.frozen(kw_only=True)
class Draw:
    """What the next token of a row depends on beside its logits: the request's parameters and its tokens so far.
    `eos_token_ids` are those of the model."""

    sampling: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    eos_token_ids: Sequence[int] = ()
    processor: LogitsProcessor | None = None

    @property
    def position(self) -> int:
        """The index of the drawn token in its sequence."""
        return len(self.prompt) + len(self.output)

    @property
    def forbidden(self) -> Sequence[int]:
        """The tokens that would end the request before it has `min_new_tokens`."""
        if len(self.output) >= self.sampling.min_new_tokens:
            return ()
        return (*self.sampling.stop_token_ids, *(() if self.sampling.ignore_eos else self.eos_token_ids))

    @property
    def penalizes(self) -> bool:
        """Whether the logit of a token depends on how often the token came."""
        sampling = self.sampling
        return sampling.repetition_penalty != 1 or bool(sampling.presence_penalty or sampling.frequency_penalty)

    @property
    def changes_logits(self) -> bool:
        """Whether anything but temperature and filters stands between the raw logits and the token."""
        return self.processor is not None or self.penalizes or bool(self.sampling.logit_bias or self.forbidden)


@attrs.frozen(kw_only=True)
class Drawn:
    """A token, and the log-softmax of the raw logits at this token and at the best ones. With an `error` the token is
    meaningless."""

    token: int
    logprob: float
    top_logprobs: TopLogprobs = ()
    error: PDInferError | None = None


def gumbel_noise(seeds: Sequence[int], positions: Sequence[int], vocab_size: int, device: torch.device) -> Tensor:
    """Return [B, vocab] float32 standard Gumbel noise, which depends on (seed, position, token id) alone.

    Seed and position become two 32-bit keys (SplitMix64: Steele, Lea, Flood 2014), which enter an integer hash of the
    token id (the two-multiply finalizer "lowbias32" of C. Wellons' hash-prospector).
    """
    keys_B2 = _keys(seeds, positions).view(np.int32)
    first_B1, second_B1 = torch.from_numpy(keys_B2).to(device)[:, :, None].unbind(1)
    x_BV = torch.arange(vocab_size, dtype=torch.int32, device=device) * _GOLDEN_32 + first_B1
    x_BV = (x_BV ^ (x_BV >> 16 & 0xFFFF)) * 0x7FEB352D ^ second_B1
    x_BV = (x_BV ^ (x_BV >> 15 & 0x1FFFF)) * _LOWBIAS_2
    x_BV = x_BV ^ (x_BV >> 16 & 0xFFFF)
    # winners have small u, and small ints become floats exactly: the resolution is fine where it decides
    uniform_BV = (x_BV & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform_BV.neg_().log1p_().neg_().log_().neg_()


_GOLDEN_32 = -1640531527
"""2**32 / golden ratio, as a signed word."""
_LOWBIAS_2 = 0x846CA68B - 2**32
_GOLDEN_64 = np.uint64(0x9E3779B97F4A7C15)


def _keys(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray[tuple[int, int], np.dtype[np.uint32]]:
    """Return [B, 2] words: 64 well mixed bits for each (seed, position)."""
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seeds, dtype=np.uint64)) + _GOLDEN_64 * np.asarray(positions, dtype=np.uint64)
        return _mix(state + _GOLDEN_64).view(np.uint32).reshape(-1, 2)


def _mix(x: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample(logits_BV: Tensor, draws: Sequence[Draw]) -> list[Drawn]:
    """Draw one token per row of float32 `logits_BV`, which is not changed.

    A row fails alone, with its error in `Drawn`. It is a PDInferError when any of its raw logits is NaN or +inf, even
    if the request masks it, or when all are -inf. It is a RequestError when the logits processor raises, when no token
    is left to draw, or when the processor allowed a token whose raw logit is -inf. Reading the result on the host syncs
    the device.
    """
    if not draws:
        return []
    changed_BV, errors = _change(logits_BV, draws)
    tokens_B = changed_BV.argmax(-1)
    random = [row for row, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if random:
        rows = torch.tensor(random, device=logits_BV.device)
        chosen = changed_BV if len(random) == len(draws) else changed_BV[rows]
        tokens_B[rows] = _draw(chosen, [draws[row] for row in random])
    normalizers_B = logits_BV.logsumexp(-1)
    logprobs_B = logits_BV.gather(1, tokens_B[:, None])[:, 0] - normalizers_B
    tops = _top_logprobs(logits_BV, normalizers_B, draws)
    drawn = []
    numbers = zip(tokens_B.tolist(), logprobs_B.tolist(), normalizers_B.tolist(), strict=True)
    for row, (token, logprob, normalizer) in enumerate(numbers):
        error = errors.get(row)
        if not math.isfinite(normalizer):  # one logit that is NaN or +inf makes it so
            error = PDInferError("the model's logits are not finite")
        elif error is None and not math.isfinite(logprob):
            error = RequestError(f"its logits processor allowed token {token}, whose logit is -inf in the model")
        drawn.append(Drawn(token=token, logprob=logprob, top_logprobs=tops.get(row, ()), error=error))
    return drawn


def _top_logprobs(logits_BV: Tensor, normalizers_B: Tensor, draws: Sequence[Draw]) -> dict[int, TopLogprobs]:
    """Return by row as many of the best tokens as it asks for, without those that cannot come. Of equal tokens the one
    with the smaller id comes first."""
    wanted = {row: count for row, draw in enumerate(draws) if (count := draw.sampling.logprobs)}
    if not wanted:
        return {}
    rows = torch.tensor(list(wanted), device=logits_BV.device)
    some_BV, vocab = logits_BV[rows], logits_BV.shape[1]
    # each becomes one integer, so that no two are equal: the bits of the logit, ordered as floats, and then the id
    bits_BV = (some_BV + 0.0).view(torch.int32)
    ordered_BV = (bits_BV ^ (bits_BV >> 31 & 0x7FFFFFFF)).long() << 32
    keys_BV = ordered_BV + torch.arange(vocab - 1, -1, -1, device=logits_BV.device)
    best_BK = keys_BV.topk(min(max(wanted.values()), vocab)).values
    ids_BK = vocab - 1 - (best_BK & 0xFFFFFFFF)
    logprobs_BK = some_BV.gather(1, ids_BK) - normalizers_B[rows, None]
    tops = zip(ids_BK.tolist(), logprobs_BK.tolist(), strict=True)
    return {
        row: tuple(pair for pair in zip(ids[:count], logprobs[:count], strict=True) if pair[1] > -math.inf)
        for (row, count), (ids, logprobs) in zip(wanted.items(), tops, strict=True)
    }


def _change(logits_BV: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, dict[int, PDInferError]]:
    """Return the logits from which greedy decoding takes its token, and the errors by row. The logits are the same
    tensor if no row asks for a change."""
    rows = [row for row, draw in enumerate(draws) if draw.changes_logits]
    if not rows:
        return logits_BV, {}
    some = [draws[row] for row in rows]
    index = torch.tensor(rows, device=logits_BV.device)
    some_BV = logits_BV[index]
    _add_bias(some_BV, some)
    _penalize(some_BV, some)
    _forbid(some_BV, some)
    errors = _process(some_BV, some)
    for row, best in enumerate(some_BV.amax(-1).tolist()):
        if not math.isfinite(best):
            errors.setdefault(row, _nothing_left(some[row]))
    changed_BV = logits_BV.index_copy(0, index, some_BV) if len(rows) < len(draws) else some_BV
    return changed_BV, {rows[row]: error for row, error in errors.items()}


def _nothing_left(draw: Draw) -> RequestError:
    causes = ["min_new_tokens"] * bool(draw.forbidden) + ["its logits processor"] * (draw.processor is not None)
    return RequestError(
        f"no token is left to draw: the best logit is -inf, inf or nan after {' and '.join(causes) or 'penalties'}; "
        f"leave at least one finite logit"
    )


def _add_bias(logits_BV: Tensor, draws: Sequence[Draw]) -> None:
    biases = [draw.sampling.logit_bias for draw in draws]
    if any(biases):
        values = torch.tensor([value for bias in biases for _, value in bias], dtype=torch.float64).to(logits_BV)
        places = _places([[token for token, _ in bias] for bias in biases], logits_BV.device)
        logits_BV.index_put_(places, values, accumulate=True)


def _penalize(logits_BV: Tensor, draws: Sequence[Draw]) -> None:
    """Apply the penalties in place.

    Repetition (Keskar et al. 2019, section 4.1, with negative logits as in Hugging Face): the logits of tokens in
    prompt or output are divided by the penalty when positive, otherwise multiplied. Frequency and presence (OpenAI's
    API): subtracted once for each time that the token is in the output, and once if it is there at all.
    """
    if not any(draw.penalizes for draw in draws):
        return
    params = [draw.sampling for draw in draws]
    counts_BV = torch.zeros_like(logits_BV)
    places = _places([draw.output if draw.penalizes else () for draw in draws], logits_BV.device)
    counts_BV.index_put_(places, torch.ones_like(places[0], dtype=logits_BV.dtype), accumulate=True)
    present_BV = counts_BV > 0
    seen_BV = present_BV.clone()
    prompts = [draw.prompt if draw.sampling.repetition_penalty != 1 else () for draw in draws]
    seen_BV[_places(prompts, logits_BV.device)] = True
    repetition_B1 = _column([param.repetition_penalty for param in params], logits_BV)
    repeated_BV = torch.where(logits_BV > 0, logits_BV / repetition_B1, logits_BV * repetition_B1)
    logits_BV.copy_(torch.where(seen_BV, repeated_BV, logits_BV))
    logits_BV -= _column([param.frequency_penalty for param in params], logits_BV) * counts_BV
    logits_BV -= _column([param.presence_penalty for param in params], logits_BV) * present_BV


def _forbid(logits_BV: Tensor, draws: Sequence[Draw]) -> None:
    forbidden = [draw.forbidden for draw in draws]
    if any(forbidden):
        logits_BV[_places(forbidden, logits_BV.device)] = -torch.inf


def _process(logits_BV: Tensor, draws: Sequence[Draw]) -> dict[int, PDInferError]:
    """Run the processor of each row. What it raises becomes the error of that row."""
    errors: dict[int, PDInferError] = {}
    for row, draw in enumerate(draws):
        if draw.processor is None:
            continue
        logits_V = logits_BV[row]
        try:
            changed = draw.processor(tuple(draw.prompt), tuple(draw.output), logits_V.clone())
            logits_V.copy_(_of_shape(changed, logits_V))
        except Exception as error:  # noqa: BLE001 - a host's own code; the rest of the batch goes on
            _log.debug("a logits processor failed", exc_info=True)
            errors[row] = RequestError(
                f"logits processor {clip(draw.sampling.logits_processor)} failed: {type(error).__name__}: "
                f"{str(error)[:200]}"
            )
    return errors


def _of_shape(changed: object, logits_V: Tensor) -> Tensor:
    if not isinstance(changed, Tensor) or changed.shape != logits_V.shape:
        raise TypeError(f"it must return a tensor of {len(logits_V)} logits")
    return changed


def _places(tokens: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the (row, id) of every token of every row as an index into [B, vocab]."""
    ids = [np.asarray(row, dtype=np.int64) for row in tokens]
    rows = np.repeat(np.arange(len(ids)), [len(row) for row in ids])
    return torch.from_numpy(rows).to(device), torch.from_numpy(np.concatenate(ids)).to(device)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Return the values as [B, 1], with the dtype and on the device of `like`."""
    return torch.tensor(values, dtype=torch.float64).to(like)[:, None]


def _draw(logits_BV: Tensor, draws: Sequence[Draw]) -> Tensor:
    params = [draw.sampling for draw in draws]

    scaled_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    scaled_BV = scaled_BV / _column([param.temperature for param in params], logits_BV)
    if any(param.top_k or param.top_p < 1 for param in params):
        scaled_BV = _keep_top(scaled_BV, params)
    if any(param.min_p > 0 for param in params):
        # relative to the best token, whose scaled logit is 0
        floor = _column([np.log(param.min_p) if param.min_p > 0 else -np.inf for param in params], logits_BV)
        scaled_BV = scaled_BV.masked_fill(scaled_BV < floor, -torch.inf)
    seeds, positions = [param.seed or 0 for param in params], [draw.position for draw in draws]
    return (scaled_BV + gumbel_noise(seeds, positions, scaled_BV.shape[1], scaled_BV.device)).argmax(-1)


def _keep_top(scaled_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Apply top_k, and then top_p to what is left. Tokens tied with the last one that is kept are kept too."""
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
