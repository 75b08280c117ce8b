"""Attention over latents by FlashMLA, on Hopper cards that have it. This is the only file that imports flash_mla.

Sources: deepseek-ai/FlashMLA, csrc/api/dense_decode.h and sparse_decode.h of 2026-04, csrc/pybind.cpp of 2025-09. Its
versions differ in the plan of a call: older ones compute it in `get_mla_metadata`, newer ones in the call itself, bound
to the lengths of that call. One way of calling suits both, with a plan for all layers of a step (`PagedCache.of_step`).

What it does to numbers that are not finite: a score of -inf beside finite ones gets no weight, so an infinite rotary
key, or a product that overflows, may be lost where other ops return NaN."""

from __future__ import annotations

import importlib
import inspect

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from pdinfer.kernels import hopper
from pdinfer.kernels.arguments import DecodeCache, PagedCache, TokenCache
from pdinfer.kernels.ops import Declined
from pdinfer.kernels.spec import OpSpec

PAGE_SIZE = 64
LATENT, ROPE = 512, 64
SPARSE_HEADS = (64, 128)
SPARSE_STEP = 64
"""The number of positions that a token reads is a multiple of this."""


def unavailable(spec: OpSpec) -> str | None:
    """Return why FlashMLA cannot run on a device, or None where it can. It decodes over plain latents on Hopper cards
    alone."""
    return hopper.why_not(spec.device, "flash_mla", (("get_mla_metadata",), ("flash_mla_with_kvcache",)))


def refuses(op: str, spec: OpSpec) -> str | None:
    """Return why an op is not served for these sizes and formats, or None where it is, or is not known to be not."""
    if spec.dtype != torch.bfloat16:
        return f"computes in bfloat16, the model runs in {spec.dtype}"
    if op == "mla_sparse" and not _reads_chosen():
        return "this flash_mla is too old for sparse attention"
    packed = None if spec.kv_format is None else spec.kv_format == "fp8"
    return _why_not(
        op, spec.num_heads, spec.kv_lora_rank, spec.qk_rope_head_dim, page_size=spec.page_size, packed=packed
    )


def _reads_chosen() -> bool:
    library = importlib.import_module("flash_mla")
    return "indices" in inspect.signature(library.flash_mla_with_kvcache).parameters


def _why_not(
    op: str, heads: int | None, latent: int | None, rope: int | None, *, page_size: int | None, packed: bool | None
) -> str | None:
    """Return why an op cannot have these sizes, of which None may be any, or None where it can."""
    if (latent or LATENT, rope or ROPE) != (LATENT, ROPE):
        have = f"{latent or 'any'} and {rope or 'any'}"
        return f"reads latents of {LATENT} and rotary keys of {ROPE} elements, they have {have}"
    sparse = op == "mla_sparse"
    if packed is not None and packed != sparse:
        return f"reads pages of {'packed FP8' if sparse else 'bfloat16'}, these are {'not' if sparse else 'packed FP8'}"
    if sparse and (heads or SPARSE_HEADS[0]) not in SPARSE_HEADS:
        return f"has sparse kernels for {' and '.join(map(str, SPARSE_HEADS))} heads on a rank, there are {heads}"
    if (page_size or PAGE_SIZE) != PAGE_SIZE:
        gain = "2.6 to 2.8 times" if sparse else "1.5 to 2 times with 128 heads, 1.2 times with 16,"
        return (
            f"reads pages of {PAGE_SIZE} tokens, these have {page_size}: with page_size={PAGE_SIZE} it was {gain} as "
            "fast as Triton on an H200 (benchmarks/results/2026-11-26-gpu-h200.jsonl)"
        )
    return None


def mla_decode(q_latent_BQHC: Tensor, q_rope_BQHR: Tensor, cache: DecodeCache, *, scale: float) -> Tensor:
    """The queries of a sequence are rows of the same tiles, so that one pass over its latents is for as many of them as
    a tile has room for. They come in another order (`_Queries`)."""
    _check("mla_decode", q_latent_BQHC, q_rope_BQHR, cache)
    if not len(q_latent_BQHC):
        return torch.empty_like(q_latent_BQHC)
    num_queries, num_heads = q_latent_BQHC.shape[1:3]
    library, key = importlib.import_module("flash_mla"), (__name__, num_queries, num_heads)
    if key not in cache.of_step:
        queries = _Queries.of(cache, num_queries)
        plan = library.get_mla_metadata(queries.lens_B, num_queries * num_heads, 1)
        cache.of_step[key] = queries, cache.table_BM.to(torch.int32), plan
    queries, table_BM, plan = cache.of_step[key]
    out_BQHC, lse_BHQ = library.flash_mla_with_kvcache(
        _in_order(torch.cat((q_latent_BQHC, q_rope_BQHR), -1), queries.order_T),
        cache.pages_PGW[:, :, None],
        table_BM,
        queries.lens_B,
        LATENT,
        *plan,
        softmax_scale=scale,
        causal=num_queries > 1,
    )
    return _in_order(_nan_where_lost(out_BQHC, lse_BHQ), queries.back_T)


@attrs.frozen
class _Queries:
    """The order in which queries of a sequence go to the library: the live ones last. Lengths, int32, end with them.

    The causal mask multiplies what it hides by 0, and a row that was never written may hold NaN. So nothing that is not
    live is within the length, behind which the library puts zeros itself (csrc/sm90/decode/dense/splitkv_mla.cuh,
    `fill_oob_V`). Query i comes from `order_T[i]`, and its result is number `back_T[i]`; None is the same order."""

    lens_B: Tensor
    order_T: Tensor | None = None
    back_T: Tensor | None = None

    @classmethod
    def of(cls, cache: DecodeCache, num_queries: int) -> _Queries:
        if cache.live_T is None or num_queries == 1:
            return cls(cache.lens_B.to(torch.int32))
        # a sequence without a live query reads its first row
        num_live_B = cache.live_T.view(-1, num_queries).sum(1).clamp_min(1)
        query_T = torch.arange(len(cache.live_T), device=cache.live_T.device, dtype=torch.int64)
        at_BQ, first_T = (query_T % num_queries).view(-1, num_queries), query_T // num_queries * num_queries
        order_BQ, back_BQ = ((at_BQ + turn * num_live_B[:, None]) % num_queries for turn in (1, -1))
        return cls(
            (cache.lens_B - num_queries + num_live_B).to(torch.int32),
            first_T + order_BQ.flatten(),
            first_T + back_BQ.flatten(),
        )


def _in_order(x_BQ: Tensor, order_T: Tensor | None) -> Tensor:
    """Return x [B, Q, ...] with its queries in another order."""
    return x_BQ if order_T is None else x_BQ.flatten(0, 1).index_select(0, order_T).view(x_BQ.shape)


def mla_sparse(
    q_latent_THC: Tensor, q_rope_THR: Tensor, cache: TokenCache, selected_TS: Tensor, *, scale: float
) -> Tensor:
    """Positions become slots of the pool, and their number is filled up to whole steps with slots that are none."""
    _check("mla_sparse", q_latent_THC, q_rope_THR, cache)
    num_tokens, num_chosen = selected_TS.shape
    if not num_tokens or not num_chosen:
        return torch.full_like(q_latent_THC, torch.nan)
    positions_TS = selected_TS.clamp_min(0)
    pages_TS = cache.table_BM[cache.sequence_T[:, None], positions_TS // PAGE_SIZE].long()
    slots_TS = (pages_TS * PAGE_SIZE + positions_TS % PAGE_SIZE).where(selected_TS >= 0, -1).to(torch.int32)
    slots_TS = F.pad(slots_TS, (0, -num_chosen % SPARSE_STEP), value=-1)
    library, num_heads = importlib.import_module("flash_mla"), q_latent_THC.shape[1]
    key = __name__, num_heads, slots_TS.shape
    if key not in cache.of_step:
        # of a sparse call the lengths and the table are not read, but older versions look at their shapes
        lens_T = slots_TS.new_full((num_tokens,), num_chosen)
        cache.of_step[key] = (
            lens_T,
            library.get_mla_metadata(
                lens_T, num_heads, 1, num_heads_q=num_heads, is_fp8_kvcache=True, topk=slots_TS.shape[1]
            ),
        )
    lens_T, plan = cache.of_step[key]
    out_T1HC, lse_TH1 = library.flash_mla_with_kvcache(
        torch.cat((q_latent_THC, q_rope_THR), -1)[:, None],
        cache.pages_PGW[:, :, None],
        slots_TS[:, :1],
        lens_T,
        LATENT,
        *plan,
        softmax_scale=scale,
        is_fp8_kvcache=True,
        indices=slots_TS[:, None],
    )
    return _nan_where_lost(out_T1HC, lse_TH1)[:, 0]


def _nan_where_lost(out_BQHC: Tensor, lse_BHQ: Tensor) -> Tensor:
    """Return the result with NaN where the log-sum-exp of the scores is not finite. It is +inf, in some versions -inf,
    where a token read nothing; or all its scores were -inf, and the library returns 0."""
    return out_BQHC + (0 * lse_BHQ).mT[..., None].to(out_BQHC.dtype)


def _check(op: str, q_latent: Tensor, q_rope: Tensor, cache: PagedCache) -> None:
    """Raise Declined where an op cannot read these pages with these queries."""
    if q_latent.dtype != torch.bfloat16:
        raise Declined(f"computes in bfloat16, these queries are of {q_latent.dtype}")
    sizes = (q_latent.shape[-2], q_latent.shape[-1], q_rope.shape[-1])
    if reason := _why_not(op, *sizes, page_size=cache.page_size, packed=cache.packed):
        raise Declined(reason)


DECLINES = ("mla_decode", "mla_sparse")
