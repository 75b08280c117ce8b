"""Experts on several ranks, reached by DeepEP's first API, `Buffer`: kernels for prefill ("normal") and decode ("low
latency"). This is the only file that imports deep_ep.

Source: deepseek-ai/DeepEP, docs/legacy.md."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from pdinfer.errors import BackendUnavailable, ConfigError
from pdinfer.kernels.formats.activations import FP8Rows, Rounded
from pdinfer.kernels.formats.fp8 import BLOCK
from pdinfer.kernels.ops import Ops
from pdinfer.moe.dispatchers.base import Contiguous, Masked, Returned
from pdinfer.moe.dispatchers.deep_ep_limits import DeepEPConfig, ExpertSizes, round_up
from pdinfer.parallel.groups import Group
from pdinfer.process.modes import own_modes
from pdinfer.process.streams import is_current

LOW_LATENCY_LIVE = 2
DEFAULT_QPS = 24
"""`Buffer` takes as many queue pairs for each rank. Between nodes its kernels trap where they have more blocks."""
BUFFER_ALIGNMENT_BYTES = 128


@attrs.frozen(kw_only=True)
class Sent:
    """Rows in transit, in the form of `sent`. `kept` must stay alive until what is `received` has arrived."""

    received: tuple[Any, ...]
    sent: Tensor | FP8Rows
    kept: tuple[Tensor, ...]

    def wait(self) -> tuple[Any, ...]:
        """Return what has arrived, the rows first, in the form in which they were sent. The stream waits for them."""
        rows, *rest, event = self.received
        event.current_stream_wait()
        if isinstance(self.sent, FP8Rows):
            rows = attrs.evolve(self.sent, numbers_TI=rows[0], scales_TN=rows[1])
        return rows, *rest


@attrs.frozen(kw_only=True)
class Returning:
    """Results in transit. `kept` must stay alive until they have arrived."""

    y_TD: Tensor
    event: Any
    kept: Any

    def wait(self) -> Returned:
        """Return the results. The stream waits for them."""
        self.event.current_stream_wait()
        return Returned(self.y_TD)


@attrs.frozen(kw_only=True)
class _Received(Contiguous):
    """Received rows. `row_NK[i]` are the rows with the results for received token i, -1 for experts elsewhere."""

    row_NK: Tensor
    weights_NK: Tensor
    handle: Any


@attrs.frozen(kw_only=True)
class DeepEPNormal:
    """The dispatcher for many tokens.

    A token travels once to each rank that has experts for it. There the results are weighted and summed, and the sum
    travels back as one bfloat16 row. The token's rank adds the rows up in float32. The host waits for the counts of
    received rows."""

    buffer: Any
    group: Group
    sizes: ExpertSizes
    ops: Ops
    index_dtype: torch.dtype
    dispatch_chunks: Any
    combine_chunks: Any
    max_live: ClassVar[int | None] = None
    max_tokens: ClassVar[int | None] = None
    graph_safe: ClassVar[bool] = False

    @classmethod
    def connect(
        cls, group: Group, sizes: ExpertSizes, ops: Ops, config: DeepEPConfig | None = None, *, device: torch.device
    ) -> DeepEPNormal:
        """Make the buffers of this rank, for sizes that were checked. A collective. Without `config`, DeepEP's own
        tables say how traffic is cut. Raises BackendUnavailable without deep_ep."""
        library = import_deep_ep("Buffer", "dispatch")
        check_current(device)
        if config is None:
            chunks = [library.Buffer.get_dispatch_config(group.size), library.Buffer.get_combine_config(group.size)]
        else:
            library.Buffer.set_num_sms(config.normal_dispatch.num_sms)
            chunks = [library.Config(**attrs.asdict(part)) for part in (config.normal_dispatch, config.normal_combine)]
        hidden_bytes = sizes.hidden_size * 2
        nvl_bytes = max(part.get_nvl_buffer_size_hint(hidden_bytes, group.size) for part in chunks)
        rdma_bytes = max(part.get_rdma_buffer_size_hint(hidden_bytes, group.size) for part in chunks)
        buffer = library.Buffer(
            group.process_group,
            round_up(nvl_bytes, BUFFER_ALIGNMENT_BYTES),
            round_up(rdma_bytes, BUFFER_ALIGNMENT_BYTES),
            num_qps_per_rank=max(DEFAULT_QPS, library.Buffer.num_sms),
            explicitly_destroy=True,
        )
        end_with(group, buffer, device)
        return cls(
            buffer=buffer,
            group=group,
            sizes=sizes,
            ops=ops,
            index_dtype=library.topk_idx_t,
            dispatch_chunks=chunks[0],
            combine_chunks=chunks[1],
        )

    def dispatch_begin(self, x_TD: Tensor | Rounded, ids_TK: Tensor, weights_TK: Tensor) -> Sent:
        check_current(ids_TK.device)
        sent = travelling_form(x_TD)
        ids_TK = ids_TK.to(self.index_dtype)
        per_rank, per_node, per_expert, is_in_rank, _ = self.buffer.get_dispatch_layout(ids_TK, self.sizes.num_experts)
        received = self.buffer.dispatch(
            as_argument(sent),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
            config=self.dispatch_chunks,
            async_finish=True,
        )
        return Sent(received=received, sent=sent, kept=(ids_TK, weights_TK))

    def dispatch_end(self, pending: Sent) -> _Received:
        x_ND, ids_NK, weights_NK, counts, handle = pending.wait()
        # an expert of another rank is -1
        ids_NK, experts, num_rows = ids_NK.to(torch.int64), self.sizes.experts_per_rank, sum(counts)
        x_SD: Tensor | FP8Rows
        if isinstance(x_ND, FP8Rows):
            x_SD, counts_E, row_NK = self.ops.sort_rows_fp8(x_ND, ids_NK, experts, num_rows)
        else:
            counts_E, token_of_row_S, row_NK = self.ops.group_rows(ids_NK, experts)
            x_SD = x_ND.index_select(0, token_of_row_S[:num_rows])
        return _Received(x_SD=x_SD, counts_E=counts_E, row_NK=row_NK, weights_NK=weights_NK, handle=handle)

    def combine_begin(self, y: Tensor, dispatched: _Received) -> Returning:
        sum_ND = self.ops.combine_rows(y, dispatched.row_NK, dispatched.weights_NK).to(y.dtype)
        y_TD, _, event = self.buffer.combine(sum_ND, dispatched.handle, config=self.combine_chunks, async_finish=True)
        return Returning(y_TD=y_TD, event=event, kept=sum_ND)

    def combine_end(self, pending: Returning) -> Returned:
        return pending.wait()


@attrs.frozen(kw_only=True)
class _Room(Masked):
    handle: Any
    ids_TK: Tensor
    weights_TK: Tensor


@attrs.frozen(kw_only=True)
class _Hooked:
    """A result that is complete once `hook` was called."""

    result: Any
    hook: Any
    kept: Any


@attrs.define(kw_only=True)
class DeepEPLowLatency:
    """The dispatcher for few tokens: at most `max_tokens` per rank and step.

    Every (token, expert) pair travels as a row, into memory reserved for it; for experts in FP8 the kernel rounds it
    on the way. Its result returns in bfloat16 and is weighted on the token's rank."""

    buffer: Any
    sizes: ExpertSizes
    max_tokens: int
    index_dtype: torch.dtype
    live: int = 0
    max_live: ClassVar[int | None] = LOW_LATENCY_LIVE
    graph_safe: ClassVar[bool] = True

    @classmethod
    def connect(cls, group: Group, sizes: ExpertSizes, max_tokens: int, *, device: torch.device) -> DeepEPLowLatency:
        """Make the buffer of this rank, for sizes that were checked. A collective.

        Raises BackendUnavailable without deep_ep, ConfigError where ranks differ in `max_tokens`."""
        library = import_deep_ep("Buffer", "low_latency_dispatch")
        check_current(device)
        check_same_room(group, max_tokens, device)
        num_bytes = library.Buffer.get_low_latency_rdma_size_hint(
            max_tokens, sizes.hidden_size, group.size, sizes.num_experts
        )
        buffer = library.Buffer(
            group.process_group,
            0,
            round_up(num_bytes, BUFFER_ALIGNMENT_BYTES),
            low_latency_mode=True,
            num_qps_per_rank=sizes.experts_per_rank,
            explicitly_destroy=True,
        )
        end_with(group, buffer, device)
        return cls(buffer=buffer, sizes=sizes, max_tokens=max_tokens, index_dtype=library.topk_idx_t)

    def dispatch_begin(self, x_TD: Tensor | Rounded, ids_TK: Tensor, weights_TK: Tensor) -> _Hooked:
        check_current(ids_TK.device)
        check_room(len(x_TD), self.max_tokens)
        if self.live == LOW_LATENCY_LIVE:
            raise ConfigError(
                f"DeepEP's low-latency buffer holds {LOW_LATENCY_LIVE} batches at once, a third was begun"
            )
        self.live += 1
        ids_TK = ids_TK.to(self.index_dtype)
        rounded = x_TD.rows if isinstance(x_TD, Rounded) else None
        x_TD = x_TD.floats_TI if isinstance(x_TD, Rounded) else x_TD
        x_END, counts_E, handle, _, hook = self.buffer.low_latency_dispatch(
            x_TD,
            ids_TK,
            self.max_tokens,
            self.sizes.num_experts,
            use_fp8=rounded is not None,
            round_scale=rounded is not None and rounded.ue8m0,
            return_recv_hook=True,
        )
        if rounded is not None:
            numbers, scales = x_END
            # all ranks have as many tokens in a captured step
            expected = -(-ids_TK.numel() * self.sizes.num_ranks // self.sizes.num_experts)
            x_END = FP8Rows(numbers, scales, dtype=x_TD.dtype, ue8m0=rounded.ue8m0, expected=expected)
        room = _Room(x_END=x_END, counts_E=counts_E, handle=handle, ids_TK=ids_TK, weights_TK=weights_TK)
        return _Hooked(result=room, hook=hook, kept=x_TD)

    def dispatch_end(self, pending: _Hooked) -> _Room:
        pending.hook()
        room: _Room = pending.result
        return room

    def combine_begin(self, y: Tensor, dispatched: _Room) -> _Hooked:
        y_TD, _, hook = self.buffer.low_latency_combine(
            y, dispatched.ids_TK, dispatched.weights_TK, dispatched.handle, return_recv_hook=True
        )
        return _Hooked(result=y_TD, hook=hook, kept=(y, dispatched))

    def combine_end(self, pending: _Hooked) -> Returned:
        pending.hook()
        self.live -= 1
        return Returned(pending.result)


def travelling_form(x_TD: Tensor | Rounded) -> Tensor | FP8Rows:
    """Return the form in which rows travel: FP8 where they have it, as scales travel one per 128 channels, without a
    smaller last block."""
    if isinstance(x_TD, Rounded):
        return x_TD.floats_TI if x_TD.floats_TI.shape[1] % BLOCK else x_TD.rows
    return x_TD


def as_argument(rows: Tensor | FP8Rows) -> Tensor | tuple[Tensor, Tensor]:
    """Return rows as the kernels take them."""
    return rows if isinstance(rows, Tensor) else (rows.numbers_TI, rows.scales_TN)


def check_current(device: torch.device) -> None:
    """Raise ConfigError where another device than that of the rows is the current one of this thread: DeepEP makes its
    buffers there, and launches there."""
    if not is_current(device):
        raise ConfigError(
            f"rows are on {device}, and another device is the current one of this thread, where DeepEP would launch: "
            f"call torch.cuda.set_device({device.index}) first"
        )


def end_with(group: Group, buffer: Any, device: torch.device) -> None:
    """Destroy a buffer with its group. Its destructor would do that wherever Python drops it, and meet there ranks that
    may be lost."""

    def end() -> None:
        with own_modes(device):
            buffer.destroy()

    group.ends.append(end)


def check_room(num_tokens: int, max_tokens: int) -> None:
    """Raise ConfigError for a step with more tokens than memory was reserved for."""
    if num_tokens > max_tokens:
        raise ConfigError(
            f"a step has {num_tokens} tokens on this rank and num_max_dispatch_tokens_per_rank is {max_tokens}: run "
            "smaller steps (max_running_requests, num_draft_tokens, chunked_prefill_size), or raise it"
        )


def check_same_room(group: Group, max_tokens: int, device: torch.device) -> None:
    """Raise ConfigError where ranks would reserve memory for different numbers of tokens. A collective."""
    theirs = group.all_gather(torch.tensor([max_tokens], device=device, dtype=torch.int64)).tolist()
    if any(other != max_tokens for other in theirs):
        raise ConfigError(f"num_max_dispatch_tokens_per_rank must be the same on all ranks; by rank it is {theirs}")


def import_deep_ep(kind: str, method: str) -> Any:
    """Import DeepEP, and check that its class `kind` has `method`. Raises BackendUnavailable."""
    advice = 'build DeepEP from its sources (PyPI has no usable one), or choose moe_a2a_backend="all_to_all"'
    try:
        library = importlib.import_module("deep_ep")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise BackendUnavailable(f"deep_ep cannot be imported ({reason}): {advice}") from error
    if not hasattr(getattr(library, kind, None), method) or not hasattr(library, "topk_idx_t"):
        raise BackendUnavailable(f"this deep_ep has no {kind}.{method}, or no topk_idx_t: {advice}")
    return library
