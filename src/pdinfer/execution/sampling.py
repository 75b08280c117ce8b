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

import enum
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

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


def signed(word: int) -> int:
    """Return the 64-bit word as the int64 with the same bits."""
    return word - (word >> 63 << 64)


class DrawKind(enum.IntEnum):
    """What a batch of draws has to compute, each kind including the ones before it. Rows that ask for less get what
    they would get alone."""

    GREEDY = 0
    RANDOM = 1
    FILTERED = 2

    @classmethod
    def of(cls, sampling: SamplingParams) -> DrawKind:
        """Return what one request needs."""
        if sampling.temperature <= 0:
            return cls.GREEDY
        return cls.FILTERED if sampling.top_k or sampling.top_p < 1 else cls.RANDOM


@attrs.frozen(kw_only=True)
class Controls:
    """The parameters of a draw as tensors [B] on the device of the logits. `min_logit_B` is log(min_p), or -inf;
    `top_k_B` of 0 keeps all. A row of temperature 0 is greedy. `position_B` is the index of the drawn token."""

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
        steps_Q = torch.arange(num_queries, device=self.position_B.device)
        each["position_B"] = (self.position_B[:, None] + steps_Q).view(-1)
        return Controls(**each)

    @classmethod
    def of(cls, draws: Sequence[Draw], device: torch.device) -> Controls:
        """Return the parameters of these draws."""
        columns = zip(*(control_values(draw.sampling) for draw in draws), strict=True)
        tensors = {
            f"{name}_B": torch.tensor(column, dtype=dtype, device=device)
            for (name, dtype), column in zip(CONTROLS.items(), columns, strict=True)
        }
        position_B = torch.tensor([draw.position for draw in draws], dtype=torch.int64, device=device)
        return cls(position_B=position_B, **tensors)


CONTROLS: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "temperature": torch.float64,
        "top_p": torch.float64,
        "min_logit": torch.float64,
        "top_k": torch.int64,
        "seed": torch.int64,
    }
)
"""The columns of `Controls` that do not change while a request runs, with their dtypes."""


def control_values(sampling: SamplingParams) -> tuple[float, float, float, int, int]:
    """Return the values of one request in the order of `CONTROLS`."""
    min_logit = math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
    return sampling.temperature, sampling.top_p, min_logit, sampling.top_k or 0, signed(sampling.seed or 0)


def gumbel_noise(seed_B: Tensor, position_B: Tensor, vocab_size: int) -> Tensor:
    """Return [B, vocab] float32 standard Gumbel noise, which depends on (seed, position, token id) alone. Seeds and
    positions are int64, a seed of 2**63 or more with its bits as they are.

    Seed and position become two 32-bit keys (SplitMix64: Steele, Lea, Flood 2014), which enter an integer hash of the
    token id (the two-multiply finalizer "lowbias32" of C. Wellons' hash-prospector).
    """
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
_GOLDEN_64 = signed(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = signed(0xBF58476D1CE4E5B9), signed(0x94D049BB133111EB)


def _mix(x: Tensor) -> Tensor:
    """Return 64 well mixed bits. Products wrap around; a shift to the right brings in zeros."""
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * _MIX_1
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * _MIX_2
    return x ^ (x >> 31 & (1 << 33) - 1)


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
    kind = max(DrawKind.of(draw.sampling) for draw in draws)
    packed_3B = draw_tokens(logits_BV, changed_BV, Controls.of(draws, logits_BV.device), kind)
    return read_drawn(packed_3B.cpu(), logits_BV, draws, errors)


def draw_tokens(logits_BV: Tensor, changed_BV: Tensor, controls: Controls, kind: DrawKind) -> Tensor:
    """Draw one token per row of `changed_BV`, which are the raw logits `logits_BV` or what a request made of them.
    `kind` is at least that of every row. Does not sync.

    Returns int32 [3, B]: the tokens, and as the bits of float32 their log-probabilities and the logsumexp of the raw
    logits.
    """
    tokens_B = changed_BV.argmax(-1)
    if kind is not DrawKind.GREEDY:
        tokens_B = torch.where(controls.temperature_B > 0, _draw(changed_BV, controls, kind), tokens_B)
    normalizers_B = logits_BV.logsumexp(-1)
    logprobs_B = logits_BV.gather(1, tokens_B[:, None])[:, 0] - normalizers_B
    return torch.stack((tokens_B.int(), logprobs_B.view(torch.int32), normalizers_B.view(torch.int32)))


def read_drawn(
    packed_3B: Tensor, logits_BV: Tensor, draws: Sequence[Draw], errors: Mapping[int, PDInferError]
) -> list[Drawn]:
    """Return what `draw_tokens` drew, from its result on the host. `errors` are those of rows whose logits could not be
    changed. Syncs the device only where a row asks for the best tokens too."""
    words = packed_3B.numpy()
    normalizers = words[2].view(np.float32)
    tops = _top_logprobs(logits_BV, normalizers, draws)
    drawn = []
    numbers = zip(words[0].tolist(), words[1].view(np.float32).tolist(), normalizers.tolist(), strict=True)
    for row, (token, logprob, normalizer) in enumerate(numbers):
        error = errors.get(row)
        if not math.isfinite(normalizer):  # one logit that is NaN or +inf makes it so
            error = PDInferError("the model's logits are not finite")
        elif error is None and not math.isfinite(logprob):
            error = RequestError(f"its logits processor allowed token {token}, whose logit is -inf in the model")
        drawn.append(Drawn(token=token, logprob=logprob, top_logprobs=tops.get(row, ()), error=error))
    return drawn


def _top_logprobs(
    logits_BV: Tensor, normalizers: np.ndarray[tuple[int], np.dtype[np.float32]], draws: Sequence[Draw]
) -> dict[int, TopLogprobs]:
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
    normalizers_B1 = torch.from_numpy(normalizers[list(wanted)]).to(logits_BV.device)[:, None]
    logprobs_BK = some_BV.gather(1, ids_BK) - normalizers_B1
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


def _draw(logits_BV: Tensor, controls: Controls, kind: DrawKind) -> Tensor:
    """Return a token per row, drawn. Rows of temperature 0 get some token."""
    temperature_B = controls.temperature_B
    divisor_B = torch.where(temperature_B > 0, temperature_B, 1).to(logits_BV.dtype)
    scaled_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)) / divisor_B[:, None]
    if kind is DrawKind.FILTERED:
        scaled_BV = _keep_top(scaled_BV, controls)
    # min_p is relative to the best token, whose scaled logit is 0
    scaled_BV = scaled_BV.masked_fill(scaled_BV < controls.min_logit_B.to(logits_BV.dtype)[:, None], -torch.inf)
    return (scaled_BV + gumbel_noise(controls.seed_B, controls.position_B, scaled_BV.shape[1])).argmax(-1)


def _keep_top(scaled_BV: Tensor, controls: Controls) -> Tensor:
    """Apply top_k, and then top_p to what is left. Tokens tied with the last one that is kept are kept too."""
    vocab = scaled_BV.shape[1]
    ordered_BV = scaled_BV.sort(-1, descending=True).values
    top_k_B = torch.where(controls.top_k_B > 0, controls.top_k_B, vocab)
    ranks_V = torch.arange(vocab, device=scaled_BV.device)
    ordered_BV = ordered_BV.masked_fill(ranks_V >= top_k_B[:, None], -torch.inf)
    shares_BV = ordered_BV.softmax(-1, dtype=torch.float64)
    before_BV = shares_BV.cumsum(-1) - shares_BV
    kept_BV = (before_BV < controls.top_p_B[:, None]) & (ordered_BV > -torch.inf)
    last_B1 = ordered_BV.masked_fill(~kept_BV, torch.inf).amin(-1, keepdim=True)
    return scaled_BV.masked_fill(scaled_BV < last_B1, -torch.inf)
