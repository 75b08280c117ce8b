"""Products with quantized weights of DeepSeek-V3: an output map, and 32 experts of a rank."""

from __future__ import annotations

import torch
from torch import Tensor

from pdinfer.kernels.formats.activations import FP8Rows
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic, Int8Static
from pdinfer.kernels.triton import products
from tests.unit.kernels.aot import Specimen

HIDDEN, WIDTH, EXPERTS, HEADS = 7168, 2048, 32, 16384
FP8 = torch.float8_e4m3fn
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


def experts(kind: str, *rows: int) -> None:
    """Run the experts on rows sorted by expert, or in room for some rows each."""
    counts_E = empty(EXPERTS, dtype=torch.int32 if len(rows) > 1 else torch.int64)
    if kind == "fp8":
        gate_up, down = fp8(EXPERTS, 2 * WIDTH, HIDDEN, parts=2), fp8(EXPERTS, HIDDEN, WIDTH)
        products.grouped_mlp_fp8(fp8_rows(*rows, HIDDEN), counts_E, gate_up, down)
    elif kind == "int8":
        gate_up, down = int8(EXPERTS, 2 * WIDTH, HIDDEN), int8(EXPERTS, HIDDEN, WIDTH)
        products.grouped_mlp_w8a8_dynamic(floats(*rows, HIDDEN), counts_E, gate_up, down)
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
        )
    ),
    *(
        Specimen(
            f"grouped_mlp_{kind}, {rows} sorted rows", lambda kind=kind, rows=rows: experts(kind, rows), narrow=SCALES
        )
        for kind, rows in (("fp8", 256), ("fp8", 32768), ("int8", 256), ("int8", 32768), ("bf16", 256), ("bf16", 32768))
    ),
)
