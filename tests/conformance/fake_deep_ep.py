"""A stand-in for the library deep_ep on host tensors: its `Buffer` API with its checks of shapes and dtypes, over gloo.

What a real one writes from a stream of its own is garbage here until the event was waited for or the hook was called.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdinfer.kernels.reference import quantize_fp8

topk_idx_t = torch.int64


class Config:
    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        assert num_sms % 2 == 0
        self.arguments = dict(locals())

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert hidden_bytes % 16 == 0
        return hidden_bytes * num_ranks + 1

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= 8 else hidden_bytes * num_ranks


class Late:
    """An event that fills tensors when it is waited for."""

    def __init__(self, fill: Callable[[], None]) -> None:
        self.fill = fill

    def current_stream_wait(self) -> None:
        self.fill()


def late(*values: Tensor) -> tuple[list[Tensor], Late]:
    shown = [torch.full_like(value, -1 if not value.is_floating_point() else float("nan")) for value in values]

    def fill() -> None:
        for into, value in zip(shown, values, strict=True):
            into.copy_(value)

    return shown, Late(fill)


class Buffer:
    num_sms = 20

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
    ) -> None:
        assert num_nvl_bytes % 128 == 0
        assert num_rdma_bytes % 128 == 0
        assert (num_rdma_bytes if low_latency_mode else num_nvl_bytes) > 0
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.low_latency_mode = low_latency_mode
        self.num_qps_per_rank = num_qps_per_rank
        self.live = 0

    @classmethod
    def set_num_sms(cls, num_sms: int) -> None:
        assert num_sms % 2 == 0
        cls.num_sms = num_sms

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return 2 * num_experts * num_max_dispatch_tokens_per_rank * 2 * (2 * hidden + 4 * hidden // 128)

    # ---- normal ----------------------------------------------------------------------------------------------------

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == topk_idx_t
        assert topk_idx.is_contiguous()
        assert num_experts % self.size == 0
        # an index of -1 is a slot without an expert
        hits = torch.zeros(len(topk_idx), num_experts + 1, dtype=torch.bool)
        hits = hits.scatter_(1, topk_idx.where(topk_idx >= 0, num_experts), True)[:, :num_experts]
        in_rank = hits.view(len(hits), self.size, num_experts // self.size).any(-1)
        per_rank, per_expert = in_rank.sum(0, dtype=torch.int32), hits.sum(0, dtype=torch.int32)
        return per_rank, None, per_expert, in_rank, Late(lambda: None)

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        *,
        num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: Tensor | None,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        config: Config,
        async_finish: bool,
    ) -> tuple[Any, ...]:
        assert not self.low_latency_mode
        assert topk_weights.dtype == torch.float32
        if isinstance(x, tuple):
            x, scales = x
            assert (x.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
            assert scales.shape == (len(x), x.shape[1] // 128)
        else:
            scales = None
            assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert topk_weights.is_contiguous()
        assert topk_idx.shape == topk_weights.shape == (len(x), topk_idx.shape[1])
        assert torch.equal(is_token_in_rank.sum(0), num_tokens_per_rank.long())
        tokens = [is_token_in_rank[:, rank].nonzero().flatten() for rank in range(self.size)]
        per_rank = len(num_tokens_per_expert) // self.size
        received_x = self._exchange([x[at] for at in tokens])
        received_scales = None if scales is None else self._exchange([scales[at] for at in tokens])
        ids = torch.cat(self._exchange([topk_idx[at] for at in tokens])) - self.rank * per_rank
        elsewhere = (ids < 0) | (ids >= per_rank)
        ids = ids.masked_fill(elsewhere, -1)
        weights = torch.cat(self._exchange([topk_weights[at] for at in tokens])).masked_fill(elsewhere, 0)
        counts = torch.bincount(ids[ids >= 0], minlength=per_rank).tolist()
        handle = (tokens, [len(rows) for rows in received_x], len(x))
        if received_scales is None:
            shown, event = late(torch.cat(received_x), ids, weights)
            return *shown, counts, handle, event
        (numbers, into, ids, weights), event = late(torch.cat(received_x), torch.cat(received_scales), ids, weights)
        return (numbers, into), ids, weights, counts, handle, event

    def combine(self, x: Tensor, handle: Any, *, config: Config, async_finish: bool) -> tuple[Tensor, None, Late]:
        tokens, received, num_tokens = handle
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert len(x) == sum(received)
        back = self._exchange(list(x.split(received)))
        y = torch.zeros(num_tokens, x.shape[1])
        for at, rows in zip(tokens, back, strict=True):
            y[at] += rows.float()
        (shown,), event = late(y.to(torch.bfloat16))
        return shown, None, event

    # ---- low latency -----------------------------------------------------------------------------------------------

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *,
        use_fp8: bool,
        round_scale: bool,
        return_recv_hook: bool,
    ) -> tuple[Any, ...]:
        assert self.low_latency_mode
        assert return_recv_hook
        assert use_fp8 or not round_scale
        assert not use_fp8 or x.shape[1] % 512 == 0
        assert (x.dtype, topk_idx.dtype) == (torch.bfloat16, topk_idx_t)
        assert x.is_contiguous()
        assert x.shape[1] in (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
        assert len(topk_idx) == len(x) <= num_max_dispatch_tokens_per_rank
        assert num_max_dispatch_tokens_per_rank * self.size % 4 == 0
        assert topk_idx.shape[1] <= 11
        per_rank = num_experts // self.size
        assert self.num_qps_per_rank >= per_rank
        self.live += 1
        assert self.live <= 2
        pairs = [(topk_idx // per_rank == rank).nonzero() for rank in range(self.size)]
        rows = self._exchange([x[at[:, 0]] for at in pairs])
        experts = self._exchange([topk_idx[at[:, 0], at[:, 1]] for at in pairs])
        room = x.new_full((per_rank, num_max_dispatch_tokens_per_rank * self.size, x.shape[1]), float("nan"))
        counts = torch.zeros(per_rank, dtype=torch.int32)
        places = []
        for row, expert in zip(torch.cat(rows), (torch.cat(experts) - self.rank * per_rank).tolist(), strict=True):
            places.append((expert, int(counts[expert])))
            room[expert, counts[expert]] = row
            counts[expert] += 1
        handle = (pairs, [len(part) for part in rows], places)
        if not use_fp8:
            shown, event = late(room, counts)
            return *shown, handle, event, event.fill
        rounded = quantize_fp8(room, ue8m0=round_scale)
        # scales of a group of channels are together
        (numbers, scales, counts), event = late(rounded.numbers_TI, rounded.scales_TN.mT.contiguous(), counts)
        return (numbers, scales.mT), counts, handle, event, event.fill

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: Any, *, return_recv_hook: bool
    ) -> tuple[Any, ...]:
        pairs, received, places = handle
        assert return_recv_hook
        assert (x.dtype, topk_weights.dtype) == (torch.bfloat16, torch.float32)
        assert x.is_contiguous()
        assert x.ndim == 3
        rows = x[[expert for expert, _ in places], [at for _, at in places]]
        y = torch.zeros(len(topk_idx), x.shape[2])
        for at, part in zip(pairs, self._exchange(list(rows.split(received))), strict=True):
            y.index_add_(0, at[:, 0], part.float() * topk_weights[at[:, 0], at[:, 1], None])
        (shown,), event = late(y.to(torch.bfloat16))

        def hook() -> None:
            event.fill()
            self.live -= 1

        return shown, event, hook

    def _exchange(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send part r to rank r, and return what came from each."""
        counts = torch.tensor([len(part) for part in parts])
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        joined = torch.cat(list(parts))
        sent = joined.view(torch.uint8) if joined.dtype == torch.float8_e4m3fn else joined
        received = sent.new_empty(int(theirs.sum()), *sent.shape[1:])
        dist.all_to_all_single(received, sent, theirs.tolist(), counts.tolist(), group=self.group)
        return list(received.view(joined.dtype).split(theirs.tolist()))
