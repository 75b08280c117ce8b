"""The smallest parts: where weights come from, linear maps, norms, the gated MLP and rotary angles."""

from __future__ import annotations

from typing import Protocol

import attrs
import torch
from torch import Tensor

from pdinfer.config import ModelConfig
from pdinfer.kernels.ops import Ops


class WeightSource(Protocol):
    """Where a part gets its tensors when it is built. Every tensor a model has is asked for by its checkpoint name, so
    that building on a device without memory ("meta") lists what a checkpoint must hold."""

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor called `name`, in the model's dtype unless `dtype` says otherwise."""

    def find(self, name: str, *shape: int) -> Tensor | None:
        """As `take`, or None where a tensor called `name` is neither promised nor there."""

    def into(self, name: str, destination: Tensor) -> None:
        """Fills `destination`, a slice of a larger tensor, from the tensor called `name`."""

    def new(self, *shape: int) -> Tensor:
        """An uninitialised tensor of the model's dtype, for `into` to fill."""


@attrs.frozen
class Linear:
    """x @ weight.T, weight [out, in]; no bias."""

    weight_OI: Tensor
    ops: Ops

    @classmethod
    def build(cls, source: WeightSource, name: str, out_features: int, in_features: int, ops: Ops) -> Linear:
        return cls(source.take(f"{name}.weight", out_features, in_features), ops)

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.ops.linear(x_TI, self.weight_OI)


@attrs.frozen
class RMSNorm:
    """Root-mean-square norm over the last axis, and the bias that INT8 checkpoints may add to tame outliers."""

    weight_D: Tensor
    eps: float
    ops: Ops
    bias_D: Tensor | None = None

    @classmethod
    def build(cls, source: WeightSource, name: str, size: int, eps: float, ops: Ops) -> RMSNorm:
        return cls(source.take(f"{name}.weight", size), eps, ops, source.find(f"{name}.bias", size))

    def __call__(self, x_TD: Tensor) -> Tensor:
        y_TD = self.ops.rms_norm(x_TD, self.weight_D, self.eps)
        return y_TD if self.bias_D is None else y_TD + self.bias_D


@attrs.frozen
class GatedMLP:
    """down(silu(gate(x)) * up(x)); gate and up are one matrix, gate rows first."""

    gate_up_JD: Tensor
    down_DI: Tensor
    ops: Ops

    @classmethod
    def build(cls, source: WeightSource, name: str, hidden_size: int, intermediate_size: int, ops: Ops) -> GatedMLP:
        gate_up_JD = source.new(2 * intermediate_size, hidden_size)
        source.into(f"{name}.gate_proj.weight", gate_up_JD[:intermediate_size])
        source.into(f"{name}.up_proj.weight", gate_up_JD[intermediate_size:])
        return cls(gate_up_JD, source.take(f"{name}.down_proj.weight", hidden_size, intermediate_size), ops)

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.ops.linear(self.ops.gated_silu(self.ops.linear(x_TD, self.gate_up_JD)), self.down_DI)


@attrs.frozen
class Rotary:
    """Angles of the rotary embedding: position * inv_frequency, with YaRN's amplitude folded into cos and sin."""

    inv_frequency_F: Tensor
    amplitude: float

    @classmethod
    def build(cls, config: ModelConfig, device: torch.device) -> Rotary:
        frequencies = torch.tensor(config.inv_frequencies(), dtype=torch.float64).float()
        return cls(frequencies.to(device), config.rope_attention_factor)

    def __call__(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """(cos_TF, sin_TF), float32, F = qk_rope_head_dim / 2."""
        angle_TF = positions_T[:, None].float() * self.inv_frequency_F
        return angle_TF.cos() * self.amplitude, angle_TF.sin() * self.amplitude
