"""A checkpoint folder becomes a Model, tensor by tensor. Every name and shape is checked before anything is allocated,
and memory never holds more than the model and one tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import compress

import torch

from pdinfer.checkpoint.reader import Checkpoint
from pdinfer.checkpoint.schemes import QUANTIZED, StoredWeights
from pdinfer.checks import clip, typed
from pdinfer.config import CacheConfig, ExpertConfig, ModelConfig
from pdinfer.errors import BackendUnavailable, CheckpointError, ConfigError
from pdinfer.files import AnyPath
from pdinfer.kernels.formats import IN_STRIPS
from pdinfer.kernels.formats.format import Format
from pdinfer.kernels.ops import Ops
from pdinfer.kernels.resolve import ResolvedOps, resolve_ops
from pdinfer.kernels.torch.products import sum_in_float32
from pdinfer.kv.view import DTYPES
from pdinfer.model.destinations import kept_formats, lie_in_strips
from pdinfer.model.load_plan import Build, LoadPlan, Target
from pdinfer.model.model import Model, check_divides, op_spec_of
from pdinfer.model.mtp import copy_names
from pdinfer.moe.parallel import ExpertParallel, checked_placement
from pdinfer.moe.placement.placement import ExpertPlacement
from pdinfer.parallel.groups import Groups
from pdinfer.parallel.topology import Topology
from pdinfer.process.forked import begin_to_compute
from pdinfer.process.modes import own_modes
from pdinfer.process.streams import make_current, present
from pdinfer.process.untraced import untraced
from pdinfer.progress import Progress, telling

Device = str | torch.device
DType = torch.dtype | str
Formats = frozenset[type[Format]]

LAYER_TENSORS = 7
"""The least that a layer has: of attention a query, two projections and a norm for the latent, and an output; and the
two norms of the layer."""
MLP_TENSORS = 3
MANY = 2000
"""With up to this many tensors missing, their names are still found and listed."""


@untraced
@typed
@own_modes()
def load_model(
    checkpoint: AnyPath,
    *,
    device: Device = "cpu",
    dtype: DType | None = None,
    weights: str = "auto",
    topology: Topology | None = None,
    progress: Progress = None,
    providers: str | Mapping[str, str] | None = None,
    check_finite: bool = True,
    mtp: bool = False,
    experts: ExpertConfig | None = None,
    placement: ExpertPlacement | None = None,
    trusted_roots: Sequence[AnyPath] = (),
    cache: CacheConfig | None = None,
) -> Model:
    """Load the model in the folder `checkpoint` (config.json and safetensors in Hugging Face layout) onto `device`.

    `dtype` is a torch dtype or its name ("float32"), and defaults to the stored one. `weights` says what becomes of
    quantized weights. "float" turns them into floats while they are read. "stored" keeps them as they are, and
    quantizes activations as their format says; only kv_b_proj becomes floats, because attention takes it apart by
    heads. "auto" keeps those whose ops run at speed on `device`. `explain_backends(model)` says the outcome.
    `progress(done_bytes, total_bytes)` is called after every tensor; True draws a line on stderr. `providers` forces
    the op provider, for all ops or per op (see `explain_backends`). `check_finite` refuses NaN and infinity. `mtp` also
    loads the layer that drafts tokens (`EngineConfig.num_draft_tokens`). With a `topology` of several ranks each of
    them calls this; `experts` says how their experts are reached, and `placement` which rank holds which. With the
    `cache` of its pools, ops can be taken that are made for one page size or format; others are then refused. A tensor
    that the model does not read is refused, unless `load_plan` expects it. Links in the folder may end inside it, among
    the blobs of the hub cache whose snapshot it is, and in `trusted_roots`.

    `device` is "cpu", "cuda", or what a vendor's package has brought to torch ("npu" by torch_npu). One that is no CPU
    becomes the current one of the calling thread, and without a number it is the one that is. On CUDA products are
    summed in float32 alone, in the whole process (docs/decisions/0025-products-on-a-card.md).

    The bytes of this rank are logged before they are allocated. Raises ConfigError, CheckpointError or
    BackendUnavailable, all before large allocations except for bad values."""
    begin_to_compute(torch.get_num_threads())
    topology, experts = topology or Topology(), experts or ExpertConfig()
    config = ModelConfig.from_checkpoint(checkpoint, trusted_roots=trusted_roots)
    check_divides(config, topology)
    device, dtype = _checked_device(device), _checked_dtype(config.dtype if dtype is None else dtype)
    target = Target(config=config, topology=topology, device=device, dtype=dtype, mtp=mtp)
    with Checkpoint.open(checkpoint, prefixes=config.family.tensor_prefixes, trusted_roots=trusted_roots) as files:
        _check_count(files, config, topology)
        placement = checked_placement(config, topology.ep_size, placement, experts, mtp=mtp)
        stored = StoredWeights.survey(files, config, check_finite=check_finite)
        formats = [kind.name for kind in stored.quantized_formats]
        spec = op_spec_of(config, topology, target.device, target.dtype, formats, cache)
        resolved = resolve_ops(spec, forced=providers)
        sum_in_float32(target.device)
        groups, sampled_id, kept, strips = _meet(files, target, weights, resolved)
        build = _builder(files, target, groups, resolved.ops, experts, placement)
        plan = LoadPlan(
            target=target, build=build, stored=stored, weights=weights, kept=kept, strips=strips, resolved=resolved
        )
        plan.check()
        model, destinations = plan.allocate()
        with telling(progress, "loading", "bytes") as tell:
            return plan.read(model, destinations, tell, sampled_id)


def _builder(
    files: Checkpoint,
    target: Target,
    groups: Groups,
    ops: Ops,
    experts: ExpertConfig,
    placement: ExpertPlacement | None,
) -> Build:
    """Return a function that builds this rank's model from a source of weights."""
    config, device, dtype, mtp = target.config, target.device, target.dtype, target.mtp
    parallel = ExpertParallel.connect(
        config, ops, groups.ep, device=device, dtype=dtype, mtp=mtp, options=experts, placement=placement
    )
    return partial(
        Model.build,
        config,
        device=device,
        dtype=dtype,
        topology=target.topology,
        groups=groups,
        experts=parallel,
        mtp=mtp,
        mtp_copies=_own_copies(files, config) if mtp else (),
    )


def _check_count(files: Checkpoint, config: ModelConfig, topology: Topology) -> None:
    """Refuse a config.json that promises far more tensors than the files hold, before any name is made. Where only a
    few are missing, `LoadPlan.check` lists their names."""
    num_dense = config.first_k_dense_replace
    num_experts = (config.num_hidden_layers - num_dense) * config.n_routed_experts // topology.ep_size
    least = config.num_hidden_layers * LAYER_TENSORS + (num_dense + num_experts) * MLP_TENSORS
    if least > len(files.tensors) + MANY:
        raise CheckpointError(
            f"{files.folder}: config.json has {config.num_hidden_layers} layers and {config.n_routed_experts} routed "
            f"experts, whose weights are at least {least} tensors, and the files hold {len(files.tensors)}: tensors "
            "that the config asks for are missing"
        )


def _meet(
    files: Checkpoint, target: Target, weights: str, resolved: ResolvedOps
) -> tuple[Groups, bytes, Formats, Formats]:
    """Meet the other ranks. Return their groups, a digest of what the checkpoint seems to be, the formats that all of
    them keep, and those that all have in strips. Ranks give each other experts as they lie, so all hold them alike.
    Raises CheckpointError when they have opened other checkpoints."""
    make_current(target.device)
    kept, strips = kept_formats(weights, resolved), lie_in_strips(resolved)
    groups, sampled_id = target.topology.connect(target.device), files.sample_digest()
    holds = bytes([kind in kept for kind in QUANTIZED] + [kind in strips for kind in IN_STRIPS])
    ours = torch.frombuffer(bytearray(sampled_id + holds), dtype=torch.uint8).to(target.device)[None]
    theirs = groups.world.all_gather(ours)
    others = (theirs != ours)[:, : len(sampled_id)].any(-1).nonzero().flatten().tolist()
    if others:
        raise CheckpointError(
            f"rank {target.topology.rank} reads other weights than ranks {', '.join(map(str, others))}: give all ranks "
            "copies of one checkpoint"
        )
    by_all = theirs[:, len(sampled_id) :].bool().all(0).tolist()
    kept, strips = frozenset(compress(QUANTIZED, by_all)), frozenset(compress(IN_STRIPS, by_all[len(QUANTIZED) :]))
    return groups, sampled_id, kept, strips


def _own_copies(files: Checkpoint, config: ModelConfig) -> list[str]:
    """Return the names of the MTP layer's embedding and head that the files hold and that differ from the main
    model's."""
    if not config.num_nextn_predict_layers:
        raise ConfigError(f"mtp=True was asked for and {files.folder} has no MTP layer; leave it out")
    embed = "model.embed_tokens.weight"
    mains = (embed, embed if config.tie_word_embeddings else "lm_head.weight")
    both = [
        (files.tensors[copy], files.tensors[main])
        for copy, main in zip(copy_names(config), mains, strict=True)
        if copy in files.tensors and main in files.tensors
    ]
    return [copy.name for copy, main in both if not torch.equal(files.read(copy), files.read(main))]


def _checked_dtype(dtype: DType) -> torch.dtype:
    known = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if known is None or known not in DTYPES.values():
        raise ConfigError(
            f"dtype {clip(dtype) if isinstance(dtype, str) else dtype} cannot be used; choose one of "
            f"{', '.join(map(str, DTYPES.values()))}, or its name without torch as a string"
        )
    return known


def named_device(device: Device) -> torch.device:
    """Return the device of a name. Raise BackendUnavailable when torch knows none."""
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BackendUnavailable(
            f"device {device!r} is not a torch device name such as 'cpu' or 'cuda:0'; a vendor's package, such as "
            "torch_npu for 'npu', brings its own name when it is imported"
        ) from error


def _checked_device(device: Device) -> torch.device:
    target = named_device(device)
    return target if target.type == "cpu" else present(target)
