"""What a draw of tokens depends on beside its logits, as values on the device."""

from __future__ import annotations

import enum

import attrs
import torch
from torch import Tensor


class DrawKind(enum.IntEnum):
    """What a batch of draws has to compute, each kind including the ones before it. Rows that ask for less get what
    they would get alone."""

    GREEDY = 0
    RANDOM = 1
    FILTERED = 2


@attrs.frozen(kw_only=True)
class Controls:
    """The parameters of a draw as tensors [B] on the device of the logits: float64, and int64 from `top_k_B` on.

    `min_logit_B` is log(min_p), or -inf; `top_k_B` of 0 keeps all. A row of temperature 0 is greedy. `seed_B` are the
    64 bits of a seed, and `position_B` is the index of the drawn token in its sequence.
    """

    temperature_B: Tensor
    top_p_B: Tensor
    min_logit_B: Tensor
    top_k_B: Tensor
    seed_B: Tensor
    position_B: Tensor

    def later(self, num_tokens: int) -> Controls:
        """Return the parameters for the tokens so much further on."""
        return attrs.evolve(self, position_B=self.position_B + num_tokens) if num_tokens else self

    def repeated(self, num_queries: int) -> Controls:
        """Return the parameters of Q tokens per row that follow each other, row by row."""
        columns = {field.name: getattr(self, field.name) for field in attrs.fields(Controls)}
        each = {name: column_B.repeat_interleave(num_queries) for name, column_B in columns.items()}
        steps_Q = torch.arange(num_queries, device=self.position_B.device, dtype=torch.int64)
        each["position_B"] = (self.position_B[:, None] + steps_Q).view(-1)
        return Controls(**each)
