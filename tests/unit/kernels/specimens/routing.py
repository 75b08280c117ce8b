"""The routers of DeepSeek-V3, and of V2, which has no biases and takes the softmax."""

from __future__ import annotations

import torch

from pdinfer.kernels.arguments import RouterRule
from pdinfer.kernels.triton import routing
from tests.unit.kernels.aot import Specimen


def route(num_tokens: int, *, num_experts: int = 256, biased: bool = True) -> object:
    return routing.route(
        torch.empty(num_tokens, num_experts, dtype=torch.float32, device="meta"),
        torch.empty(num_experts, dtype=torch.float32, device="meta") if biased else None,
        RouterRule(sigmoid=biased, top_k=8, num_groups=8, top_k_groups=4, normalize=biased, scaling_factor=2.5),
    )


SPECIMENS = (
    Specimen("route of V3, 32 tokens", lambda: route(32)),
    Specimen("route of V3, 4096 tokens", lambda: route(4096), narrow=1),
    Specimen("route of V2, 4096 tokens", lambda: route(4096, num_experts=160, biased=False), narrow=8),
)
