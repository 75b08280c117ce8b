"""Attention in eager torch, the choice of what it reads, and rows of pages that are written, gathered and scattered.

Softmax and index scores stay float32. No tensor of size [tokens, tokens] is ever held, nor the keys and values of a
long context: attention goes through blocks of queries, and through blocks of context where that is long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from pdinfer.kernels.arguments import DecodeCache, PagedCache, PrefillCache, TokenCache
from pdinfer.kernels.formats import cache_rows
from pdinfer.kernels.formats.floats import not_finite
from pdinfer.kernels.torch import flash

SCORE_BLOCK_BYTES = 32 << 20
"""The memory for one block of attention scores: small enough for a CPU's outer cache to help, large enough for a
GEMM."""

CONTEXT_BLOCK_BYTES = 64 << 20
"""The memory for what is computed from one block of context, such as its keys and values, or its rows gathered token by
token."""


def mla_prefill(q_THQ: Tensor, kv_b_OC: Tensor, cache: PrefillCache, *, v_head_dim: int, scale: float) -> Tensor:
    num_heads, latent_rank = q_THQ.shape[1], kv_b_OC.shape[1]
    nope = kv_b_OC.shape[0] // num_heads - v_head_dim
    page_size = cache.page_size
    block_pages = max(1, CONTEXT_BLOCK_BYTES // (page_size * num_heads * (2 * q_THQ.shape[-1] + v_head_dim) * 4))

    def keys_values(table_M: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Return (k_HSQ, v_HSV) of the first `context` slots of these pages."""
        cached = cache.pages_PGW.index_select(0, table_M).flatten(0, 1)[:context]
        cached = cache_rows.latents(cached, latent_rank, q_THQ.dtype)
        kv = F.linear(cached[:, :latent_rank], kv_b_OC).view(context, num_heads, nope + v_head_dim)
        k_rope = cached[:, None, latent_rank:].expand(-1, num_heads, -1)
        return torch.cat((kv[..., :nope], k_rope), -1).transpose(0, 1), kv[..., nope:].transpose(0, 1)

    out = q_THQ.new_empty(q_THQ.shape[0], num_heads, v_head_dim)
    for queries, pages_M, context in cache.sequences():
        q_HTQ, out_THV = q_THQ[queries].transpose(0, 1), out[queries]
        offset = context - len(out_THV)

        def blocks(pages_M: Tensor = pages_M, context: int = context) -> Iterator[flash.Block]:
            for start, part in zip(range(0, len(pages_M), block_pages), torch.split(pages_M, block_pages), strict=True):
                position = start * page_size
                yield position, *keys_values(part, min(len(part) * page_size, context - position))

        fused = len(out_THV) and out.is_cpu and out.dtype in flash.DTYPES
        if fused and flash.attend(q_HTQ, offset, blocks(), scale, out_THV):
            continue
        _attend(q_HTQ, offset, blocks(), scale, out_THV)
    return out


def _lost(scores: Tensor) -> Tensor:
    """Return what to add to one score of each row before others are masked: NaN for rows that hold -inf, to which a
    softmax would give no weight, or NaN; 0 for others. A softmax turns +inf into NaN by itself."""
    return scores.amin(-1, keepdim=True) * 0


def _attend(q_HTQ: Tensor, offset: int, blocks: Iterable[flash.Block], scale: float, out_THV: Tensor) -> None:
    """Let T queries, the first at position `offset`, attend to themselves and all before, block by block of context and
    of queries."""
    num_heads, num_queries, _ = q_HTQ.shape
    softmax = _RunningSoftmax.start(num_heads, num_queries, out_THV.shape[-1], q_HTQ.device)
    for position, k_HSQ, v_HSV in blocks:
        size = k_HSQ.shape[1]
        query_block = max(1, SCORE_BLOCK_BYTES // (4 * num_heads * size))
        # queries before the block see nothing of it
        for start in range(max(0, position - offset), num_queries, query_block):
            part = slice(start, min(start + query_block, num_queries))
            scores = torch.bmm(q_HTQ[:, part], k_HSQ.mT).float().mul_(scale)
            lost_HT1 = _lost(scores)
            if position + size > offset + start + 1:
                at = torch.arange(offset + start, offset + part.stop, device=q_HTQ.device, dtype=torch.int64)
                future = torch.arange(position, position + size, device=q_HTQ.device, dtype=torch.int64) > at[:, None]
                scores.masked_fill_(future, -torch.inf)
            softmax.add(scores, v_HSV, lost_HT1, part)
    out_THV.copy_(softmax.result().transpose(0, 1))


@attrs.frozen
class _RunningSoftmax:
    """A sum of values weighed by a softmax, block of context by block, with a running maximum (arXiv 1805.02867,
    algorithm 3): N times T rows. float32."""

    value_NTV: Tensor
    total_NT1: Tensor
    maximum_NT1: Tensor

    @classmethod
    def start(cls, count: int, rows: int, width: int, device: torch.device) -> _RunningSoftmax:
        """Begin with nothing for `rows` rows in each of `count` groups, which share their values."""
        total_NT1 = torch.zeros(count, rows, 1, device=device, dtype=torch.float32)
        value_NTV = torch.zeros(count, rows, width, device=device, dtype=torch.float32)
        return cls(value_NTV, total_NT1, torch.full_like(total_NT1, -torch.inf))

    def add(self, scores_NTS: Tensor, v_NSV: Tensor, lost_NT1: Tensor, part: slice = slice(None)) -> None:
        """Add a block to the rows in `part`, each of which has seen a position by then. Changes the scores, which are
        -inf where a row sees nothing. `lost_NT1` is NaN for rows to lose, otherwise 0."""
        before = self.maximum_NT1[:, part]
        highest = torch.maximum(before, scores_NTS.amax(-1, keepdim=True))
        weights = scores_NTS.sub_(highest).exp_()
        kept = (before - highest).exp_()
        self.total_NT1[:, part] = self.total_NT1[:, part] * kept + weights.sum(-1, keepdim=True) + lost_NT1
        self.value_NTV[:, part] = self.value_NTV[:, part] * kept + torch.bmm(weights.to(v_NSV.dtype), v_NSV).float()
        self.maximum_NT1[:, part] = highest

    def result(self) -> Tensor:
        """Return [N, T, V]."""
        return self.value_NTV / self.total_NT1


def mla_decode(q_latent_BQHC: Tensor, q_rope_BQHR: Tensor, cache: DecodeCache, *, scale: float) -> Tensor:
    batch, num_queries, num_heads, latent_rank = q_latent_BQHC.shape
    if not batch:
        return torch.empty_like(q_latent_BQHC)
    page_size, device = cache.page_size, cache.pages_PGW.device
    table_BM = _columns_in_use(cache)
    q_BQHW = torch.cat((q_latent_BQHC, q_rope_BQHR), -1)
    last_BQ1 = _last_seen(cache.lens_B, num_queries)[..., None]

    def scored(pages_BM: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Score the rows in pages that begin at position `start`, as `_scored` does."""
        size = pages_BM.shape[1] * page_size
        cached_BSW = cache.pages_PGW.index_select(0, pages_BM.flatten()).view(batch, size, cache.pages_PGW.shape[-1])
        cached_BSW = cache_rows.latents(cached_BSW, latent_rank, q_BQHW.dtype)
        position_S = torch.arange(start, start + size, device=device, dtype=torch.int64)
        return _scored(q_BQHW, cached_BSW, position_S > last_BQ1, scale)

    num_rows = num_queries * num_heads
    block = max(1, CONTEXT_BLOCK_BYTES // (8 * batch * page_size * (q_BQHW.shape[-1] + num_rows)))
    if table_BM.shape[1] <= block:
        return _weighed(*scored(table_BM, 0), q_latent_BQHC)
    softmax = _RunningSoftmax.start(batch, num_rows, latent_rank, device)
    for column in range(0, table_BM.shape[1], block):
        scores_BNS, lost_BN1, cached_BSW = scored(table_BM[:, column : column + block], column * page_size)
        softmax.add(scores_BNS, cached_BSW[..., :latent_rank], lost_BN1)
    return softmax.result().to(q_BQHW.dtype).view(q_latent_BQHC.shape)


def _scored(q_BQHW: Tensor, cached_BSW: Tensor, unseen_BQS: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores of all queries and heads of each sequence for its rows [B, Q * H, S], -inf where they are
    unseen, NaN for those that are lost and 0 for others [B, Q * H, 1], and the rows as values. Changes the rows."""
    scores_BNS = torch.bmm(q_BQHW.flatten(1, 2), cached_BSW.transpose(1, 2)).float().mul_(scale)
    scores_BQHS, unseen_BQ1S = scores_BNS.view(*q_BQHW.shape[:3], cached_BSW.shape[1]), unseen_BQS[:, :, None]
    scores_BQHS.masked_fill_(unseen_BQ1S, 0)
    lost_BN1 = _lost(scores_BNS)
    scores_BQHS.masked_fill_(unseen_BQ1S, -torch.inf)
    # unseen rows may hold an earlier owner's NaN, and 0 * NaN is NaN; of those that are seen the scores have it
    return scores_BNS, lost_BN1, cached_BSW.nan_to_num_(0, 0, 0)


def _weighed(scores_BNS: Tensor, lost_BN1: Tensor, cached_BSW: Tensor, like: Tensor) -> Tensor:
    """Return the latents of rows, summed by the softmax of their scores, in the shape and dtype of `like`: [..., C]."""
    scores_BNS[..., :1] += lost_BN1
    weights_BNS = scores_BNS.softmax(-1).to(like.dtype)
    return torch.bmm(weights_BNS, cached_BSW[..., : like.shape[-1]]).view(like.shape)


def _columns_in_use(cache: DecodeCache) -> Tensor:
    """Return the table as wide as the longest context on a CPU, and whole elsewhere, where to ask for a length would
    wait for the device."""
    if cache.lens_B.device.type != "cpu":
        return cache.table_BM
    return cache.table_BM[:, : -(-int(cache.lens_B.max()) // cache.page_size)]


def _last_seen(lens_B: Tensor, num_queries: int) -> Tensor:
    """Return the position of each query, the last one it sees, of the last `num_queries` of each sequence [B, Q]."""
    return lens_B[:, None] + torch.arange(-num_queries, 0, device=lens_B.device, dtype=torch.int64)


def mla_sparse(
    q_latent_THC: Tensor, q_rope_THR: Tensor, cache: TokenCache, selected_TS: Tensor, *, scale: float
) -> Tensor:
    if not selected_TS.shape[1]:
        return torch.full_like(q_latent_THC, torch.nan)
    num_heads, latent_rank = q_latent_THC.shape[1:]
    page_size, width = cache.page_size, latent_rank + q_rope_THR.shape[-1]
    rows_NW, q_THW = cache.pages_PGW.view(-1, cache.pages_PGW.shape[-1]), torch.cat((q_latent_THC, q_rope_THR), -1)
    block = max(1, CONTEXT_BLOCK_BYTES // (8 * max(1, selected_TS.shape[1]) * (width + num_heads)))
    out = torch.empty_like(q_latent_THC)
    for start in range(0, len(out), block):
        part = slice(start, start + block)
        none_TS = selected_TS[part] < 0
        positions_TS = selected_TS[part].clamp_min(0)
        pages_TS = cache.table_BM[cache.sequence_T[part, None], positions_TS // page_size]
        slots_TS = pages_TS * page_size + positions_TS % page_size
        cached_TSW = rows_NW.index_select(0, slots_TS.flatten()).view(*slots_TS.shape, -1)
        cached_TSW = cache_rows.latents(cached_TSW, latent_rank, out.dtype)
        out[part] = _weighed(*_scored(q_THW[part, None], cached_TSW, none_TS[:, None], scale), out[part])
    return out


def index_topk(q_TXY: Tensor, weights_TX: Tensor, cache: PrefillCache, *, top_k: int) -> Tensor:
    q_TXY = _index_queries(q_TXY, cache)
    size = min(top_k, max(cache.context_lens, default=0))
    selected_TS = torch.full((len(q_TXY), size), -1, device=q_TXY.device, dtype=torch.int64)
    for queries, pages_M, context in cache.sequences():
        block = max(1, SCORE_BLOCK_BYTES // (16 * context))  # choosing takes three times the scores' memory on top
        for start in range(queries.start, queries.stop, block):
            part = slice(start, min(start + block, queries.stop))
            own, visible = (context - queries.stop + token for token in (part.start, part.stop))  # positions
            pages_BM = pages_M[None, : -(-visible // cache.page_size)]
            scores_TS = _index_scores(q_TXY[None, part], weights_TX[None, part], cache.pages_PGW, pages_BM)[:, :visible]
            last_T = torch.arange(own, visible, device=q_TXY.device, dtype=torch.int64)
            best_TS = _lowest_of_best(scores_TS, last_T, min(top_k, visible))
            selected_TS[part, : best_TS.shape[1]] = best_TS
    return selected_TS


def index_topk_decode(q_BQXY: Tensor, weights_BQX: Tensor, cache: DecodeCache, *, top_k: int) -> Tensor:
    q_BQXY = _index_queries(q_BQXY, cache)
    batch, num_queries = q_BQXY.shape[:2]
    count = min(top_k, cache.table_BM.shape[1] * cache.page_size)
    selected_BQS = torch.full((batch, num_queries, count), -1, device=q_BQXY.device, dtype=torch.int64)
    if not batch:
        return selected_BQS
    table_BM = _columns_in_use(cache)
    last_BQ, size = _last_seen(cache.lens_B, num_queries), table_BM.shape[1] * cache.page_size
    block = max(1, SCORE_BLOCK_BYTES // (16 * num_queries * size))  # as in `index_topk`
    for first in range(0, batch, block):
        part = slice(first, first + block)
        scores_TS = _index_scores(q_BQXY[part], weights_BQX[part], cache.pages_PGW, table_BM[part])
        best_TS = _lowest_of_best(scores_TS, last_BQ[part].flatten(), min(count, size))
        selected_BQS[part, :, : best_TS.shape[1]] = best_TS.view(-1, num_queries, best_TS.shape[1])
    return selected_BQS


def _index_queries(q: Tensor, cache: PagedCache) -> Tensor:
    """Return queries that fit the keys of these pages, in float32: NaN where one is not finite."""
    q = cache_rows.index_queries(q.float(), cache.pages_PGW.dtype)
    return q + not_finite(q)


def _index_scores(q_BQXY: Tensor, weights_BQX: Tensor, pages_PGY: Tensor, table_BM: Tensor) -> Tensor:
    """Return the scores of every query for every row in the pages of its sequence, float32 [B * Q, S]."""
    batch, num_queries, num_heads, _ = q_BQXY.shape
    page_size = pages_PGY.shape[1]
    q_BNY, weights_T1X = q_BQXY.flatten(1, 2), weights_BQX.flatten(0, 1)[:, None]
    scores = []
    block = max(1, SCORE_BLOCK_BYTES // (4 * page_size * q_BNY.shape[:2].numel()))
    for pages_BM in torch.split(table_BM, block, 1):
        size = pages_BM.shape[1] * page_size
        keys_BSY = cache_rows.index_keys(pages_PGY.index_select(0, pages_BM.flatten())).float().view(batch, size, -1)
        keys_BSY = keys_BSY + not_finite(keys_BSY)
        dots_TXS = torch.bmm(q_BNY, keys_BSY.transpose(1, 2)).view(batch * num_queries, num_heads, size)
        scores.append(torch.bmm(weights_T1X, dots_TXS.relu_())[:, 0])
    return torch.cat(scores, -1)


def _lowest_of_best(scores_TS: Tensor, last_T: Tensor, count: int) -> Tensor:
    """Return the positions of the `count` largest scores of each row, ascending; among equals the lowest. Row t sees
    the positions up to `last_T[t]`. -1 fills up where it sees fewer than `count`, and everything where one of its
    scores is not finite. Changes the scores."""
    position_S = torch.arange(scores_TS.shape[1], dtype=torch.int32, device=scores_TS.device)
    last_T1 = last_T[:, None]
    future_TS = position_S > last_T1
    lost_T1 = ~scores_TS.masked_fill_(future_TS, 0).isfinite().all(-1, keepdim=True)
    scores_TS.masked_fill_(future_TS, -torch.inf)
    least_T1 = scores_TS.topk(count, -1).values[:, -1:]
    above_TS = scores_TS > least_T1
    equal_TS = scores_TS == least_T1
    room_T1 = count - above_TS.sum(-1, keepdim=True)
    taken_TS = above_TS | (equal_TS & (equal_TS.cumsum(-1, dtype=torch.int32) <= room_T1))
    best_TS = torch.where(taken_TS, position_S, len(position_S)).topk(count, largest=False).values.long()
    return best_TS.masked_fill_((best_TS > last_T1) | lost_T1, -1)


def store_latent(pages_PGW: Tensor, slots_T: Tensor, c_TC: Tensor, k_rope_TR: Tensor) -> None:
    rows_TW = cache_rows.latent_rows(c_TC, k_rope_TR, pages_PGW.dtype)
    pages_PGW.view(-1, pages_PGW.shape[-1]).index_copy_(0, slots_T, rows_TW)


def store_index_keys(pages_PGY: Tensor, slots_T: Tensor, keys_TY: Tensor) -> None:
    rows_TY = cache_rows.index_rows(keys_TY, pages_PGY.dtype)
    pages_PGY.view(-1, pages_PGY.shape[-1]).index_copy_(0, slots_T, rows_TY)


def gather_pages(pool_NW: Tensor, rows_S: Tensor, into_SW: Tensor) -> None:
    torch.index_select(pool_NW, 0, rows_S, out=into_SW)


def scatter_pages(pool_NW: Tensor, rows_S: Tensor, from_SW: Tensor) -> None:
    pool_NW.index_copy_(0, rows_S, from_SW)
