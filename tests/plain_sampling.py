"""Sampling as plain loops over Python's own floats, one token at a time: the specification of
`pdinfer.execution.sampling`."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import attrs

from pdinfer.types import SamplingParams


@attrs.frozen
class PlainToken:
    """A drawn token. `margin` is the distance of its sum of logit and noise to the second best; filters have borders of
    their own, which `margin` does not cover."""

    token: int
    logprob: float
    margin: float
    top_logprobs: list[tuple[int, float]]


def plain_draw(
    logits: Sequence[float],
    sampling: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_token_ids: Sequence[int] = (),
    allowed: Collection[int] | None = None,
) -> PlainToken:
    """Draw the token behind `output`; `allowed` are those that a logits processor leaves, by default all."""
    changed = changed_logits(logits, sampling, prompt, output, eos_token_ids)
    if allowed is not None:
        changed = [logit if token in allowed else -math.inf for token, logit in enumerate(changed)]
    sums = dict(enumerate(changed))
    if sampling.temperature:
        position = len(prompt) + len(output)
        sums = {
            token: changed[token] / sampling.temperature + plain_noise(sampling.seed or 0, position, token)
            for token in kept(changed, sampling)
        }
    order = sorted(sums, key=lambda token: (-sums[token], token))
    best = max(logits)
    normalizer = best + math.log(sum(math.exp(logit - best) for logit in logits))
    tops = sorted(range(len(logits)), key=lambda token: (-logits[token], token))[: sampling.logprobs or 0]
    return PlainToken(
        token=order[0],
        logprob=logits[order[0]] - normalizer,
        margin=sums[order[0]] - sums[order[1]] if len(order) > 1 else math.inf,
        top_logprobs=[(token, logits[token] - normalizer) for token in tops],
    )


def changed_logits(
    logits: Sequence[float],
    sampling: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_token_ids: Sequence[int] = (),
) -> list[float]:
    """Apply the bias, then penalties, then what `min_new_tokens` forbids."""
    changed = list(logits)
    for token, bias in sampling.logit_bias:
        changed[token] += bias
    for token in {*prompt, *output}:
        if changed[token] > 0:
            changed[token] /= sampling.repetition_penalty
        else:
            changed[token] *= sampling.repetition_penalty
    for token in output:
        changed[token] -= sampling.frequency_penalty
    for token in set(output):
        changed[token] -= sampling.presence_penalty
    if len(output) < sampling.min_new_tokens:
        for token in sampling.stop_token_ids:
            changed[token] = -math.inf
        for token in () if sampling.ignore_eos else eos_token_ids:
            changed[token] = -math.inf
    return changed


def kept(logits: Sequence[float], sampling: SamplingParams) -> set[int]:
    """Return the tokens that may be drawn, by a plain loop over the sorted vocabulary; the logits must have no ties."""
    best = max(logits)
    weights = {token: math.exp((logit - best) / sampling.temperature) for token, logit in enumerate(logits)}
    order = sorted(weights, key=lambda token: -weights[token])[: sampling.top_k or None]
    total = sum(weights[token] for token in order)
    inside: set[int] = set()
    share = 0.0
    for token in order:
        if share < sampling.top_p:
            inside.add(token)
        share += weights[token] / total
    return {token for token in inside if weights[token] >= sampling.min_p}


def plain_noise(seed: int, position: int, token: int) -> float:
    """Compute the documented hash in Python's own integers: SplitMix64's finalizer twice, then lowbias32 with two
    keys."""

    def mixed(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    keys = mixed((mixed(seed) + golden * position + golden) % 2**64)
    x = (token * 0x9E3779B9 + keys % 2**32) % 2**32
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32 ^ keys >> 32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    x ^= x >> 16
    return -math.log(-math.log1p(-(x % 2**31 + 0.5) / 2**31))
