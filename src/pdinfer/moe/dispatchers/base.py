"""How tokens reach experts and come back: the seam behind which ranks may lie, and its one-rank form.

Both ways have two halves, so that ranks can compute while rows travel:

    dispatch_begin   ...   dispatch_end   the experts   combine_begin   ...   combine_end

What lies between the halves of one batch may be the halves of another, if `max_live` allows for two. Every rank makes
the same calls in the same order, a rank without tokens too.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import attrs
from torch import Tensor

from pdinfer.kernels.ops import Ops


@attrs.frozen(kw_only=True)
class Contiguous:
    """Rows for the experts of this rank, one per token and expert, sorted by expert: `counts_E[e]` (int64, on the host)
    for the e-th. A `loose` one did not wait for its counts: they are integers on the device of the rows, and rows
    behind the last may hold anything.

    `weights_S` (float32) are for whoever runs the experts to multiply the results with; None where the dispatcher does
    that on combining."""

    x_SD: Tensor
    counts_E: Tensor
    weights_S: Tensor | None = None
    loose: bool = False


@attrs.frozen(kw_only=True)
class Masked:
    """The same with room for N rows per expert, of which the first `counts_E[e]` (integers, on the device of the rows)
    are there; the others may hold anything."""

    x_END: Tensor
    counts_E: Tensor
    weights_EN: Tensor | None = None


Dispatched = Contiguous | Masked
"""What the experts get. A dispatcher makes a class of its own from one of these; what that adds, and what the `begin_`
halves return, only that dispatcher reads."""


class TokenDispatcher(Protocol):
    """Sends each token to its experts and sums what they return."""

    @property
    def max_live(self) -> int | None:
        """How many batches may be between `dispatch_begin` and `combine_end` at once; None is any number."""

    @property
    def max_tokens(self) -> int | None:
        """How many tokens a rank may bring to one `dispatch_begin`; None is any number."""

    @property
    def graph_safe(self) -> bool:
        """Whether all four halves can be captured in a CUDA graph: none of them waits for the device."""

    def dispatch_begin(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Any:
        """Starts rows on their way: token t to the physical experts `ids_TK[t]` (int64, all different). The tensors
        must not change until `combine_end`."""

    def dispatch_end(self, pending: Any) -> Dispatched:
        """The rows that came for the experts of this rank."""

    def combine_begin(self, y: Tensor, dispatched: Any) -> Any:
        """Starts results on their way back: one for each row that was dispatched, of the same shape and dtype."""

    def combine_end(self, pending: Any) -> Tensor:
        """sum_k weight_k * y_k per token, in the order of `dispatch_begin` -> float32 [T, D]."""


@attrs.frozen(kw_only=True)
class _Sorted(Contiguous):
    row_TK: Tensor
    weights_TK: Tensor


@attrs.frozen
class LocalDispatcher:
    """All experts are here: sort the rows, un-sort the sum. Reading the counts syncs the device."""

    num_experts: int
    ops: Ops
    max_live: ClassVar[int | None] = None
    max_tokens: ClassVar[int | None] = None
    graph_safe: ClassVar[bool] = False

    def dispatch_begin(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> _Sorted:
        counts_E, token_of_row_S, row_TK = self.ops.group_rows(ids_TK, self.num_experts)
        return _Sorted(
            x_SD=x_TD.index_select(0, token_of_row_S), counts_E=counts_E, row_TK=row_TK, weights_TK=weights_TK
        )

    def dispatch_end(self, pending: _Sorted) -> _Sorted:
        return pending

    def combine_begin(self, y: Tensor, dispatched: _Sorted) -> Tensor:
        return self.ops.combine_rows(y, dispatched.row_TK, dispatched.weights_TK)

    def combine_end(self, pending: Tensor) -> Tensor:
        return pending
