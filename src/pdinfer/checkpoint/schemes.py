"""The format in which each matrix of a model folder is stored, and its value once read and checked.

FP8 is known by the `weight_scale_inv` next to a weight, never by its name. INT8 is known by the description file that
modelslim writes (`quant_model_description*.json`, with a scheme per tensor; a tensor it does not mention is FLOAT).
INT4 and MXFP4 are known by the `weight_packed` that compressed-tensors has in place of a weight, and the MXFP4 of
DeepSeek-V4 by the `scale` next to one. A weight and the tensors that belong to it may be in different files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import attrs
import torch
from torch import Tensor

from pdinfer.checkpoint.reader import Checkpoint, TensorInfo, names_in_files, renamed
from pdinfer.checks import clip
from pdinfer.config import ModelConfig
from pdinfer.config.packed import PackedWeights
from pdinfer.errors import CheckpointError
from pdinfer.files import read_json
from pdinfer.kernels.formats.floats import Plain, all_finite
from pdinfer.kernels.formats.format import WHOLE, Format, Shard, Weight
from pdinfer.kernels.formats.four_bits import GROUP, MXFP4, Int4
from pdinfer.kernels.formats.fp8 import BLOCK, FP8_MAX, FP8Blocks, any_nan
from pdinfer.kernels.formats.int8 import Int8Dynamic, Int8Static
from pdinfer.kernels.formats.weights import columns_of

MAX_DESCRIPTION_BYTES = 64 << 20
DESCRIPTION = "quant_model_description*.json"
SUFFIX = "weight"

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int8, torch.int32, torch.int64)


@attrs.frozen
class Companion:
    """A tensor that belongs to a weight [O, I]: what its name ends in instead of "weight", and which dtypes and shapes
    it may have."""

    suffix: str
    dtypes: tuple[torch.dtype, ...]
    per: str = "row"

    def shapes(self, rows: int, columns: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes it may have, the usual one first."""
        if self.per == "block":
            return ((math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)),)
        if self.per == "group":
            return ((rows, columns // GROUP),)
        if self.per == "shape":
            return ((2,),)
        return ((rows, 1), (rows,)) if self.per == "row" else ((1,), (), (1, 1))


@attrs.frozen
class StoredForm:
    """What a format is in a file: the dtypes that its numbers may have, and the tensors that belong to them."""

    numbers: tuple[torch.dtype, ...]
    companions: tuple[Companion, ...] = ()
    codes: int = 1
    """The weights in one of the numbers, the first of them lowest."""


_ROW_SCALES = (Companion("weight_scale", FLOATS), Companion("weight_offset", FLOATS + INTS))
_STATIC_SCALES = (
    Companion("input_scale", FLOATS, per="matrix"),
    Companion("input_offset", FLOATS + INTS, per="matrix"),
    Companion("deq_scale", (*FLOATS, torch.int64)),
    Companion("quant_bias", (torch.int32,)),
)
_BLOCK_SCALES = (Companion("weight_scale_inv", (*FLOATS, torch.float8_e8m0fnu, torch.uint8), per="block"),)
_INT4_SCALES = (
    Companion("weight_scale", (torch.bfloat16,), per="group"),
    Companion("weight_shape", (torch.int64, torch.int32), per="shape"),
)
STORED_FORMS: Mapping[type[Format], StoredForm] = MappingProxyType(
    {
        Plain: StoredForm(FLOATS),
        FP8Blocks: StoredForm((torch.float8_e4m3fn,), _BLOCK_SCALES),
        Int8Dynamic: StoredForm((torch.int8,), _ROW_SCALES),
        Int8Static: StoredForm((torch.int8,), _ROW_SCALES + _STATIC_SCALES),
        Int4: StoredForm((torch.int32,), _INT4_SCALES, codes=8),
        MXFP4: StoredForm((torch.uint8,), (Companion("weight_scale", (torch.uint8,), per="group"),), codes=2),
    }
)
MXFP4_OF_V4 = StoredForm(
    (torch.int8,), (Companion("scale", (torch.float8_e8m0fnu, torch.uint8), per="group"),), codes=2
)
"""MXFP4 as DeepSeek-V4 has it, under the name of the weight."""
PACKED = f"{SUFFIX}_packed"
NEVER_PACKED = ("weight_zero_point", "weight_g_idx", "weight_global_scale")
"""What belongs to packed weights of other kinds, which would mean other numbers."""
QUANTIZED: tuple[type[Format], ...] = tuple(kind for kind in STORED_FORMS if kind is not Plain)
SCHEMES: Mapping[str, type[Format]] = {kind.name.upper(): kind for kind in (Plain, Int8Static, Int8Dynamic)}
"""The formats by modelslim's names."""


@attrs.frozen
class StoredWeights:
    """The weights of an open checkpoint. `ue8m0` is what the config says about the scales of FP8 activations, and
    `packed` what it says of packed weights."""

    files: Checkpoint
    ue8m0: bool
    packed: PackedWeights | None
    check_finite: bool
    description: Mapping[str, object]
    description_path: Path | None

    @classmethod
    def survey(
        cls, files: Checkpoint, config: ModelConfig | None = None, *, check_finite: bool = True
    ) -> StoredWeights:
        """Read the description file, if there is one; its names are those in the files. Raises CheckpointError."""
        paths = sorted(files.folder.glob(DESCRIPTION))
        if len(paths) > 1:
            raise CheckpointError(f"{files.folder} holds {len(paths)} {DESCRIPTION}; keep the one that is meant")
        path = paths[0] if paths else None
        described = (
            read_json(path, max_bytes=MAX_DESCRIPTION_BYTES, error=CheckpointError, trusted_roots=files.trusted_roots)
            if path
            else {}
        )
        described = {renamed(name, files.prefixes): scheme for name, scheme in described.items()}
        ue8m0 = config is not None and config.scale_fmt == "ue8m0"
        return cls(files, ue8m0, None if config is None else config.packed, check_finite, described, path)

    def stored_as(self, name: str) -> type[Format]:
        """Return the format of the tensor `name`, which is plain where no tensor has that name. Raises
        CheckpointError."""
        described = self.description.get(name, "FLOAT")
        kind = SCHEMES.get(described) if isinstance(described, str) else None
        if kind is None:
            raise CheckpointError(
                f"{self.description_path}: scheme {clip(described)} of {clip(name)} is not supported; supported: "
                f"{', '.join(SCHEMES)}"
            )
        if kind is not Plain or not name.endswith(SUFFIX):
            return kind
        tensors, base = self.files.tensors, name.removesuffix(SUFFIX)
        if f"{name}_scale_inv" in tensors:
            return FP8Blocks
        if f"{base}{PACKED}" in tensors:
            return Int4 if self.packed is None or self.packed.format == Int4.name else MXFP4
        if f"{base}scale" in tensors and name in tensors and tensors[name].dtype == torch.int8:
            return MXFP4
        return kind

    def form(self, name: str) -> StoredForm:
        """Return what the format of a tensor is in these files."""
        kind = self.stored_as(name)
        return MXFP4_OF_V4 if kind is MXFP4 and self.numbers(name) == name else STORED_FORMS[kind]

    def numbers(self, name: str) -> str:
        """Return the name of the tensor that holds the numbers of the matrix, or other tensor, `name`."""
        packed = f"{name.removesuffix(SUFFIX)}{PACKED}"
        return packed if name.endswith(SUFFIX) and packed in self.files.tensors else name

    @staticmethod
    def matrix(name: str) -> str:
        """Return the name of the matrix whose numbers a tensor holds."""
        return f"{name.removesuffix(PACKED)}{SUFFIX}" if name.endswith(PACKED) else name

    def info(self, name: str) -> TensorInfo:
        """Return the tensor that holds the numbers of a matrix."""
        return self.files.tensors[self.numbers(name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the matrix, or other tensor, `name`."""
        shape = self.info(name).shape
        return (*shape[:-1], shape[-1] * self.form(name).codes) if shape else shape

    @property
    def quantized_formats(self) -> frozenset[type[Format]]:
        """The formats of its quantized tensors, also of those that a model does not read."""
        described = {value for value in self.description.values() if isinstance(value, str)}
        found = {kind for scheme, kind in SCHEMES.items() if scheme in described}
        if any(name.endswith(f"{SUFFIX}_scale_inv") for name in self.files.tensors):
            found.add(FP8Blocks)
        stems = (name.removesuffix(PACKED).removesuffix("scale") for name in self.files.tensors)
        found |= {self.stored_as(f"{stem}{SUFFIX}") for stem in stems if stem.endswith(".")}
        return frozenset(found - {Plain})

    def holds(self, name: str) -> bool:
        """Return whether there is a tensor of that name."""
        return self.numbers(name) in self.files.tensors

    def parts(self, name: str) -> list[str]:
        """Return the names of the tensors that a matrix is stored in, its numbers first."""
        return [self.numbers(name), *self._companions(name)]

    def infos(self, name: str) -> list[TensorInfo]:
        """Return the tensors that a matrix is stored in, its numbers first."""
        return [self.files.tensors[part] for part in self.parts(name)]

    def complaints(self, name: str, shape: tuple[int, ...]) -> Iterator[str]:
        """Yield what keeps the tensor `name`, which is there, from being read as one of `shape`."""
        info, kind = self.info(name), self.stored_as(name)
        if self.form(name).codes > 1 and info.shape:
            yield from self._complaints_of_four_bits(name, info)
        if self.shape(name) != shape:
            yield f"{name} is {list(self.shape(name))} in {info.file}, the config says {list(shape)}"
        elif info.dtype not in self.form(name).numbers:
            yield f"{name} is {info.dtype} in {info.file}, {self._reason(name, kind)}"
        elif kind is not Plain and len(shape) != 2:
            yield f"{name} is {list(info.shape)} in {info.file}, and {kind.name.upper()} is for matrices"
        elif kind is not Int8Static and name.endswith(f".{SUFFIX}") and len(shape) == 2:
            bias = self.files.tensors.get(f"{name.removesuffix(SUFFIX)}bias")
            if bias is not None:
                yield f"{bias.name} is in {bias.file}, and a linear map with a bias is not supported"
        if len(shape) != 2:
            return
        for part, companion in self._companions(name).items():
            found = self.files.tensors.get(part)
            if found is None:
                yield f"{part} is missing, though {name} in {info.file} is stored as {kind.name.upper()}"
            elif found.shape not in companion.shapes(*shape):
                yield f"{part} is {list(found.shape)} in {found.file}, expected {list(companion.shapes(*shape)[0])}"
            elif found.dtype not in companion.dtypes:
                yield f"{part} is {found.dtype} in {found.file}, supported are {_names(companion.dtypes)}"

    def _complaints_of_four_bits(self, name: str, info: TensorInfo) -> Iterator[str]:
        base = name.removesuffix(SUFFIX)
        if self.numbers(name) != name:
            if name in self.files.tensors:
                yield f"{name} is in {self.files.tensors[name].file}, and packed in {info.file} too"
            if self.packed is None:
                yield f"{info.name} is packed, and config.json has no quantization_config of compressed-tensors"
            elif any(map(self.packed.ignores, names_in_files(base.removesuffix("."), self.files.prefixes))):
                yield f"{info.name} is packed, and config.json says that it is not (ignore)"
        for suffix in NEVER_PACKED:
            if f"{base}{suffix}" in self.files.tensors:
                yield f"{base}{suffix} belongs to packed weights of another kind, which are not supported"
        columns = self.shape(name)[-1]
        if columns % GROUP:
            yield f"{name} has {columns} columns, not a multiple of the {GROUP} that share a scale"

    def read(self, name: str, shard: Shard = WHOLE) -> Weight:
        """Return the matrix, or any other tensor, `name` as it is stored, or a part of it, on the CPU. Rows outside the
        part and its blocks are not read; columns are cut out of the whole. Raises CheckpointError for bad values."""
        if shard.size > 1 and shard.axis:
            return columns_of(self._rows(name, WHOLE), shard)
        return self._rows(name, shard)

    def _rows(self, name: str, shard: Shard) -> Weight:
        kind, info = self.stored_as(name), self.info(name)
        rows = shard.of(info.shape[0]) if shard.size > 1 else None
        if kind is Plain:
            return self._finite(info, rows)
        numbers = self.files.read(info, rows)
        companions = {}
        for part, companion in self._companions(name).items():
            found = self.files.tensors[part]
            whole = rows is None or companion.per in ("matrix", "shape")
            cut = None if whole else shard.of(found.shape[0])
            companions[companion.suffix] = self._finite(found, cut)
        weight = self._quantized(name, numbers, companions)
        if self.check_finite:
            self._check_products(name, weight, companions)
        return weight

    def _quantized(self, name: str, numbers: Tensor, companions: Mapping[str, Tensor]) -> Format:
        kind = self.stored_as(name)
        if kind in (Int4, MXFP4):
            return self._four_bits(name, numbers, companions)
        if kind is FP8Blocks:
            if self.check_finite and any_nan(numbers):
                raise CheckpointError(f"{self.files.tensors[name].file}: tensor {name} holds NaN")
            scale = self._positive(name, "weight_scale_inv", companions)
            return FP8Blocks(numbers=numbers, scale=scale, ue8m0=self.ue8m0)
        if bool((companions["weight_offset"] != 0).any()):
            raise self._bad(name, "weight_offset", "not 0: asymmetric INT8 weights are not supported")
        scale = self._positive(name, "weight_scale", companions).view(-1, 1)
        if kind is Int8Dynamic:
            return Int8Dynamic(numbers=numbers, scale=scale)
        return Int8Static(
            numbers=numbers,
            scale=scale,
            input_scale=self._positive(name, "input_scale", companions).view(1, 1),
            input_offset=companions["input_offset"].float().view(1, 1),
            output_scale=self._positive(name, "deq_scale", companions).view(-1, 1),
            output_offset=companions["quant_bias"].view(-1, 1),
        )

    def _check_products(self, name: str, weight: Format, companions: Mapping[str, Tensor]) -> None:
        """Refuse a weight that is infinite though its numbers and scales are not. They are multiplied only where a
        scale is so large."""
        suffix = self.form(name).companions[0].suffix
        if float(companions[suffix].max()) * FP8_MAX <= torch.finfo(torch.float32).max:  # no format has larger numbers
            return
        floats = torch.empty(len(weight.numbers), self.shape(name)[1], dtype=torch.float32, device="cpu")
        weight.floats_into(floats)
        if not all_finite(floats):
            raise self._bad(name, suffix, "so large that weights are infinite")

    def _four_bits(self, name: str, numbers: Tensor, companions: Mapping[str, Tensor]) -> Format:
        said = companions.get("weight_shape")
        if said is not None and said.tolist() != list(self.shape(name)):
            shape = self.files.tensors[f"{name.removesuffix(SUFFIX)}weight_shape"]
            raise CheckpointError(
                f"{shape.file}: tensor {shape.name} says {said.tolist()}, and {self.numbers(name)} is "
                f"{list(self.shape(name))}"
            )
        scale = self._positive(name, self.form(name).companions[0].suffix, companions)
        codes = numbers.view(torch.uint8)
        if self.stored_as(name) is Int4:
            return Int4(numbers=codes, scale=scale.bfloat16())
        return MXFP4(numbers=codes, scale=scale.to(torch.float8_e8m0fnu).view(torch.uint8))

    def _companions(self, name: str) -> dict[str, Companion]:
        base = name.removesuffix(SUFFIX)
        return {f"{base}{companion.suffix}": companion for companion in self.form(name).companions}

    def _reason(self, name: str, kind: type[Format]) -> str:
        if kind is Plain and self.files.tensors[name].dtype == torch.float8_e4m3fn:
            return f"and {name}_scale_inv is missing"
        if kind is Plain and self.files.tensors[name].dtype == torch.int8:
            where = self.description_path.name if self.description_path else f"{DESCRIPTION} is missing and"
            return f"and {where} does not say with which scheme"
        return f"supported for {kind.name.upper()} are {_names(self.form(name).numbers)}"

    def _finite(self, info: TensorInfo, rows: range | None = None) -> Tensor:
        tensor = self.files.read(info, rows)
        if info.dtype in (torch.float8_e8m0fnu, torch.uint8):
            tensor = tensor.view(torch.float8_e8m0fnu).float()
        elif info.dtype == torch.int64 and info.name.endswith("deq_scale"):
            if bool((tensor != tensor.to(torch.int32)).any()):
                raise CheckpointError(
                    f"{info.file}: tensor {info.name} holds integers that are not the bits of a float32"
                )
            tensor = tensor.to(torch.int32).view(torch.float32)
        if self.check_finite and tensor.is_floating_point() and not all_finite(tensor):
            bad = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(f"{info.file}: tensor {info.name} holds {bad} NaN or infinite values")
        return tensor

    def _positive(self, name: str, suffix: str, companions: Mapping[str, Tensor]) -> Tensor:
        tensor = companions[suffix].float()
        if self.check_finite and bool((tensor <= 0).any()):
            raise self._bad(name, suffix, "zero or negative, which a scale cannot be")
        return tensor

    def _bad(self, name: str, suffix: str, problem: str) -> CheckpointError:
        info = self.files.tensors[f"{name.removesuffix(SUFFIX)}{suffix}"]
        return CheckpointError(f"{info.file}: tensor {info.name} holds values that are {problem}")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
