"""How tokens reach experts and come back: the seam behind which ranks may lie, and its one-rank form."""

from __future__ import annotations

from typing import Protocol

import attrs
from torch import Tensor

from pdinfer.kernels.ops import Ops


@attrs.frozen(kw_only=True)
class Dispatched:
    """Rows sorted by expert. `x_SD` has `counts_E[e]` rows (int64, on the host) for expert e of this rank; the other
    fields belong to the dispatcher that made it and only its `combine` reads them."""

    x_SD: Tensor
    counts_E: Tensor
    row_TK: Tensor
    weights_TK: Tensor


class TokenDispatcher(Protocol):
    """Sends each token to its experts and sums what they return."""

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        """Rows for the experts of this rank. Reading the counts on the host syncs the device."""

    def combine(self, y_SD: Tensor, dispatched: Dispatched) -> Tensor:
        """sum_k weight_k * y_k per token -> float32 [T, D]."""


@attrs.frozen
class LocalDispatcher:
    """All experts are here: sort the rows, un-sort the sum."""

    num_experts: int
    ops: Ops

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        counts_E, token_of_row_S, row_TK = self.ops.group_rows(ids_TK, self.num_experts)
        return Dispatched(
            x_SD=x_TD.index_select(0, token_of_row_S), counts_E=counts_E, row_TK=row_TK, weights_TK=weights_TK
        )

    def combine(self, y_SD: Tensor, dispatched: Dispatched) -> Tensor:
        return self.ops.combine_rows(y_SD, dispatched.row_TK, dispatched.weights_TK)
