"""Bugs in the products and experts of bfloat16 models in C."""

from __future__ import annotations

from tests.planted.mutant import Mutant

OPS = "test_ops.py"
BODIES = "test_native_bodies.py"
NATIVE_OPS = "test_native_ops.py"
SHAPES = "test_native_shapes.py"
LOADED = "test_strips.py"

MUTANTS = [
    Mutant(
        "native linear leaves out the end of a row",
        "add_products(rows, x + i, ldf, rest[0], PAIRS, acc);",
        "",
        f"{BODIES}::test_linear",
    ),
    Mutant(
        "native experts activate all rows but the last",
        "for (i64 r = 0; r < rows; r++)\n            silu_times(wide",
        "for (i64 r = 0; r < rows - 1; r++)\n            silu_times(wide",
        f"{OPS}::test_grouped_mlp",
    ),
    Mutant(
        "native routers leave out the last columns",
        "for (; i < n; i++) sum += a[i] * from_bf16(b[i]);",
        "",
        f"{NATIVE_OPS}::test_choose_experts",
    ),
    Mutant(
        "native rows of experts are those of the choice",
        "memcpy(y + row[n] * bytes, x + n / k * bytes, bytes);",
        "memcpy(y + row[n] * bytes, x + n % tokens * bytes, bytes);",
        f"{NATIVE_OPS}::test_sort_rows",
    ),
    Mutant(
        "native sort_rows copies the row of a choice that is none",
        "if (row[n] >= 0) memcpy",
        "if (1) memcpy",
        f"{NATIVE_OPS}::test_sort_rows",
    ),
    Mutant(
        "an MLP in one call has the rows of another step",
        '    return torch.tensor([rows], dtype=torch.int64, device="cpu")',
        '    return torch.tensor([1], dtype=torch.int64, device="cpu")',
        f"{NATIVE_OPS}::test_gated_mlp",
    ),
    Mutant(
        "native absorbed attention rotates what has no position",
        "library.rotate(q + size * nope, heads",
        "library.rotate(q, heads",
        f"{NATIVE_OPS}::test_mla_absorbed",
    ),
    Mutant(
        "native absorbed attention takes drafts for sequences",
        "rows // cache[2].shape[0], torch",
        "1, torch",
        f"{NATIVE_OPS}::test_mla_absorbed",
    ),
    Mutant(
        "native absorbed attention reads queries that lie apart",
        "for each in (q_THQ, pages_PGW, cos_TF, sin_TF)",
        "for each in (pages_PGW, cos_TF, sin_TF)",
        f"{NATIVE_OPS}::test_mla_absorbed",
    ),
    Mutant(
        "native strips drop the last inputs of a row",
        "for (i64 i = 0; i < MIN(32, inputs); i++) to[",
        "for (i64 i = 0; i < MIN(32, inputs) - 1; i++) to[",
        f"{BODIES}::test_linear",
    ),
    Mutant(
        "native experts keep what a strip has beyond the hidden values",
        "for (i64 i = MAX(0, there); i < 16; i++) row[i] = 0;",
        "for (i64 i = MAX(0, there); i < 16; i++) row[i] = NAN;",
        f"{BODIES}::test_experts",
    ),
    Mutant(
        "native experts of many rows all read the first expert's weights",
        "        to_next(&gate_up);\n        to_next(&down);\n",
        "",
        f"{BODIES}::test_experts",
    ),
    Mutant(
        "tiles forget the sums of the inputs before",
        "line, end, k > 0, to);\n            else",
        "line, end, 0, to);\n            else",
        f"{BODIES}::test_experts",
    ),
    Mutant(
        "tiles take a block of rows twice",
        "const bf16 *b = a + 16 * padded(n);",
        "const bf16 *b = a;",
        f"{BODIES}::test_experts",
    ),
    Mutant(
        "native products read two matrices in strips as one",
        "outs, width, weight.parts\n",
        "outs, width, 1\n",
        f"{SHAPES}::test_linear_with_strips",
    ),
    Mutant(
        "products with FP8 in strips take the scale of the first half for both",
        "LOWER * scales[h][b]",
        "LOWER * scales[0][b]",
        f"{BODIES}::test_fp8_in_strips",
    ),
    Mutant(
        "products with FP8 in strips make numbers of weights that are NaN",
        "int lost = holds_nan(strip, steps * STEP), few",
        "int lost = 0, few",
        f"{BODIES}::test_fp8_weights_that_are_nan_spoil_their_own_columns",
    ),
    Mutant(
        "experts with FP8 in strips multiply hidden values that were not rounded",
        "            if (way->finish) way->finish(part->rows, inner, part->hidden);\n",
        "            if (way->finish) way->finish(0, inner, part->hidden);\n",
        f"{BODIES}::test_experts_with_fp8_in_strips",
    ),
    Mutant(
        "threads that share experts have one panel for all of them",
        "whole ? own : shared + all * p",
        "whole ? own : shared",
        f"{SHAPES}::test_experts",
    ),
    Mutant(
        "a few rows pass over steps behind the end of a strip",
        "MIN(deep, steps - k),",
        "deep,",
        f"{SHAPES}::test_linear_with_strips",
    ),
    Mutant(
        "strips swap the columns of a pair",
        "_pairs(matrix_OI.contiguous())",
        "_pairs(matrix_OI.unflatten(-1, (-1, 2)).flip(-1).flatten(-2).contiguous())",
        f"{LOADED}::test_they_hold_the_same_values_in_another_order",
    ),
    Mutant(
        "the second of two matrices is written over the first",
        "strips.chunk(parts, -4)[index]",
        "strips.chunk(parts, -4)[0]",
        f"{LOADED}::test_they_hold_the_same_values_in_another_order",
    ),
    Mutant(
        "a model whose products torch was to compute lies in strips",
        "(*kind.ops(), *strips.ops())",
        "strips.ops()",
        f"{LOADED}::test_they_are_for_models_whose_products_are_all_of_the_provider_that_reads_them",
    ),
    Mutant(
        "a rank holds experts in strips that another reads as plain",
        "reduce(and_, [int.from_bytes(bytes(each)) for each in theirs[:, -CHOICE_BYTES:].tolist()])",
        "bits",
        "test_ranks.py::test_ranks_hold_experts_alike",
    ),
    Mutant(
        "of FP8 in strips the blocks behind the fifth are left out",
        "for (i64 b = 0; b < blocks; b++, strip += DEPTH * STEP)",
        "for (i64 b = 0; b < MIN(blocks, 5); b++, strip += DEPTH * STEP)",
        "test_native_bodies.py::test_fp8_in_strips_of_many_blocks",
    ),
    Mutant(
        "blocks behind the fifth have the scales of the fifth",
        "by[m] = LOWER * scales[h][b] * panels->scales[(first + m) * blocks + b];",
        "by[m] = LOWER * scales[h][MIN(b, 4)] * panels->scales[(first + m) * blocks + b];",
        "test_native_bodies.py::test_experts_with_fp8_in_strips",
    ),
]
