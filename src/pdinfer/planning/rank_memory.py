"""What a rank's device holds: weights, counted without a checkpoint and without memory for them, and what there is
beside these, pages and DeepEP's buffer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property

import attrs
import torch

from pdinfer.checkpoint.quantize import quantized_names
from pdinfer.config import ExpertConfig, ModelConfig
from pdinfer.errors import ConfigError
from pdinfer.execution.graphs import KINDS
from pdinfer.kernels.formats.floats import Plain
from pdinfer.kernels.formats.format import Format, Weight
from pdinfer.kernels.formats.four_bits import MXFP4, Int4
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic
from pdinfer.kernels.formats.weights import as_format, num_bytes
from pdinfer.kernels.resolve import resolve_ops
from pdinfer.kernels.spec import DeviceSpec
from pdinfer.kv.view import DTYPES
from pdinfer.model.destinations import Destinations, kept_formats
from pdinfer.model.model import Model, op_spec_of
from pdinfer.moe.dispatchers.choose import check_dispatcher
from pdinfer.moe.dispatchers.deep_ep_limits import ExpertSizes
from pdinfer.moe.parallel import ExpertParallel, expert_sizes
from pdinfer.moe.placement.placement import ExpertPlacement
from pdinfer.parallel.topology import Topology
from pdinfer.values import Value

STORED = {kind.name: kind for kind in (Plain, FP8Blocks, Int8Dynamic, Int4, MXFP4)}
"""How published checkpoints are stored, under the names of `quantize_checkpoint`; "float" is not quantized."""


@attrs.frozen(kw_only=True)
class PublishedWeights(Value):
    """A checkpoint of `config` in which the same weights are quantized as in published ones; `stored` is in STORED."""

    config: ModelConfig
    stored: str

    @property
    def ue8m0(self) -> bool:
        return self.config.scale_fmt == "ue8m0"

    @cached_property
    def _is_quantized(self) -> Callable[[str], bool]:
        return quantized_names(self.stored, self.config)

    def stored_as(self, name: str) -> type[Format]:
        is_float = self.stored == "float" or not self._is_quantized(name)
        return Plain if is_float else STORED[self.stored]

    def holds(self, name: str) -> bool:
        """Return False: only what every checkpoint must have is counted."""
        return False


@attrs.frozen(kw_only=True)
class RankWeights(Value):
    """The bytes of a rank's weights: of those that are kept as they are stored, scales included, and of floats."""

    quantized: int
    floats: int

    @property
    def total(self) -> int:
        return self.quantized + self.floats


@attrs.define
class Counted(Destinations):
    """Destinations that only count bytes, which is quick."""

    quantized: int = 0
    floats: int = 0

    def _remember(self, weight: Weight, *_: object) -> None:
        if as_format(weight).holds_floats:
            self.floats += num_bytes(weight)
        else:
            self.quantized += num_bytes(weight)


def rank_weights(
    config: ModelConfig,
    topology: Topology,
    *,
    stored: str,
    weights: str,
    device: DeviceSpec,
    mtp: bool,
    experts: ExpertConfig,
    placement: ExpertPlacement | None,
) -> RankWeights:
    """Return how many bytes `load_model` with these arguments would allocate for a published checkpoint.

    It builds the same model on the meta device. The MTP layer shares the model's embedding and head. Raises what
    `load_model` would raise for such sizes.
    """
    if stored not in STORED:
        raise ConfigError(f"stored must be one of {', '.join(STORED)}, got {stored!r}")
    dtype, groups = DTYPES[config.dtype], topology.apart()
    formats = [stored] if stored != "float" else []
    resolved = resolve_ops(op_spec_of(config, topology, device, dtype, formats))
    kept = kept_formats(weights, resolved)
    plan = Counted(torch.device("meta"), dtype, PublishedWeights(config=config, stored=stored), kept)
    if placement is not None:
        check_dispatcher(expert_sizes(config, groups.ep, placement, dtype), experts, torch.device(device.type))
    parallel = ExpertParallel.apart(config, resolved.ops, mtp=mtp, group=groups.ep, placement=placement)
    Model.build(
        config,
        plan,
        resolved,
        device=plan.device,
        dtype=dtype,
        topology=topology,
        groups=groups,
        experts=parallel,
        mtp=mtp,
    )
    return RankWeights(quantized=plan.quantized, floats=plan.floats)


DRIVER_BYTES = 1 << 30
"""An estimate for a process on a GPU: its CUDA context, loaded kernels, libraries' workspaces and NCCL's channels. It
lies within `mem_fraction_static`, as a pool finds it in use. A study of DeepSeek-V3 saw 65 and 70 of 79 GB in use on P2
and D2; 0.81 of a card, DeepEP's buffer and the rows at experts are 64.9 and 70.3 GiB."""


def room_bytes(config: ModelConfig, sizes: ExpertSizes, options: ExpertConfig, *, is_fp8: bool) -> int:
    """Return what rows take at the experts of a layer where their number is not known before: in DeepEP's low-latency
    mode, and in captured steps of its second API.

    An expert has room for the rows of all tokens of all ranks, or a token for the experts of a rank. Rows lie there as
    they came (in FP8 with a scale for 128 numbers if experts hold FP8), multiplied by gate and up, rounded again, and
    multiplied by down. Layers take turns, so this is there once, and once more with two batches.
    """
    tokens = sizes.num_ranks * options.num_max_dispatch_tokens_per_rank
    low_latency = options.deepep_mode == "low_latency"
    rows = tokens * (sizes.experts_per_rank if low_latency else min(sizes.top_k, sizes.experts_per_rank))
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    read = hidden + inner
    row = (read + 4 * read // 128 if is_fp8 else 2 * read) + 2 * (2 * inner + hidden)
    return rows * row * (1 + options.two_batch_overlap)


def graph_bytes(config: ModelConfig, sizes: Collection[int], num_queries: int) -> int:
    """Return what captured decode steps of `sizes` sequences keep, of `num_queries` tokens each.

    A step of each size and kind of draw has logits of its own, in float32 for the whole vocabulary. All of them work in
    the memory of the largest, where most is what the head gives before it becomes float32. It is an estimate: what
    layers take in turn, and what the driver keeps of each launch, is not counted.
    """
    if not sizes:
        return 0
    kept = len(KINDS) * sum({*sizes}) * 4
    return num_queries * config.vocab_size * (kept + max(sizes) * DTYPES[config.dtype].itemsize)
