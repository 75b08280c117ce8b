"""Where a model has its experts on one rank, and how tokens get there."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch
from torch import Tensor

from pdinfer.config import ExpertConfig, ModelConfig
from pdinfer.errors import ConfigError
from pdinfer.kernels.ops import Ops
from pdinfer.moe.dispatchers.base import LocalDispatcher, TokenDispatcher
from pdinfer.moe.dispatchers.choose import buffer_bytes, choose_dispatcher
from pdinfer.moe.dispatchers.deep_ep_limits import ExpertSizes
from pdinfer.moe.placement.placement import ExpertPlacement, PlacementSizes, check_sizes
from pdinfer.moe.placement.recorder import ExpertLoadRecorder
from pdinfer.moe.placement.replicas import DispatchRule, LayerReplicas, ReplicaTables
from pdinfer.parallel.groups import ALONE, Group
from pdinfer.values import Value


@attrs.define(eq=False, kw_only=True)
class ExpertParallel(Value):
    """What all mixture-of-experts layers of a model share.

    `layers` holds the numbers of these layers, that of an MTP layer last. They are the rows of `placement`, which is
    None in a model without experts. `epoch` numbers the placements that the model has had. On one rank there are no
    `replicas` and slots are mere names: every expert is where its own number says. `recorder` counts what the tokens of
    this rank choose. The dispatcher has `buffer_bytes` of the GPU, and brings rows in INT8 with `int8_rows`."""

    group: Group
    layers: Sequence[int]
    placement: ExpertPlacement | None
    dispatcher: TokenDispatcher
    replicas: ReplicaTables | None = None
    recorder: ExpertLoadRecorder | None = None
    two_batch_overlap: bool = False
    buffer_bytes: int = 0
    int8_rows: bool = False
    epoch: int = 0

    @classmethod
    def apart(
        cls, config: ModelConfig, ops: Ops, *, mtp: bool, group: Group = ALONE, placement: ExpertPlacement | None = None
    ) -> ExpertParallel:
        """Return the experts of a rank that has all of them. With a `group` and its `placement`, return what `connect`
        would, without meeting the other ranks: enough to plan a model, not to run it."""
        layers = _moe_layers(config, mtp)
        if placement is None and layers:
            placement = ExpertPlacement.trivial(len(layers), config.n_routed_experts, 1)
        dispatcher = LocalDispatcher(config.n_routed_experts, ops)
        return cls(group=group, layers=layers, placement=placement, dispatcher=dispatcher)

    @classmethod
    def connect(
        cls,
        config: ModelConfig,
        ops: Ops,
        group: Group,
        *,
        device: torch.device,
        dtype: torch.dtype,
        mtp: bool,
        options: ExpertConfig,
        placement: ExpertPlacement | None,
    ) -> ExpertParallel:
        """Connect this rank to the experts on the others. A collective: all ranks pass the same arguments.

        `placement` comes from `checked_placement`. Raises ConfigError where ranks differ, and what `choose_dispatcher`
        raises."""
        if placement is None:
            return cls.apart(config, ops, mtp=mtp)
        _check_same(group, placement, options, device)
        replicas = recorder = None
        if options.expert_distribution_recorder_mode != "off":
            recorder = ExpertLoadRecorder(
                placement.num_layers,
                placement.num_logical_experts,
                device=device,
                mode=options.expert_distribution_recorder_mode,
                window=options.expert_distribution_recorder_buffer_size,
            )
        if group.size > 1:
            replicas = ReplicaTables.build(
                placement,
                DispatchRule(options.ep_dispatch_algorithm),
                rank=group.rank,
                ranks_per_node=options.ranks_per_node,
                device=device,
            )
        sizes = expert_sizes(config, group, placement, dtype)
        return cls(
            group=group,
            layers=_moe_layers(config, mtp),
            placement=placement,
            replicas=replicas,
            dispatcher=choose_dispatcher(group, sizes, options, ops, device),
            recorder=recorder,
            two_batch_overlap=options.two_batch_overlap,
            buffer_bytes=buffer_bytes(sizes, options),
            int8_rows=options.moe_a2a_backend == "all_to_all_int8",
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """What is odd about the placement in use, in sentences."""
        if self.placement is None or self.replicas is None or not (count := int(self.placement.twins.sum())):
            return ()
        remark = (
            f"{count} of {self.placement.twins.size} expert slots hold an expert that is in another slot of their rank "
            "too, which takes memory and evens out nothing; moe.solve_placement makes none of these"
        )
        return (remark,)

    def experts_of(self, layer: int) -> list[int]:
        """Return the logical experts in the slots of this rank."""
        assert self.placement is not None
        if self.group.size == 1:
            return list(range(self.placement.num_logical_experts))
        row = self.placement.physical_to_logical_map[self.layers.index(layer)]
        experts: list[int] = row[list(self.placement.slots_of(self.group.rank))].tolist()
        return experts

    def record_of(self, layer: int) -> Callable[[Tensor], None] | None:
        """Return the function that counts the choices of a layer's router, or None when nothing is recorded."""
        return None if self.recorder is None else partial(self.recorder.record, self.layers.index(layer))

    def check_step(self, num_tokens: int, reason: str, *, tp_size: int, num_queries: int = 1) -> None:
        """Check that a step of `num_tokens`, divided by `tp_size` ranks, can be dispatched. Two batches have whole
        sequences, of `num_queries` tokens each.

        Raises ConfigError where a rank has too many of them; `reason` names the options that make the step so large."""
        if self.dispatcher.max_tokens is not None:
            overlap = num_queries if self.two_batch_overlap else None
            check_step_fits(self.dispatcher.max_tokens, overlap, num_tokens, reason, tp_size=tp_size)

    def replicas_of(self, layer: int) -> LayerReplicas | None:
        """Return where this rank sends the tokens of a layer, or None where slots are mere names."""
        return None if self.replicas is None else self.replicas.of_layer(self.layers.index(layer))


def check_step_fits(max_tokens: int, overlap: int | None, num_tokens: int, reason: str, *, tp_size: int) -> None:
    """Check a step as `ExpertParallel.check_step` does, for a dispatcher of `max_tokens`. `overlap` is the number of
    tokens that stay together when the step is halved, None where it is not."""
    in_batch = num_tokens if overlap is None else -(-num_tokens // (2 * overlap)) * overlap
    on_rank = -(-in_batch // tp_size)
    if on_rank > max_tokens:
        raise ConfigError(
            f"num_max_dispatch_tokens_per_rank is {max_tokens}, and a step may have {on_rank} tokens on a rank"
            f"{'' if overlap is None else ' in each of two batches'}: {reason}; raise the one or lower the other"
        )


def expert_sizes(config: ModelConfig, group: Group, placement: ExpertPlacement, dtype: torch.dtype) -> ExpertSizes:
    """Return what a dispatcher between the ranks of `group` has to carry."""
    return ExpertSizes(
        num_ranks=group.size,
        num_experts=placement.num_slots if group.size > 1 else placement.num_logical_experts,
        hidden_size=config.hidden_size,
        top_k=config.num_experts_per_tok,
        dtype=dtype,
    )


def _moe_layers(config: ModelConfig, mtp: bool) -> list[int]:
    return [layer for layer in range(config.num_hidden_layers + mtp) if config.is_moe_layer(layer)]


def checked_placement(
    config: ModelConfig, num_ranks: int, placement: ExpertPlacement | None, options: ExpertConfig, *, mtp: bool
) -> ExpertPlacement | None:
    """Return the placement to begin with, or None for a model without experts.

    It is `placement` where one is given, else the one with expert `p % E` in slot p. Raises ConfigError, with the
    values, for a placement that does not fit the model or `num_ranks`."""
    num_layers = len(_moe_layers(config, mtp))
    num_experts, redundant = config.n_routed_experts, options.num_redundant_experts
    if num_layers == 0:
        if placement is not None:
            raise ConfigError("a placement was given and the model has no experts; leave it out")
        return None
    if placement is None:
        if (num_experts + redundant) % num_ranks:
            raise ConfigError(
                f"ep_size {num_ranks} does not divide n_routed_experts + num_redundant_experts = {num_experts} + "
                f"{redundant} = {num_experts + redundant}; num_redundant_experts = "
                f"{redundant + -(num_experts + redundant) % num_ranks} is the next that fits"
            )
        return ExpertPlacement.trivial(num_layers, num_experts, num_ranks, redundant)
    wanted = PlacementSizes(num_layers, num_experts, placement.num_slots, num_ranks)
    check_sizes(
        "the placement", placement, "the model (with its MTP layer, if that is loaded) has on these ranks", wanted
    )
    if redundant not in (0, placement.num_slots - num_experts):
        raise ConfigError(
            f"num_redundant_experts is {redundant} and the placement has {placement.num_slots - num_experts}; leave it "
            "out: the placement says it"
        )
    return placement


def _check_same(group: Group, placement: ExpertPlacement, options: ExpertConfig, device: torch.device) -> None:
    """Raise ConfigError where ranks differ in placement or options: they would compute wrong tokens."""
    said = f"{options}".encode() + placement.physical_to_logical_map.tobytes()
    if placement.slot_shares is not None:
        said += placement.slot_shares.tobytes()
    ours = torch.frombuffer(bytearray(hashlib.sha256(said).digest()), dtype=torch.uint8).to(device)[None]
    others = (group.all_gather(ours) != ours).any(-1).nonzero().flatten().tolist()
    if others:
        names = ", ".join(str(group.ranks[other]) for other in others)
        raise ConfigError(
            f"rank {group.ranks[group.rank]} has another expert placement, or other options for experts, than ranks "
            f"{names}: give all ranks the same"
        )
