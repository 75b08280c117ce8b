"""Experts on several ranks, reached by DeepEP's second API, `ElasticBuffer`: the same kernels for prefill and decode.

Sources: deepseek-ai/DeepEP 2.1, deep_ep/buffers/elastic.py and the checks in csrc/elastic/buffer.hpp."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.formats.activations import Rounded
from pdinfer.moe.dispatchers.base import Contiguous, Returned
from pdinfer.moe.dispatchers.deep_ep import (
    Returning,
    Sent,
    as_argument,
    check_current,
    check_room,
    check_same_room,
    end_with,
    import_deep_ep,
    travelling_form,
)
from pdinfer.moe.dispatchers.deep_ep_limits import ExpertSizes
from pdinfer.parallel.groups import Group, timeout_of
from pdinfer.process.streams import is_capturing


@attrs.frozen(kw_only=True)
class _Expanded(Contiguous):
    handle: Any


@attrs.frozen(kw_only=True)
class DeepEPElastic:
    """The dispatcher for up to `max_tokens` tokens per rank, of a prompt or of a decode step.

    A token travels once to each rank that has experts for it. There it becomes one row per expert, sorted. The host
    waits for the counts of received rows; a capture cannot, and has room for all tokens of all ranks. Experts weight
    their results, and sums travel back as bfloat16 rows."""

    buffer: Any
    sizes: ExpertSizes
    max_tokens: int
    index_dtype: torch.dtype
    num_sms: int = 0
    max_live: ClassVar[int | None] = None
    graph_safe: ClassVar[bool] = True

    @classmethod
    def connect(
        cls, group: Group, sizes: ExpertSizes, max_tokens: int, num_sms: int | None = None, *, device: torch.device
    ) -> DeepEPElastic:
        """Make the buffer of this rank, for sizes that were checked. A collective. Without `num_sms` DeepEP computes
        how many multiprocessors its kernels take, as if routers chose evenly among all experts.

        Raises BackendUnavailable without this API of deep_ep, ConfigError where ranks differ in `max_tokens`."""
        library = import_deep_ep("ElasticBuffer", "dispatch")
        check_current(device)
        check_same_room(group, max_tokens, device)
        # torch frees what was recorded on two streams of a capture at its end: the rows of all layers. Events hold them
        # instead, and we hold the events
        os.environ["EP_AVOID_RECORD_STREAM"] = "1"
        timeout_s = math.ceil(timeout_of(group.process_group, device.type).total_seconds())
        # sized for rows of bfloat16, it has room for those in FP8
        buffer = library.ElasticBuffer(
            group.process_group,
            num_max_tokens_per_rank=max_tokens,
            hidden=sizes.hidden_size,
            num_topk=sizes.top_k,
            num_cpu_timeout_secs=timeout_s,
            num_gpu_timeout_secs=timeout_s,
            explicitly_destroy=True,
        )
        end_with(group, buffer, device)
        index_dtype = library.topk_idx_t
        return cls(buffer=buffer, sizes=sizes, max_tokens=max_tokens, index_dtype=index_dtype, num_sms=num_sms or 0)

    def dispatch_begin(self, x_TD: Tensor | Rounded, ids_TK: Tensor, weights_TK: Tensor) -> Sent:
        check_current(ids_TK.device)
        check_room(len(x_TD), self.max_tokens)
        sent = travelling_form(x_TD)
        ids_TK = ids_TK.to(self.index_dtype)
        with _memory_as_it_comes():
            received = self.buffer.dispatch(
                as_argument(sent),
                topk_idx=ids_TK,
                topk_weights=weights_TK,
                num_experts=self.sizes.num_experts,
                num_max_tokens_per_rank=self.max_tokens,
                expert_alignment=1,
                num_sms=self.num_sms,  # its combine takes as many
                async_with_compute_stream=True,
                do_cpu_sync=not is_capturing(ids_TK.device),
                do_expand=True,
            )
        return Sent(received=received, sent=sent, kept=(ids_TK, weights_TK))

    def dispatch_end(self, pending: Sent) -> _Expanded:
        x_SD, _, weights_S, handle = pending.wait()
        counts_E = handle.num_unaligned_recv_tokens_per_expert
        return _Expanded(x_SD=x_SD, counts_E=counts_E, weights_S=weights_S, handle=handle)

    def combine_begin(self, y: Tensor, dispatched: _Expanded) -> Returning:
        with _memory_as_it_comes():
            y_TD, _, event = self.buffer.combine(y, dispatched.handle, async_with_compute_stream=True)
        return Returning(y_TD=y_TD, event=event, kept=(y, dispatched.handle))

    def combine_end(self, pending: Returning) -> Returned:
        return pending.wait()


@contextlib.contextmanager
def _memory_as_it_comes() -> Iterator[None]:
    """Let torch fill no new memory, as it does for a host with `torch.use_deterministic_algorithms(True)`: that might
    run beside DeepEP's kernels, so DeepEP refuses it."""
    setting: Any = torch.utils.deterministic  # a module that torch gives this attribute as it is imported
    fills = setting.fill_uninitialized_memory
    setting.fill_uninitialized_memory = False
    try:
        yield
    finally:
        setting.fill_uninitialized_memory = fills
