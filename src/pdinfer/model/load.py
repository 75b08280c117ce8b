"""A checkpoint folder becomes a Model, tensor by tensor: every name and shape is checked before anything is allocated,
and at no time is there more than the model and one tensor."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import attrs
import torch
from torch import Tensor

from pdinfer.checkpoint.reader import Checkpoint, TensorInfo
from pdinfer.checkpoint.schemes import Scheme, StoredWeights
from pdinfer.checks import check_fits, clip
from pdinfer.config import ExpertConfig, ModelConfig
from pdinfer.errors import BackendUnavailable, CheckpointError, ConfigError
from pdinfer.files import AnyPath
from pdinfer.kernels.ops import Ops
from pdinfer.kernels.resolve import ResolvedOps, resolve_ops
from pdinfer.kernels.weight_formats import (
    BLOCK,
    FloatWithBias,
    Int8Static,
    Stored,
    Weight,
    assign,
    columns_of,
    dequantize,
    tensors_of,
)
from pdinfer.kv.view import DTYPES
from pdinfer.layers import WeightSource
from pdinfer.model.destinations import OPS_OF_SCHEME, Destinations, Place, kept_schemes, slow_op
from pdinfer.model.model import Model, check_divides
from pdinfer.model.mtp import copy_names
from pdinfer.model.unread import check_tied, refuse_unread
from pdinfer.moe.parallel import ExpertParallel, checked_placement
from pdinfer.moe.placement.placement import ExpertPlacement
from pdinfer.parallel.groups import Groups, InTouch
from pdinfer.parallel.topology import Topology
from pdinfer.process.forked import begin_to_compute
from pdinfer.process.memory import device_memory_bytes

_log = logging.getLogger("pdinfer")

Device = str | torch.device
DType = torch.dtype | str

MAX_NAMED = 10
LAYER_TENSORS = 7
"""Attention's at least: a query, two and a norm for the latent, an output; and the layer's two norms."""
MLP_TENSORS = 3
MANY = 2000
"""Tensors that may be missing and are still found out by name."""


def load_model(
    checkpoint: AnyPath,
    *,
    device: Device = "cpu",
    dtype: DType | None = None,
    weights: str = "auto",
    topology: Topology | None = None,
    progress: Callable[[int, int], None] | None = None,
    providers: str | Mapping[str, str] | None = None,
    check_finite: bool = True,
    mtp: bool = False,
    experts: ExpertConfig | None = None,
    placement: ExpertPlacement | None = None,
    trusted_roots: Sequence[AnyPath] = (),
) -> Model:
    """The model in the folder `checkpoint` (config.json and safetensors in Hugging Face layout) on `device`.

    `dtype`, a torch dtype or its name ("float32"), defaults to the stored one. `weights`: "float" makes floats of
    quantized weights while they are read, "stored" keeps them as they are (kv_b_proj alone becomes floats: attention
    takes it apart by heads) and quantizes activations as their format says, "auto" keeps those whose ops run at speed
    on `device`. `explain_backends(model)` tells what became of them. `progress(done_bytes, total_bytes)` is called
    after every tensor. `providers` forces the op provider, for all ops or per op (see `explain_backends`).
    `check_finite` refuses NaN and infinity. `mtp` also loads the layer that drafts tokens
    (`EngineConfig.num_draft_tokens`). With a `topology` of several ranks each calls this; `experts` says how theirs are
    reached, `placement` which are where. A tensor that the model does not read and that `unread` does not name is
    refused. Links in the folder may end in it, in the blobs of the hub cache that it is a snapshot of, and in
    `trusted_roots`.

    The bytes of this rank are logged before they are allocated. Raises ConfigError, CheckpointError or
    BackendUnavailable, all before large allocations except for bad values.
    """
    begin_to_compute(torch.get_num_threads())
    topology, experts = topology or Topology.single(), experts or ExpertConfig()
    config = ModelConfig.from_checkpoint(checkpoint, trusted_roots=trusted_roots)
    check_divides(config, topology)
    target = _checked_device(device)
    dtype = _checked_dtype(config.dtype if dtype is None else dtype)
    resolved = resolve_ops(target, dtype, forced=providers)
    kept = kept_schemes(weights, resolved)
    with Checkpoint.open(checkpoint, prefixes=config.family.tensor_prefixes, trusted_roots=trusted_roots) as files:
        _check_count(files, config, topology)
        placement = checked_placement(config, topology.ep_size, placement, experts, mtp=mtp)
        asked = _Asked(
            config=config, topology=topology, device=target, dtype=dtype, mtp=mtp, experts=experts, placement=placement
        )
        stored = StoredWeights.survey(files, ue8m0=config.scale_fmt == "ue8m0", check_finite=check_finite)
        build = asked.builder(files, resolved.ops)
        plan = Destinations(torch.device("meta"), dtype, stored, kept)
        build(plan, resolved)
        wanted = _matched(stored, plan.places, config)
        refuse_unread(stored, plan.places, config, mtp=mtp)
        _check_room(plan.num_bytes, topology, target, f"the weights of {os.fspath(checkpoint)} in {dtype}")
        resolved = attrs.evolve(resolved, weights=tuple(_told(plan, resolved, weights)))
        destinations = Destinations(target, dtype, stored, kept)
        model = build(destinations, resolved)
        ranks = InTouch(model.groups.world, target)
        _read_all(stored, wanted, destinations.places, progress, ranks)
        check_tied(stored, config, model)
        ranks.done()
    return model


@attrs.frozen(kw_only=True)
class _Asked:
    """What the caller of `load_model` asked for, checked."""

    config: ModelConfig
    topology: Topology
    device: torch.device
    dtype: torch.dtype
    mtp: bool
    experts: ExpertConfig
    placement: ExpertPlacement | None

    def builder(self, files: Checkpoint, ops: Ops) -> Callable[[WeightSource, ResolvedOps], Model]:
        """Makes this rank's model of weights from a source, once all ranks have met."""
        weights_id = files.sample_digest()
        groups = _met(self.topology, self.device, weights_id)
        return partial(
            Model.build,
            self.config,
            device=self.device,
            dtype=self.dtype,
            topology=self.topology,
            groups=groups,
            experts=ExpertParallel.connect(
                self.config,
                ops,
                groups.ep,
                device=self.device,
                dtype=self.dtype,
                mtp=self.mtp,
                options=self.experts,
                placement=self.placement,
            ),
            weights_id=weights_id,
            mtp=self.mtp,
            mtp_copies=_own_copies(files, self.config) if self.mtp else (),
        )


def _check_count(files: Checkpoint, config: ModelConfig, topology: Topology) -> None:
    """Refuses a config.json that promises far more tensors than the files hold, before a name is made of any. Where few
    are missing, their names are told later."""
    num_dense = config.first_k_dense_replace
    num_experts = (config.num_hidden_layers - num_dense) * config.n_routed_experts // topology.ep_size
    least = config.num_hidden_layers * LAYER_TENSORS + (num_dense + num_experts) * MLP_TENSORS
    if least > len(files.tensors) + MANY:
        raise CheckpointError(
            f"{files.folder}: config.json has {config.num_hidden_layers} layers and {config.n_routed_experts} routed "
            f"experts, whose weights are at least {least} tensors, and the files hold {len(files.tensors)}: tensors "
            "that the config asks for are missing"
        )


def _met(topology: Topology, device: torch.device, weights_id: bytes) -> Groups:
    """The groups of this rank, once all ranks have opened the same checkpoint."""
    groups = topology.connect(device)
    ours = torch.frombuffer(bytearray(weights_id), dtype=torch.uint8).to(device)[None]
    theirs = groups.world.all_gather(ours)
    others = (theirs != ours).any(-1).nonzero().flatten().tolist()
    if others:
        raise CheckpointError(
            f"rank {topology.rank} reads other weights than ranks {', '.join(map(str, others))}: give all ranks copies "
            "of one checkpoint"
        )
    return groups


def _check_room(num_bytes: int, topology: Topology, device: torch.device, what: str) -> None:
    """Says what this rank is about to allocate, and refuses what its device cannot have."""
    available = device_memory_bytes(device)
    _log.info(
        "rank %d of %d loads %.2f GiB of weights onto %s, which has %.2f GiB",
        topology.rank,
        topology.world_size,
        num_bytes / 2**30,
        device,
        available / 2**30,
    )
    check_fits(num_bytes, available, what)


def _told(plan: Destinations, resolved: ResolvedOps, weights: str) -> Iterator[str]:
    """What becomes of quantized weights, a sentence for each scheme and outcome."""
    counts = Counter(
        (plan.scheme(name), isinstance(held[0].weight, Tensor | FloatWithBias)) for name, held in plan.places.items()
    )
    for scheme in OPS_OF_SCHEME:
        if counts[scheme, False]:
            yield f"{counts[scheme, False]} {scheme.value} weights are held as they are stored"
        if counts[scheme, True]:
            slow = slow_op(scheme, resolved)
            told = f": {slow.op} of {slow.provider} {slow.slow}" if weights == "auto" and slow else ""
            dtype = str(plan.dtype).removeprefix("torch.")
            yield f'{counts[scheme, True]} {scheme.value} weights became {dtype} (weights="{weights}"){told}'


def _own_copies(files: Checkpoint, config: ModelConfig) -> list[str]:
    """Of the embedding and head that the files hold for the MTP layer, those that are not the main model's again."""
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


def _checked_device(device: Device) -> torch.device:
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BackendUnavailable(f"device {device!r} is not a torch device name such as 'cpu' or 'cuda:0'") from error
    if target.type not in ("cpu", "cuda"):
        raise BackendUnavailable(f"device {device} cannot hold a model here; use 'cpu' or 'cuda'")
    if target.type == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(f"device {device} was asked for and torch sees no CUDA device; use device='cpu'")
    return target


def _matched(stored: StoredWeights, expected: Mapping[str, Sequence[Place]], config: ModelConfig) -> list[TensorInfo]:
    """The tensors to load, in file order; raises with the first names that are missing or cannot be read."""
    files = stored.files
    missing = [name for name in expected if name not in files.tensors]
    if missing:
        raise CheckpointError(
            f"{files.folder}: {len(missing)} tensors that the config asks for are missing: {_listing(missing)}"
            + _without_mtp(missing, config)
        )
    wrong = [complaint for name, held in expected.items() for complaint in stored.complaints(name, held[0].shape)]
    if wrong:
        raise CheckpointError(f"{files.folder}: {len(wrong)} tensors do not fit the config: {_listing(wrong)}")
    return list(files.in_file_order(expected))


def _without_mtp(missing: list[str], config: ModelConfig) -> str:
    layer = f"model.layers.{config.num_hidden_layers}."
    if not all(name.startswith(layer) for name in missing):
        return ""
    return "; these are of the MTP layer that the config promises: add them, or load with mtp=False"


def _read_all(
    stored: StoredWeights,
    wanted: Sequence[TensorInfo],
    where: Mapping[str, Sequence[Place]],
    progress: Callable[[int, int], None] | None,
    ranks: InTouch,
) -> None:
    sizes = [sum(part.num_bytes for part in stored.infos(info.name)) for info in wanted]
    done, total = 0, sum(sizes)
    for info, size in zip(wanted, sizes, strict=True):
        value = _part(stored, info.name, where[info.name][0])
        for place in where[info.name]:
            _put(value, place.weight, info, stored.check_finite)
        done += size
        if progress is not None:
            progress(done, total)
        ranks.going_on()


def _part(stored: StoredWeights, name: str, place: Place) -> Stored:
    """What goes there. Where a part ends inside an FP8 block, the whole becomes floats and is cut then."""
    shard = place.shard
    whole_blocks = place.shape[shard.axis] % (shard.size * BLOCK) == 0
    if shard.size == 1 or whole_blocks or stored.scheme(name) is not Scheme.FP8_BLOCKS:
        return stored.read(name, shard)
    whole = torch.empty(place.shape)
    dequantize(stored.read(name), whole)
    rows = shard.of(place.shape[0])
    return columns_of(whole, shard) if shard.axis else whole[rows.start : rows.stop]


def _put(value: Weight, place: Weight, info: TensorInfo, check_finite: bool) -> None:
    if isinstance(value, Int8Static) and isinstance(place, Tensor) and bool(value.bias.any()):
        raise CheckpointError(f"{info.file}: quant_bias of {info.name} holds a bias, which is not supported there")
    assign(place, value)
    numbers = tensors_of(place)[0]
    if check_finite and numbers.dtype in (torch.float16, torch.bfloat16) and not bool(torch.isfinite(numbers).all()):
        raise CheckpointError(
            f"{info.file}: tensor {info.name} overflows {numbers.dtype}; load it as bfloat16 or float32"
        )


def _listing(items: list[str]) -> str:
    rest = len(items) - MAX_NAMED
    return "; ".join(items[:MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
