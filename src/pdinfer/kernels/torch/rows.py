"""Rows of pages that are written, gathered and scattered."""

from __future__ import annotations

import torch
from torch import Tensor

from pdinfer.kernels.formats import cache_rows


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
