"""NaN and infinity are not lost in any op of any provider, and nobody else's rows feel them (see `kernels.ops`).

Every case says which rows of the result must not be finite when one element of an input is not; the others must be
what they are without it, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from pdinfer.kernels.arguments import DecodeCache, PrefillCache, RouterRule, TokenCache
from pdinfer.kernels.formats import cache_rows
from pdinfer.kernels.formats.four_bits import MXFP4, Int4
from pdinfer.kernels.formats.fp8 import FP8Blocks, e4m3_to_float
from pdinfer.kernels.native import ops as native
from pdinfer.kernels.torch import attention as torch_attention
from pdinfer.kernels.torch import flash as torch_flash
from tests.conformance.op_suite import (
    CPU,
    draw,
    for_every_op,
    four_bit_weight,
    four_bits_in_strips,
    fp8_in_strips,
    fp8_weight,
    fused_of,
    in_strips,
    int8_weight,
    on_a_cpu,
    op_of,
    static_weight,
)
from tests.joined import for_each

BAD = (math.nan, math.inf, -math.inf)
every_bad = for_each("bad", BAD)

Run = Callable[..., Tensor]


def put(x: Tensor, at: tuple[int, ...], bad: float) -> Tensor:
    """Return a copy with one bad element."""
    x = x.clone()
    x[at] = bad
    return x


def assert_lost(run: Callable[[], Tensor], run_bad: Callable[[], Tensor], rows: set[int]) -> None:
    """Assert that the rows (of the first axis) in `rows` are not finite, and that the others are as without the bad
    value."""
    good, got = run(), run_bad()
    assert good.isfinite().all()
    assert {*(~got.isfinite()).flatten(1).any(-1).nonzero().flatten().tolist()} == rows
    others = [row for row in range(len(got)) if row not in rows]
    assert torch.equal(got[others], good[others])


# Rows by themselves: the last axis of the first input is one row


@attrs.frozen
class Rows:
    """An op on rows [5, width], and the columns to spoil: at both ends, where vectors and their remainders are."""

    op: str
    width: int
    rest: Callable[[torch.dtype], tuple[Any, ...]] = lambda dtype: ()
    more: Callable[[], dict[str, Any]] = dict


def down(dtype: torch.dtype, *shape: int) -> Tensor:
    return draw(*shape, seed=1).to(dtype)


def identity_fp8(width: int) -> FP8Blocks:
    size = math.ceil(width / 128)
    return FP8Blocks(numbers=torch.eye(width).to(torch.float8_e4m3fn), scale=torch.ones(size, size))


COUNTS = torch.tensor([2, 0, 3])
ROWS = [
    Rows("rms_norm", 48, lambda dtype: (down(dtype, 48), 1e-6)),
    Rows("rms_norm", 39, lambda dtype: (down(dtype, 39), 1e-6)),
    Rows("layer_norm", 48, lambda dtype: (draw(48), draw(48, seed=1), 1e-6)),
    Rows("linear", 48, lambda dtype: (down(dtype, 16, 48),)),
    Rows("linear", 39, lambda dtype: (down(dtype, 8, 39),)),
    Rows("linear[fp8]", 130, lambda dtype: (fp8_weight(9, 130),)),
    Rows("linear[fp8]", 130, lambda dtype: (fp8_weight(9, 130, ue8m0=True),)),
    Rows("linear[w8a8_dynamic]", 130, lambda dtype: (int8_weight(9, 130),)),
    Rows("linear[w8a8]", 130, lambda dtype: (static_weight(9, 130, 1),)),
    Rows("round_fp8", 130, more=lambda: {"ue8m0": False}),
    Rows("round_fp8", 130, more=lambda: {"ue8m0": True}),
    Rows("round_int8", 130),
    Rows("gated_silu", 96),
    Rows("gated_silu", 78),
    Rows("grouped_mlp", 48, lambda dtype: (COUNTS, down(dtype, 3, 64, 48), down(dtype, 3, 48, 32))),
    Rows("grouped_mlp", 39, lambda dtype: (COUNTS, down(dtype, 3, 10, 39), down(dtype, 3, 39, 5))),
    Rows("linear[strips]", 64, lambda dtype: (in_strips(down(dtype, 32, 64)),)),
    Rows(
        "grouped_mlp[strips]",
        64,
        lambda dtype: (
            COUNTS,
            in_strips(down(dtype, 3, 64, 64), 2),
            in_strips(down(dtype, 3, 64, 32)),
        ),
    ),
    Rows("linear[fp8_strips]", 160, lambda dtype: (fp8_in_strips(fp8_weight(32, 160)),)),
    Rows(
        "grouped_mlp[fp8_strips]",
        160,
        lambda dtype: (
            COUNTS,
            fp8_in_strips(fp8_weight(3, 160, 160, parts=2)),
            fp8_in_strips(fp8_weight(3, 160, 160)),
        ),
    ),
    *(
        Rows(
            f"linear[{kind.name}_strips]",
            64,
            lambda dtype, kind=kind: (four_bits_in_strips(four_bit_weight(kind, 32, 64)),),
        )
        for kind in (Int4, MXFP4)
    ),
    *(
        Rows(
            f"grouped_mlp[{kind.name}_strips]",
            64,
            lambda dtype, kind=kind: (
                COUNTS,
                four_bits_in_strips(four_bit_weight(kind, 3, 64, 64), 2),
                four_bits_in_strips(four_bit_weight(kind, 3, 64, 32)),
            ),
        )
        for kind in (Int4, MXFP4)
    ),
    Rows("grouped_mlp[fp8]", 48, lambda dtype: (COUNTS, fp8_weight(3, 16, 48, parts=2), fp8_weight(3, 48, 16))),
    Rows("grouped_mlp[w8a8_dynamic]", 48, lambda dtype: (COUNTS, int8_weight(3, 32, 48), int8_weight(3, 48, 16))),
]


PLAIN, STRIPS = (
    {case.op: (case.op,) for case in ROWS if case.op.endswith("strips]") is strips} for strips in (False, True)
)


@for_every_op("op", PLAIN, devices=("cpu",))
@every_bad
def test_a_row_that_is_not_finite_stays_so(provider: str, device: str, dtype: torch.dtype, bad: float, op: str) -> None:
    check_rows(provider, device, dtype, bad, op)


@for_every_op("op", STRIPS, dtypes=(torch.bfloat16,), devices=("cpu",))
@every_bad
def test_a_row_that_is_not_finite_stays_so_through_strips(
    provider: str, device: str, dtype: torch.dtype, bad: float, op: str
) -> None:
    check_rows(provider, device, dtype, bad, op)


def check_rows(provider: str, device: str, dtype: torch.dtype, bad: float, op: str) -> None:
    for case in (case for case in ROWS if case.op == op):
        run = partial(fused_of(provider, op, device, dtype), **case.more())
        x, rest = draw(5, case.width).to(dtype), case.rest(dtype)
        good = run(x, *rest)
        for column in (0, case.width // 2 - 1, case.width - 1):
            assert_lost(
                lambda: good,  # noqa: B023
                lambda column=column: run(put(x, (2, column), bad), *rest),  # noqa: B023
                {2},
            )


@on_a_cpu("rotate")
@every_bad
@for_each("interleaved", [True, False])
def test_a_rotated_head_that_is_not_finite_stays_so(
    provider: str, dtype: torch.dtype, bad: float, interleaved: bool
) -> None:
    rotate = op_of(provider, "rotate", "cpu", dtype)
    x, angles = draw(3, 2, 8).to(dtype), draw(3, 4)
    run = partial(rotate, cos_TF=angles.cos(), sin_TF=angles.sin(), interleaved=interleaved)
    assert_lost(lambda: run(x), lambda: run(put(x, (1, 1, 7), bad)), {1})
    spoilt = put(angles.sin(), (0, 3), bad)
    assert_lost(lambda: run(x), lambda: rotate(x, angles.cos(), spoilt, interleaved=interleaved), {0})


@for_every_op("op", {name: (name,) for name in ("rms_norm", "layer_norm")}, devices=("cpu",))
def test_squares_that_overflow_are_no_row_of_zeros(provider: str, device: str, dtype: torch.dtype, op: str) -> None:
    x, one = draw(3, 48).to(dtype), torch.ones(48, dtype=dtype)
    rest = (one, 1e-6) if op == "rms_norm" else (one.float(), one.float(), 1e-6)
    run = op_of(provider, op, device, dtype)
    assert_lost(lambda: run(x, *rest), lambda: run(put(x, (1, 5), 1e30), *rest), {1})


@on_a_cpu("heads_in", "heads_out")
@every_bad
def test_a_product_by_heads_stays_so(provider: str, dtype: torch.dtype, bad: float) -> None:
    for name, shape in (("heads_in", (3, 40, 128)), ("heads_out", (3, 16, 40))):
        run, x, weight = op_of(provider, name, "cpu", dtype), draw(5, 3, 40).to(dtype), down(dtype, *shape)
        assert_lost(lambda: run(x, weight), lambda: run(put(x, (3, 1, 39), bad), weight), {3})  # noqa: B023
        good, got = run(x, weight), run(put(x, (3, 1, 39), bad), weight)
        assert torch.equal(got[:, [0, 2]], good[:, [0, 2]])  # other heads


@on_a_cpu("combine_rows")
@every_bad
def test_a_row_or_a_weight_of_an_expert_stays_so(provider: str, dtype: torch.dtype, bad: float) -> None:
    combine = op_of(provider, "combine_rows", "cpu", dtype)
    row = torch.randperm(4 * 9, generator=torch.Generator().manual_seed(1)).view(4, 9)
    for width in (32, 37):
        y, weights = draw(36, width).to(dtype), draw(4, 9).abs()
        for choice in (0, 8):
            spoilt = put(y, (int(row[2, choice]), width - 1), bad)
            assert_lost(lambda: combine(y, row, weights), lambda: combine(spoilt, row, weights), {2})  # noqa: B023
            unsaid = put(weights, (1, choice), bad)
            assert_lost(lambda: combine(y, row, weights), lambda: combine(y, row, unsaid), {1})  # noqa: B023


# The router


@on_a_cpu("route", dtypes=(torch.bfloat16,))
@every_bad
@for_each("groups", [1, 4])
@for_each("rule", ["sigmoid", "softmax", "biased"])
def test_a_router_with_a_logit_that_is_not_finite_weighs_nothing(
    provider: str, dtype: torch.dtype, bad: float, groups: int, rule: str
) -> None:
    """This holds wherever the expert stands, chosen or not. The experts it names can still be counted."""
    op = op_of(provider, "route", "cpu", dtype)
    bias = draw(16, seed=3) * 0.1 if rule == "biased" else None
    sums = RouterRule(
        sigmoid=rule != "softmax",
        top_k=4,
        num_groups=groups,
        top_k_groups=2 if groups > 1 else 1,
        normalize=rule == "biased",
        scaling_factor=2.5,
    )
    run = partial(op, rule=sums)
    logits = draw(3, 16)
    good_ids, good = run(logits, bias)
    assert good.isfinite().all()
    for expert in range(16):
        ids, weights = run(put(logits, (1, expert), bad), bias)
        assert weights[1].isnan().all()
        assert torch.equal(ids[[0, 2]], good_ids[[0, 2]])
        assert torch.equal(weights[[0, 2]], good[[0, 2]])
        assert len({*ids[1].tolist()} & {*range(16)}) == 4
        if bias is not None:
            ids, weights = run(logits, put(bias, (expert,), bad))
            assert weights.isnan().all()
            assert all(len({*chosen} & {*range(16)}) == 4 for chosen in ids.tolist())
    ids, weights = run(torch.full((1, 16), bad), bias)
    assert weights.isnan().all()
    assert len({*ids[0].tolist()} & {*range(16)}) == 4


# Attention


PAGES = ((4, 0, 5), (4, 1, 4), (2, 2, 2))


@attrs.frozen
class Cached:
    """Three sequences in pages of 16, the second of which starts with the same page as the first one's. What nobody
    reads is NaN."""

    dtype: torch.dtype
    packed: bool = False
    heads: int = 3
    latent: int = 128
    rope: int = 32
    contexts: tuple[int, ...] = (40, 23, 9)

    @property
    def table(self) -> Tensor:
        return torch.tensor(PAGES)

    def pages(self, rows: Tensor | None = None) -> Tensor:
        """`rows` are those of all slots [7 * 16, latent + rope], by default random ones."""
        rows = self.rows() if rows is None else rows
        kind = torch.uint8 if self.packed else self.dtype
        written = cache_rows.latent_rows(rows[:, : self.latent], rows[:, self.latent :], kind)
        return written.view(7, 16, -1)

    def rows(self) -> Tensor:
        rows = draw(7 * 16, self.latent + self.rope).to(self.dtype)
        read = {self.slot(row, at) for row, context in enumerate(self.contexts) for at in range(context)}
        rows[[slot for slot in range(7 * 16) if slot not in read]] = torch.nan
        return rows

    def slot(self, row: int, position: int) -> int:
        return PAGES[row][position // 16] * 16 + position % 16

    def queries(self, count: int) -> tuple[Tensor, Tensor]:
        q_latent = draw(count, self.heads, self.latent).to(self.dtype) * 0.1
        return q_latent, draw(count, self.heads, self.rope).to(self.dtype)

    def decode(self, provider: str, pages: Tensor, queries: tuple[Tensor, Tensor]) -> Tensor:
        op, (q_latent, q_rope) = op_of(provider, "mla_decode", "cpu", self.dtype), queries
        lens = torch.tensor(self.contexts)
        return op(q_latent[:, None], q_rope[:, None], DecodeCache(pages, self.table, lens), scale=0.25)[:, 0]

    def sparse(self, provider: str, pages: Tensor, queries: tuple[Tensor, Tensor]) -> Tensor:
        """Attend with everything chosen."""
        at = torch.arange(40).expand(3, -1)
        selected = torch.where(at < torch.tensor(self.contexts)[:, None], at, -1)
        op = op_of(provider, "mla_sparse", "cpu", self.dtype)
        return op(*queries, TokenCache(pages, self.table, torch.arange(3)), selected, scale=0.25)

    def prefill(
        self, provider: str, pages: Tensor, queries: tuple[Tensor, Tensor], kv_b: Tensor | None = None
    ) -> Tensor:
        """Each sequence's last token; expanded, values and keys have 64 elements and 34."""
        op = op_of(provider, "mla_prefill", "cpu", self.dtype)
        kv_b = self.kv_b if kv_b is None else kv_b
        q = torch.cat((queries[0][..., :34], queries[1]), -1)
        return op(q, kv_b, PrefillCache(pages, self.table, (1, 1, 1), self.contexts), v_head_dim=64, scale=0.25)

    @property
    def kv_b(self) -> Tensor:
        return (draw(self.heads * 98, self.latent, seed=1) * self.latent**-0.5).to(self.dtype)


FORMS = {"decode": ("mla_decode",), "sparse": ("mla_sparse",), "prefill": ("mla_prefill",)}
every_form = for_every_op("form", FORMS, devices=("cpu",))
every_page_format = for_each("packed", [False, True])


def readers(case: Cached, slot: int) -> set[int]:
    """Return the sequences that read a slot."""
    return {row for row, context in enumerate(case.contexts) if slot in {case.slot(row, at) for at in range(context)}}


@every_form
@every_bad
@every_page_format
def test_a_cached_row_that_is_not_finite_is_seen_by_all_who_read_it(
    provider: str, device: str, dtype: torch.dtype, bad: float, form: str, packed: bool
) -> None:
    """The bad value is in the latent or the rotated key, at both ends of a context and of its blocks, in shared rows
    and others, and in every head."""
    case = Cached(dtype, packed)
    run, queries = getattr(case, form), case.queries(3)
    rows = case.rows()
    good = run(provider, case.pages(rows), queries)
    for at, (row, position) in enumerate(((0, 0), (0, 39), (0, 20), (1, 22), (2, 8), (2, 0))):
        slot = case.slot(row, position)
        lost = [row in readers(case, slot) for row in range(3)]
        for column in ((0, 128), (127, 159))[at % 2]:
            got = run(provider, case.pages(put(rows, (slot, column), bad)), queries)
            assert (~got.isfinite()).any(-1).tolist() == [[reads] * case.heads for reads in lost]
            kept = [row for row in range(3) if not lost[row]]
            assert torch.equal(got[kept], good[kept])


@on_a_cpu("mla_decode")
@every_bad
@for_each("column", [0, 511, 512, 543])
def test_a_wide_packed_row_that_is_not_finite_is_seen_by_all_who_read_it(
    provider: str, dtype: torch.dtype, bad: float, column: int
) -> None:
    """The parts of these rows are aligned for TMA. The row is before or among the newest of its sequence."""
    case = Cached(dtype, packed=True, latent=512)
    queries = case.queries(3)
    good = case.decode(provider, case.pages(), queries)
    for row, position in ((0, 3), (1, 22)):
        pages = case.pages(put(case.rows(), (case.slot(row, position), column), bad))
        got = case.decode(provider, pages, queries)
        lost = [reads in readers(case, case.slot(row, position)) for reads in range(3)]
        assert (~got.isfinite()).any(-1).tolist() == [[reads] * case.heads for reads in lost]
        kept = [row for row in range(3) if not lost[row]]
        assert torch.equal(got[kept], good[kept])


@every_form
@every_bad
def test_a_query_that_is_not_finite_is_lost_alone(
    provider: str, device: str, dtype: torch.dtype, bad: float, form: str
) -> None:
    case = Cached(dtype)
    run, (q_latent, q_rope) = getattr(case, form), case.queries(3)
    good = run(provider, case.pages(), (q_latent, q_rope))
    for queries in ((put(q_latent, (1, 2, 0), bad), q_rope), (q_latent, put(q_rope, (1, 2, 31), bad))):
        got = run(provider, case.pages(), queries)
        lost = (~got.isfinite()).any(-1)
        assert lost.tolist() == [[False] * 3, [False, False, True], [False] * 3]
        assert torch.equal(got[~lost], good[~lost])


@every_form
@for_each("sign", [1, -1])
@for_each("position", [0, 21, 39])
def test_a_score_that_overflows_is_seen(
    provider: str, device: str, dtype: torch.dtype, form: str, sign: int, position: int
) -> None:
    """All products have one sign, so that the sum overflows in any order."""
    case = Cached(dtype)
    run, (q_latent, q_rope) = getattr(case, form), case.queries(3)
    q_rope[0] = 2e19
    rows = case.rows()
    rows[case.slot(0, position), 128:] = sign * 2e19
    got = run(provider, case.pages(rows), (q_latent, q_rope))
    assert (~got.isfinite()).any(-1).tolist() == [[True] * 3, [False] * 3, [False] * 3]


@on_a_cpu("mla_decode")
@every_bad
@for_each("part_tokens", [64, 1024])
def test_a_bad_row_is_seen_in_every_part_of_a_long_context(
    provider: str, dtype: torch.dtype, bad: float, part_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.attention, "PART_TOKENS", part_tokens)
    pages, table = draw(13, 16, 160).to(dtype), torch.arange(13)[None]
    q_latent, q_rope = draw(1, 1, 3, 128).to(dtype) * 0.1, draw(1, 1, 3, 32).to(dtype)
    op = op_of(provider, "mla_decode", "cpu", dtype)
    for position in (0, 63, 64, 130, 199):
        spoilt = put(pages, (position // 16, position % 16, 159), bad)
        got = op(q_latent, q_rope, DecodeCache(spoilt, table, torch.tensor([200])), scale=0.25)
        assert (~got.isfinite()).any(-1).all()
    pages[:4, :, 159] = bad  # a block of 64, and nothing else in it
    q_rope[..., -1] = 1
    got = op(q_latent, q_rope, DecodeCache(pages, table, torch.tensor([200])), scale=0.25)
    assert (~got.isfinite()).any(-1).all()


@on_a_cpu("mla_prefill")
@every_bad
@for_each(("small", "fused"), [(False, True), (True, True), (True, False)])
def test_a_bad_row_in_a_long_prompt_is_seen_by_all_behind_it(
    provider: str, dtype: torch.dtype, bad: float, small: bool, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The context is one block or many. The other prompt of the batch feels nothing."""
    if not fused:
        monkeypatch.setattr(torch_flash, "DTYPES", ())
    if small:
        monkeypatch.setattr(native.attention, "KEYS", 32)
        monkeypatch.setattr(torch_attention, "CONTEXT_BLOCK_BYTES", 1)
        monkeypatch.setattr(torch_attention, "SCORE_BLOCK_BYTES", 4 * 3 * 16 * 7)
    case, pages = Cached(dtype), draw(14, 16, 160).to(dtype)
    table = torch.arange(14).view(2, 7)
    q = draw(130, 3, 66).to(dtype)
    op, kv_b = op_of(provider, "mla_prefill", "cpu", dtype), case.kv_b

    def run(pages: Tensor) -> Tensor:
        cache = PrefillCache(pages, table, (30, 100), (30, 100))
        got: Tensor = op(q, kv_b, cache, v_head_dim=64, scale=0.1)
        return got

    good = run(pages)
    for position, column in ((0, 0), (99, 159), (50, 130), (33, 128)):
        spoilt = put(pages, (7 + position // 16, position % 16, column), bad)
        got = run(spoilt)
        assert torch.equal(got[:30], good[:30])
        assert (~got[30 + position :].isfinite()).any(-1).all()
    q[..., -1] = 1
    pages[7:11, :, 159] = bad
    assert (~run(pages)[30:].isfinite()).any(-1).all()


# Choosing tokens, and the cache


@on_a_cpu("index_topk")
@every_bad
@every_page_format
def test_a_token_whose_index_scores_are_not_finite_chooses_nothing(
    provider: str, dtype: torch.dtype, bad: float, packed: bool
) -> None:
    """Attention to nothing is NaN. Tokens before a bad key, and other sequences, choose what they chose."""
    index_topk = op_of(provider, "index_topk", "cpu", dtype)
    kind = torch.uint8 if packed else dtype
    rows, q, weights = draw(5 * 8, 16).to(dtype), draw(9, 2, 16).to(dtype), draw(9, 2)

    def choose(rows: Tensor = rows, q: Tensor = q, weights: Tensor = weights) -> Tensor:
        pages, table = cache_rows.index_rows(rows, kind).view(5, 8, -1), torch.tensor([[3, 1, 4], [0, 2, 0]])
        got: Tensor = index_topk(q, weights, PrefillCache(pages, table, (5, 4), (20, 11)), top_k=6)
        return got

    good = choose()
    assert (good >= 0).all()
    # position 17 of the first sequence lies in its third page; its last three tokens see it
    for got, lost in (
        (choose(rows=put(rows, (4 * 8 + 1, 3), bad)), [2, 3, 4]),
        (choose(rows=put(rows, (0 * 8 + 7, 0), bad)), [5, 6, 7, 8]),
        (choose(q=put(q, (6, 1, 15), bad)), [6]),
        (choose(weights=put(weights, (3, 0), bad)), [3]),
    ):
        assert (got[lost] == -1).all()
        kept = [token for token in range(9) if token not in lost]
        assert torch.equal(got[kept], good[kept])


@on_a_cpu("index_topk_decode")
@every_bad
@every_page_format
def test_a_query_of_decode_whose_index_scores_are_not_finite_chooses_nothing(
    provider: str, dtype: torch.dtype, bad: float, packed: bool
) -> None:
    """Also one that sees fewer positions than it may choose. The queries before a bad key choose what they chose."""
    index_topk = op_of(provider, "index_topk_decode", "cpu", dtype)
    kind = torch.uint8 if packed else dtype
    rows, q, weights = draw(5 * 8, 16).to(dtype), draw(2, 3, 2, 16).to(dtype), draw(2, 3, 2)

    def choose(rows: Tensor = rows, q: Tensor = q, weights: Tensor = weights) -> Tensor:
        pages, table = cache_rows.index_rows(rows, kind).view(5, 8, -1), torch.tensor([[3, 1, 4], [0, 2, 0]])
        got: Tensor = index_topk(q, weights, DecodeCache(pages, table, torch.tensor([20, 11])), top_k=12)
        return got.flatten(0, 1)

    good = choose()
    assert (good >= 0).sum(-1).tolist() == [12, 12, 12, 9, 10, 11]
    # position 18 of the first sequence lies in its third page; its last two queries see it
    for got, lost in (
        (choose(rows=put(rows, (4 * 8 + 2, 3), bad)), [1, 2]),
        (choose(rows=put(rows, (0 * 8 + 7, 0), bad)), [3, 4, 5]),
        (choose(q=put(q, (1, 1, 1, 15), bad)), [4]),
        (choose(weights=put(weights, (0, 2, 0), bad)), [2]),
    ):
        assert (got[lost] == -1).all()
        kept = [query for query in range(6) if query not in lost]
        assert torch.equal(got[kept], good[kept])


@on_a_cpu("mla_sparse")
def test_attention_to_nothing_is_nan(provider: str, dtype: torch.dtype) -> None:
    op = op_of(provider, "mla_sparse", "cpu", dtype)
    q_latent, q_rope, pages = (draw(*shape).to(dtype) for shape in ((3, 2, 128), (3, 2, 8), (2, 4, 136)))
    selected = torch.tensor([[0, 2], [-1, -1], [1, -1]])
    cache = TokenCache(pages, torch.tensor([[0, 1]]), torch.zeros(3, dtype=torch.int64))
    got = op(q_latent, q_rope, cache, selected, scale=1.0)
    assert got.isnan().flatten(1).all(-1).tolist() == [False, True, False]


@on_a_cpu("store_latent")
@every_bad
@every_page_format
def test_what_is_stored_and_read_again_stays_so(provider: str, dtype: torch.dtype, bad: float, packed: bool) -> None:
    kind = torch.uint8 if packed else dtype
    c, k_rope, slots = draw(3, 256).to(dtype), draw(3, 8).to(dtype), torch.tensor([5, 0, 2])

    def again(c: Tensor, k_rope: Tensor) -> Tensor:
        pages = cache_rows.latent_rows(torch.zeros(6, 256, dtype=dtype), torch.zeros(6, 8, dtype=dtype), kind)
        pages = pages.view(2, 3, -1)
        op_of(provider, "store_latent", "cpu", dtype)(pages, slots, c, k_rope)
        return cache_rows.latents(pages.flatten(0, 1), 256, dtype)

    assert_lost(lambda: again(c, k_rope), lambda: again(put(c, (1, 255), bad), k_rope), {0})
    assert_lost(lambda: again(c, k_rope), lambda: again(c, put(k_rope, (0, 7), bad)), {5})


# FP8 weights


def codes() -> Iterator[tuple[int, bool]]:
    """Return every e4m3 byte, and whether it is NaN."""
    return ((code, code & 0x7F == 0x7F) for code in range(256))


def test_every_fp8_number_is_worth_what_it_says() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = e4m3_to_float(numbers)
    assert got.isnan().tolist() == [is_nan for _, is_nan in codes()]
    assert torch.equal(got.nan_to_num(999), numbers.float().nan_to_num(999))


@on_a_cpu("linear[fp8]")
@for_each("rows", [3, 20])
@for_each("code", [0x7F, 0xFF])
def test_a_weight_that_is_nan_is_no_number(provider: str, dtype: torch.dtype, code: int, rows: int) -> None:
    weight = fp8_weight(9, 130)
    weight.numbers.view(torch.uint8)[4, 129] = code
    got = op_of(provider, "linear[fp8]", str(CPU), dtype)(draw(rows, 130).to(dtype), weight)
    assert got.isnan().any(0).tolist() == [row == 4 for row in range(9)]
