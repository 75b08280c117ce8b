"""The router, for every provider, as in test_ops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, cached_property

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.arguments import RouterRule
from tests.conformance.op_suite import draw, every_place, op_of
from tests.joined import for_each
from tests.rounding import assert_within, gamma


@attrs.frozen
class Routing:
    """One routing rule. `bias` is added to random biases; None means that the rule has no biases."""

    name: str
    sigmoid: bool
    bias: float | None
    experts: int = 8
    top_k: int = 3
    groups: int = 1
    top_k_groups: int = 1
    normalize: bool = False
    scaling: float = 1.0
    even: bool = False
    """All biases are `bias`."""

    @cached_property
    def biases(self) -> Tensor | None:
        return None if self.bias is None else draw(self.experts, seed=5) * 0.15 * (not self.even) + self.bias

    def expected(self, logits: Sequence[float]) -> list[tuple[int, float]]:
        """Return (id, weight) of each chosen expert of one token, best first, by the rule's definition in plain
        floats."""
        if self.sigmoid:
            scores = [1 / (1 + math.exp(-logit)) for logit in logits]
        else:
            total = sum(math.exp(logit) for logit in logits)
            scores = [math.exp(logit) / total for logit in logits]
        rounded = torch.tensor(scores, dtype=torch.float64).float()
        choice = (rounded if self.biases is None else rounded + self.biases).tolist()
        size = self.experts // self.groups
        groups = [range(start, start + size) for start in range(0, self.experts, size)]
        if self.groups > 1:
            counted = 1 if self.bias is None else 2
            best = [sorted((choice[e] for e in group), reverse=True)[:counted] for group in groups]
            worth = torch.tensor(best).sum(-1).tolist()  # in float32
            groups.sort(key=lambda group: -worth[group.start // size])
            groups = groups[: self.top_k_groups]
        allowed = sorted((expert for group in groups for expert in group), key=lambda e: (-choice[e], e))
        chosen = allowed[: self.top_k]
        total = sum(scores[expert] for expert in chosen) + 1e-20 if self.normalize else 1.0
        return [(expert, scores[expert] / total * self.scaling) for expert in chosen]

    def run(self, provider: str, device: str, logits: Tensor, biases: Tensor | None) -> tuple[Tensor, Tensor]:
        ids, weights = op_of(provider, "route", device, torch.bfloat16)(
            logits.to(device),
            None if biases is None else biases.to(device),
            RouterRule(
                sigmoid=self.sigmoid,
                top_k=self.top_k,
                num_groups=self.groups,
                top_k_groups=self.top_k_groups,
                normalize=self.normalize,
                scaling_factor=self.scaling,
            ),
        )
        assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
        assert ids.shape == weights.shape == (len(logits), self.top_k)
        return ids.cpu(), weights.cpu()


RULES = [
    Routing("v3", sigmoid=True, bias=0.0, groups=4, top_k_groups=2, normalize=True, scaling=2.5),
    Routing("v3-ungrouped", sigmoid=True, bias=0.0, experts=10, top_k=2, normalize=True, scaling=2.5),
    Routing("biases-below-zero", sigmoid=True, bias=-5.0, groups=4, top_k_groups=2, normalize=True),
    Routing("all-of-one-group", sigmoid=True, bias=-5.0, experts=9, groups=3, top_k_groups=1),
    Routing("v2", sigmoid=False, bias=None, groups=4, top_k_groups=2, scaling=16.0),
    Routing("v2-one-expert-per-group", sigmoid=False, bias=None, groups=8, top_k_groups=4),
    Routing("v2-lite", sigmoid=False, bias=None, experts=7, top_k=7),
    Routing("one-expert", sigmoid=False, bias=None, experts=1, top_k=1),
]


@every_place("route", dtype=torch.bfloat16)
@for_each("tokens", [0, 1, 5, 64])
@for_each("rule", RULES)
def test_route(provider: str, device: str, rule: Routing, tokens: int) -> None:
    check_routing(provider, device, rule, draw(tokens, rule.experts) * 2)


def check_routing(provider: str, device: str, rule: Routing, logits: Tensor) -> None:
    ids, weights = rule.run(provider, device, logits, rule.biases)
    expected = expected_of(rule, tuple(map(tuple, logits.tolist())))
    assert ids.tolist() == [[expert for expert, _ in row] for row in expected]
    # rounded as a score, in the sum of `top_k` of them, and at three operations on it
    exact = torch.tensor([exact for row in expected for _, exact in row], dtype=torch.float64).view_as(weights)
    assert_within(weights, exact, gamma(rule.top_k + 5) * exact, torch.float32)


@cache
def expected_of(rule: Routing, logits: tuple[tuple[float, ...], ...]) -> list[list[tuple[int, float]]]:
    # once for all providers
    return [rule.expected(row) for row in logits]


@every_place("route", dtype=torch.bfloat16)
@for_each("rule", RULES)
@for_each("values", ["few", "large", "nothing"])
def test_ties_of_a_router_are_broken_alike(provider: str, device: str, rule: Routing, values: str) -> None:
    """The logits have few values, or sizes whose sigmoids are all 1 or nearly all 0, or are all 0. The biases are equal
    too."""
    drawn = torch.randint(-1, 2, (200, rule.experts), generator=torch.Generator().manual_seed(4)).float()
    logits = {"few": drawn, "large": draw(200, rule.experts) * 40, "nothing": torch.full((1, rule.experts), -200.0)}[
        values
    ]
    check_routing(provider, device, rule, logits)
    rule = attrs.evolve(rule, even=True)
    check_routing(provider, device, rule, logits)


@every_place("route", dtype=torch.bfloat16)
@for_each("experts", [7, 17, 33, 250])
def test_equal_logits_are_equal_scores_wherever_they_stand(provider: str, device: str, experts: int) -> None:
    rule = Routing("equal", sigmoid=True, bias=None, experts=experts, top_k=5)
    logits = draw(40, 1).expand(40, experts).contiguous() * 4
    for sigmoid in (True, False):
        ids, weights = attrs.evolve(rule, sigmoid=sigmoid).run(provider, device, logits, None)
        assert (ids == torch.arange(5)).all()
        assert (weights == weights[:, :1]).all()
