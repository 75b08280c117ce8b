"""A checkpoint folder becomes a Model, tensor by tensor: every name and shape is checked before anything is allocated,
and at no time is there more than the model and one tensor."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping

import attrs
import torch
from torch import Tensor

from pdinfer.checkpoint import Checkpoint, TensorInfo
from pdinfer.checks import check_fits
from pdinfer.config import ModelConfig
from pdinfer.errors import BackendUnavailable, CheckpointError, ConfigError
from pdinfer.kernels.resolve import resolve_ops
from pdinfer.kernels.weight_formats import Int8Static, Weight, dequantize
from pdinfer.kv.view import DTYPES
from pdinfer.model import Model, device_memory_bytes
from pdinfer.schemes import StoredWeights
from pdinfer.topology import Topology

Device = str | torch.device
DType = torch.dtype

MAX_NAMED = 10


@attrs.define
class Destinations:
    """A WeightSource that allocates on `device` and remembers which name belongs where. `present` are the names that a
    checkpoint holds."""

    device: torch.device
    dtype: torch.dtype
    present: Container[str] = ()
    tensors: dict[str, Tensor] = attrs.field(factory=dict)

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self.tensors[name] = tensor
        return tensor

    def find(self, name: str, *shape: int) -> Tensor | None:
        return self.take(name, *shape) if name in self.present else None

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
) -> Model:
    """The model in the folder `checkpoint` (config.json and safetensors in Hugging Face layout) on `device`.

    `dtype` defaults to the stored one. `weights`: "auto", "stored" or "float"; for the float checkpoints that are
    supported all three mean the same. `progress(done_bytes, total_bytes)` is called after every tensor. `providers`
    forces the op provider, for all ops or per op (see `explain_backends`). `check_finite` refuses NaN and infinity.

    Raises ConfigError, CheckpointError or BackendUnavailable, all before large allocations except for bad values.
    """
    if weights not in ("auto", "stored", "float"):
        raise ConfigError(f'weights must be "auto", "stored" or "float", got {weights!r}')
    topology = topology or Topology.single()
    if topology.world_size != 1:
        raise ConfigError(f"this version runs one rank per engine; the topology has {topology.world_size}")
    config = ModelConfig.from_checkpoint(checkpoint)
    target = _checked_device(device)
    dtype = dtype or DTYPES[config.dtype]
    if dtype not in DTYPES.values():
        raise ConfigError(f"dtype {dtype} cannot be used; choose one of {', '.join(map(str, DTYPES.values()))}")
    resolved = resolve_ops(target, forced=providers)

    def build(source: Destinations, weights_id: bytes) -> Model:
        return Model.build(
            config, source, resolved, device=target, dtype=dtype, topology=topology, weights_id=weights_id
        )

    with Checkpoint.open(checkpoint) as files:
        plan = Destinations(torch.device("meta"), dtype, files.tensors)
        build(plan, b"")
        stored = StoredWeights.survey(files, ue8m0=config.scale_fmt == "ue8m0", check_finite=check_finite)
        wanted = _matched(stored, plan.tensors)
        needed = sum(tensor.numel() * tensor.element_size() for tensor in plan.tensors.values())
        check_fits(needed, device_memory_bytes(target), f"the weights of {os.fspath(checkpoint)} in {dtype}")
        destinations = Destinations(target, dtype, files.tensors)
        model = build(destinations, files.sample_digest())
        sizes = {info.name: sum(part.num_bytes for part in stored.infos(info.name)) for info in wanted}
        done, total = 0, sum(sizes.values())
        for info in wanted:
            _fill(destinations.tensors[info.name], stored.read(info.name), info, check_finite)
            done += sizes[info.name]
            if progress is not None:
                progress(done, total)
        _check_tied(files, config, model)
    return model


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


def _matched(stored: StoredWeights, expected: Mapping[str, Tensor]) -> list[TensorInfo]:
    """The tensors to load, in file order; raises with the first names that are missing or cannot be read."""
    files = stored.files
    missing = [name for name in expected if name not in files.tensors]
    if missing:
        raise CheckpointError(
            f"{files.folder}: {len(missing)} tensors that the config asks for are missing: {_listing(missing)}"
        )
    wrong = [
        complaint for name, tensor in expected.items() for complaint in stored.complaints(name, tuple(tensor.shape))
    ]
    if wrong:
        raise CheckpointError(f"{files.folder}: {len(wrong)} tensors do not fit the config: {_listing(wrong)}")
    return list(files.in_file_order(expected))


def _fill(destination: Tensor, value: Weight, info: TensorInfo, check_finite: bool) -> None:
    if isinstance(value, Int8Static) and bool(value.bias.any()):
        raise CheckpointError(f"{info.file}: quant_bias of {info.name} holds a bias, which floats cannot keep here")
    dequantize(value, destination)
    if check_finite and destination.dtype != torch.float32 and not bool(torch.isfinite(destination).all()):
        raise CheckpointError(
            f"{info.file}: tensor {info.name} overflows {destination.dtype}; load it as bfloat16 or float32"
        )


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
