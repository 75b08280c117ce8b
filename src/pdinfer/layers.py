"""The smallest parts of a model: where weights come from, linear maps, norms, the gated MLP and rotary angles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from pdinfer.config import ModelConfig
from pdinfer.kernels.formats.activations import FP8Rows, Rounded
from pdinfer.kernels.formats.floats import FloatWithBias
from pdinfer.kernels.formats.format import WHOLE, Format, Shard, Weight
from pdinfer.kernels.formats.weights import as_format
from pdinfer.kernels.ops import Ops
from pdinfer.parallel.groups import ALONE, Group
from pdinfer.trace import Trace, mark
from pdinfer.values import Value


class WeightSource(Protocol):
    """The source of a part's tensors when it is built. A part asks for every tensor by its checkpoint name, so building
    a model on a device without memory ("meta") lists what a checkpoint must hold."""

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None, shard: Shard = WHOLE) -> Tensor:
        """Return the tensor called `name`, in the model's dtype unless `dtype` says otherwise. `shape` is that of the
        whole tensor; the result is the part that `shard` keeps."""

    def find(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor | None:
        """Return what `take` returns, or None where there is no tensor called `name`."""

    def weight(self, names: Sequence[str], rows: int, columns: int, shard: Shard = WHOLE) -> Weight:
        """Return the matrices [rows, columns] called `names`, or the part of each that `shard` keeps, one below the
        other, in the format that the source holds them in."""

    def format(self, name: str) -> type[Format]:
        """Return the format that `weight` would hold this matrix in."""

    def stack(self, names: Sequence[Sequence[str]], rows: int, columns: int) -> Weight:
        """Return such a weight for every expert: a stack with one for each list of names."""


@attrs.frozen
class Linear(Value):
    """x @ weight.T, with a weight [out, in] in any format. It has a bias only where one was quantized with the
    weight."""

    weight: Weight
    op: Callable[[Any, Any], Tensor]
    bias_O: Tensor | None = None
    reads_fp8: bool = attrs.field(init=False)

    @reads_fp8.default
    def _reads_fp8(self) -> bool:
        return fp8_scales_of([self.weight]) is not None

    @classmethod
    def build(
        cls, source: WeightSource, name: str, out_features: int, in_features: int, ops: Ops, shard: Shard = WHOLE
    ) -> Linear:
        return cls.of(source.weight((f"{name}.weight",), out_features, in_features, shard), ops)

    @classmethod
    def of(cls, weight: Weight, ops: Ops) -> Linear:
        if isinstance(weight, FloatWithBias):
            return cls(weight.numbers, ops.linear.of(weight.numbers), weight.bias.squeeze(-1))
        return cls(weight, ops.linear.of(weight))

    def __call__(self, x_TI: Tensor | FP8Rows | Rounded) -> Tensor:
        if isinstance(x_TI, Rounded):
            x_TI = x_TI.rows if self.reads_fp8 else x_TI.floats_TI
        y_TO = self.op(x_TI, self.weight)
        return y_TO if self.bias_O is None else y_TO + self.bias_O


@attrs.frozen
class _Divided(Value):
    linear: Linear
    group: Group

    @property
    def weight(self) -> Weight:
        return self.linear.weight


@attrs.frozen
class RowParallelLinear(_Divided):
    """A linear map of inputs whose channels are divided over `group`. Each rank has the columns of the weight for its
    channels (rows in Megatron's transposed view, hence the name), and the products are summed."""

    def __call__(self, x_TI: Tensor | FP8Rows) -> Tensor:
        return self.group.all_reduce(self.linear(x_TI))


@attrs.frozen
class GatheredLinear(_Divided):
    """A linear map of divided inputs in a format that scales each token over all of its channels, which no rank has.
    The inputs are gathered, each rank computes a part of the outputs, and these are gathered too."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self.group.all_gather_columns(self.linear(self.group.all_gather_columns(x_TI)))


def row_parallel(
    source: WeightSource, name: str, out_features: int, in_features: int, ops: Ops, group: Group
) -> Linear | RowParallelLinear | GatheredLinear:
    """Build the map from inputs divided over `group` to whole outputs on each of its ranks."""
    if source.format(f"{name}.weight").scales_tokens:
        linear = Linear.build(source, name, out_features, in_features, ops, Shard(group.rank, group.size))
        return linear if group.size == 1 else GatheredLinear(linear, group)
    linear = Linear.build(source, name, out_features, in_features, ops, Shard(group.rank, group.size, axis=1))
    return linear if group.size == 1 else RowParallelLinear(linear, group)


def fp8_scales_of(weights: Iterable[Weight]) -> bool | None:
    """Return `ue8m0` of those weights whose products read FP8, the same for all in a model; None if there are none."""
    scales = (as_format(weight).ue8m0 for weight in weights)
    return next((ue8m0 for ue8m0 in scales if ue8m0 is not None), None)


@attrs.frozen
class RMSNorm(Value):
    """A root-mean-square norm over the last axis, with the bias that INT8 checkpoints may add to tame outliers."""

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
class InputNorm(Value):
    """The norm of the residual stream in front of linear maps, with the sum that goes before it.

    `ue8m0` is None where no map is in FP8; else the norm is also rounded as those maps read it, once for all of them.
    """

    norm: RMSNorm
    ue8m0: bool | None = None

    @classmethod
    def of(cls, norm: RMSNorm, readers: Iterable[Weight]) -> InputNorm:
        """Build the norm that is read by products with these weights."""
        return cls(norm, fp8_scales_of(readers))

    def __call__(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> tuple[Tensor | Rounded, Tensor]:
        """Return (norm of the sum, the sum), where the sum is residual + x, or x itself without a residual."""
        ops, weight_D, eps = self.norm.ops, self.norm.weight_D, self.norm.eps
        if self.norm.bias_D is not None:
            sum_TD = x_TD if residual_TD is None else residual_TD + x_TD
            return self.norm(sum_TD), sum_TD
        if self.ue8m0 is None:
            return ops.add_rms_norm(x_TD, residual_TD, weight_D, eps)
        return ops.add_rms_norm_fp8(x_TD, residual_TD, weight_D, eps, ue8m0=self.ue8m0)


@attrs.frozen
class GatedMLP(Value):
    """down(silu(gate(x)) * up(x)). Gate and up are one matrix, with the gate's rows first. `activate` returns what
    `down` reads."""

    gate_up: Linear
    activate: Callable[[Tensor], Any]
    down: Callable[[Any], Tensor]
    whole: Callable[[Any], Tensor] | None
    """Does all of it in one op, where both maps are whole and in one format of floats."""

    @classmethod
    def build(
        cls, source: WeightSource, name: str, hidden_size: int, intermediate_size: int, ops: Ops, group: Group = ALONE
    ) -> GatedMLP:
        """Ask `source` for the three matrices. The intermediate channels are divided over `group`."""
        names = (f"{name}.gate_proj.weight", f"{name}.up_proj.weight")
        shard = Shard(group.rank, group.size)
        gate_up = Linear.of(source.weight(names, intermediate_size, hidden_size, shard), ops)
        down = row_parallel(source, f"{name}.down_proj", hidden_size, intermediate_size, ops, group)
        ue8m0 = fp8_scales_of([down.weight])
        activate = ops.gated_silu if ue8m0 is None else partial(ops.gated_silu_fp8, ue8m0=ue8m0)
        floats = as_format(gate_up.weight).holds_floats and type(gate_up.weight) is type(down.weight)
        whole = None
        if floats and isinstance(down, Linear) and gate_up.bias_O is None and down.bias_O is None:
            whole = partial(ops.gated_mlp, gate_up=gate_up.weight, down=down.weight)
        return cls(gate_up, activate, down, whole)

    @property
    def readers(self) -> tuple[Weight, ...]:
        """The weights that multiply the input."""
        return (self.gate_up.weight,)

    def __call__(self, x_TD: Tensor | Rounded, trace: Trace | None = None) -> Tensor:
        mark(trace, "mlp")
        if self.whole is not None:
            return self.whole(x_TD)
        return self.down(self.activate(self.gate_up(x_TD)))


@attrs.frozen
class Rotary(Value):
    """The angles of the rotary embedding: position * inv_frequency. Cos and sin include YaRN's amplitude."""

    inv_frequency_F: Tensor
    amplitude: float

    @classmethod
    def build(cls, config: ModelConfig, device: torch.device) -> Rotary:
        frequencies = torch.tensor(config.inv_frequencies(), dtype=torch.float64, device="cpu").float()
        return cls(frequencies.to(device), config.rope_attention_factor)

    def __call__(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos_TF, sin_TF), float32, F = qk_rope_head_dim / 2."""
        angle_TF = positions_T[:, None].float() * self.inv_frequency_F
        return angle_TF.cos() * self.amplitude, angle_TF.sin() * self.amplitude
