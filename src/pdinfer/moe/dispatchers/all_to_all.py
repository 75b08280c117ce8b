"""Experts on several ranks, reached by the collectives of torch.distributed, on any of its backends: with rows of
floats, or of INT8 as products read them."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from pdinfer.kernels.formats.activations import INT8Rows, Rounded
from pdinfer.kernels.formats.int8 import int8_activation
from pdinfer.kernels.ops import Ops
from pdinfer.moe.dispatchers.base import Contiguous, Returned
from pdinfer.parallel.groups import Begun, Group
from pdinfer.values import Value


@attrs.frozen(kw_only=True)
class _Travelling:
    """Rows in transit, one for each (token, expert) pair of this rank, sorted by expert.

    `row_TK` is the row of each pair. `received_P` counts what comes from each rank for each expert here."""

    rows: Begun
    received_P: Tensor
    send_counts: list[int]
    receive_counts: list[int]
    row_TK: Tensor
    weights_TK: Tensor


@attrs.frozen(kw_only=True)
class _Arrived(Contiguous):
    """Received rows, sorted by expert. Row i was number `arrival_S[i]` in the order of arrival."""

    arrival_S: Tensor
    travelled: _Travelling


@attrs.frozen(kw_only=True)
class _Returning:
    rows: Begun
    row_TK: Tensor
    weights_TK: Tensor


@attrs.frozen
class AllToAllDispatcher(Value):
    """The dispatcher over collectives: rank r has the physical experts `r * E` to `(r + 1) * E - 1`, E =
    `experts_per_rank`.

    Every (token, expert) pair travels as a row of its own, and its result returns as one. So sums are formed on the
    token's rank in the order of its experts, in float32, and do not depend on where experts are. A layer takes three
    collectives: counts, rows, results. Reading the counts is the only sync of the device."""

    group: Group
    experts_per_rank: int
    ops: Ops
    max_live: ClassVar[int | None] = None
    max_tokens: ClassVar[int | None] = None
    graph_safe: ClassVar[bool] = False

    def dispatch_begin(self, x_TD: Tensor | Rounded, ids_TK: Tensor, weights_TK: Tensor) -> _Travelling:
        x_TD = x_TD.floats_TI if isinstance(x_TD, Rounded) else x_TD
        num_ranks, num_experts = self.group.size, self.experts_per_rank
        sent_P, token_of_row_S, row_TK = self.ops.group_rows(ids_TK, num_ranks * num_experts)
        received_P = self.group.all_to_all(sent_P, [num_experts] * num_ranks, [num_experts] * num_ranks)
        sent_RE, received_RE = torch.stack((sent_P, received_P)).view(2, num_ranks, num_experts).cpu()
        send_counts, receive_counts = sent_RE.sum(1).tolist(), received_RE.sum(1).tolist()
        rows_SD = x_TD.index_select(0, token_of_row_S[: sum(send_counts)])
        return _Travelling(
            rows=self.group.all_to_all_begin(rows_SD, send_counts, receive_counts),
            received_P=received_P,
            send_counts=send_counts,
            receive_counts=receive_counts,
            row_TK=row_TK,
            weights_TK=weights_TK,
        )

    def dispatch_end(self, pending: _Travelling) -> _Arrived:
        arrived_SD = pending.rows.wait()
        num_ranks, num_experts = self.group.size, self.experts_per_rank
        experts_P = torch.arange(num_experts, device=arrived_SD.device, dtype=torch.int64).repeat(num_ranks)
        expert_S = experts_P.repeat_interleave(pending.received_P, output_size=len(arrived_SD))
        arrival_S = expert_S.argsort(stable=True)
        return _Arrived(
            x_SD=arrived_SD.index_select(0, arrival_S),
            counts_E=pending.received_P.view(num_ranks, num_experts).sum(0),
            arrival_S=arrival_S,
            travelled=pending,
        )

    def combine_begin(self, y: Tensor, dispatched: _Arrived) -> _Returning:
        travelled = dispatched.travelled
        rows_SD = torch.empty_like(y).index_copy_(0, dispatched.arrival_S, y)
        return _Returning(
            rows=self.group.all_to_all_begin(rows_SD, travelled.receive_counts, travelled.send_counts),
            row_TK=travelled.row_TK,
            weights_TK=travelled.weights_TK,
        )

    def combine_end(self, pending: _Returning) -> Returned:
        return Returned(pending.rows.wait(), pending.row_TK, pending.weights_TK)


SCALE_BYTES = torch.float32.itemsize


@attrs.frozen
class _TravellingBytes(Value):
    """Rows in transit, and the dtype of their floats."""

    packed: Any
    dtype: torch.dtype


@attrs.frozen
class Int8AllToAllDispatcher(Value):
    """The dispatcher over collectives for experts in INT8 with a scale per token ("w8a8_dynamic").

    A token is rounded once, before it is sent to its experts, and takes D + 4 bytes on the way to each instead of 2 D
    in bfloat16. Rows arrive without room between those of one expert and of the next, as `INT8Rows`: the form in which
    Ascend's dispatch returns them (npu_moe_distribute_dispatch_v2 of torch_npu 2.11, quant_mode 2). Results return as
    floats."""

    carrier: AllToAllDispatcher
    """It carries bytes: an int8 for each channel, then the scale."""

    max_live: ClassVar[int | None] = None
    max_tokens: ClassVar[int | None] = None
    graph_safe: ClassVar[bool] = False

    def dispatch_begin(self, x_TD: Tensor | Rounded, ids_TK: Tensor, weights_TK: Tensor) -> _TravellingBytes:
        x_TD = x_TD.floats_TI if isinstance(x_TD, Rounded) else x_TD
        packed_TW = torch.cat([_dense(each).view(torch.uint8) for each in int8_activation(x_TD)], -1)
        return _TravellingBytes(self.carrier.dispatch_begin(packed_TW, ids_TK, weights_TK), x_TD.dtype)

    def dispatch_end(self, pending: _TravellingBytes) -> Contiguous:
        arrived = self.carrier.dispatch_end(pending.packed)
        assert isinstance(arrived.x_SD, Tensor)
        numbers_SD, scales_S1 = map(_dense, arrived.x_SD.tensor_split((-SCALE_BYTES,), -1))
        rows = INT8Rows(numbers_SD.view(torch.int8), scales_S1.view(torch.float32), dtype=pending.dtype)
        return attrs.evolve(arrived, x_SD=rows)

    def combine_begin(self, y: Tensor, dispatched: Any) -> Any:
        return self.carrier.combine_begin(y, dispatched)

    def combine_end(self, pending: Any) -> Returned:
        return self.carrier.combine_end(pending)


def _dense(x: Tensor) -> Tensor:
    """Return a copy whose bytes another dtype can be read from. To torch a tensor of one row or none is contiguous
    whatever its strides and offset are."""
    return x.clone(memory_format=torch.contiguous_format)
