"""How tokens reach experts and come back: the seam to other ranks, and its implementation for one rank.

Both ways have two halves, so that ranks can compute while rows travel:

    dispatch_begin   ...   dispatch_end   the experts   combine_begin   ...   combine_end

Between the halves of one batch there may be halves of another, if `max_live` allows for two. Every rank makes the same
calls in the same order, even a rank without tokens."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import attrs
from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows, Rounded, ScaledRows
from pdinfer.kernels.ops import Ops
from pdinfer.values import Value


@attrs.frozen(kw_only=True)
class Contiguous(Value):
    """Rows for the experts of this rank, one per token and expert, sorted by expert. Others may be among them, whose
    results nobody reads.

    Expert e has `counts_E[e]` rows (integers, on the device of the rows). Rows behind the last may hold anything.
    Results are multiplied by `weights_S` (float32) where the experts run, unless it is None: then the dispatcher does
    that when it combines."""

    x_SD: Tensor | ScaledRows
    counts_E: Tensor
    weights_S: Tensor | None = None


@attrs.frozen(kw_only=True)
class Masked(Value):
    """Rows for the experts of this rank, in room for N rows per expert.

    The first `counts_E[e]` rows of expert e are present (integers, on the device of the rows); the others may hold
    anything. `weights_EN` is as in `Contiguous`."""

    x_END: Tensor | ScaledRows
    counts_E: Tensor
    weights_EN: Tensor | None = None


Dispatched = Contiguous | Masked
"""What the experts receive. A dispatcher derives its own class from one of these; only that dispatcher reads what the
class adds, and what the `begin` halves return."""


@attrs.frozen
class Returned(Value):
    """What experts returned for the tokens of this rank, in the form that `Ops.combine_experts` sums: the
    result of token t is sum_k weights_TK[t, k] * y_SD[row_TK[t, k]], where a row of -1 is none. Without these two, y_SD
    is that sum, [T, D]."""

    y_SD: Tensor
    row_TK: Tensor | None = None
    weights_TK: Tensor | None = None


class TokenDispatcher(Protocol):
    """The seam: it sends each token to its experts and brings back what they return."""

    @property
    def max_live(self) -> int | None:
        """How many batches may be between `dispatch_begin` and `combine_end` at once; None for any number."""

    @property
    def max_tokens(self) -> int | None:
        """How many tokens a rank may bring to one `dispatch_begin`; None for any number."""

    @property
    def graph_safe(self) -> bool:
        """Whether all four halves can be captured in a CUDA graph: none of them waits for the device."""

    def dispatch_begin(self, x_TD: Tensor | Rounded, ids_TK: Tensor, weights_TK: Tensor) -> Any:
        """Start sending rows: token t to the physical experts `ids_TK[t]` (int64, all different, or -1 for none).

        For experts in FP8 the rows come in both forms, and the dispatcher sends the one that it can. The tensors must
        not change until `combine_end`."""

    def dispatch_end(self, pending: Any) -> Dispatched:
        """Return the rows that came for the experts of this rank."""

    def combine_begin(self, y: Tensor, dispatched: Any) -> Any:
        """Start sending results back: one for each dispatched row, of the same shape, in the dtype of the floats."""

    def combine_end(self, pending: Any) -> Returned:
        """Return the results of all tokens, in the order and dtype of `dispatch_begin`. No expert adds 0."""


@attrs.frozen(kw_only=True)
class _Sorted(Contiguous):
    row_TK: Tensor
    weights_TK: Tensor


@attrs.frozen
class LocalDispatcher(Value):
    """The dispatcher for one rank: it sorts the rows."""

    num_experts: int
    ops: Ops
    max_live: ClassVar[int | None] = None
    max_tokens: ClassVar[int | None] = None
    graph_safe: ClassVar[bool] = True

    def dispatch_begin(self, x_TD: Tensor | Rounded, ids_TK: Tensor, weights_TK: Tensor) -> _Sorted:
        x_SD: Tensor | FP8Rows
        if isinstance(x_TD, Rounded):
            x_SD, counts_E, row_TK = self.ops.sort_rows_fp8(x_TD.rows, ids_TK, self.num_experts, ids_TK.numel())
        else:
            x_SD, counts_E, row_TK = self.ops.sort_rows(x_TD, ids_TK, self.num_experts)
        return _Sorted(x_SD=x_SD, counts_E=counts_E, row_TK=row_TK, weights_TK=weights_TK)

    def dispatch_end(self, pending: _Sorted) -> _Sorted:
        return pending

    def combine_begin(self, y: Tensor, dispatched: _Sorted) -> Returned:
        return Returned(y, dispatched.row_TK, dispatched.weights_TK)

    def combine_end(self, pending: Returned) -> Returned:
        return pending
