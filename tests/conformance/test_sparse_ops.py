"""The ops of sparse attention and of packed pages, for every provider, as in test_ops."""

from __future__ import annotations

import importlib
from functools import cache, cached_property
from itertools import product

import attrs
import pytest
import torch
from torch import Tensor

from pdinfer.kernels import reference
from pdinfer.kernels.arguments import DecodeCache, PrefillCache, TokenCache
from pdinfer.kernels.formats import cache_rows
from pdinfer.kernels.torch import attention as torch_attention
from pdinfer.model.batch import Batch, Row
from tests.conformance.op_suite import (
    ATTENTION,
    CPU,
    SCALE,
    Attention,
    assert_turned,
    contexts_of,
    draw,
    every_place,
    for_every_op,
    for_every_provider,
    op_of,
    query_lens_of,
)
from tests.joined import for_each, pairs_each_time
from tests.rounding import assert_within, error_of_attention, error_of_norm

every_page_format = for_each("packed", [False, True])


@for_every_provider("layer_norm")
@for_each(("rows", "width"), [*product((0, 1, 5), (1, 7, 48))])
def test_layer_norm(provider: str, device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight, bias = draw(rows, width).to(dtype), draw(width, seed=1), draw(width, seed=2)
    x[1:2] *= 1000
    x[2:3] = 3
    got = op_of(provider, "layer_norm", device, dtype)(x.to(device), weight.to(device), bias.to(device), 1e-6)
    x, weight, bias = x.double(), weight.double(), bias.double()
    exact = torch.nn.functional.layer_norm(x, (width,), weight, bias, 1e-6)
    assert_within(got, exact, error_of_norm(x, weight, bias, 1e-6), dtype)


@for_every_provider("rotate")
@pairs_each_time
@for_each(("rows", "heads", "width"), [*product((0, 1, 5), (1, 3), (2, 6, 8))])
def test_rotate_halves(provider: str, device: str, dtype: torch.dtype, rows: int, heads: int, width: int) -> None:
    """Pairs (i, i + R/2) turn like neighbours that were brought together and apart again."""
    x = draw(rows, heads, width).to(dtype)
    angles = draw(rows, width // 2, seed=1) * 100
    together = x.view(rows, heads, 2, width // 2).transpose(-1, -2).reshape(x.shape)
    turned = reference.rotate(together.double(), angles.cos(), angles.sin())
    exact = turned.view(rows, heads, width // 2, 2).transpose(-1, -2).reshape(x.shape)
    rotate = op_of(provider, "rotate", device, dtype)
    got = rotate(x.to(device), angles.cos().to(device), angles.sin().to(device), interleaved=False)
    assert_turned(got, exact, dtype)


# The cache


STORES = {name: (name,) for name in ("store_latent", "store_index_keys")}


@for_every_op("name", STORES)
@every_page_format
@for_each(("page_size", "rows"), [*product((1, 16), (0, 1, 5))])
def test_rows_are_stored(
    provider: str, device: str, dtype: torch.dtype, packed: bool, name: str, page_size: int, rows: int
) -> None:
    x = draw(rows, 132 if name == "store_latent" else 16).to(dtype)
    parts = x.split((128, 4), -1) if name == "store_latent" else (x,)
    pack = cache_rows.latent_rows if name == "store_latent" else cache_rows.index_rows
    kind = torch.uint8 if packed else dtype
    slots = torch.randperm(6 * page_size, generator=torch.Generator().manual_seed(rows))[:rows]
    written = pack(*parts, kind)
    expected = torch.full((6, page_size, written.shape[-1]), 7, dtype=kind)
    pages = expected.to(device, copy=True)
    expected.view(-1, expected.shape[-1])[slots] = written
    op_of(provider, name, device, dtype)(pages, slots.to(device), *(part.to(device) for part in parts))
    assert torch.equal(pages.cpu(), expected)


@attrs.frozen
class PackedAttention(Attention):
    """Inputs of both attention ops over packed pages. What belongs to no sequence is NaN."""

    def fill(self) -> Tensor:
        latent, _, _, _ = self.dims
        plain = super().fill().float()
        rows = plain.flatten(0, 1)
        packed = cache_rows.latent_rows(rows[:, :latent], rows[:, latent:], torch.uint8)
        return packed.view(*plain.shape[:2], -1)

    def unpacked(self) -> Tensor:
        return cache_rows.latents(self.pages, self.dims[0], torch.float32).to(self.dtype).double()


@for_every_op("name", ATTENTION)
@pairs_each_time
@for_each(("page_size", "count"), [*product((3, 16), (0, 5))])
@for_each("dims", [(256, 6, 7, 9), (512, 8, 7, 9)])
def test_attention_over_packed_pages(
    provider: str,
    device: str,
    dtype: torch.dtype,
    name: str,
    page_size: int,
    count: int,
    dims: tuple[int, int, int, int],
) -> None:
    """The parts of a row are aligned for TMA or not."""
    contexts = contexts_of(page_size, count)
    case = PackedAttention(dtype, 3, page_size, contexts, query_lens_of(contexts), dims)
    case.check(name, provider, device)


@for_every_provider("mla_decode")
@for_each("num_queries", [1, 4])
def test_several_queries_over_packed_pages(provider: str, device: str, dtype: torch.dtype, num_queries: int) -> None:
    """More rows than one tile has, and contexts in several parts. The last slots of a context may be unwritten."""
    contexts = (150, 4, 33)
    case = PackedAttention(dtype, 5, 16, contexts, (1,) * 3, (512, 8, 7, 9), num_queries, spare_columns=3)
    case.check("mla_decode", provider, device)
    unused = case.pages
    exact, error = case.expected("mla_decode")
    for mine, context in zip(case.owned, contexts, strict=True):
        unused[mine[(context - 1) // 16], (context - 1) % 16] = 0xFF
    got = case.run("mla_decode", provider, device, unused)
    assert_within(got[:, :-1], exact[:, :-1], error[:, :-1], dtype)
    assert got[:, -1].isnan().all()


@for_each("context_bytes", [1, 4 * 16 * 3 * 46 * 2])
@for_each("score_bytes", [1, 4 * 3 * 32 * 7, 1 << 20])
@for_each("kind", [Attention, PackedAttention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_context_is_attended_to_in_blocks(
    dtype: torch.dtype, kind: type[Attention], score_bytes: int, context_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks are one page or two, after and within the queries' own, and hold one query, a few or all."""
    monkeypatch.setattr(torch_attention, "SCORE_BLOCK_BYTES", score_bytes)
    monkeypatch.setattr(torch_attention, "CONTEXT_BLOCK_BYTES", context_bytes)
    dims = (128, 6, 12, 10) if kind is PackedAttention else (16, 6, 12, 10)
    kind(dtype, 3, 16, (70, 33, 64, 81), (70, 20, 1, 49), dims).check("mla_prefill", "torch")


# Choosing tokens


@attrs.frozen
class Choice:
    """Inputs of `index_topk`: small integers, so that sums are exact in any order and many scores are equal. Every slot
    that is no sequence's own is NaN."""

    page_size: int
    contexts: tuple[int, ...]
    query_lens: tuple[int, ...]
    top_k: int
    dtype: torch.dtype = torch.float32
    packed: bool = False
    heads: int = 3
    width: int = 16
    spare_columns: int = 0
    unwritten: int = 0
    """How many of each sequence's last keys are NaN."""

    def integers(self, low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=torch.Generator().manual_seed(seed)).float()

    def keys(self, row: int) -> Tensor:
        return self.integers(-1, 1, self.contexts[row], self.width, seed=row)

    @property
    def queries(self) -> tuple[Tensor, Tensor]:
        count = sum(self.query_lens)
        return self.integers(-2, 2, count, self.heads, self.width, seed=50), self.integers(
            -1, 2, count, self.heads, seed=51
        )

    @cached_property
    def attention(self) -> Attention:
        """Who owns which page."""
        return Attention(
            self.dtype, 1, self.page_size, self.contexts, self.query_lens, spare_columns=self.spare_columns
        )

    @property
    def pages(self) -> Tensor:
        kind = torch.uint8 if self.packed else self.dtype
        owned = self.attention.owned
        nothing = cache_rows.index_rows(torch.full((1, self.width), torch.nan).to(self.dtype), kind)
        pages = nothing.expand(sum(map(len, owned)) + 1, self.page_size, -1).clone()
        for row, mine in enumerate(owned):
            keys = self.keys(row)
            keys[len(keys) - self.unwritten :] = torch.nan
            for page, part in zip(
                mine, cache_rows.index_rows(keys.to(self.dtype), kind).split(self.page_size), strict=True
            ):
                pages[page, : len(part)] = part
        return pages

    def run(self, provider: str, device: str) -> Tensor:
        q, weights = self.queries
        return op_of(provider, "index_topk", device, self.dtype)(
            q.to(device, self.dtype),
            weights.to(device),
            PrefillCache(self.pages.to(device), self.attention.table.to(device), self.query_lens, self.contexts),
            top_k=self.top_k,
        ).cpu()

    def decode(self, provider: str, device: str) -> Tensor:
        """Choose for the same number of queries in each sequence -> [T, S]."""
        q, weights = self.queries
        rows = (len(self.contexts), self.query_lens[0] if self.query_lens else 1)
        got = op_of(provider, "index_topk_decode", device, self.dtype)(
            q.to(device, self.dtype).view(*rows, self.heads, self.width),
            weights.to(device).view(*rows, self.heads),
            DecodeCache(
                self.pages.to(device),
                self.attention.wide_table.to(device),
                torch.tensor(self.contexts, dtype=torch.int64, device=device),
            ),
            top_k=self.top_k,
        ).cpu()
        assert got.dtype == torch.int64
        assert got.shape == (*rows, min(self.top_k, self.attention.wide_table.shape[1] * self.page_size))
        return got.flatten(0, 1)

    def expected(self) -> list[list[int]]:
        """Return the choice position by position, in plain ints: a sort by (score down, position up)."""
        width = min(self.top_k, max(self.contexts, default=0))
        (q, weights), rows, token = self.queries, [], 0
        for row, (context, num_queries) in enumerate(zip(self.contexts, self.query_lens, strict=True)):
            keys = self.keys(row)
            for own in range(context - num_queries, context):
                dots = (q[token] @ keys[: own + 1].T).clamp_min(0)
                scores = (weights[token] @ dots).int().tolist()
                best = sorted(range(own + 1), key=lambda at, scores=scores: (-scores[at], at))[: self.top_k]
                rows.append(sorted(best) + [-1] * (width - len(best)))
                token += 1
        return rows


@for_every_provider("index_topk")
@pairs_each_time
@every_page_format
@for_each(("page_size", "count", "top_k"), [*product((1, 3, 16), (0, 1, 5), (1, 5, 40))])
def test_index_topk(
    provider: str, device: str, dtype: torch.dtype, packed: bool, page_size: int, count: int, top_k: int
) -> None:
    contexts = contexts_of(page_size, count)
    case = Choice(page_size, contexts, query_lens_of(contexts), top_k, dtype, packed)
    got = case.run(provider, device)
    assert got.dtype == torch.int64
    assert got.tolist() == case.expected()


@for_every_provider("index_topk_decode")
@pairs_each_time
@every_page_format
@for_each("num_queries", [1, 2, 3, 4])
@for_each(("page_size", "count", "top_k"), [*product((1, 3, 16), (0, 1, 5), (1, 5, 40))])
def test_index_topk_decode(
    provider: str,
    device: str,
    dtype: torch.dtype,
    packed: bool,
    num_queries: int,
    page_size: int,
    count: int,
    top_k: int,
) -> None:
    """Sequences are shorter and longer than `top_k`, and the table is wider than any."""
    contexts = tuple(max(num_queries, context) for context in contexts_of(page_size, count))
    case = Choice(page_size, contexts, (num_queries,) * count, top_k, dtype, packed, spare_columns=2)
    assert case.decode(provider, device).tolist() == filled(case)


def filled(case: Choice) -> list[list[int]]:
    """Return what is expected, in rows as long as the table allows."""
    width = min(case.top_k, case.attention.wide_table.shape[1] * case.page_size)
    return [row + [-1] * (width - len(row)) for row in case.expected()]


@for_every_provider("index_topk_decode")
@every_page_format
def test_a_key_that_was_not_written_changes_no_choice_before_it(
    provider: str, device: str, dtype: torch.dtype, packed: bool
) -> None:
    """Neither of keys that are chosen, nor where fewer than `top_k` are seen."""
    for unwritten in (1, 2):
        case = Choice(16, (20, 4, 33, 64), (4,) * 4, 6, dtype, packed, unwritten=unwritten)
        got, expected = case.decode(provider, device).view(4, 4, -1), torch.tensor(filled(case)).view(4, 4, -1)
        assert torch.equal(got[:, : 4 - unwritten], expected[:, : 4 - unwritten])
        assert (got[:, 4 - unwritten :] == -1).all()


@for_each("score_bytes", [1, 4 * 70 * 7, 4 * 16 * 70 * 3])
def test_blocks_of_scores_change_no_choice(score_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "SCORE_BLOCK_BYTES", score_bytes)
    case = Choice(16, (70, 33, 64, 81), (70, 20, 1, 49), 9)
    assert case.run("torch", "cpu").tolist() == case.expected()
    case = Choice(16, (70, 33, 64, 81), (3,) * 4, 9, spare_columns=1)
    assert case.decode("torch", "cpu").tolist() == filled(case)


@every_page_format
@for_each("block_bytes", [1, 4096, 1 << 20])
def test_tables_that_are_read_whole_change_nothing(
    packed: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on devices, whose lengths no host knows: most columns hold nothing of most sequences."""
    monkeypatch.setattr(torch_attention, "_columns_in_use", lambda cache: cache.table_BM)
    monkeypatch.setattr(torch_attention, "SCORE_BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(torch_attention, "CONTEXT_BLOCK_BYTES", block_bytes)
    contexts = (20, 2, 33, 64)
    case = Choice(16, contexts, (2,) * 4, 6, packed=packed, spare_columns=9)
    assert case.decode("torch", "cpu").tolist() == filled(case)
    kind = PackedAttention if packed else Attention
    kind(torch.float32, 3, 16, contexts, (1,) * 4, (128, 8, 12, 10), 2, spare_columns=9).check("mla_decode", "torch")


@every_place("index_topk", "index_topk_decode")
def test_of_equal_scores_the_lowest_positions_are_taken(provider: str, device: str) -> None:
    pages, table = torch.ones(4, 4, 2, device=device), torch.arange(4, device=device)[None]
    q, weights = torch.ones(16, 1, 2, device=device), torch.zeros(16, 1, device=device)
    op = op_of(provider, "index_topk", device)
    got = op(q, weights, PrefillCache(pages, table, (16,), (16,)), top_k=3).tolist()
    assert got == [[0, -1, -1], [0, 1, -1], *[[0, 1, 2]] * 14]
    op = op_of(provider, "index_topk_decode", device)
    cache = DecodeCache(pages, table, torch.tensor([4], device=device))
    got = op(q[None, :3], weights[None, :3], cache, top_k=3)
    assert got.tolist() == [[[0, 1, -1], [0, 1, 2], [0, 1, 2]]]


@every_place("index_topk", "index_topk_decode")
def test_equal_scores_of_a_long_context_are_counted_from_its_start(provider: str, device: str) -> None:
    """A few higher ones are taken wherever they are."""
    best = [2098, 700, 1400]
    pages = torch.ones(1, 2100, 2)
    pages[0, best] = 2
    q, weights = torch.ones(1, 1, 2, device=device), torch.ones(1, 1, device=device)
    pages, table = pages.to(device), torch.zeros(1, 1, dtype=torch.int32, device=device)
    expected = sorted({*range(1497 + 2), 2098})
    got = op_of(provider, "index_topk", device)(q, weights, PrefillCache(pages, table, (1,), (2100,)), top_k=1500)
    assert got.tolist() == [expected]
    cache = DecodeCache(pages, table, torch.tensor([2100], device=device))
    got = op_of(provider, "index_topk_decode", device)(q[None], weights[None], cache, top_k=1500)
    assert got.tolist() == [[expected]]


@for_every_provider("index_topk", "index_topk_decode")
@every_page_format
def test_scores_that_differ_in_float32_alone_are_told_apart(
    provider: str, device: str, dtype: torch.dtype, packed: bool
) -> None:
    """The scores 63.94, 64.06 and 64.19 of one key each are one number in bfloat16. Turned keys are unit vectors."""
    q, weights, table = torch.zeros(1, 1, 16, dtype=dtype), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    q[..., :3] = torch.tensor([256, 0.25, 0.5])
    keys = cache_rows.hadamard(torch.eye(16)[[2, 1, 0]]).to(dtype)
    pages = cache_rows.index_rows(keys, torch.uint8 if packed else dtype)[None]
    q, weights, pages, table = (x.to(device) for x in (q, weights, pages, table))
    choose = op_of(provider, "index_topk", device, dtype)
    assert choose(q, weights, PrefillCache(pages, table, (1,), (3,)), top_k=1).tolist() == [[2]]
    cache = DecodeCache(pages, table, torch.tensor([3], device=device))
    choose = op_of(provider, "index_topk_decode", device, dtype)
    assert choose(q[None], weights[None], cache, top_k=1).tolist() == [[[2]]]


# Attending to them


@attrs.frozen
class Sparse:
    """Inputs of `mla_sparse`: tokens of several sequences with positions of their own, among slots full of NaN."""

    dtype: torch.dtype
    page_size: int
    packed: bool
    heads: int = 3
    latent: int = 128
    rope: int = 6
    contexts: tuple[int, ...] = (17, 1, 40)
    counts: tuple[int, ...] = (3, 1, 2, 5, 0, 7)
    """How many positions each of six tokens reads: of the sequences 0, 1, 2, 2, 0, 2. None gives NaN."""

    sequences: tuple[int, ...] = (0, 1, 2, 2, 0, 2)
    room: int = 8
    """How many positions each token has room for."""
    num_large: int = 0
    """How many of the first elements of each row are 64 times as large, so that packed parts have other scales."""

    @cached_property
    def selected(self) -> Tensor:
        rows = torch.full((6, self.room), -1)
        for token, (row, count) in enumerate(zip(self.sequences, self.counts, strict=True)):
            order = torch.randperm(self.contexts[row], generator=torch.Generator().manual_seed(token))
            rows[token, :count] = order[:count].sort().values
        return rows

    @property
    def queries(self) -> tuple[Tensor, Tensor]:
        shapes = ((6, self.heads, self.latent), (6, self.heads, self.rope))
        q_latent, q_rope = (draw(*shape, seed=9).to(self.dtype) for shape in shapes)
        return q_latent, q_rope

    @cached_property
    def cached(self) -> list[Tensor]:
        """The cached rows of each sequence [context, width], with NaN where nobody reads."""
        read: list[set[int]] = [set() for _ in self.contexts]
        for row, positions in zip(self.sequences, self.selected.tolist(), strict=True):
            read[row] |= {position for position in positions if position >= 0}
        rows = [
            draw(context, self.latent + self.rope, seed=row).to(self.dtype) for row, context in enumerate(self.contexts)
        ]
        for mine, positions in zip(rows, read, strict=True):
            mine[:, : self.num_large] *= 64
            mine[[at for at in range(len(mine)) if at not in positions]] = torch.nan
        return rows

    def run(self, provider: str, device: str) -> Tensor:
        owned = Attention(self.dtype, 1, self.page_size, self.contexts, (1,) * len(self.contexts)).owned
        kind = torch.uint8 if self.packed else self.dtype
        parts = [cache_rows.latent_rows(rows[:, : self.latent], rows[:, self.latent :], kind) for rows in self.cached]
        nothing = 0xFF if self.packed else torch.nan
        pages = torch.full((sum(map(len, owned)) + 1, self.page_size, parts[0].shape[-1]), nothing, dtype=kind)
        for rows, mine in zip(parts, owned, strict=True):
            for page, part in zip(mine, rows.split(self.page_size), strict=True):
                pages[page, : len(part)] = part
        table = Batch.build(
            [Row([0], context - 1, mine) for context, mine in zip(self.contexts, owned, strict=True)],
            page_size=self.page_size,
            device=CPU,
            decode=True,
        ).page_table_BM
        q_latent, q_rope = (x.to(device) for x in self.queries)
        cache = TokenCache(*(x.to(device) for x in (pages, table, torch.tensor(self.sequences))))
        op = op_of(provider, "mla_sparse", device, self.dtype)
        return op(q_latent, q_rope, cache, self.selected.to(device), scale=SCALE).cpu()

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return the softmax over the chosen rows, token by token, in float64, and how far from it a result may be."""
        q_latent, q_rope = self.queries
        out = torch.full(q_latent.shape, torch.nan, dtype=torch.float64)
        error = torch.zeros_like(out)
        for token, (row, count) in enumerate(zip(self.sequences, self.counts, strict=True)):
            rows = self.cached[row][self.selected[token, :count]]
            if self.packed:
                packed = cache_rows.latent_rows(rows[:, : self.latent], rows[:, self.latent :], torch.uint8)
                rows = cache_rows.latents(packed, self.latent, self.dtype)
            q = torch.cat((q_latent[token], q_rope[token]), -1).double()
            if count:
                out[token] = (SCALE * q @ rows.double().T).softmax(-1) @ rows[:, : self.latent].double()
                k_SHN = rows.double()[:, None].expand(-1, self.heads, -1)
                visible, value = torch.ones(1, count, dtype=torch.bool), k_SHN[..., : self.latent]
                error[token] = error_of_attention(q[None], k_SHN, value, visible, SCALE, self.dtype)[0]
        return out, error


@for_every_provider("mla_sparse")
@pairs_each_time
@every_page_format
@for_each("page_size", [1, 16])
@for_each("block_bytes", [1, 1 << 20])
def test_mla_sparse(
    provider: str,
    device: str,
    dtype: torch.dtype,
    packed: bool,
    page_size: int,
    block_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_attention, "CONTEXT_BLOCK_BYTES", block_bytes)
    check_sparse(Sparse(dtype, page_size, packed), provider, device)


@cache
def _expected(case: Sparse) -> tuple[Tensor, Tensor]:
    # once for all providers
    return case.expected()


def check_sparse(case: Sparse, provider: str, device: str) -> None:
    got, (exact, error) = case.run(provider, device), _expected(case)
    some = [token for token, count in enumerate(case.counts) if count]
    assert_within(got[some], exact[some], error[some], case.dtype)


@for_every_provider("mla_sparse")
@every_page_format
def test_many_chosen_positions_are_read_in_parts(provider: str, device: str, dtype: torch.dtype, packed: bool) -> None:
    """Few tokens choose many positions each. Some have none in the later parts, and one has none at all."""
    counts = (150, 1, 2, 200, 0, 130)
    check_sparse(Sparse(dtype, 16, packed, contexts=(150, 1, 210), counts=counts, room=272), provider, device)


@for_every_provider("mla_sparse")
def test_each_part_of_a_chosen_row_has_a_scale_of_its_own(provider: str, device: str, dtype: torch.dtype) -> None:
    check_sparse(Sparse(dtype, 16, packed=True, latent=384, num_large=128), provider, device)


@for_every_provider("mla_sparse")
@every_page_format
@for_each("rope", [8, 6])
def test_more_heads_than_a_tile_has(
    provider: str, device: str, dtype: torch.dtype, packed: bool, rope: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton copies chosen rows then, those of all tokens at once or of two, unless TMA could not read the copies."""
    contexts, counts = (17, 1, 90), (3, 1, 16, 5, 0, 70)
    case = Sparse(dtype, 16, packed, 65, 256, rope, contexts=contexts, counts=counts, room=72, num_large=128)
    check_sparse(case, provider, device)
    if provider == "triton":
        module = importlib.import_module("pdinfer.kernels.triton.mla_sparse")
        monkeypatch.setattr(module, "COPIED_BYTES", 2 * 128 * (256 + rope) * dtype.itemsize)
        check_sparse(case, provider, device)


@for_every_provider("mla_sparse")
def test_all_positions_are_the_dense_way(provider: str, device: str, dtype: torch.dtype) -> None:
    case = Attention(dtype, 3, 4, (9, 6, 12), (1, 1, 1))

    def decode(q_latent: Tensor, q_rope: Tensor, cache: DecodeCache, *, scale: float) -> Tensor:
        at = torch.arange(12, device=device).expand(3, -1)
        selected = torch.where(at < cache.lens_B[:, None], at, -1)
        tokens = TokenCache(cache.pages_PGW, cache.table_BM, torch.arange(3, device=device))
        op = op_of(provider, "mla_sparse", device, dtype)
        return op(q_latent[:, 0], q_rope[:, 0], tokens, selected, scale=scale)[:, None]

    got = case.decode(decode, case.pages.to(device), lambda x: x.to(device))
    assert_within(got, *case.expected("mla_decode"), dtype)


@every_place("mla_sparse")
def test_no_tokens_read_nothing(provider: str, device: str) -> None:
    shapes = ((0, 2, 4), (0, 2, 2), (3, 4, 6))
    q_latent, q_rope, pages = (torch.zeros(shape, device=device) for shape in shapes)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    op = op_of(provider, "mla_sparse", device)
    cache = TokenCache(pages, empty.view(0, 0), empty)
    assert op(q_latent, q_rope, cache, empty.view(0, 0), scale=1.0).shape == (0, 2, 4)
