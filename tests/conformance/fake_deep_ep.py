"""A stand-in for the library deep_ep: both its APIs, with their checks of shapes, dtypes, strides, alignment and
devices, over gloo for host tensors, and for one rank on a simulated device.

Read at DeepEP dd758ca (2026-07-14): deep_ep/buffers/legacy.py and elastic.py, csrc/legacy/buffer.hpp and config.hpp,
csrc/elastic/buffer.hpp. What a real one writes from a stream of its own is garbage here until the event was waited for
or the hook was called. A buffer belongs to the device that was `here` when it was made, and takes tensors of it alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pdinfer.kernels.reference import quantize_fp8
from pdinfer.process.streams import is_capturing

topk_idx_t = torch.int64
ROW_ALIGNMENT = 16
"""Kernels read rows as int4."""


def here() -> torch.device:
    """Return the current device, as cudaGetDevice says it."""
    return torch.device("cpu")


def check_taken(buffer: Buffer | ElasticBuffer, rows: Tensor, *others: Tensor) -> None:
    """Check what all kernels ask of their tensors: the launch is on the current device, whatever they are on."""
    assert here() == buffer.device
    assert not buffer.is_destroyed
    for x in (rows, *others):
        assert x.device == buffer.device
        assert x.is_contiguous()
    assert rows.data_ptr() % ROW_ALIGNMENT == rows.shape[-1] * rows.itemsize % ROW_ALIGNMENT == 0


def check_unfilled() -> None:
    """Check that torch fills no new memory, which may run beside the kernels."""
    assert not (torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory)


class Config:
    def __init__(
        self,
        num_sms: int = 20,
        num_max_nvl_chunked_send_tokens: int = 6,
        num_max_nvl_chunked_recv_tokens: int = 256,
        num_max_rdma_chunked_send_tokens: int = 6,
        num_max_rdma_chunked_recv_tokens: int = 256,
    ) -> None:
        self.arguments = dict(locals())
        send, receive = num_max_rdma_chunked_send_tokens, num_max_rdma_chunked_recv_tokens
        assert 0 < num_max_nvl_chunked_send_tokens < num_max_nvl_chunked_recv_tokens
        assert num_sms % 2 == 0 < num_sms
        assert 0 < send <= -(-receive // send) * send // 2

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


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return the rank and the number of ranks."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def exchange(group: dist.ProcessGroup | None, parts: Sequence[Tensor]) -> list[Tensor]:
    """Send part r to rank r, and return what came from each."""
    if group is None:
        return list(parts)
    counts = torch.tensor([len(part) for part in parts])
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    joined = torch.cat(list(parts))
    sent = joined.view(torch.uint8) if joined.dtype == torch.float8_e4m3fn else joined
    received = sent.new_empty(int(theirs.sum()), *sent.shape[1:])
    dist.all_to_all_single(received, sent, theirs.tolist(), counts.tolist(), group=group)
    return list(received.view(joined.dtype).split(theirs.tolist()))


class Destroyed:
    """What is destroyed by hand, once, by all ranks together, on its own device."""

    group: dist.ProcessGroup | None
    device: torch.device
    is_destroyed = False

    def destroy(self) -> None:
        assert here() == self.device
        assert not self.is_destroyed
        self.is_destroyed = True
        if self.group is not None:
            dist.barrier(self.group)


class Buffer(Destroyed):
    num_sms = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        *,
        explicitly_destroy: bool = False,
    ) -> None:
        assert explicitly_destroy
        assert num_nvl_bytes % 128 == 0
        assert num_rdma_bytes % 128 == 0
        assert (num_rdma_bytes if low_latency_mode else num_nvl_bytes) > 0
        assert num_rdma_bytes == 0 or low_latency_mode or max(num_nvl_bytes, num_rdma_bytes) < 1 << 31
        self.group = group
        self.device = here()
        self.rank, self.size = place(group)
        assert self.size < 8 or self.size % 8 == 0
        self.rdma_bytes = num_rdma_bytes
        self.qp_depth = int(os.environ.get("NVSHMEM_QP_DEPTH", "1024"))
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
        dispatched = 16 + max(hidden * 2, hidden + hidden // 128 * 4)
        combined = hidden // 128 * 4 + hidden * 2
        send = max(
            num_max_dispatch_tokens_per_rank * dispatched, num_experts * num_max_dispatch_tokens_per_rank * combined
        )
        receive = num_experts * num_max_dispatch_tokens_per_rank * max(dispatched, combined)
        signals = -(-num_experts * 4 // 128) * 128
        return (2 * (send + receive + signals) + 128) // 128 * 128

    # ---- normal ----------------------------------------------------------------------------------------------------

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == topk_idx_t
        assert topk_idx.is_contiguous()
        assert here() == self.device == topk_idx.device
        assert num_experts % self.size == 0
        # an index of -1 is a slot without an expert
        hits = topk_idx.new_zeros(len(topk_idx), num_experts + 1, dtype=torch.bool)
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
        assert self.num_qps_per_rank == self.num_sms // 2 or self.num_qps_per_rank >= self.num_sms  # between nodes
        assert topk_weights.dtype == torch.float32
        if isinstance(x, tuple):
            x, scales = x
            assert (x.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
            assert scales.shape == (len(x), x.shape[1] // 128)
        else:
            scales = None
            assert x.dtype == torch.bfloat16
        check_taken(self, x, topk_idx, topk_weights, is_token_in_rank, *([] if scales is None else [scales]))
        assert topk_idx.shape == topk_weights.shape == (len(x), topk_idx.shape[1])
        assert (num_tokens_per_rank.dtype, is_token_in_rank.dtype) == (torch.int32, torch.bool)
        assert torch.equal(is_token_in_rank.sum(0), num_tokens_per_rank.long())
        tokens = [is_token_in_rank[:, rank].nonzero().flatten() for rank in range(self.size)]
        per_rank = len(num_tokens_per_expert) // self.size
        received_x = exchange(self.group, [x[at] for at in tokens])
        received_scales = None if scales is None else exchange(self.group, [scales[at] for at in tokens])
        ids = torch.cat(exchange(self.group, [topk_idx[at] for at in tokens])) - self.rank * per_rank
        elsewhere = (ids < 0) | (ids >= per_rank)
        ids = ids.masked_fill(elsewhere, -1)
        weights = torch.cat(exchange(self.group, [topk_weights[at] for at in tokens])).masked_fill(elsewhere, 0)
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
        check_taken(self, x)
        assert len(x) == sum(received)
        back = exchange(self.group, list(x.split(received)))
        y = x.new_zeros(num_tokens, x.shape[1], dtype=torch.float32)
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
        check_taken(self, x, topk_idx)
        assert x.shape[1] in (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
        assert len(topk_idx) == len(x) <= num_max_dispatch_tokens_per_rank
        assert num_max_dispatch_tokens_per_rank * self.size % 4 == 0
        assert self.qp_depth >= 2 * (num_max_dispatch_tokens_per_rank + 1)
        assert topk_idx.shape[1] <= 11
        asked = self.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank, x.shape[1], self.size, num_experts
        )
        assert asked <= self.rdma_bytes
        per_rank = num_experts // self.size
        assert num_experts % self.size == 0
        assert self.num_qps_per_rank >= per_rank
        self.live += 1
        assert self.live <= 2
        pairs = [(topk_idx // per_rank == rank).nonzero() for rank in range(self.size)]
        rows = exchange(self.group, [x[at[:, 0]] for at in pairs])
        experts = exchange(self.group, [topk_idx[at[:, 0], at[:, 1]] for at in pairs])
        room = x.new_full((per_rank, num_max_dispatch_tokens_per_rank * self.size, x.shape[1]), float("nan"))
        counts = x.new_zeros(per_rank, dtype=torch.int32)
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
        assert (x.dtype, topk_idx.dtype, topk_weights.dtype) == (torch.bfloat16, topk_idx_t, torch.float32)
        assert topk_weights.shape == topk_idx.shape
        check_taken(self, x, topk_weights)
        assert x.ndim == 3
        rows = x[[expert for expert, _ in places], [at for _, at in places]]
        y = x.new_zeros(len(topk_idx), x.shape[2], dtype=torch.float32)
        for at, part in zip(pairs, exchange(self.group, list(rows.split(received))), strict=True):
            y.index_add_(0, at[:, 0], part.float() * topk_weights[at[:, 0], at[:, 1], None])
        (shown,), event = late(y.to(torch.bfloat16))

        def hook() -> None:
            event.fill()
            self.live -= 1

        return shown, event, hook


class EPHandle:
    """What a dispatch leaves for its combine. Of `counts` there is no copy on the host."""

    def __init__(
        self,
        counts: Tensor,
        slots: Tensor,
        received: list[int],
        tokens: list[Tensor],
        num_tokens: int,
        num_sms: int,
    ) -> None:
        self.num_unaligned_recv_tokens_per_expert = counts
        self.num_recv_tokens_per_expert_list: list[int] = []
        self.slots, self.received, self.tokens, self.num_tokens = slots, received, tokens, num_tokens
        self.num_sms = num_sms


class ElasticBuffer(Destroyed):
    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        assert explicitly_destroy
        self.timeouts = num_cpu_timeout_secs, num_gpu_timeout_secs
        assert min(num_max_tokens_per_rank, hidden) > 0
        assert 0 <= num_topk <= 32
        self.group, self.room, self.hidden, self.num_topk = group, num_max_tokens_per_rank, hidden, num_topk
        self.device = here()
        self.rank, self.size = place(group)

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        *,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        num_max_tokens_per_rank: int,
        expert_alignment: int,
        num_sms: int,
        async_with_compute_stream: bool,
        do_cpu_sync: bool,
        do_expand: bool,
    ) -> tuple[Any, ...]:
        """The only layout is the expanded one: in memory for the worst case, unless the host waits for the counts.
        Rows of one stream that another uses are recorded, which in a capture keeps them to its end, unless a variable
        says that the caller holds them."""
        check_unfilled()
        assert async_with_compute_stream
        assert num_sms % 2 == 0 <= num_sms <= 160
        assert do_expand
        assert not is_capturing(self.device) or os.environ.get("EP_AVOID_RECORD_STREAM") == "1"
        assert expert_alignment == 1
        rows, scales = x if isinstance(x, tuple) else (x, None)
        check_taken(self, rows, topk_idx, topk_weights)
        assert rows.shape[1] <= self.hidden
        assert len(rows) <= num_max_tokens_per_rank <= self.room
        assert topk_idx.dtype == topk_idx_t
        assert topk_weights.dtype == torch.float32
        assert topk_idx.shape == topk_weights.shape == (len(rows), topk_idx.shape[1])
        assert topk_idx.shape[1] <= self.num_topk
        assert num_experts % self.size == 0
        assert num_experts <= 2048
        assert num_experts // self.size <= 256
        assert rows.shape[1] * rows.itemsize % 32 == 0
        if scales is not None:
            assert (rows.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
            assert scales.shape == (len(rows), rows.shape[1] // 128)
        else:
            assert rows.dtype == torch.bfloat16
        per_rank, num_topk = num_experts // self.size, topk_idx.shape[1]
        owner = topk_idx.div(per_rank, rounding_mode="floor")
        tokens = [(owner == rank).any(-1).nonzero().flatten() for rank in range(self.size)] if self.group else []
        tokens = tokens or [torch.arange(len(rows), device=rows.device)]
        parts = exchange(self.group, [rows[at] for at in tokens])
        ids = torch.cat(exchange(self.group, [topk_idx[at] for at in tokens])) - self.rank * per_rank
        weights = torch.cat(exchange(self.group, [topk_weights[at] for at in tokens]))
        expert = ids.where((ids >= 0) & (ids < per_rank), per_rank).flatten()
        counts = (expert[:, None] == torch.arange(per_rank, device=ids.device)).sum(0, dtype=torch.int32)
        order = expert.argsort(stable=True)  # those of other ranks come last
        capacity = self.size * num_max_tokens_per_rank * min(num_topk, per_rank)
        if do_cpu_sync:
            capacity = int(counts.sum())

        def expanded(values: Tensor) -> Tensor:
            room = torch.full((capacity, *values.shape[1:]), float("nan"), device=values.device).to(values.dtype)
            taken = values[order[:capacity]]
            room[: len(taken)] = taken
            return room

        slots = torch.empty_like(expert)
        slots[order] = torch.arange(len(order), device=ids.device)
        slots = slots.where(expert < per_rank, -1).view(ids.shape)
        handle_of = (slots, [len(part) for part in parts], tokens, len(rows), num_sms)
        outs = [expanded(torch.cat(parts).repeat_interleave(num_topk, 0)), expanded(weights.flatten()), counts]
        if scales is not None:
            received = torch.cat(exchange(self.group, [scales[at] for at in tokens]))
            outs.append(expanded(received.repeat_interleave(num_topk, 0)))
        shown, event = late(*outs)
        recv_x = shown[0] if scales is None else (shown[0], shown[3])
        return recv_x, None, shown[1], EPHandle(shown[2], *handle_of), event

    def combine(self, x: Tensor, handle: EPHandle, *, async_with_compute_stream: bool) -> tuple[Tensor, None, Late]:
        """A rank adds up its experts' results for a token, and the token's rank adds up those sums."""
        check_unfilled()
        assert async_with_compute_stream
        assert x.dtype == torch.bfloat16
        check_taken(self, x)
        x = x if len(x) else x.new_zeros(1, x.shape[1])
        taken = x[handle.slots.clamp_min(0)].float().masked_fill(handle.slots[..., None] < 0, 0)
        sums = taken.sum(1).to(torch.bfloat16)
        y = x.new_zeros(handle.num_tokens, x.shape[1], dtype=torch.float32)
        for at, rows in zip(handle.tokens, exchange(self.group, list(sums.split(handle.received))), strict=True):
            y[at] += rows.float()
        (shown,), event = late(y.to(torch.bfloat16))
        return shown, None, event
