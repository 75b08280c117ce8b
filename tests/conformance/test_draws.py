"""Draws of tokens, for every provider, as in test_ops. What the reference draws, plain loops draw too
(tests/unit/execution/test_sampling.py)."""

from __future__ import annotations

import math
import random
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from pdinfer.kernels import reference
from pdinfer.kernels.draws import Controls, DrawKind
from tests.conformance.op_suite import draw, every_place, op_of
from tests.joined import for_each
from tests.rounding import assert_within

VOCABS = [1, 500, 2048, 4100]
"""Widths within a tile, as wide as one, and wider."""


def controls_of(
    rows: int,
    *,
    temperature: tuple[float, ...] = (1.0,),
    top_k: tuple[int, ...] = (0,),
    top_p: tuple[float, ...] = (1.0,),
    min_p: tuple[float, ...] = (0.0,),
    seed: int = 0,
) -> Controls:
    """Return parameters of which each row has any of the values given, and any seed and position."""
    chance = random.Random(seed)

    def column(values: tuple[float, ...]) -> Tensor:
        return torch.tensor([float(chance.choice(values)) for _ in range(rows)], dtype=torch.float64)

    def words(low: int, high: int) -> Tensor:
        return torch.tensor([chance.randrange(low, high) for _ in range(rows)], dtype=torch.int64)

    return Controls(
        temperature_B=column(temperature),
        top_p_B=column(top_p),
        min_logit_B=column(min_p).log(),
        top_k_B=column(top_k).long(),
        seed_B=words(-(2**63), 2**63),
        position_B=words(0, 2**31),
    )


def moved(controls: Controls, device: str) -> Controls:
    """Return the parameters on the device."""
    return Controls(**{field.name: getattr(controls, field.name).to(device) for field in attrs.fields(Controls)})


def draw_of(provider: str, device: str) -> Any:
    """Return the op of a model of bfloat16, whose logits are float32 too, since all providers have it."""
    return op_of(provider, "draw", device, torch.bfloat16)


def check(
    provider: str,
    device: str,
    logits_BV: Tensor,
    controls: Controls,
    kind: DrawKind = DrawKind.FILTERED,
    changed_BV: Tensor | None = None,
) -> Tensor:
    """Assert that the tokens are those of the reference, with their log-probabilities, and return them."""
    changed_BV = logits_BV if changed_BV is None else changed_BV
    there = [x.to(device) for x in (logits_BV, changed_BV)]
    if changed_BV is logits_BV:
        there[1] = there[0]
    packed_3B = draw_of(provider, device)(*there, moved(controls, device), kind).cpu()
    assert (packed_3B.dtype, packed_3B.shape) == (torch.int32, (3, len(logits_BV)))
    tokens_B = packed_3B[0].long()
    assert tokens_B.tolist() == reference.draw(logits_BV, changed_BV, controls, kind)[0].tolist()
    exact_BV = logits_BV.double()
    normalizers_B = exact_BV.logsumexp(-1)
    # exponentials are good to a few bits, and so are 32 partial sums of 5000; the largest logit stands before the log
    bound_B = 1e-6 * (1 + exact_BV.amax(-1).abs() + math.log(logits_BV.shape[1]))
    assert_within(packed_3B[2].view(torch.float32), normalizers_B, bound_B, torch.float32)
    logprobs_B = exact_BV.gather(1, tokens_B[:, None])[:, 0] - normalizers_B
    assert_within(packed_3B[1].view(torch.float32), logprobs_B, 2 * bound_B, torch.float32)
    return tokens_B


@every_place("draw", dtype=torch.bfloat16)
@for_each("vocab", VOCABS)
@for_each("kind", DrawKind)
def test_tokens_are_those_of_the_reference(provider: str, device: str, kind: DrawKind, vocab: int) -> None:
    """Rows of every kind up to `kind` stand beside each other."""
    controls = controls_of(
        5,
        temperature=(0.0,) if kind is DrawKind.GREEDY else (0.0, 0.3, 1.0, 2.5),
        min_p=(0.0, 0.05),
        top_k=(0, 1, 3, 40, 3000, 10**6) if kind is DrawKind.FILTERED else (0,),
        top_p=(1.0, 0.9, 0.5, 1e-9) if kind is DrawKind.FILTERED else (1.0,),
    )
    check(provider, device, draw(5, vocab) * 3, controls, kind)


OTHERS = {"temperature_B": 0.0, "top_p_B": 1e-9, "min_logit_B": 0.0, "top_k_B": 1, "seed_B": 7, "position_B": 7}
"""For each parameter of a draw a value with which other tokens come than with those of `controls_of`."""


@every_place("draw", dtype=torch.bfloat16)
def test_every_parameter_of_a_draw_decides(provider: str, device: str) -> None:
    """A provider that does not read one would draw as if it were off, and nobody would be told."""
    assert set(OTHERS) == {field.name for field in attrs.fields(Controls)}, "give a new parameter a value in OTHERS"
    logits_BV, plain = draw(40, 500), controls_of(40)
    tokens_B = check(provider, device, logits_BV, plain)
    for name, value in OTHERS.items():
        other = attrs.evolve(plain, **{name: torch.full_like(getattr(plain, name), value)})
        assert not torch.equal(check(provider, device, logits_BV, other), tokens_B), name


@every_place("draw", dtype=torch.bfloat16)
@for_each("top_k", [0, 2, 30])
@for_each("top_p", [1.0, 0.999, 0.7])
def test_the_filters_keep_what_a_sort_keeps(provider: str, device: str, top_k: int, top_p: float) -> None:
    """Also what is tied with the last logit: there are few values. Flat rows need every step of a search."""
    logits_BV = torch.cat((draw(2, 1500) * 3, (draw(2, 1500, seed=1) * 2).round(), draw(2, 1500, seed=2) * 1e-3))
    controls = controls_of(6, temperature=(0.7, 1.9), top_k=(top_k,), top_p=(top_p,), min_p=(0.0, 0.01))
    check(provider, device, logits_BV, controls)


@every_place("draw", dtype=torch.bfloat16)
@for_each("kept", [1, 3])
def test_no_token_beyond_the_filters_is_drawn(provider: str, device: str, kept: int) -> None:
    """Of equal shares each is worth the same: with a share of top_p a little less than `kept` of them, so many come."""
    logits_BV = torch.full((8, 600), -50.0)
    logits_BV[:, 100 : 100 + kept] = 1.0 - torch.arange(kept) * 1e-4
    best = range(100, 100 + kept)
    for controls in (
        controls_of(8, top_k=(kept,)),
        controls_of(8, top_k=(0, 599), top_p=(1 - 0.3 / kept,)),
        controls_of(8, top_k=(kept,), top_p=(0.9999,)),
    ):
        assert set(check(provider, device, logits_BV, controls).tolist()) <= set(best)
    if kept > 1:
        allowed = range(100, 99 + kept)
        tokens_B = check(provider, device, logits_BV, controls_of(8, top_k=(kept,), top_p=(1 - 1.2 / kept,)))
        assert set(tokens_B.tolist()) <= set(allowed)


@every_place("draw", dtype=torch.bfloat16)
@for_each("temperature", [0.0, 1.0])
def test_equal_logits_are_drawn_alike(provider: str, device: str, temperature: float) -> None:
    """All are tied, and a zero has no sign. Of a row's equal logits the first is the greedy token."""
    logits_BV = torch.zeros(6, 3000)
    logits_BV[::2] = -logits_BV[::2]
    logits_BV[:, 1::3] *= -1
    controls = controls_of(6, temperature=(temperature,), top_k=(0, 1, 7), top_p=(1.0, 0.5))
    tokens = check(provider, device, logits_BV, controls).tolist()
    assert (set(tokens) == {0}) is (temperature == 0)


@every_place("draw", dtype=torch.bfloat16)
def test_the_largest_may_be_anywhere(provider: str, device: str) -> None:
    at = [0, 7, 8, 511, 512, 1023, 1024, 1039, 1040, 1042]
    logits_BV = draw(len(at), 1043)
    logits_BV[range(len(at)), at] = 9.0
    assert check(provider, device, logits_BV, controls_of(len(at), temperature=(0.0,)), DrawKind.GREEDY).tolist() == at


@every_place("draw", dtype=torch.bfloat16)
@for_each("temperature", [1e-6, 1e-45])
def test_a_tiny_temperature_takes_the_largest(provider: str, device: str, temperature: float) -> None:
    logits_BV = draw(4, 700)
    controls = controls_of(4, temperature=(temperature,), top_k=(0, 5), top_p=(1.0, 0.5), min_p=(0.0, 0.1))
    assert check(provider, device, logits_BV, controls).tolist() == logits_BV.argmax(-1).tolist()


@every_place("draw", dtype=torch.bfloat16)
def test_changed_logits_are_drawn_from_and_raw_ones_weighed(provider: str, device: str) -> None:
    raw_BV = draw(4, 4500) * 2
    changed_BV = raw_BV + draw(4, 4500, seed=1) * 3
    changed_BV[:, 1::2] = -torch.inf
    controls = controls_of(4, temperature=(0.0, 0.8), top_k=(0, 20), top_p=(1.0, 0.8))
    tokens_B = check(provider, device, raw_BV, controls, changed_BV=changed_BV)
    assert (tokens_B % 2 == 0).all()


@every_place("draw", dtype=torch.bfloat16)
def test_what_a_row_cannot_have_is_never_drawn(provider: str, device: str) -> None:
    """A row has few logits that are not -inf, in tiles that may have none."""
    logits_BV = torch.full((4, 9000), -torch.inf)
    for row in range(4):
        logits_BV[row, 4090 + row :: 1500] = draw(9000, seed=row)[4090 + row :: 1500]
    controls = controls_of(4, temperature=(0.0, 1.0, 5.0), top_k=(0, 2, 100), top_p=(1.0, 0.6))
    tokens_B = check(provider, device, logits_BV, controls)
    assert logits_BV.gather(1, tokens_B[:, None]).isfinite().all()


@every_place("draw", dtype=torch.bfloat16)
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # of Triton's interpreter
@for_each("bad", [math.nan, math.inf, -math.inf])
@for_each("kind", DrawKind)
def test_a_spoilt_row_is_known_by_its_normalizer(provider: str, device: str, kind: DrawKind, bad: float) -> None:
    """And its token is one. Of -inf a whole row is bad. The other rows stay as they are, to the bit."""
    logits_BV = draw(3, 3000)
    temperature = (0.0,) if kind is DrawKind.GREEDY else (1.0,)
    controls = controls_of(3, temperature=temperature, top_k=(3,), top_p=(0.9,))
    controls = moved(controls, device)
    op, logits_BV = draw_of(provider, device), logits_BV.to(device)
    expected_3B = op(logits_BV, logits_BV, controls, kind).cpu()
    for columns in (slice(None),) if bad == -math.inf else (slice(2999, None), slice(None)):
        spoilt_BV = logits_BV.clone()
        spoilt_BV[1, columns] = bad
        drawn_3B = op(spoilt_BV, spoilt_BV, controls, kind).cpu()
        assert not drawn_3B[2].view(torch.float32)[1].isfinite()
        assert 0 <= int(drawn_3B[0, 1]) < 3000
        assert drawn_3B[:, [0, 2]].equal(expected_3B[:, [0, 2]])


@every_place("draw", dtype=torch.bfloat16)
def test_no_rows_are_no_tokens(provider: str, device: str) -> None:
    assert check(provider, device, torch.empty(0, 50), controls_of(0)).tolist() == []


@every_place("draw", dtype=torch.bfloat16)
@for_each("kind", [DrawKind.GREEDY, DrawKind.FILTERED])
def test_logits_may_lie_apart(provider: str, device: str, kind: DrawKind) -> None:
    """Rows, and the logits of a row."""
    controls = controls_of(3, temperature=(0.0,) if kind is DrawKind.GREEDY else (0.0, 1.0), top_k=(40,))
    wide_BV = draw(3, 1400)
    for logits_BV in (wide_BV[:, :700], wide_BV[:, ::2], wide_BV.mT.contiguous().mT):
        tokens_B = check(provider, device, logits_BV, controls, kind)
        assert tokens_B.tolist() == check(provider, device, logits_BV.clone(), controls, kind).tolist()
