"""Products with quantized weights of DeepSeek-V3: an output map, and 32 experts of a rank."""

from __future__ import annotations

import torch
from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.format import Shape
from pdinfer.kernels.formats.four_bits import MXFP4, FourBits, Int4
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic, Int8Static
from pdinfer.kernels.triton import products
from tests.unit.kernels.aot import Specimen

HIDDEN, WIDTH, EXPERTS, HEADS = 7168, 2048, 32, 16384
FP8 = torch.float8_e4m3fn
FOUR_BITS = {"int4": Int4, "mxfp4": MXFP4}
SCALES = 11
"""Loads of single numbers: scales of rows and of blocks of weights, and counts."""


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def floats(*shape: int) -> Tensor:
    return empty(*shape, dtype=torch.bfloat16)


def fp8_rows(*shape: int) -> FP8Rows:
    return FP8Rows(empty(*shape, dtype=FP8), empty(*shape[:-1], shape[-1] // 128), dtype=torch.bfloat16)


def fp8(*shape: int, parts: int = 1) -> FP8Blocks:
    *lead, rows, columns = shape
    scale = empty(*lead, rows // 128, columns // 128)
    return FP8Blocks(numbers=empty(*shape, dtype=FP8), scale=scale, parts=parts)


def int8(*shape: int) -> Int8Dynamic:
    return Int8Dynamic(numbers=empty(*shape, dtype=torch.int8), scale=empty(*shape[:-1], 1))


def int8_static(rows: int, columns: int) -> Int8Static:
    one, each = empty(1, 1), empty(rows, 1)
    return Int8Static(
        numbers=empty(rows, columns, dtype=torch.int8),
        scale=each,
        input_scale=one,
        input_offset=one,
        output_scale=each,
        output_offset=empty(rows, 1, dtype=torch.int32),
    )


def four_bits(kind: type[FourBits], *shape: int) -> FourBits:
    *lead, rows, columns = shape
    size = Shape(lead[0] if lead else 1, 1, rows, columns)
    weight = kind.empty(size, dtype=torch.bfloat16, device=torch.device("meta"))
    assert isinstance(weight, FourBits)
    return weight if lead else weight.map(lambda tensor: tensor[0])


def experts(kind: str, *rows: int) -> None:
    """Run the experts on rows sorted by expert, or in room for some rows each."""
    counts_E = empty(EXPERTS, dtype=torch.int32 if len(rows) > 1 else torch.int64)
    if kind == "fp8":
        gate_up, down = fp8(EXPERTS, 2 * WIDTH, HIDDEN, parts=2), fp8(EXPERTS, HIDDEN, WIDTH)
        products.grouped_mlp_fp8(fp8_rows(*rows, HIDDEN), counts_E, gate_up, down)
    elif kind == "int8":
        gate_up, down = int8(EXPERTS, 2 * WIDTH, HIDDEN), int8(EXPERTS, HIDDEN, WIDTH)
        products.grouped_mlp_w8a8_dynamic(floats(*rows, HIDDEN), counts_E, gate_up, down)
    elif kind in FOUR_BITS:
        gate_up, down = (four_bits(FOUR_BITS[kind], EXPERTS, *size) for size in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)))
        products.grouped_mlp_int4(floats(*rows, HIDDEN), counts_E, gate_up, down)
    else:
        gate_up, down = floats(EXPERTS, 2 * WIDTH, HIDDEN), floats(EXPERTS, HIDDEN, WIDTH)
        products.grouped_mlp(floats(*rows, HIDDEN), counts_E, gate_up, down)


SPECIMENS = (
    *(
        Specimen(
            f"linear_fp8, {rows} rows",
            lambda rows=rows: products.linear_fp8(fp8_rows(rows, HEADS), fp8(HIDDEN, HEADS)),
            narrow=SCALES,
        )
        for rows in (16, 32, 64, 4096)
    ),
    *(
        Specimen(
            f"linear_int8, {rows} rows",
            lambda rows=rows: products.linear_w8a8_dynamic(floats(rows, HEADS), int8(HIDDEN, HEADS)),
            narrow=SCALES,
        )
        for rows in (16, 64, 4096)
    ),
    Specimen(
        "linear_int8_static, 4096 rows",
        lambda: products.linear_w8a8(floats(4096, HEADS), int8_static(HIDDEN, HEADS)),
        narrow=SCALES,
    ),
    *(
        Specimen(
            f"linear_{kind}, {rows} rows",
            lambda kind=kind, rows=rows: products.linear_int4(
                floats(rows, HEADS), four_bits(FOUR_BITS[kind], HIDDEN, HEADS)
            ),
            narrow=SCALES,
        )
        for kind in FOUR_BITS
        for rows in (16, 32, 64, 128, 4096)
    ),
    *(
        Specimen(
            f"grouped_mlp_{kind}, room for {room} rows",
            lambda kind=kind, room=room: experts(kind, EXPERTS, room),
            narrow=SCALES,
        )
        for kind, room in (
            ("fp8", 16),
            ("fp8", 32),
            ("fp8", 1024),
            ("int8", 16),
            ("int8", 1024),
            ("bf16", 16),
            ("bf16", 1024),
            ("int4", 16),
            ("int4", 1024),
            ("mxfp4", 16),
            ("mxfp4", 1024),
        )
    ),
    *(
        Specimen(
            f"grouped_mlp_{kind}, {rows} sorted rows", lambda kind=kind, rows=rows: experts(kind, rows), narrow=SCALES
        )
        for kind in ("fp8", "int8", "bf16", "int4", "mxfp4")
        for rows in (256, 32768)
    ),
)
