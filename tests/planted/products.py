"""Bugs in the products and experts of bfloat16 models in C."""

from __future__ import annotations

from tests.planted.mutant import Mutant

EXPERTS = "src/pdinfer/kernels/native/experts.c"
FLOATS = "src/pdinfer/kernels/native/floats.c"
PRODUCTS = "src/pdinfer/kernels/native/products.c"
STRIPS = "src/pdinfer/kernels/native/strips.c"
TILES = "src/pdinfer/kernels/native/tiles.c"
OPS = "tests/conformance/test_ops.py"
BODIES = "tests/conformance/test_native_bodies.py"

MUTANTS = [
    Mutant(
        "native linear leaves out the end of a row",
        FLOATS,
        "ADD(M, R, rest[r])",
        "",
        f"{BODIES}::test_linear",
    ),
    Mutant(
        "native experts activate all rows but the last",
        EXPERTS,
        "for (i64 r = 0; r < rows; r++)\n            silu_times(wide",
        "for (i64 r = 0; r < rows - 1; r++)\n            silu_times(wide",
        f"{OPS}::test_grouped_mlp",
    ),
    Mutant(
        "native router's product leaves out the last columns",
        PRODUCTS,
        "for (; i < n; i++) sum += a[i] * b[i];",
        "",
        f"{OPS}::test_a_router_stays_float32",
    ),
    Mutant(
        "native strips drop the last inputs of a row",
        STRIPS,
        "for (i64 i = 0; i < MIN(32, inputs); i++) to[",
        "for (i64 i = 0; i < MIN(32, inputs) - 1; i++) to[",
        f"{BODIES}::test_linear",
    ),
    Mutant(
        "native experts keep what a strip has beyond the hidden values",
        EXPERTS,
        "for (i64 i = there; i < 16; i++) row[i] = 0;",
        "for (i64 i = there; i < 16; i++) row[i] = NAN;",
        f"{BODIES}::test_experts",
    ),
    Mutant(
        "native experts of many rows all read the first expert's weights",
        EXPERTS,
        "gate_up + e * 2 * inner * width, down + e * width * inner, y + row * width",
        "gate_up, down, y + row * width",
        f"{BODIES}::test_experts",
    ),
    Mutant(
        "tiles forget the sums of the inputs before",
        TILES,
        "steps, n, k > 0, c + STRIP * m);\n            else",
        "steps, n, 0, c + STRIP * m);\n            else",
        f"{BODIES}::test_experts",
    ),
    Mutant(
        "tiles take a block of rows twice",
        TILES,
        "const bf16 *b = a + 16 * padded(n);",
        "const bf16 *b = a;",
        f"{BODIES}::test_experts",
    ),
]
