"""From logits to tokens. A token depends only on its row and its `Draw` (the request's parameters and its tokens so
far), so batch, engine and re-prefill do not change it.

The parameters of a request are applied in the order of vLLM's sampler: logit bias; repetition, frequency and presence
penalties; `min_new_tokens`; the logits processor. Greedy decoding takes the largest logit that is left. Otherwise the
temperature follows, then top_k, top_p and min_p, in the order of SGLang's sampler. Log-probabilities are those of the
raw logits. What does not need the host is the op `draw`."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdinfer.bounds import TopLogprobs, cause
from pdinfer.checks import clip
from pdinfer.errors import PDInferError, RequestError
from pdinfer.kernels import reference
from pdinfer.kernels.draws import Controls, DrawKind
from pdinfer.log import log
from pdinfer.types import Request, SamplingParams

LogitsProcessor = Callable[[tuple[int, ...], tuple[int, ...], Tensor], Tensor]
"""`(prompt, output, logits_V) -> logits_V`: changes the float32 [vocab] logits of one request's next token. Tokens that
must not come get -inf. It may change its argument in place. It must be a pure function of all three arguments:
prefill calls it for the first token, decode for the others, and both again after a re-prefill. `output` may be a guess
of speculative decoding. If the guess is wrong, what the processor returns or raises is not used."""
LogitsProcessorFactory = Callable[[str], LogitsProcessor]
"""Makes the processor of a request from its `SamplingParams.logits_processor_argument`, once per engine and attempt."""


def make_processor(factories: Mapping[str, LogitsProcessorFactory], sampling: SamplingParams) -> LogitsProcessor | None:
    """Make the logits processor of a request that was checked. Raise RequestError when that fails."""
    name = sampling.logits_processor
    if name is None:
        return None
    try:
        processor = factories[name](sampling.logits_processor_argument)
        if not callable(processor):
            raise TypeError("its factory made no function")
    except Exception as error:  # a host's own code; what it says about the argument is meant for the sender
        raise RequestError(f"logits processor {name!r} does not take its argument: {cause(error)}") from error
    return processor


@attrs.frozen(kw_only=True)
class Draw:
    """What the next token of a row depends on besides its logits: the request's parameters and its tokens so far.
    `eos_token_ids` are those of the model."""

    sampling: SamplingParams
    prompt: Sequence[int]
    output: Sequence[int]
    eos_token_ids: Sequence[int] = ()
    processor: LogitsProcessor | None = None
    # what follows once, not in every step
    kind: DrawKind = attrs.field(init=False)
    """What the op has to compute for it."""
    is_plain: bool = attrs.field(init=False)
    """Whether nothing but temperature and filters ever stands between the raw logits and the token."""

    @kind.default
    def _kind(self) -> DrawKind:
        sampling = self.sampling
        if sampling.temperature <= 0:
            return DrawKind.GREEDY
        return DrawKind.FILTERED if sampling.top_k or sampling.top_p < 1 else DrawKind.RANDOM

    @is_plain.default
    def _is_plain(self) -> bool:
        sampling = self.sampling
        has_none = self.processor is None and not sampling.logit_bias and not sampling.min_new_tokens
        return has_none and not self.penalizes

    @classmethod
    def of(
        cls, request: Request, output: Sequence[int], *, eos_token_ids: Sequence[int], processor: LogitsProcessor | None
    ) -> Draw:
        """Return what the token of a request after `output` depends on. Prefill, which draws the first one, and decode
        ask here, so that neither lacks what the other has."""
        # every step reads all of a prompt whose tokens are penalized, which is slow for a tuple of ints
        prompt = array("q", request.prompt) if request.sampling.repetition_penalty != 1 else request.prompt
        return cls(
            sampling=request.sampling, prompt=prompt, output=output, eos_token_ids=eos_token_ids, processor=processor
        )

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
        """Whether anything but temperature and filters stands between the raw logits and the next token."""
        if self.is_plain:
            return False
        return self.processor is not None or self.penalizes or bool(self.sampling.logit_bias or self.forbidden)


@attrs.define(kw_only=True)
class Drawn:
    """A token, and the log-softmax of the raw logits at this token and at the best ones; None for a token that another
    engine drew and sent without it. With an `error` the token is meaningless. Nobody changes it; one is made for each
    token, and to make a frozen one takes more than twice as long."""

    token: int
    logprob: float | None
    top_logprobs: TopLogprobs = ()
    error: PDInferError | None = None


def signed(word: int) -> int:
    """Return the 64-bit word as the int64 with the same bits."""
    return word - (word >> 63 << 64)


def change_logits(draws: Sequence[Draw]) -> bool:
    """Return whether one of these draws changes its logits, which the host does."""
    return any(draw.changes_logits for draw in draws if not draw.is_plain)


def kind_of(draws: Sequence[Draw]) -> DrawKind:
    """Return what a batch of these draws needs."""
    return max([draw.kind for draw in draws], default=DrawKind.GREEDY)


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


def controls_of(draws: Sequence[Draw], device: torch.device) -> Controls:
    """Return the parameters of these draws on the device."""
    columns = zip(*(control_values(draw.sampling) for draw in draws), strict=True)
    tensors = {
        f"{name}_B": torch.tensor(column, dtype=dtype, device=device)
        for (name, dtype), column in zip(CONTROLS.items(), columns, strict=True)
    }
    position_B = torch.tensor([draw.position for draw in draws], dtype=torch.int64, device=device)
    return Controls(position_B=position_B, **tensors)


def sample(
    logits_BV: Tensor,
    draws: Sequence[Draw],
    draw: Callable[[Tensor, Tensor, Controls, DrawKind], Tensor] = reference.draw,
) -> list[Drawn]:
    """Draw one token per row of float32 `logits_BV`, which is not changed, with the op `draw`.

    A row fails alone, with its error in `Drawn`. It is a PDInferError when any of its raw logits is NaN or +inf, even
    if the request masks it, or when all are -inf. It is a RequestError when the logits processor raises, when no token
    is left to draw, or when the processor allowed a token whose raw logit is -inf. Reading the result on the host syncs
    the device."""
    if not draws:
        return []
    changed_BV, errors = _change(logits_BV, draws)
    packed_3B = draw(logits_BV, changed_BV, controls_of(draws, logits_BV.device), kind_of(draws))
    return read_drawn(packed_3B.cpu().numpy(), logits_BV, draws, errors)


def read_drawn(
    words: npt.NDArray[np.int32], logits_BV: Tensor, draws: Sequence[Draw], errors: Mapping[int, PDInferError]
) -> list[Drawn]:
    """Return what the op `draw` drew, from its result [3, B] on the host. `errors` are those of rows whose logits could
    not be changed. Syncs the device only where a row asks for the best tokens too."""
    logprobs, normalizers = words[1:].view(np.float32)
    tops = _top_logprobs(logits_BV, normalizers, draws)
    if not tops and not errors and np.isfinite(logprobs).all() and np.isfinite(normalizers).all():
        pairs = zip(words[0].tolist(), logprobs.tolist(), strict=True)
        return [Drawn(token=token, logprob=logprob) for token, logprob in pairs]
    drawn = []
    numbers = zip(words[0].tolist(), logprobs.tolist(), normalizers.tolist(), strict=True)
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
    rows = torch.tensor(list(wanted), device=logits_BV.device, dtype=torch.int64)
    some_BV, vocab = logits_BV[rows], logits_BV.shape[1]
    # each becomes one integer, so that no two are equal: the bits of the logit, ordered as floats, and then the id
    bits_BV = (some_BV + 0.0).view(torch.int32)
    ordered_BV = (bits_BV ^ (bits_BV >> 31 & 0x7FFFFFFF)).long() << 32
    keys_BV = ordered_BV + torch.arange(vocab - 1, -1, -1, device=logits_BV.device, dtype=torch.int64)
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
    index = torch.tensor(rows, device=logits_BV.device, dtype=torch.int64)
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
        values = torch.tensor([value for bias in biases for _, value in bias], dtype=torch.float64, device="cpu").to(
            logits_BV
        )
        places = _places([[token for token, _ in bias] for bias in biases], logits_BV.device)
        logits_BV.index_put_(places, values, accumulate=True)


def _penalize(logits_BV: Tensor, draws: Sequence[Draw]) -> None:
    """Apply the penalties in place.

    Repetition (Keskar et al. 2019, section 4.1, with negative logits as in Hugging Face): the logits of tokens in
    prompt or output are divided by the penalty when positive, otherwise multiplied. Frequency and presence (OpenAI's
    API): subtracted once for each time that the token is in the output, and once if it is there at all."""
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
            logits_V.copy_(_ending_alike(_of_shape(changed, logits_V), logits_V, draw))
        except Exception as error:  # noqa: BLE001 - a host's own code; the rest of the batch goes on
            log.debug("a logits processor failed", exc_info=True)
            errors[row] = RequestError(
                f"logits processor {clip(draw.sampling.logits_processor)} failed: {cause(error)}"
            )
    return errors


def _ending_alike(changed_V: Tensor, logits_V: Tensor, draw: Draw) -> Tensor:
    """Let an answer end by each of its ends where the processor lets it end by an eos: a processor knows neither the
    request's stop tokens nor, maybe, all eos tokens of the model."""
    eos = list(draw.eos_token_ids)
    if not eos or not bool((changed_V[eos] > -torch.inf).any()):
        return changed_V
    ends = [*eos, *draw.sampling.stop_token_ids]
    changed_V = changed_V.clone()  # it may be one that the processor keeps
    changed_V[ends] = torch.where(changed_V[ends] == -torch.inf, logits_V[ends], changed_V[ends])
    return changed_V


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
    return torch.tensor(values, dtype=torch.float64, device="cpu").to(like)[:, None]
