"""The bounds hold for float32 sums in any order, and exclude wrong results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.rounding import (
    assert_within,
    error_of_attention,
    error_of_mlp,
    error_of_norm,
    error_of_products,
    error_of_silu,
    rounded,
)

F32 = torch.float32


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Draw values that float32 can represent, as float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def in_order(terms: Tensor) -> Tensor:
    """Sum one term after the other, every sum rounded."""
    total = torch.zeros_like(terms[..., 0])
    for term in terms.unbind(-1):
        total = total + term
    return total


def in_pairs(terms: Tensor) -> Tensor:
    """Sum as the dot products of bfloat16 pairs do: 16 lanes, each two terms at a time."""
    lanes = terms.reshape(*terms.shape[:-1], -1, 16, 2)
    total = torch.zeros_like(lanes[..., 0, :, 0])
    for step in lanes.unbind(-3):
        total = total + step[..., 0] + step[..., 1]
    return in_order(total)


SUMS: dict[str, Callable[[Tensor], Tensor]] = {
    "in order": in_order,
    "backwards": lambda terms: in_order(terms.flip(-1)),
    "largest first": lambda terms: in_order(terms.gather(-1, terms.abs().argsort(-1, descending=True))),
    "smallest first": lambda terms: in_order(terms.gather(-1, terms.abs().argsort(-1))),
    "signs apart": lambda terms: in_order(terms.clamp(min=0)) + in_order(terms.clamp(max=0)),
    "in pairs": in_pairs,
    "in blocks of 64": lambda terms: in_order(in_order(terms.unflatten(-1, (-1, 64)))),
    "halves": lambda terms: terms.sum(-1),
}


@pytest.mark.parametrize("order", SUMS)
def test_products_in_any_order_are_within(order: str) -> None:
    for length in (64, 256, 4096):
        x, weight = draw(8, length), draw(16, length, seed=length)
        terms = x.float()[:, None, :] * weight.float()
        assert_within(SUMS[order](terms), x @ weight.T, error_of_products(x, weight), F32)


def wrongs(exact: Tensor) -> dict[str, Tensor]:
    return {
        "scaled": exact * 1.001,
        "shifted": exact.roll(1, -1),
        "negated": -exact,
        "of another row": exact.roll(1, 0),
        "zero": torch.zeros_like(exact),
    }


@pytest.mark.parametrize("wrong", wrongs(torch.zeros(1, 1)))
def test_what_is_wrong_is_without(wrong: str) -> None:
    x, weight, gate_up, down = draw(8, 256), draw(16, 256, seed=1), draw(24, 256, seed=2) / 16, draw(256, 12, seed=3)
    q, k, v = draw(8, 3, 48), draw(20, 3, 48, seed=1), draw(20, 3, 32, seed=2)
    hidden = torch.einsum("thn,shn->ths", q, k) * 0.1
    gate, up = (x @ gate_up.T).chunk(2, -1)
    cases = [
        (x @ weight.T, error_of_products(x, weight)),
        (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(), error_of_norm(x, torch.ones(256).double(), None, 1e-6)),
        (torch.nn.functional.silu(x) * x, error_of_silu(x, x)),
        ((torch.nn.functional.silu(gate) * up) @ down.T, error_of_mlp(x, gate_up, down, F32)),
        (
            torch.einsum("ths,shv->thv", hidden.softmax(-1), v),
            error_of_attention(q, k, v, torch.ones(8, 20, dtype=torch.bool), 0.1, F32),
        ),
    ]
    for exact, error in cases:
        assert_within(exact.float(), exact, error, F32)
        with pytest.raises(AssertionError, match="too far off"):
            assert_within(wrongs(exact)[wrong].float(), exact, error, F32)


def test_a_term_that_is_left_out_is_without() -> None:
    x, weight = draw(8, 256), draw(16, 256, seed=1)
    with pytest.raises(AssertionError, match="too far off"):
        assert_within((x[:, 1:] @ weight[:, 1:].T).float(), x @ weight.T, error_of_products(x, weight), F32)


def test_rounding_is_to_the_nearest() -> None:
    exact = draw(1000)
    low = exact.to(torch.bfloat16)
    assert_within(low, exact, 0.0, torch.bfloat16)
    with pytest.raises(AssertionError, match="too far off"):
        assert_within((low.view(torch.int16) + 1).view(torch.bfloat16), exact, 0.0, torch.bfloat16)
    assert (rounded(exact, 0.0, F32) < rounded(exact, 0.0, torch.bfloat16)).all()
