"""What every token dispatcher must do, as functions that run on each rank of a group.

Expert p multiplies a row by p + 2 and the last element of every row names its token, so that a row given to another
expert, token or rank shows. Elements are exact in FP8. Cases are drawn from a seed that all ranks share: each knows
what the others send.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows, Rounded, ScaledRows
from pdinfer.kernels.resolve import resolve_ops
from pdinfer.kernels.spec import OpSpec
from pdinfer.moe.dispatchers.base import Dispatched, LocalDispatcher, Masked, Returned, TokenDispatcher
from pdinfer.parallel.groups import Group
from tests.rounding import gamma

OPS = resolve_ops(OpSpec(device="cpu", dtype=torch.float32)).ops
MAX_TOKENS = 6
GARBAGE = float("nan")


@attrs.frozen
class Kind:
    """A kind of dispatcher: how to make one, for which sizes, and how exact its sums are. With `fp8` rows come in both
    forms, and `carries_fp8` is the one that arrives. `arrives` says what becomes of floats on the way."""

    make: Callable[[Group, int, int], TokenDispatcher]  # (group, experts per rank, top_k)
    width: int = 3
    dtype: torch.dtype = torch.float32
    tolerance: float = gamma(8)
    fp8: bool = False
    carries_fp8: bool = False
    arrives: Callable[[Tensor], Tensor] = lambda rows: rows


@attrs.frozen
class Routed:
    """The tokens of one rank, and where the router sends them."""

    x_TD: Tensor
    ids_TK: Tensor
    weights_TK: Tensor

    def expected(self) -> Tensor:
        chosen_TK = self.ids_TK >= 0
        factor_TK = torch.where(chosen_TK, self.weights_TK * (self.ids_TK + 2), 0)
        return torch.where(chosen_TK.any(-1, keepdim=True), self.x_TD.float() * factor_TK.sum(-1, keepdim=True), 0)


@attrs.frozen
class World:
    """A dispatcher of one rank and what all ranks send through it."""

    kind: Kind
    group: Group
    dispatcher: TokenDispatcher
    experts_per_rank: int
    top_k: int

    @classmethod
    def draw(cls, kind: Kind, group: Group, generator: torch.Generator) -> World:
        experts_per_rank = int(torch.randint(1, 4, (), generator=generator))
        top_k = int(torch.randint(1, min(experts_per_rank * group.size, 5) + 1, (), generator=generator))
        dispatcher = kind.make(group, experts_per_rank, top_k)
        return cls(kind, group, dispatcher, experts_per_rank, top_k)

    def batch(self, generator: torch.Generator, *, at_most: int = MAX_TOKENS) -> list[Routed]:
        """Draw what each rank sends. Ranks without tokens are frequent."""
        counts = torch.randint(-2, at_most + 1, (self.group.size,), generator=generator).clamp_(min=0).tolist()
        return [self.routed(count, first=rank * MAX_TOKENS, generator=generator) for rank, count in enumerate(counts)]

    def routed(self, count: int, *, first: int, generator: torch.Generator) -> Routed:
        num_experts = self.experts_per_rank * self.group.size
        ids_TK = torch.rand(count, num_experts, generator=generator).argsort(-1)[:, : self.top_k].contiguous()
        x_TD = torch.randint(-8, 9, (count, self.kind.width), generator=generator).float()
        x_TD[:, -1] = name_of(first + torch.arange(count))
        weights_TK = torch.rand(ids_TK.shape, generator=generator)
        # a token of padding has no expert, and others may lack one; what belongs to none means nothing
        padding_T = torch.rand(count, generator=generator) < 0.25
        none_TK = padding_T[:, None] | (torch.rand(ids_TK.shape, generator=generator) < 0.1)
        x_TD[padding_T] = GARBAGE
        return Routed(
            x_TD.to(self.kind.dtype), ids_TK.masked_fill(none_TK, -1), weights_TK.masked_fill(none_TK, GARBAGE)
        )

    def begin(self, routed: Routed) -> Any:
        """Start dispatching, in the form that the experts of this kind read."""
        x_TD: Tensor | Rounded = routed.x_TD
        if self.kind.fp8:
            x_TD = Rounded(routed.x_TD, OPS.quantize_fp8(routed.x_TD, ue8m0=True))
        return self.dispatcher.dispatch_begin(x_TD, routed.ids_TK, routed.weights_TK)

    def run_experts(self, dispatched: Dispatched) -> Tensor:
        factor_E = torch.arange(self.experts_per_rank).float() + 2 + self.group.rank * self.experts_per_rank
        if isinstance(dispatched, Masked):
            y_END = dispatched.x_END.new_empty(dispatched.x_END.shape).fill_(GARBAGE)
            for expert, rows in enumerate(rows_by_expert(dispatched)):
                y_END[expert, : len(rows)] = rows * factor_E[expert]
            assert dispatched.weights_EN is None
            return y_END
        factor_S = factor_E.repeat_interleave(dispatched.counts_E)
        if dispatched.weights_S is not None:
            factor_S = factor_S * dispatched.weights_S[: len(factor_S)]
        y_SD = dispatched.x_SD.new_empty(dispatched.x_SD.shape).fill_(GARBAGE)
        y_SD[: len(factor_S)] = floats_of(dispatched.x_SD[: len(factor_S)]) * factor_S[:, None]
        return y_SD

    def check_sum(self, returned: Returned, routed: Routed) -> None:
        got = summed(returned)
        assert returned.y_SD.dtype == self.kind.dtype
        assert got.shape == routed.x_TD.shape
        # terms of one sign, at most five: their sum is as exact as they are
        arrived = attrs.evolve(routed, x_TD=self.kind.arrives(routed.x_TD))
        torch.testing.assert_close(got, arrived.expected(), rtol=self.kind.tolerance, atol=0)


def summed(returned: Returned) -> Tensor:
    """Return the sums of tokens in float32."""
    if returned.row_TK is None or returned.weights_TK is None:
        return returned.y_SD.float()
    return OPS.combine_rows(returned.y_SD, returned.row_TK, returned.weights_TK)


def rows_by_expert(dispatched: Dispatched) -> list[Tensor]:
    """Return the rows of each expert of this rank, as floats."""
    counts = dispatched.counts_E.tolist()
    if isinstance(dispatched, Masked):
        return [floats_of(dispatched.x_END[expert, :count]) for expert, count in enumerate(counts)]
    rows = list(floats_of(dispatched.x_SD[: sum(counts)]).split(counts))
    expert_S = dispatched.x_SD.expert_S if isinstance(dispatched.x_SD, FP8Rows) else None
    if expert_S is None:
        return rows
    # rows that only fill up a tile are nobody's
    return [part[mine >= 0] for part, mine in zip(rows, expert_S[: sum(counts)].split(counts), strict=True)]


def floats_of(rows: Tensor | ScaledRows) -> Tensor:
    return rows.floats() if isinstance(rows, ScaledRows) else rows


def name_of(token_T: Tensor) -> Tensor:
    """Return a number for each token, of its own and with no more digits than FP8 has."""
    return ((8 + token_T % 8) * 2 ** (token_T // 8)).float()


def experts_get_their_tokens(kind: Kind, group: Group, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    world = World.draw(kind, group, generator)
    batches = world.batch(generator)
    mine = batches[group.rank]
    pending = world.begin(mine)
    dispatched = world.dispatcher.dispatch_end(pending)
    arrived = dispatched.x_END if isinstance(dispatched, Masked) else dispatched.x_SD
    assert isinstance(arrived, FP8Rows) == kind.carries_fp8
    if isinstance(arrived, FP8Rows):
        assert (arrived.scales_TN.mT if isinstance(dispatched, Masked) else arrived.scales_TN).is_contiguous()
    by_expert = rows_by_expert(dispatched)
    assert len(by_expert) == world.experts_per_rank
    for expert, rows in enumerate(by_expert, start=group.rank * world.experts_per_rank):
        assert rows.dtype == kind.dtype
        expected = torch.cat([kind.arrives(routed.x_TD)[(routed.ids_TK == expert).any(-1)] for routed in batches])
        assert sorted(rows.tolist()) == sorted(expected.tolist())
    world.dispatcher.combine_end(world.dispatcher.combine_begin(world.run_experts(dispatched), dispatched))


def results_are_weighted_sums(kind: Kind, group: Group, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    world = World.draw(kind, group, generator)
    dispatcher = world.dispatcher
    for _ in range(2):  # a dispatcher is used again and again
        mine = world.batch(generator)[group.rank]
        dispatched = dispatcher.dispatch_end(world.begin(mine))
        world.check_sum(
            dispatcher.combine_end(dispatcher.combine_begin(world.run_experts(dispatched), dispatched)), mine
        )


def two_batches_can_be_under_way(kind: Kind, group: Group, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    world = World.draw(kind, group, generator)
    dispatcher = world.dispatcher
    first, second = world.batch(generator)[group.rank], world.batch(generator)[group.rank]
    begun_first = world.begin(first)
    begun_second = world.begin(second)
    there_first = dispatcher.dispatch_end(begun_first)
    back_first = dispatcher.combine_begin(world.run_experts(there_first), there_first)
    there_second = dispatcher.dispatch_end(begun_second)
    back_second = dispatcher.combine_begin(world.run_experts(there_second), there_second)
    world.check_sum(dispatcher.combine_end(back_first), first)
    world.check_sum(dispatcher.combine_end(back_second), second)


def nobody_has_a_token(kind: Kind, group: Group, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    world = World.draw(kind, group, generator)
    mine = world.routed(0, first=0, generator=generator)
    dispatched = world.dispatcher.dispatch_end(world.begin(mine))
    assert [len(rows) for rows in rows_by_expert(dispatched)] == [0] * world.experts_per_rank
    returning = world.dispatcher.combine_begin(world.run_experts(dispatched), dispatched)
    world.check_sum(world.dispatcher.combine_end(returning), mine)


def sums_are_those_of_one_rank(kind: Kind, group: Group, seed: int) -> None:
    """Compare bit by bit, where every result returns unchanged."""
    generator = torch.Generator().manual_seed(seed)
    world = World.draw(kind, group, generator)
    mine = world.batch(generator)[group.rank]
    local = attrs.evolve(
        world,
        group=Group("ep"),
        experts_per_rank=world.experts_per_rank * group.size,
        dispatcher=LocalDispatcher(world.experts_per_rank * group.size, OPS),
    )
    sums = []
    for each in (world, local):
        dispatched = each.dispatcher.dispatch_end(each.begin(mine))
        returning = each.dispatcher.combine_begin(each.run_experts(dispatched), dispatched)
        sums.append(summed(each.dispatcher.combine_end(returning)))
    assert torch.equal(*sums)


SUITE = (experts_get_their_tokens, results_are_weighted_sums, two_batches_can_be_under_way, nobody_has_a_token)
