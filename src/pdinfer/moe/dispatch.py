"""How tokens reach experts and come back: the seam behind which ranks may lie, and its one-rank form."""

from __future__ import annotations

from typing import Protocol

import attrs
import torch
from torch import Tensor


@attrs.frozen(kw_only=True)
class Dispatched:
    """Rows sorted by expert. `x_SD` has `counts_E[e]` rows (int64, on the host) for expert e of this rank; the other
    fields belong to the dispatcher that made it and only its `combine` reads them."""

    x_SD: Tensor
    counts_E: Tensor
    token_of_row_S: Tensor
    weight_of_row_S: Tensor
    num_tokens: int


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

    def dispatch(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Dispatched:
        experts_S, order_S = ids_TK.flatten().sort(stable=True)
        token_of_row_S = order_S // ids_TK.shape[1]
        return Dispatched(
            x_SD=x_TD.index_select(0, token_of_row_S),
            counts_E=torch.bincount(experts_S, minlength=self.num_experts).cpu(),
            token_of_row_S=token_of_row_S,
            weight_of_row_S=weights_TK.flatten().index_select(0, order_S),
            num_tokens=len(x_TD),
        )

    def combine(self, y_SD: Tensor, dispatched: Dispatched) -> Tensor:
        out_TD = torch.zeros(dispatched.num_tokens, y_SD.shape[1], dtype=torch.float32, device=y_SD.device)
        return out_TD.index_add_(0, dispatched.token_of_row_S, y_SD.float() * dispatched.weight_of_row_S[:, None])
