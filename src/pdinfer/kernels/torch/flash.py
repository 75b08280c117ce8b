"""Causal attention by torch's fused kernel for CPUs, block of context by block.

The kernel takes keys and values of one width, so the narrower ones are padded with zeros. Its causal mask begins at the
first key it is given: what lies before the queries is a part of its own, and parts are joined by the logarithms of
their sums. It gives a score of -inf no weight, so it is given finite numbers alone, whose products do not overflow."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
LARGEST_SCORE = 1e37
"""A bound on the sums of products below which none of them overflows, in any order."""

Block = tuple[int, Tensor, Tensor]
"""The position of the first of S keys, the keys [H, S, Q] and their values [H, S, V]."""


def attend(q_HTQ: Tensor, offset: int, blocks: Iterable[Block], scale: float, out_THV: Tensor) -> bool:
    """Let T queries, the first at position `offset`, attend to themselves and all before, and write what they get: NaN
    for a query that is not finite, or sees a key or a value that is not. `blocks` are all keys in order. Return False
    where a score of finite numbers may overflow: `out_THV` then has no meaning."""
    num_heads, num_queries, width = q_HTQ.shape
    v_width = out_THV.shape[-1]
    width = max(width, v_width)
    sum_HTV = torch.zeros(num_heads, num_queries, v_width, dtype=torch.float32, device="cpu")
    log_HT = torch.full((num_heads, num_queries), -torch.inf, dtype=torch.float32, device="cpu")
    lost_HT = torch.zeros_like(log_HT, dtype=torch.bool)
    q_HTQ, largest = _finite(q_HTQ, lost_HT)
    for position, k_HSQ, v_HSV in _cut(blocks, offset):
        behind = slice(max(0, position - offset), num_queries)
        spoilt_HS = lost_HT.new_zeros(num_heads, k_HSQ.shape[1])
        k_HSQ, largest_key = _finite(k_HSQ, spoilt_HS)
        v_HSV, _ = _finite(v_HSV, spoilt_HS)
        if not largest * largest_key * width < LARGEST_SCORE:
            return False
        if spoilt_HS.any():
            newest_T = (
                torch.arange(behind.start, num_queries, dtype=torch.int64, device="cpu")
                .add_(offset - position)
                .clamp_max_(k_HSQ.shape[1] - 1)
            )
            lost_HT[:, behind] |= spoilt_HS.cummax(-1).values.index_select(1, newest_T)
        # the public function does not tell the logarithms
        part_HTV, log_part_HT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
            _widened(q_HTQ[:, behind], width),
            _widened(k_HSQ, width),
            _widened(v_HSV, width),
            0.0,
            position >= offset,
            scale=scale,
        )
        _join(sum_HTV[:, behind], log_HT[:, behind], part_HTV[0, ..., :v_width], log_part_HT[0])
    out_THV.copy_(sum_HTV.masked_fill_(lost_HT[..., None], torch.nan).transpose(0, 1))
    return True


def _finite(rows_HNX: Tensor, spoilt_HN: Tensor) -> tuple[Tensor, float]:
    """Return the rows with zeros in place of those that are not finite, which are marked, and their largest absolute
    value."""
    least, most = torch.aminmax(rows_HNX)
    largest = float(torch.maximum(-least, most))
    if math.isfinite(largest):
        return rows_HNX, largest
    bad_HN = ~rows_HNX.isfinite().all(-1)
    spoilt_HN |= bad_HN
    return _finite(rows_HNX.masked_fill(bad_HN[..., None], 0), spoilt_HN)


def _widened(rows_HNX: Tensor, width: int) -> Tensor:
    """Return [1, H, N, width], with zeros behind what is there."""
    return F.pad(rows_HNX, (0, width - rows_HNX.shape[-1]))[None]


def _cut(blocks: Iterable[Block], offset: int) -> Iterator[Block]:
    """Cut the block in which the queries begin, so that each lies before the first of them, or not."""
    for position, k_HSQ, v_HSV in blocks:
        before = offset - position
        if 0 < before < k_HSQ.shape[1]:
            yield position, k_HSQ[:, :before], v_HSV[:, :before]
            yield offset, k_HSQ[:, before:], v_HSV[:, before:]
        else:
            yield position, k_HSQ, v_HSV


def _join(sum_HTV: Tensor, log_HT: Tensor, part_HTV: Tensor, log_part_HT: Tensor) -> None:
    """Add a part to what was weighed before. Both are divided by their sums, whose logarithms are given."""
    joined_HT = torch.logaddexp(log_HT, log_part_HT)
    kept, added = (log_HT - joined_HT).exp_(), (log_part_HT - joined_HT).exp_()
    sum_HTV.mul_(kept[..., None]).addcmul_(part_HTV.float(), added[..., None])
    log_HT.copy_(joined_HT)
