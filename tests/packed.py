"""Checkpoints in four bits as compressed-tensors packs them, and twins that hold the same numbers in floats."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save_file
from torch import Tensor

from pdinfer.checkpoint.quantize import PACKED_CONFIGS, quantize_checkpoint
from pdinfer.kernels.formats.four_bits import GROUP, quantize_int4, quantize_mxfp4

SCHEMES = ("int4", "mxfp4")
EVERY_LINEAR = r"model\.layers\..*_(proj|proj_with_mqa)\.weight"
Change = Callable[[dict[str, Tensor]], object]
ConfigChange = Callable[[dict[str, Any]], object]


def changed(source: Path, folder: Path, change: Change, config: ConfigChange = len) -> Path:
    """Write a copy of a folder with other tensors and another config."""
    folder.mkdir()
    tensors = tensors_of(source)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    stored = json.loads((source / "config.json").read_text())
    config(stored)
    (folder / "config.json").write_text(json.dumps(stored))
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load(file.read_bytes())
    return tensors


def with_twin(floats: Path, scheme: str, *, every_linear: bool = False) -> tuple[Path, Path]:
    """Write the checkpoint in `floats` with packed experts, or with every linear map packed that has whole groups, to a
    folder beside it, and the twin of that. Return both folders."""
    folder = floats.with_name(f"{floats.name}-{scheme}")

    def say(config: dict[str, Any]) -> None:
        config["quantization_config"] = {**PACKED_CONFIGS[scheme], "ignore": ["lm_head"]}

    if every_linear:  # also of a model without experts
        changed(floats, folder, lambda tensors: pack(tensors, scheme), say)
    else:
        quantize_checkpoint(floats, folder, scheme=scheme)
    return folder, twin_of(folder)


def twin_of(folder: Path) -> Path:
    twin = folder.with_name(f"{folder.name}-twin")
    return changed(folder, twin, unpack, lambda config: config.pop("quantization_config"))


def prefixed(tensors: dict[str, Tensor]) -> None:
    """Name tensors as files do in which a text model is a part of another one."""
    for name in list(tensors):
        tensors[f"language_model.{name}"] = tensors.pop(name)


def ignoring(config: dict[str, Any], *names: str) -> None:
    config["quantization_config"]["ignore"] = list(names)


def pack(tensors: dict[str, Tensor], scheme: str) -> None:
    """Pack every linear map, as `quantize_checkpoint` packs experts."""
    for name in [name for name, tensor in tensors.items() if re.fullmatch(EVERY_LINEAR, name)]:
        if tensors[name].shape[1] % GROUP:
            continue
        matrix = tensors.pop(name)
        numbers, scale = (quantize_int4 if scheme == "int4" else quantize_mxfp4)(matrix)
        tensors |= {f"{name}_packed": numbers, f"{name}_scale": scale}
        if scheme == "int4":
            tensors |= {f"{name}_packed": numbers.view(torch.int32), f"{name}_shape": torch.tensor(matrix.shape)}


def unpack(tensors: dict[str, Tensor]) -> None:
    """Put floats in the place of what is packed, code by code."""
    for name in [name for name in tensors if name.endswith("_packed")]:
        base, words = name.removesuffix("_packed"), tensors.pop(name)
        tensors.pop(f"{base}_shape", None)
        scale = tensors.pop(f"{base}_scale")
        scheme, per = ("int4", 8) if words.dtype == torch.int32 else ("mxfp4", 2)
        codes = torch.stack([words.long() >> 4 * at & 15 for at in range(per)], -1).flatten(-2)
        values = torch.tensor([number(code, scheme) for code in range(16)])[codes]
        scales = scale.float() if scheme == "int4" else torch.exp2(scale.float() - 127)
        tensors[base] = values * scales.repeat_interleave(GROUP, -1)


def number(code: int, scheme: str) -> float:
    """Return what a code stands for, by the words of the formats."""
    if scheme == "int4":
        return code - 8
    exponent, fraction = code >> 1 & 3, code & 1
    size = fraction * 0.5 if exponent == 0 else (1 + fraction / 2) * 2 ** (exponent - 1)
    return -size if code & 8 else size
