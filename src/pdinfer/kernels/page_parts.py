"""Ops over pages whose rows lie in two parts: latents and rotated keys, or index keys in INT8 and their scales.

Ops of Ascend take such pages as they are. The other providers read whole rows, so here the rows in the pages of a call
are joined first, for ops that were chosen for whole rows: a copy of the contexts in each layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from pdinfer.kernels import compositions
from pdinfer.kernels.arguments import PagedCache
from pdinfer.kernels.formats import cache_rows
from pdinfer.kernels.ops import Composed, Ops
from pdinfer.kernels.spec import OpSpec

Parts = tuple[Tensor, Tensor]
"""The two parts of each page, [P, G, W] each, which the fields and arguments for whole pages have in their place."""


ATTENTION, INDEXERS = ("mla_prefill", "mla_decode", "mla_sparse"), ("index_topk", "index_topk_decode")
JOINING = frozenset((*ATTENTION, *INDEXERS))
"""The ops that read pages."""


def functions_of(spec: OpSpec, whole: Ops) -> dict[str, Callable[..., Any]]:
    """Return the ops over the parts that `spec` names, as functions that join them for the ops `whole`. There are none
    for a spec without parts."""
    functions: dict[str, Callable[..., Any]] = {}
    if spec.rope_apart:
        functions |= {name: partial(_over_rows, whole[name]) for name in ATTENTION}
        functions["store_latent"] = lambda pages, slots_T, c_TC, k_rope_TR: _store(pages, slots_T, (c_TC, k_rope_TR))
        for composition in (compositions.norm_rotate_store, compositions.mla_absorbed):
            functions[composition.__name__] = Composed(composition)
    if spec.index_format == "int8":
        functions |= {name: partial(_over_keys, whole[name]) for name in INDEXERS}
        functions["store_index_keys"] = lambda pages, slots_T, keys_TY: _store(
            pages, slots_T, cache_rows.int8_index_rows(keys_TY)
        )
    return functions


def _store(pages: Parts, slots_T: Tensor, rows: Parts) -> None:
    for part_PGW, rows_TW in zip(pages, rows, strict=True):
        part_PGW.view(-1, part_PGW.shape[-1]).index_copy_(0, slots_T, rows_TW)


def _over_rows(op: Callable[..., Tensor], *arguments: Any, **options: Any) -> Tensor:
    return op(*(_joined(each, _rows) if isinstance(each, PagedCache) else each for each in arguments), **options)


def _over_keys(op: Callable[..., Tensor], q: Tensor, weights: Tensor, cache: PagedCache, *, top_k: int) -> Tensor:
    return op(q.float(), weights, _joined(cache, cache_rows.int8_index_keys), top_k=top_k)


def _rows(c_PGC: Tensor, k_rope_PGR: Tensor) -> Tensor:
    return torch.cat((c_PGC, k_rope_PGR), -1)


def _joined(cache: PagedCache, join: Callable[[Tensor, Tensor], Tensor]) -> PagedCache:
    """Return the cache with whole rows, in new pages for those of its table alone, which are numbered anew."""
    table_BM, parts = cache.table_BM, cache.pages_PGW
    pages_PGW = join(*(part_PGW.index_select(0, table_BM.flatten()) for part_PGW in parts))
    numbers = torch.arange(table_BM.numel(), dtype=table_BM.dtype, device=table_BM.device)
    return attrs.evolve(cache, pages_PGW=pages_PGW, table_BM=numbers.view(table_BM.shape))
