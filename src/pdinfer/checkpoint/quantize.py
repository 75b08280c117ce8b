"""Makes a quantized checkpoint from one in floats, shard by shard: FP8 blocks, INT8 as modelslim writes it, or INT4 and
MXFP4 as compressed-tensors packs them.

The choice of tensors follows the published checkpoints: the linear maps of attention and MLPs are quantized, but not
embedding, head, norms and routers. INT8 leaves kv_b_proj, indexers and the layers after the last (MTP) as they are.
INT4 and MXFP4 are for routed experts alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs
import torch
from torch import Tensor

from pdinfer.checkpoint.reader import Checkpoint, Prefixes, TensorInfo, renamed
from pdinfer.checkpoint.schemes import DESCRIPTION
from pdinfer.checks import clip, typed
from pdinfer.config import ModelConfig
from pdinfer.errors import CheckpointError, ConfigError
from pdinfer.files import MAX_CONFIG_BYTES, AnyPath, read_json, read_regular, writing
from pdinfer.kernels.formats.floats import all_finite
from pdinfer.kernels.formats.four_bits import GROUP, quantize_int4, quantize_mxfp4
from pdinfer.kernels.formats.fp8 import BLOCK, quantize_fp8
from pdinfer.kernels.formats.int8 import quantize_int8
from pdinfer.progress import Progress, telling

LINEARS = frozenset(
    {"q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
)
INDEXER_LINEARS = frozenset({"wq_b", "wk"})

MAX_SHARD_BYTES = 4 << 30
COPIED = ("*.json", "*.txt", "*.model", "*.jinja")
MAX_COPIED_BYTES = 64 << 20
SAY_QUANTIZED = ("quantization_config", "quantize", "mla_quantize")
"""The fields of a config.json that say how weights are quantized."""


_EVERY_GROUP = {"strategy": "group", "group_size": GROUP, "symmetric": True, "dynamic": False, "num_bits": 4}
_IGNORE = ("lm_head", r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*")


def _packed_config(file_format: str, **weights: object) -> dict[str, object]:
    """Return the `quantization_config` of published checkpoints whose routed experts are packed."""
    activations = {"input_activations": None, "output_activations": None}
    group = {"targets": ["Linear"], "weights": {**_EVERY_GROUP, **weights}, **activations, "format": file_format}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(_IGNORE),
    }


PACKED_CONFIGS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "int4": _packed_config("pack-quantized", type="int"),
        "mxfp4": _packed_config("mxfp4-pack-quantized", type="float", scale_dtype="torch.uint8"),
    }
)


@attrs.frozen
class Recipe:
    """The new form of each tensor, the names of the files, and the marks in config.json."""

    stem: str
    config_fields: Mapping[str, object]
    chosen: Callable[[str], bool]
    quantize: Callable[[str, Tensor], dict[str, Tensor]]


@typed
def quantize_checkpoint(
    checkpoint: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    scheme: str = "fp8",
    scale_fmt: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = None,
    trusted_roots: Sequence[AnyPath] = (),
) -> None:
    """Write the float checkpoint in the folder `checkpoint` to the new or empty folder `destination`, quantized.

    `scheme` "fp8" is e4m3 with a float32 scale per block of 128 x 128, a power of two if `scale_fmt` is "ue8m0".
    "w8a8_dynamic" is int8 with a float32 scale per row, and a quant_model_description.json. "int4" and "mxfp4" pack
    routed experts in four bits with a scale per 32 inputs, as compressed-tensors does. Memory holds one shard,
    which is at most `max_shard_bytes` of float tensors, or one tensor. Small files next to the weights are copied, but
    what they say of another quantization, which the floats may come from, stays behind. config.json comes last, so that
    an unfinished folder cannot be loaded. `progress(done_bytes, total_bytes)` counts bytes of the source; True draws a
    line on stderr. `trusted_roots` is as for `load_model`. Raises CheckpointError, and ConfigError, also where the
    destination cannot be written or is full."""
    source, target = Path(checkpoint), Path(destination)
    config = ModelConfig.from_checkpoint(source, trusted_roots=trusted_roots)
    recipe = _recipe(scheme, scale_fmt, config)
    with (
        Checkpoint.open(source, trusted_roots=trusted_roots) as files,
        telling(progress, "quantizing", "bytes") as tell,
    ):
        _check_floats(files)
        if not any(recipe.chosen(renamed(name, config.family.tensor_prefixes)) for name in files.tensors):
            raise CheckpointError(f"{source} holds no weight that scheme {scheme} quantizes; choose another scheme")
        _make_empty(target)
        shards = list(_shards(files, max_shard_bytes))
        weight_map: dict[str, str] = {}
        done = total_size = 0
        for at, infos in enumerate(shards, 1):
            tensors: dict[str, Tensor] = {}
            for info in infos:
                tensors |= _converted(files, info, recipe, config.family.tensor_prefixes)
                done += info.num_bytes
                tell(done, files.total_bytes)
            file = f"{recipe.stem}-{at:05d}-of-{len(shards):05d}.safetensors"
            _save(target / file, tensors)
            weight_map |= dict.fromkeys(tensors, file)
            total_size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(target / f"{recipe.stem}.safetensors.index.json", index)
    if scheme == "w8a8_dynamic":
        _write_json(target / "quant_model_description.json", _description(weight_map))
    _copy_the_rest(source, target, trusted_roots)
    stored = read_json(source / "config.json", max_bytes=MAX_CONFIG_BYTES, trusted_roots=trusted_roots)
    _write_json(target / "config.json", {**_of_floats(stored), **recipe.config_fields})


def quantized_names(scheme: str, config: ModelConfig) -> Callable[[str], bool]:
    """Return whether a checkpoint of that scheme holds a tensor quantized, as a function of its name. Raises
    ConfigError for another scheme."""
    return _recipe(scheme, None, config).chosen


def _recipe(scheme: str, scale_fmt: str | None, config: ModelConfig) -> Recipe:
    if scheme == "fp8" and scale_fmt in (None, "ue8m0"):
        fields: dict[str, object] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
        if scale_fmt is not None:
            fields["scale_fmt"] = scale_fmt

        def to_fp8(name: str, matrix: Tensor) -> dict[str, Tensor]:
            numbers, scale = quantize_fp8(matrix, ue8m0=scale_fmt is not None)
            return {name: numbers, f"{name}_scale_inv": scale}

        return Recipe("model", {"quantization_config": fields}, _is_linear, to_fp8)
    if scheme == "w8a8_dynamic" and scale_fmt is None:

        def to_int8(name: str, matrix: Tensor) -> dict[str, Tensor]:
            numbers, scale = quantize_int8(matrix)
            return {name: numbers, f"{name}_scale": scale, f"{name}_offset": torch.zeros_like(scale)}

        def chosen(name: str) -> bool:
            # modelslim leaves these in floats, and the MTP layer
            if not _is_linear(name) or ".indexer." in name or ".kv_b_proj." in name:
                return False
            return int(name.split(".")[2]) < config.num_hidden_layers

        return Recipe("quant_model_weights", {"quantize": "w8a8_dynamic"}, chosen, to_int8)
    if scheme in PACKED_CONFIGS and scale_fmt is None:
        if config.moe_intermediate_size % GROUP or config.hidden_size % GROUP:
            raise ConfigError(
                f"scheme {scheme} has a scale for every {GROUP} inputs of an expert, and moe_intermediate_size = "
                f"{config.moe_intermediate_size} and hidden_size = {config.hidden_size} must be multiples of that"
            )
        pack = _to_int4 if scheme == "int4" else _to_mxfp4
        return Recipe("model", {"quantization_config": PACKED_CONFIGS[scheme]}, _is_routed, pack)
    raise ConfigError(
        f'scheme {clip(scheme)} with scale_fmt {clip(scale_fmt)} is not supported; choose "fp8" with scale_fmt None or '
        '"ue8m0", or "w8a8_dynamic", "int4" or "mxfp4" with scale_fmt None'
    )


def _to_int4(name: str, matrix: Tensor) -> dict[str, Tensor]:
    numbers, scale = quantize_int4(matrix)
    shape = torch.tensor(matrix.shape, dtype=torch.int64, device="cpu")
    return {f"{name}_packed": numbers.view(torch.int32), f"{name}_scale": scale, f"{name}_shape": shape}


def _to_mxfp4(name: str, matrix: Tensor) -> dict[str, Tensor]:
    numbers, exponents = quantize_mxfp4(matrix)
    return {f"{name}_packed": numbers, f"{name}_scale": exponents}


def _is_routed(name: str) -> bool:
    return _is_linear(name) and ".mlp.experts." in name


def _is_linear(name: str) -> bool:
    parts = name.split(".")
    if len(parts) < 5 or parts[:2] != ["model", "layers"] or not parts[2].isdecimal() or parts[-1] != "weight":
        return False
    return parts[-2] in (INDEXER_LINEARS if parts[-3] == "indexer" else LINEARS)


def _check_floats(files: Checkpoint) -> None:
    quantized = [info for info in files.tensors.values() if info.dtype.itemsize == 1 or info.name.endswith("_packed")]
    if quantized:
        raise CheckpointError(
            f"{files.folder}: {quantized[0].name} is {quantized[0].dtype} in {quantized[0].file}: the checkpoint is "
            "quantized already; start from one in floats"
        )


def _of_floats(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json, and that of a text model in it, without what they say of quantized weights."""
    kept = {name: value for name, value in config.items() if name not in SAY_QUANTIZED}
    text = kept.get("text_config")
    return kept | {"text_config": _of_floats(text)} if isinstance(text, Mapping) else kept


def _make_empty(target: Path) -> None:
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        taken = next(target.iterdir(), None)
    if taken is not None:
        raise ConfigError(f"{target} is not empty, it holds {clip(taken.name)}; choose a new folder")


def _shards(files: Checkpoint, max_bytes: int) -> Iterator[list[TensorInfo]]:
    """Yield the tensors in the order of their files, cut where `max_bytes` would be exceeded."""
    shard: list[TensorInfo] = []
    size = 0
    for info in files.in_file_order(files.tensors):
        if shard and size + info.num_bytes > max_bytes:
            yield shard
            shard, size = [], 0
        shard.append(info)
        size += info.num_bytes
    yield shard


def _converted(files: Checkpoint, info: TensorInfo, recipe: Recipe, prefixes: Prefixes) -> dict[str, Tensor]:
    tensor = files.read(info)
    if not recipe.chosen(renamed(info.name, prefixes)) or len(info.shape) != 2:
        return {info.name: tensor}
    if not all_finite(tensor):
        raise CheckpointError(f"{info.file}: tensor {info.name} holds NaN or infinite values")
    return recipe.quantize(info.name, tensor)


def _description(weight_map: Mapping[str, str]) -> dict[str, object]:
    """Return a scheme for every tensor. The scale and offset of a matrix have their own entries."""
    schemes = {}
    for name in weight_map:
        weight = name.removesuffix("_scale").removesuffix("_offset")
        schemes[name] = "W8A8_DYNAMIC" if f"{weight}_scale" in weight_map else "FLOAT"
    return {"model_quant_type": "W8A8_DYNAMIC", "version": "1.0.0", "group_size": 0, **dict(sorted(schemes.items()))}


def _copy_the_rest(source: Path, target: Path, trusted_roots: Sequence[AnyPath]) -> None:
    """Copy the small files next to the weights: tokenizer, generation config and the like."""
    names = {path.name for pattern in COPIED for path in source.glob(pattern)}
    for name in sorted(names):
        written_anew = name == "config.json" or name.endswith(".safetensors.index.json") or fnmatch(name, DESCRIPTION)
        if not written_anew:
            data = read_regular(source, name, MAX_COPIED_BYTES, CheckpointError, trusted_roots)
            with writing(target / name):
                (target / name).write_bytes(data)


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    from safetensors import SafetensorError  # a writer is only needed here
    from safetensors.torch import save_file

    with writing(path):
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
        except SafetensorError as failure:
            raise OSError(str(failure)) from None


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with writing(path):
        path.write_text(json.dumps(content, indent=2) + "\n")
