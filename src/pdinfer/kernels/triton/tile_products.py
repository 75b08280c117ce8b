"""Products of rows and weights in tiles: what is multiplied, as values that all formats, dense matrices and experts
share, and how the kernel is started."""

from __future__ import annotations

from typing import Any, Literal

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.fp8 import BLOCK
from pdinfer.kernels.triton.configs import Config
from pdinfer.kernels.triton.launch import as_rows, launch, need
from pdinfer.kernels.triton.product_kernel import product

TMA_BYTES = 16
"""Where rows start at a multiple of this, the TMA of a GPU loads tiles. Others are loaded by pointers."""
INTERPRETED = {"floats": tl.float32, "fp8": tl.float64, "int8": None, "int4": tl.float32, "mxfp4": tl.float32}
"""What the interpreter multiplies instead. It has no bfloat16, and its float32 sums depend on how tiles are cut."""
TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@attrs.frozen(eq=False)
class Rows:
    """Rows to multiply, and where they are.

    `numbers` is [rows, width]: floats, e4m3 or int8. In the "sorted" form the rows of experts follow one another, with
    `counts_E` rows each; in "room" each expert has `room` rows, of which the first `counts_E` count; "dense" rows all
    belong to the only expert. With `per_part` there is a copy of all rows for each part of the matrix.

    `scales` is None for floats. FP8 has one per row and 128 channels, whose strides over experts (in "room"), rows and
    groups are `scale_strides`; int8 has one per row of `numbers`. `dtype` is that of the result."""

    numbers: Tensor
    dtype: torch.dtype
    form: Literal["dense", "sorted", "room"] = "dense"
    counts_E: Tensor | None = None
    room: int = 0
    scales: Tensor | None = None
    scale_strides: tuple[int, int, int] = (0, 1, 0)
    per_part: bool = False

    @classmethod
    def of(cls, x: Tensor | FP8Rows, counts_E: Tensor | None = None) -> Rows:
        """Return dense rows [..., I], or with counts those of experts: [S, I], or [E, N, I] in room for N."""
        numbers = x.numbers_TI if isinstance(x, FP8Rows) else x
        places: dict[str, Any] = {}
        if counts_E is not None and x.ndim == 3:
            places = {"form": "room", "room": x.shape[1], "counts_E": counts_E}
        elif counts_E is not None:
            places = {"form": "sorted", "counts_E": counts_E}
        if isinstance(x, FP8Rows):
            *experts, row, group = x.scales_TN.stride()
            places |= {"scales": x.scales_TN, "scale_strides": (experts[0] if experts else 0, row, group)}
        return cls(as_rows(numbers), x.dtype, **places)

    def with_numbers(self, x_SI: Tensor | FP8Rows) -> Rows:
        """Return other rows in the same places."""
        other = Rows.of(x_SI)
        _, row, group = other.scale_strides
        return attrs.evolve(
            self, numbers=other.numbers, scales=other.scales, scale_strides=(self.room * row, row, group)
        )

    def __len__(self) -> int:
        return len(self.numbers)


@attrs.frozen(eq=False)
class Matrices:
    """The matrices of all experts, one below the other: `numbers` [experts * parts * channels, width].

    `scales` is None for floats. FP8 has one per 128 channels of a part and 128 of the width; int8 one per channel, and
    perhaps an int32 `offsets`, which is added before; four bits, of which a byte has two, one per channel and 32 of the
    width."""

    numbers: Tensor
    experts: int
    parts: int
    scales: Tensor | None = None
    offsets: Tensor | None = None

    @classmethod
    def of(
        cls, numbers: Tensor, *, parts: int = 1, scales: Tensor | None = None, offsets: Tensor | None = None
    ) -> Matrices:
        """Return the matrices of a weight [..., O, I]; leading axes are experts."""
        return cls(as_rows(numbers), numbers.shape[:-2].numel(), parts, *map(_dense, (scales, offsets)))

    @property
    def kind(self) -> str:
        """What the kernel calls their format."""
        if self.numbers.dtype == torch.uint8:
            return "int4" if self.scales is not None and self.scales.dtype == torch.bfloat16 else "mxfp4"
        return {torch.float8_e4m3fn: "fp8", torch.int8: "int8"}.get(self.numbers.dtype, "floats")

    @property
    def per_element(self) -> int:
        """The weights that an element of `numbers` holds."""
        return 2 if self.numbers.dtype == torch.uint8 else 1

    @property
    def part_channels(self) -> int:
        return len(self.numbers) // (self.experts * self.parts)


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def multiply(x: Rows, weight: Matrices, config: Config) -> Tensor:
    """Return x @ weight.T -> [rows, parts * channels] in x's dtype."""
    num_rows = len(x) // weight.parts if x.per_part else len(x)
    out = torch.empty(num_rows, weight.parts * weight.part_channels, dtype=x.dtype, device=x.numbers.device)
    _launch(x, weight, config, out)
    return out


def multiply_gated(x: Rows, weight: Matrices, config: Config) -> Tensor:
    """Return `gated_silu` of `multiply` with a matrix of two parts -> [rows, channels] in x's dtype."""
    out = torch.empty(len(x), weight.part_channels, dtype=x.dtype, device=x.numbers.device)
    _launch(x, weight, config, out, gated=True)
    return out


def multiply_gated_fp8(x: Rows, weight: Matrices, config: Config, *, ue8m0: bool) -> FP8Rows:
    """Return `quantize_fp8` of `multiply_gated`. A tile has 128 channels."""
    device, channels = x.numbers.device, weight.part_channels
    numbers_SI = torch.empty(len(x), channels, dtype=torch.float8_e4m3fn, device=device)
    scales_SN = torch.empty(len(x), triton.cdiv(channels, BLOCK), device=device, dtype=torch.float32)
    _launch(x, weight, config, numbers_SI, scales_SN, gated=True, ue8m0=ue8m0)
    return FP8Rows(numbers_SI, scales_SN, dtype=x.dtype, ue8m0=ue8m0)


def _launch(
    x: Rows,
    weight: Matrices,
    config: Config,
    out: Tensor,
    out_scales: Tensor | None = None,
    *,
    gated: bool = False,
    ue8m0: bool = False,
) -> None:
    width, tiles, numbers, kind = x.numbers.shape[1], config.tiles, weight.numbers, weight.kind
    columns = numbers.shape[1] * weight.per_element
    need(columns == width, f"a product with {columns} columns takes as many channels, got {width}")
    counted = 1 if x.counts_E is None else len(x.counts_E)
    need(counted == weight.experts, f"there are matrices of {weight.experts} experts, and rows of {counted}")
    has_tma = _has_tma(x.numbers) and _has_tma(numbers)
    launch(
        product, (_blocks(x, weight, config, gated=gated),),
        _source(x.numbers, tiles["ROWS"], tiles["DEPTH"], has_tma and kind != "int4"), x.scales,  # see `_x_tiles`
        _source(numbers, tiles["CHANNELS"], tiles["DEPTH"] // weight.per_element, has_tma), weight.scales,
        weight.offsets, out, out_scales, x.counts_E, len(out), x.room, weight.experts, width, weight.part_channels,
        x.numbers.stride(0), numbers.stride(0), out.stride(0), *x.scale_strides,
        0 if weight.scales is None else weight.scales.shape[-1],
        FORM=x.form, FORMAT=kind, PARTS=weight.parts, PER_PART=x.per_part, DTYPE=TRITON_DTYPES[x.dtype],
        HAS_TMA=has_tma, UPCAST=_upcast(kind, x), EXPERTS=triton.next_power_of_2(weight.experts), GATED=gated,
        UE8M0=ue8m0, **config.constants,
    )  # fmt: skip


def _upcast(kind: str, x: Rows) -> tl.dtype | None:
    """Return what numbers are multiplied as, or None for what they are. Tensor cores keep 14 bits of a sum of FP8
    products (DeepSeek-V3's report, arXiv 2412.19437, section 3.3.2): enough for results in 16 bits, and for those in
    float32 the same numbers are multiplied as bfloat16."""
    if x.numbers.device.type == "cpu":
        return INTERPRETED[kind]
    return tl.bfloat16 if kind == "fp8" and x.dtype == torch.float32 else None


def _blocks(x: Rows, weight: Matrices, config: Config, *, gated: bool) -> int:
    """Return the blocks of threads that are enough whatever the counts are."""
    rows, channels = config.tiles["ROWS"], config.tiles["CHANNELS"]
    channel_tiles = -(-weight.part_channels // channels) * (1 if gated else weight.parts)
    num_rows = len(x) // weight.parts if x.per_part else len(x)
    if x.form == "room":
        return channel_tiles * weight.experts * min(-(-x.room // rows), config.tiles["SPLITS"])
    row_tiles = -(-num_rows // rows)
    if x.form == "sorted":  # the rows of each expert begin a tile
        row_tiles += min(num_rows, weight.experts) - 1 if num_rows else 0
    return channel_tiles * row_tiles


def _has_tma(numbers: Tensor) -> bool:
    return (
        numbers.numel() > 0
        and numbers.stride(0) * numbers.itemsize % TMA_BYTES == 0
        and numbers.data_ptr() % TMA_BYTES == 0
    )


def _source(numbers: Tensor, rows: int, depth: int, has_tma: bool) -> TensorDescriptor | Tensor:
    if not has_tma:
        return numbers
    return TensorDescriptor(numbers, list(numbers.shape), list(numbers.stride()), [rows, depth])
