"""Experts on several ranks, reached by DeepEP's second API, `ElasticBuffer`: the same kernels for prefill and decode.

Sources: deepseek-ai/DeepEP 2.1, deep_ep/buffers/elastic.py and the checks in csrc/elastic/buffer.hpp.
"""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from pdinfer.errors import ConfigError
from pdinfer.kernels.formats.activations import FP8Rows, Rounded
from pdinfer.kernels.formats.fp8 import BLOCK
from pdinfer.moe.dispatchers.base import Contiguous, Returned
from pdinfer.moe.dispatchers.deep_ep import ExpertSizes, check_same_room, import_deep_ep
from pdinfer.parallel import Group

MAX_RANKS = 2048
MAX_TOP_K = 32


def check_elastic(sizes: ExpertSizes) -> None:
    """Raise ConfigError, with the value, for sizes that the kernels cannot serve."""
    if not 2 <= sizes.num_ranks <= MAX_RANKS:
        raise ConfigError(f"DeepEP's elastic kernels are for 2 to {MAX_RANKS} ranks, ep_size is {sizes.num_ranks}")
    if sizes.hidden_size % 8:
        raise ConfigError(
            f"DeepEP sends rows of a multiple of 16 bytes; hidden_size {sizes.hidden_size} in bfloat16 is "
            f"{2 * sizes.hidden_size}"
        )
    if sizes.top_k > MAX_TOP_K:
        raise ConfigError(
            f"DeepEP's elastic kernels send a token to at most {MAX_TOP_K} experts, num_experts_per_tok is "
            f"{sizes.top_k}"
        )
    sizes.check_any()


@attrs.frozen(kw_only=True)
class _Sent:
    """Rows in transit, in the form of `sent`. `kept` must stay alive until what is `received` has arrived."""

    received: tuple[Any, ...]
    sent: Tensor | FP8Rows
    kept: tuple[Tensor, ...]


@attrs.frozen(kw_only=True)
class _Expanded(Contiguous):
    handle: Any


@attrs.frozen(kw_only=True)
class _Returning:
    y_TD: Tensor
    event: Any
    kept: Tensor


@attrs.frozen(kw_only=True)
class DeepEPElastic:
    """The dispatcher for up to `num_max_tokens` tokens per rank, of a prompt or of a decode step.

    A token travels once to each rank that has experts for it. There it becomes one row per expert, sorted, in room for
    all tokens of all ranks, so that no host waits for a count. Experts weight their results, and sums travel back as
    bfloat16 rows.
    """

    buffer: Any
    sizes: ExpertSizes
    num_max_tokens: int
    index_dtype: torch.dtype
    max_live: ClassVar[int | None] = None
    graph_safe: ClassVar[bool] = True

    @property
    def max_tokens(self) -> int | None:
        return self.num_max_tokens

    @classmethod
    def connect(cls, group: Group, sizes: ExpertSizes, num_max_tokens: int, *, device: torch.device) -> DeepEPElastic:
        """Make the buffer of this rank. A collective.

        Raises BackendUnavailable without this API of deep_ep, ConfigError beyond its limits and where ranks differ in
        `num_max_tokens`.
        """
        check_elastic(sizes)
        library = import_deep_ep("ElasticBuffer", "dispatch")
        check_same_room(group, num_max_tokens, device)
        # sized for rows of bfloat16, it has room for those in FP8
        buffer = library.ElasticBuffer(
            group.process_group,
            num_max_tokens_per_rank=num_max_tokens,
            hidden=sizes.hidden_size,
            num_topk=sizes.top_k,
        )
        return cls(buffer=buffer, sizes=sizes, num_max_tokens=num_max_tokens, index_dtype=library.topk_idx_t)

    def dispatch_begin(self, x_TD: Tensor | Rounded, ids_TK: Tensor, weights_TK: Tensor) -> _Sent:
        if len(x_TD) > self.num_max_tokens:
            raise ConfigError(
                f"a step has {len(x_TD)} tokens on this rank and num_max_dispatch_tokens_per_rank is "
                f"{self.num_max_tokens}: run smaller steps, or raise it"
            )
        sent: Tensor | FP8Rows
        if isinstance(x_TD, Rounded):  # scales travel one per 128 channels, without a smaller last block
            sent = x_TD.floats_TI if self.sizes.hidden_size % BLOCK else x_TD.rows
        else:
            sent = x_TD
        ids_TK = ids_TK.to(self.index_dtype)
        received = self.buffer.dispatch(
            sent if isinstance(sent, Tensor) else (sent.numbers_TI, sent.scales_TN),
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            num_experts=self.sizes.num_experts,
            num_max_tokens_per_rank=self.num_max_tokens,
            expert_alignment=1,
            async_with_compute_stream=True,
            do_cpu_sync=False,
            do_expand=True,
        )
        return _Sent(received=received, sent=sent, kept=(ids_TK, weights_TK))

    def dispatch_end(self, pending: _Sent) -> _Expanded:
        x_SD, _, weights_S, handle, event = pending.received
        event.current_stream_wait()
        if isinstance(pending.sent, FP8Rows):
            x_SD = attrs.evolve(pending.sent, numbers_TI=x_SD[0], scales_TN=x_SD[1])
        counts_E = handle.num_unaligned_recv_tokens_per_expert
        return _Expanded(x_SD=x_SD, counts_E=counts_E, weights_S=weights_S, handle=handle)

    def combine_begin(self, y: Tensor, dispatched: _Expanded) -> _Returning:
        y_TD, _, event = self.buffer.combine(y, dispatched.handle, async_with_compute_stream=True)
        return _Returning(y_TD=y_TD, event=event, kept=y)

    def combine_end(self, pending: _Returning) -> Returned:
        pending.event.current_stream_wait()
        return Returned(pending.y_TD)
