"""How many tokens chose each expert, counted where the router runs."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pdinfer.checks import check_int, clip
from pdinfer.errors import ConfigError
from pdinfer.moe.placement.placement import Ints

MODES = ("window", "stat")


class ExpertLoadRecorder:
    """The counts of one rank, per layer and logical expert.

    `mode` "window" keeps the last `window` steps, "stat" all steps since `reset`. `step_LE` is the open step, int64
    [layers, experts] on the device. `record` always writes to that address, so it may be captured in a graph. Only
    `counts` waits for the device. A window takes 4 bytes per step, layer and expert on the device. Raises ConfigError
    for sizes below 1."""

    def __init__(
        self, num_layers: int, num_experts: int, *, device: torch.device | str, mode: str = "window", window: int = 1000
    ) -> None:
        for name, value in (("num_layers", num_layers), ("num_experts", num_experts), ("window", window)):
            check_int(name, value, 1)
        if mode not in MODES:
            raise ConfigError(f"mode must be one of {', '.join(MODES)}, got {clip(mode)}")
        self.num_layers, self.num_experts, self.mode = num_layers, num_experts, mode
        self.step_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self._total_LE = torch.zeros_like(self.step_LE)
        kept = window if mode == "window" else 0
        self._steps = torch.zeros(kept, num_layers, num_experts, dtype=torch.int32, device=device)
        self._oldest = 0

    def record(self, layer: int, ids_TK: Tensor) -> None:
        """Add one to the open step for each choice: `ids_TK` int64, logical ids in 0..num_experts-1 (not checked), or
        -1 for none."""
        ids_S = ids_TK.reshape(-1)
        self.step_LE[layer].scatter_add_(0, ids_S.clamp_min(0), (ids_S >= 0).to(torch.int64))

    def end_step(self) -> None:
        """Close the open step. In a window, the oldest step goes."""
        self._total_LE += self.step_LE
        if self.mode == "window":
            oldest_LE = self._steps[self._oldest]
            self._total_LE -= oldest_LE
            oldest_LE.copy_(self.step_LE)
            self._oldest = (self._oldest + 1) % len(self._steps)
        self.step_LE.zero_()

    def device_counts(self) -> Tensor:
        """Return the closed steps of this rank: int64 [layers, experts] on the device, a copy for an all-reduce."""
        return self._total_LE.clone()

    def counts(self) -> Ints:
        """Return the closed steps of this rank on the host: [layers, experts]. Waits for the device."""
        return self._total_LE.cpu().numpy().astype(np.int64)

    def reset(self) -> None:
        """Forget all steps, including the open one."""
        for counts in (self.step_LE, self._total_LE, self._steps):
            counts.zero_()
        self._oldest = 0
