"""A checkpoint folder becomes a Model, tensor by tensor: every name and shape is checked before anything is allocated,
and at no time is there more than the model and one tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial

import attrs
import torch
from torch import Tensor

from pdinfer.checkpoint import Checkpoint, TensorInfo
from pdinfer.checks import check_fits
from pdinfer.config import ModelConfig
from pdinfer.errors import BackendUnavailable, CheckpointError, ConfigError
from pdinfer.kernels.resolve import resolve_ops
from pdinfer.kv.view import DTYPES
from pdinfer.model import Model, device_memory_bytes
from pdinfer.mtp import copy_names
from pdinfer.topology import Topology

Device = str | torch.device
DType = torch.dtype

MAX_NAMED = 10


@attrs.define
class Destinations:
    """A WeightSource that allocates on `device` and remembers which name belongs where."""

    device: torch.device
    dtype: torch.dtype
    tensors: dict[str, Tensor] = attrs.field(factory=dict)

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.tensors[name] = tensor
        return tensor

    def into(self, name: str, destination: Tensor) -> None:
        self.tensors[name] = destination

    def new(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def load_model(
    checkpoint: str | os.PathLike[str],
    *,
    device: Device = "cpu",
    dtype: DType | None = None,
    weights: str = "auto",
    topology: Topology | None = None,
    progress: Callable[[int, int], None] | None = None,
    providers: str | Mapping[str, str] | None = None,
    check_finite: bool = True,
    mtp: bool = False,
) -> Model:
    """The model in the folder `checkpoint` (config.json and safetensors in Hugging Face layout) on `device`.

    `dtype` defaults to the stored one. `weights`: "auto", "stored" or "float"; for the float checkpoints that are
    supported all three mean the same. `progress(done_bytes, total_bytes)` is called after every tensor. `providers`
    forces the op provider, for all ops or per op (see `explain_backends`). `check_finite` refuses NaN and infinity.
    `mtp` also loads the layer that drafts tokens (`EngineConfig.num_draft_tokens`).

    Raises ConfigError, CheckpointError or BackendUnavailable, all before large allocations except for bad values.
    """
    if weights not in ("auto", "stored", "float"):
        raise ConfigError(f'weights must be "auto", "stored" or "float", got {weights!r}')
    topology = topology or Topology.single()
    if topology.world_size != 1:
        raise ConfigError(f"this version runs one rank per engine; the topology has {topology.world_size}")
    config = ModelConfig.from_checkpoint(checkpoint)
    target = _checked_device(device)
    dtype = _checked_dtype(dtype or DTYPES[config.dtype])
    resolved = resolve_ops(target, forced=providers)

    with Checkpoint.open(checkpoint) as files:
        copies = _own_copies(files, config) if mtp else ()
        build = partial(Model.build, config, resolved=resolved, topology=topology, mtp=mtp, mtp_copies=copies)
        plan = Destinations(torch.device("meta"), dtype)
        build(plan, device=target, dtype=dtype)
        wanted = _matched(files, plan.tensors, config)
        needed = sum(tensor.numel() * tensor.element_size() for tensor in plan.tensors.values())
        check_fits(needed, device_memory_bytes(target), f"the weights of {os.fspath(checkpoint)} in {dtype}")
        destinations = Destinations(target, dtype)
        model = build(destinations, device=target, dtype=dtype, weights_id=files.sample_digest())
        done, total = 0, sum(info.num_bytes for info in wanted)
        for info in wanted:
            stored = files.read(info)
            if check_finite and not bool(torch.isfinite(stored).all()):
                bad = int((~torch.isfinite(stored)).sum())
                raise CheckpointError(f"{info.file}: tensor {info.name} holds {bad} NaN or infinite values")
            destination = destinations.tensors[info.name].copy_(stored)
            if check_finite and destination.dtype != stored.dtype and not bool(torch.isfinite(destination).all()):
                raise CheckpointError(
                    f"{info.file}: tensor {info.name} overflows {dtype}; load it as bfloat16 or float32"
                )
            done += info.num_bytes
            if progress is not None:
                progress(done, total)
        _check_tied(files, config, model)
    return model


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


def _checked_dtype(dtype: DType) -> DType:
    if dtype not in DTYPES.values():
        raise ConfigError(f"dtype {dtype} cannot be used; choose one of {', '.join(map(str, DTYPES.values()))}")
    return dtype


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


def _matched(files: Checkpoint, expected: Mapping[str, Tensor], config: ModelConfig) -> list[TensorInfo]:
    """The tensors to load, in file order; raises with the first names that are missing or of another shape."""
    missing = [name for name in expected if name not in files.tensors]
    if missing:
        raise CheckpointError(
            f"{files.folder}: {len(missing)} tensors that the config asks for are missing: {_listing(missing)}"
            + _without_mtp(missing, config)
        )
    wrong = []
    for name, tensor in expected.items():
        info = files.tensors[name]
        if info.shape != tuple(tensor.shape):
            wrong.append(f"{name} is {list(info.shape)} in {info.file}, the config says {list(tensor.shape)}")
        elif info.dtype not in DTYPES.values():
            wrong.append(f"{name} is {info.dtype} in {info.file}, supported are {', '.join(DTYPES)}")
    if wrong:
        raise CheckpointError(f"{files.folder}: {len(wrong)} tensors do not fit the config: {_listing(wrong)}")
    return list(files.in_file_order(expected))


def _without_mtp(missing: list[str], config: ModelConfig) -> str:
    layer = f"model.layers.{config.num_hidden_layers}."
    if not all(name.startswith(layer) for name in missing):
        return ""
    return "; these are of the MTP layer that the config promises: add them, or load with mtp=False"


def _check_tied(files: Checkpoint, config: ModelConfig, model: Model) -> None:
    """A config may tie the head to the embedding while the files hold both: then they have to be equal."""
    info = files.tensors.get("lm_head.weight")
    if config.tie_word_embeddings and info is not None:
        stored = files.read(info).to(model.device, model.dtype)
        if stored.shape != model.embed_VD.shape or not torch.equal(stored, model.embed_VD):
            raise CheckpointError(
                f"{info.file}: tie_word_embeddings is true but lm_head.weight differs from model.embed_tokens.weight"
            )


def _listing(items: list[str]) -> str:
    rest = len(items) - MAX_NAMED
    return "; ".join(items[:MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
