"""The mixture-of-experts layer: the router chooses experts for each token, the dispatcher carries the rows, the experts
of this rank run, and their results are combined."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from pdinfer.config import ModelConfig, ScoringFunc, TopkMethod
from pdinfer.errors import CheckpointError, ConfigError
from pdinfer.kernels.arguments import RouterRule
from pdinfer.kernels.formats.activations import Rounded
from pdinfer.kernels.formats.format import Weight
from pdinfer.kernels.formats.int8 import Int8Dynamic
from pdinfer.kernels.formats.weights import as_format, expert, from_bytes, num_bytes, tensors_of, to_bytes
from pdinfer.kernels.ops import Ops
from pdinfer.layers import GatedMLP, WeightSource, fp8_scales_of
from pdinfer.moe.dispatchers.base import Dispatched, Masked, TokenDispatcher
from pdinfer.moe.parallel import ExpertParallel
from pdinfer.moe.placement.replicas import LayerReplicas
from pdinfer.trace import Trace, mark
from pdinfer.values import Value


@attrs.frozen
class Router(Value):
    """The router of a layer: it scores every expert in float32 and keeps the best, as `Ops.choose_experts` says."""

    weight_ED: Tensor
    bias_E: Tensor | None
    rule: RouterRule
    ops: Ops

    @classmethod
    def build(cls, source: WeightSource, name: str, config: ModelConfig, ops: Ops) -> Router:
        num_experts, bias = config.n_routed_experts, f"{name}.e_score_correction_bias"
        weight_ED = source.take(f"{name}.weight", num_experts, config.hidden_size, dtype=torch.float32)
        bias_E = None
        if config.topk_method is TopkMethod.NOAUX_TC and config.family.optional_correction_bias:
            bias_E = source.find(bias, num_experts, dtype=torch.float32)
            if bias_E is None:
                bias_E = weight_ED.new_zeros(num_experts)
        elif config.topk_method is TopkMethod.NOAUX_TC:
            bias_E = source.take(bias, num_experts, dtype=torch.float32)
        rule = RouterRule(
            sigmoid=config.scoring_func is ScoringFunc.SIGMOID,
            top_k=config.num_experts_per_tok,
            num_groups=1 if config.topk_method is TopkMethod.GREEDY else config.n_group,
            top_k_groups=config.topk_group,
            normalize=config.norm_topk_prob,
            scaling_factor=config.routed_scaling_factor,
        )
        return cls(weight_ED, bias_E, rule, ops)

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the chosen logical experts and their weights: ids_TK int64, weights_TK float32."""
        return self.ops.choose_experts(x_TD, self.weight_ED, self.bias_E, self.rule)


@attrs.frozen
class Experts(Value):
    """Gated MLPs in two stacks: gate_up [E, 2I, D] (gate rows first) and down [E, D, I], in one format."""

    gate_up: Weight
    down: Weight
    op: Callable[[Any, Tensor, Any, Any], Tensor]
    reads_fp8: bool = attrs.field(init=False)

    @reads_fp8.default
    def _reads_fp8(self) -> bool:
        return fp8_scales_of([self.gate_up]) is not None

    @classmethod
    def build(
        cls,
        source: WeightSource,
        name: str,
        config: ModelConfig,
        ops: Ops,
        experts: Sequence[int],
        *,
        int8_rows: bool = False,
    ) -> Experts:
        """Build the experts of one layer. `experts` is the logical expert of each slot here, repeats included. Raises
        ConfigError for weights whose products do not read the INT8 rows that are dispatched."""
        hidden, size = config.hidden_size, config.moe_intermediate_size
        of_expert = [f"{name}.{number}" for number in experts]
        into = [(f"{each}.gate_proj.weight", f"{each}.up_proj.weight") for each in of_expert]
        gate_up = source.stack(into, size, hidden)
        down = source.stack([(f"{each}.down_proj.weight",) for each in of_expert], hidden, size)
        if type(gate_up) is not type(down):
            raise CheckpointError(
                f"{name}: gate_proj and up_proj are stored in one format and down_proj in another; experts need "
                'one for all three: load with weights="float"'
            )
        if not int8_rows:
            return cls(gate_up, down, ops.grouped_mlp.of(gate_up))
        if not isinstance(gate_up, Int8Dynamic):
            raise ConfigError(
                f'moe_a2a_backend "all_to_all_int8" brings rows in INT8 to experts in {Int8Dynamic.name}, and {name} '
                f'are held as {as_format(gate_up).name}: load such a checkpoint with weights="stored", or choose '
                '"all_to_all"'
            )
        return cls(gate_up, down, ops.grouped_mlp_int8_rows)

    @property
    def device(self) -> torch.device:
        return tensors_of(self.down)[0].device

    @property
    def slot_bytes(self) -> int:
        """How many bytes one expert takes."""
        return num_bytes(expert(self.gate_up, 0)) + num_bytes(expert(self.down, 0))

    def read_slot(self, slot: int) -> Tensor:
        """Return the weights of the expert in a slot of this rank: a new uint8 tensor [slot_bytes] on their device."""
        return torch.cat([to_bytes(expert(stack, slot)) for stack in (self.gate_up, self.down)])

    def write_slot(self, slot: int, data: Tensor) -> None:
        """Write into a slot, in place, what `read_slot` returned on this rank or on another.

        Raises ConfigError for data of another size."""
        if data.dtype != torch.uint8 or data.shape != (self.slot_bytes,):
            raise ConfigError(
                f"an expert takes {self.slot_bytes} bytes here, got {data.dtype} of shape {list(data.shape)}: ranks "
                "hold experts in different formats"
            )
        views = [expert(stack, slot) for stack in (self.gate_up, self.down)]
        for view, part in zip(views, torch.split(data, [num_bytes(view) for view in views]), strict=True):
            from_bytes(view, part)

    def __call__(self, dispatched: Dispatched) -> Tensor:
        """Return the result of each dispatched row, in the shape of the rows and the dtype of their floats."""
        if isinstance(dispatched, Masked):
            x, weights = dispatched.x_END, dispatched.weights_EN
        else:
            x, weights = dispatched.x_SD, dispatched.weights_S
        y = self.op(x, dispatched.counts_E, self.gate_up, self.down)
        return y if weights is None else y.mul_(weights[..., None])


@attrs.frozen
class MoE(Value):
    """The layer sum_k w_k * Expert_k(x) + Shared(x), its shared experts in one MLP, n_shared_experts times as wide.

    `record` receives the logical experts that the router chose. `replicas` maps them to physical experts; it is None
    where the two are the same."""

    router: Router
    experts: Experts
    shared: GatedMLP | None
    dispatcher: TokenDispatcher
    ops: Ops
    record: Callable[[Tensor], None] | None = None
    replicas: LayerReplicas | None = None
    two_batch_overlap: bool = False

    @classmethod
    def build(cls, source: WeightSource, layer: int, config: ModelConfig, ops: Ops, parallel: ExpertParallel) -> MoE:
        name = f"model.layers.{layer}.mlp"
        shared = None
        if config.n_shared_experts:
            size = config.moe_intermediate_size * config.n_shared_experts
            shared = GatedMLP.build(source, f"{name}.shared_experts", config.hidden_size, size, ops)
        return cls(
            Router.build(source, f"{name}.gate", config, ops),
            Experts.build(
                source, f"{name}.experts", config, ops, parallel.experts_of(layer), int8_rows=parallel.int8_rows
            ),
            shared,
            parallel.dispatcher,
            ops,
            parallel.record_of(layer),
            parallel.replicas_of(layer),
            parallel.two_batch_overlap,
        )

    @property
    def readers(self) -> tuple[Weight, ...]:
        """The weights that multiply the input, but for the router's."""
        return (self.experts.gate_up, *(() if self.shared is None else self.shared.readers))

    def __call__(
        self,
        x_TD: Tensor | Rounded,
        trace: Trace | None = None,
        live_T: Tensor | None = None,
        residual_TD: Tensor | None = None,
    ) -> Tensor:
        """Return the layer's output, added to `residual_TD` where that is given. Tokens that are not `live_T` (bool,
        None for all) go to no routed expert and are not recorded."""
        if self.two_batch_overlap:
            return self._in_two_batches(x_TD, trace, live_T, residual_TD)
        return self._combine(*self._run(x_TD, self._dispatch(x_TD, trace, live_T)), residual_TD)

    def phases(
        self, x_TD: Tensor | Rounded, trace: Trace | None, live_T: Tensor | None, residual_TD: Tensor | None
    ) -> Generator[None, None, Tensor]:
        """Do as a call, with all rows in one batch, and yield where rows have begun to travel: after dispatch, and
        after the experts."""
        pending = self._dispatch(x_TD, trace, live_T)
        yield
        returning = self._run(x_TD, pending)
        yield
        return self._combine(*returning, residual_TD)

    def _in_two_batches(
        self, x_TD: Tensor | Rounded, trace: Trace | None, live_T: Tensor | None, residual_TD: Tensor | None
    ) -> Tensor:
        """Compute one half of the rows while the other half travels: for a layer that runs alone. Where all layers run,
        `model.block` has halves of whole steps, which go through `phases`."""
        middle = -(-len(x_TD) // 2)
        halves = (x_TD[:middle], x_TD[middle:])
        live_halves = (None, None) if live_T is None else live_T.tensor_split(2)
        residuals = (None, None) if residual_TD is None else residual_TD.tensor_split(2)
        dispatched = [self._dispatch(half_TD, trace, live) for half_TD, live in zip(halves, live_halves, strict=True)]
        returning = [self._run(half_TD, pending) for half_TD, pending in zip(halves, dispatched, strict=True)]
        return torch.cat([self._combine(*both, half_TD) for both, half_TD in zip(returning, residuals, strict=True)])

    def _dispatch(self, x_TD: Tensor | Rounded, trace: Trace | None, live_T: Tensor | None) -> Any:
        mark(trace, "router")
        floats_TD = x_TD.floats_TI if isinstance(x_TD, Rounded) else x_TD
        ids_TK, weights_TK = self.router(floats_TD)
        if live_T is not None:
            ids_TK = ids_TK.where(live_T[:, None], -1)
        if self.record is not None:
            self.record(ids_TK)
        if self.replicas is not None:
            ids_TK = self.replicas(ids_TK)
        mark(trace, "experts")
        return self.dispatcher.dispatch_begin(x_TD if self.experts.reads_fp8 else floats_TD, ids_TK, weights_TK)

    def _run(self, x_TD: Tensor | Rounded, pending: Any) -> tuple[Any, Tensor | None]:
        dispatched = self.dispatcher.dispatch_end(pending)
        returning = self.dispatcher.combine_begin(self.experts(dispatched), dispatched)
        return returning, None if self.shared is None else self.shared(x_TD)  # while results travel

    def _combine(self, returning: Any, shared_TD: Tensor | None, residual_TD: Tensor | None) -> Tensor:
        back = self.dispatcher.combine_end(returning)
        return self.ops.combine_experts(back.y_SD, back.row_TK, back.weights_TK, shared_TD, residual_TD)
