"""Bugs in attention on a CPU, and in its products with quantized weights."""

from __future__ import annotations

from tests.planted.mutant import Mutant

ATTENTION = "test_attention_ops.py"
QUANTIZED = "test_quantized_ops.py"
BAD = "conformance/test_not_finite.py"
MEMORY = "test_native_memory.py"
BODIES = "test_native_bodies.py"
COMPILES = "test_native_compiles.py"
SHAPES = "test_native_shapes.py"

MUTANTS = [
    Mutant(
        "native mla_decode joins parts without rescaling",
        "sums[k * rows + r] * maxima[k * rows + r];",
        "sums[k * rows + r];",
        f"{ATTENTION}::test_long_contexts_are_decoded_in_parts",
    ),
    Mutant(
        "native mla_decode joins the values of parts without rescaling",
        "maxima[k * rows + r] = expf(maxima[k * rows + r] - top);",
        "maxima[k * rows + r] = 1;",
        f"{ATTENTION}::test_long_contexts_are_decoded_in_parts",
    ),
    Mutant(
        "native mla_decode loses the last token of a part",
        "first, MIN(first + part, lens[b]),",
        "first, MIN(first + part - 1, lens[b]),",
        f"{ATTENTION}::test_long_contexts_are_decoded_in_parts",
    ),
    Mutant(
        "native mla_decode lets every query see the drafts behind it",
        "MIN(start + TOKENS, last), seen + n)",
        "MIN(start + TOKENS, last), seen + queries)",
        f"{ATTENTION}::test_several_queries_of_a_sequence_see_each_other_in_order",
    ),
    Mutant(
        "native mla_decode weighs a latent behind a query by 0",
        "(t < TOKENS ? stop : last) - 1);",
        "last - 1);",
        f"{ATTENTION}::test_a_query_whose_latent_was_not_written_changes_no_other",
    ),
    Mutant(
        "fused attention takes cached tokens for the first of the queries' own",
        "if 0 < before < k_HSQ.shape[1]:",
        "if 0 < before < 0:",
        f"{ATTENTION}::test_a_context_of_many_blocks_is_joined",
    ),
    Mutant(
        "fused attention joins parts without rescaling",
        "sum_HTV.mul_(kept[..., None])",
        "sum_HTV",
        f"{ATTENTION}::test_a_context_of_many_blocks_is_joined",
    ),
    Mutant(
        "fused attention loses every query that shares a block with a bad key",
        ".cummax(-1).values.index_select(1, newest_T)",
        ".any(-1, keepdim=True)",
        f"{ATTENTION}::test_torch_queries_before_a_row_that_is_not_finite_keep_what_they_see",
    ),
    Mutant(
        "fused attention takes products that overflow",
        "if not largest * largest_key * width < LARGEST_SCORE:",
        "if False:",
        f"{BAD}::test_a_score_that_overflows_is_seen",
    ),
    Mutant(
        "native attention gives a score of -inf no weight",
        "total += choose(there, 0 * scaled, all_of(0));",
        "",
        f"{BAD}::test_a_cached_row_that_is_not_finite_is_seen_by_all_who_read_it",
    ),
    Mutant(
        "native attention forgets a first block without a finite score",
        "        *sum += sum_of(total);\n        return;",
        "        return;",
        f"{BAD}::test_a_bad_row_in_a_long_prompt_is_seen_by_all_behind_it {BAD}::test_a_bad_row_is_seen_in_every_part_of_a_long_context",
    ),
    Mutant(
        "native prefill shifts what a later block of queries sees",
        "values, offset + first, scale,",
        "values, offset, scale,",
        f"{ATTENTION}::test_attention",
    ),
    Mutant(
        "native prefill does not rescale earlier sums when the maximum rises",
        "        *sum *= shrink;\n",
        "",
        f"{ATTENTION}::test_attention",
    ),
    Mutant(
        "native softmax forgets that its maximum rose",
        "        *maximum = now;\n",
        "        *maximum = before;\n",
        f"{ATTENTION}::test_attention",
    ),
    Mutant(
        "native prefill cuts a context inside a page",
        "step = 0, KEYS // page_size * page_size",
        "step = 0, KEYS",
        f"{ATTENTION}::test_native_prefill_expands_a_context_piece_by_piece",
    ),
    Mutant(
        "native prefill forgets where a piece starts",
        "context - num_queries - start,",
        "context - num_queries,",
        f"{ATTENTION}::test_native_prefill_expands_a_context_piece_by_piece",
    ),
    Mutant(
        "native int8 forgets the rest of a row",
        "for (; i < n; i += WIDTH) {",
        "for (; i + WIDTH <= n; i += WIDTH) {",
        f"{QUANTIZED}::test_linear_int8",
    ),
    Mutant(
        "native int8 forgets by how much its bytes without a sign are more",
        "(words)acc[m] - OFFSET * (words)own",
        "(words)acc[m]",
        f"{BODIES}::test_stored_weights",
    ),
    Mutant(
        "native int8 cuts what it should round",
        "(load_bf16(x + i) / scale + 12582912.0f) - 12582912.0f, ints)",
        "load_bf16(x + i) / scale, ints)",
        f"{QUANTIZED}::test_linear_int8",
    ),
    Mutant(
        "native int8 experts take the scales of the first expert",
        "down_scales + e * width, inner",
        "down_scales, inner",
        f"{QUANTIZED}::test_grouped_mlp_of_quantized_experts",
    ),
    Mutant(
        "native int8 makes numbers of a row that is not finite",
        "    if (lost != lost) return lost;\n",
        "",
        f"{BAD}::test_a_row_that_is_not_finite_stays_so",
    ),
    Mutant(
        "native fp8 takes the scales of the first part",
        "(o / rows * blocks_of(rows) + o % rows / BLOCK)",
        "(o % rows / BLOCK)",
        f"{QUANTIZED}::test_linear_fp8",
    ),
    Mutant(
        "native fp8 makes numbers of weights that are NaN",
        "float lost = holds_nan(rows[r], w->n) ? NAN : 0; ",
        "float lost = 0;                                  ",
        f"{BAD}::test_a_weight_that_is_nan_is_no_number",
    ),
    Mutant(
        "native fp8 rounds small numbers as large ones",
        "(words)(size < 0x1p-6f)",
        "(words)(size < 0x1p-9f)",
        f"{QUANTIZED}::test_what_is_rounded_is_equal_on_every_device",
    ),
    Mutant(
        "native products of many rows hide that a thread lacks memory",
        "            if (each && !packed) lacking = each;\n",
        "",
        f"{MEMORY}::test_every_allocation_may_fail",
    ),
    Mutant(
        "native experts hide that a thread lacks memory",
        "        if (!able) lacking = own ? of_strip : all;\n",
        "",
        f"{MEMORY}::test_every_allocation_may_fail",
    ),
    Mutant(
        "native INT8 exchanges the rows of weights whose sums are added together",
        "memcpy((int *)&c + r, &some, sizeof some);",
        "memcpy((int *)&c + (r ^ 4), &some, sizeof some);",
        f"{QUANTIZED}::test_linear_int8",
    ),
    Mutant(
        "native experts leave panels to no one where a thread lacks memory",
        "            if (!own) continue;\n",
        "            if (!able) continue;\n",
        f"{MEMORY}::test_every_allocation_may_fail",
    ),
    Mutant(
        "native linear does not say what a kernel lacks",
        '    if lacking:\n        raise lacks(lacking, f"a product of {rows} rows{form}")\n',
        "",
        f"{MEMORY}::test_every_allocation_may_fail",
    ),
    Mutant(
        "native kernels keep the memory of threads that ended",
        "        if (key_works) pthread_setspecific(key, rooms);\n",
        "",
        f"{MEMORY}::test_a_thread_that_ends_leaves_nothing_behind",
    ),
    Mutant(
        "AVX-512 BF16 products read a value beyond the last",
        "__mmask32 some = n - i >= 32 ? ~0u : (1u << (n - i)) - 1; ",
        "__mmask32 some = n - i >= 31 ? ~0u : (2u << (n - i)) - 1; ",
        f"{SHAPES}::test_linear",
    ),
    Mutant(
        "AVX-512 BF16 sums over heads come back in the order of their lanes",
        "#define HIGH _mm512_set_epi32(31, 30, 29, 28, 15, 14, 13, 12, 27, 26, 25, 24, 11, 10, 9, 8)",
        "#define HIGH _mm512_set_epi32(31, 30, 29, 28, 27, 26, 25, 24, 15, 14, 13, 12, 11, 10, 9, 8)",
        f"{SHAPES}::test_products_of_heads",
    ),
    Mutant(
        "decode by floats takes even values of a token for odd ones",
        "left = odd(load_pairs(one)), right = odd(load_pairs(other));",
        "left = even(load_pairs(one)), right = odd(load_pairs(other));",
        f"{BODIES}::test_attention",
    ),
    Mutant(
        "decode by floats leaves values in the order of its sums",
        "store(to, load(to) + FIRST_OF(acc[a][0], acc[a][1]));",
        "store(to, load(to) + acc[a][0]);",
        f"{BODIES}::test_attention",
    ),
    Mutant(
        "decode by floats weighs the values of other heads",
        "value_heads, weights + h * (TOKENS / PER), token",
        "value_heads, weights, token",
        f"{BODIES}::test_attention",
    ),
    Mutant(
        "decode by floats loses one of five heads",
        "case 5: call(5, __VA_ARGS__); break;",
        "case 5: call(4, __VA_ARGS__); break;",
        f"{BODIES}::test_attention",
    ),
    Mutant(
        "AVX-512 BF16 decode weighs the values of other heads",
        "weights + (h + MIN(a, some - 1)) * (TOKENS / 2) + t / 2;",
        "weights + (h + MIN(a, some - 1)) * TOKENS + t / 2;",
        f"{BODIES}::test_attention",
    ),
    Mutant(
        "AVX-512 reads the second half of FP8 numbers as the first",
        "_mm512_extracti64x4_epi64(bits, 1)",
        "_mm512_extracti64x4_epi64(bits, 0)",
        f"{BODIES}::test_stored_weights",
    ),
    Mutant(
        "tiles of AMX are used without permission",
        "    if (!allowed()) return 0;\n",
        "",
        f"{BODIES}::test_tiles_that_are_not_allowed_are_not_used",
    ),
    Mutant(
        "sources ask for 8 lanes where vectors have 16",
        "#if LANES == 8 && defined(__AVX2__)",
        "#if defined(__AVX2__)",
        f"{COMPILES}::test_every_source_compiles_and_every_library_links_for",
    ),
    Mutant(
        "an instruction of AVX-512 BF16 is used wherever vectors have 16 lanes",
        "#ifdef HAVE_BF16\nINLINE bf16 to_bf16",
        "#if LANES == 16\nINLINE bf16 to_bf16",
        f"{COMPILES}::test_every_source_compiles_and_every_library_links_for",
    ),
    Mutant(
        "attention by tiles asks the library of products whether there are tiles",
        "return found ? &by_tiles : NULL;",
        "const void *by_tiles_or_null(void);\n    return by_tiles_or_null() ? &by_tiles : NULL;",
        f"{COMPILES}::test_every_source_compiles_and_every_library_links_for",
        "decode_tiles.c",
    ),
    Mutant(
        "the library of FP8 lacks a source that it calls",
        '("fp8.c", "fp8_strips.c", "parts.c", "strips.c", "room.c")',
        '("fp8.c", "fp8_strips.c", "parts.c", "room.c")',
        f"{COMPILES}::test_every_source_compiles_and_every_library_links_for",
    ),
    Mutant(
        "FP8 in strips reads half of its numbers twice with AVX2",
        "_mm256_extracti128_si256(bits, 1)",
        "_mm256_extracti128_si256(bits, 0)",
        f"{SHAPES}::test_every_body_that_this_cpu_can_run_gives_what_its_own_gives",
        "fp8_strips.c",
    ),
    Mutant(
        "tiles of AMX stay configured",
        "    else _tile_release();\n",
        "",
        f"{BODIES}::test_tiles_are_left_as_they_were_configured",
    ),
    Mutant(
        "decode by tiles gives every group of rows the first group's queries",
        "score_group(tokens, width, q + g * GROUP * width / 2, by_token);",
        "score_group(tokens, width, q, by_token);",
        f"{BODIES}::test_attention",
    ),
    Mutant(
        "decode by tiles takes the third sixteen tokens for the last",
        "LOAD(5, tokens[3] + i,",
        "LOAD(5, tokens[2] + i,",
        f"{BODIES}::test_attention",
    ),
    Mutant(
        "decode by tiles weighs the second half of a block as the first",
        "LOAD(5, weights + 32,",
        "LOAD(5, weights,",
        f"{BODIES}::test_attention",
    ),
    Mutant(
        "decode by tiles lets every query see the drafts behind it",
        "MIN(stop, seen + row / of->heads) - start;",
        "stop - start;",
        f"{BODIES}::test_attention",
    ),
    Mutant(
        "decode by tiles loses the drafts' own tokens",
        "token, MAX(0, shared), visible, rank,",
        "token, visible, visible, rank,",
        f"{BODIES}::test_attention",
    ),
    Mutant(
        "decode by tiles weighs tokens that not all queries see by 0",
        "second = _mm_set1_epi16(t + 1 < count ? -1 : 0);",
        "second = first;",
        f"{BODIES}::test_a_draft_that_was_not_written_changes_no_query_before_it",
    ),
    Mutant(
        "decode by tiles looks at the last of sixteen tokens alone",
        "apart |= token[t] != token[0]",
        "apart = token[t] != token[0]",
        f"{BODIES}::test_tokens_of_a_tile_lie_in_the_order_of_the_table",
    ),
    Mutant(
        "decode by tiles reads queries behind the last",
        "MIN(r + k, rows - 1)",
        "(r + k)",
        f"{SHAPES}::test_decode",
    ),
    Mutant(
        "decode by tiles reads tokens behind a context",
        "token_of(of, b, MIN(start + t, last - 1));",
        "token_of(of, b, start + t);",
        f"{SHAPES}::test_decode",
    ),
    Mutant(
        "decode by tiles keeps the tiles' configuration",
        "    end(&before);\n",
        "",
        f"{BODIES}::test_tiles_are_left_as_they_were_configured",
        "decode_tiles.c",
    ),
    Mutant(
        "decode by tiles asks for no permission",
        "return found ? &by_tiles : NULL;",
        "return &by_tiles;",
        f"{BODIES}::test_tiles_that_are_not_allowed_are_not_used",
        "decode_tiles.c",
    ),
    Mutant(
        "decode by tiles has room for the rows that are there, and writes whole tiles",
        "static const Body by_tiles = {GROUP,",
        "static const Body by_tiles = {1,",
        f"{BODIES}::test_attention",
    ),
    Mutant(
        "decode hides that a thread lacks memory",
        "            failed = 1;\n",
        "            failed = 0;\n",
        f"{MEMORY}::test_every_allocation_may_fail",
    ),
    Mutant(
        "rows of experts are read past their end",
        "        for (; i + PAIRS <= n; i += PAIRS) {\n            words pairs = load_pairs(x",
        "        for (; i < n; i += PAIRS) {\n            words pairs = load_pairs(x",
        f"{SHAPES}::test_memory_may_lie_anywhere",
    ),
    Mutant(
        "native add_rms_norm normalises x without the residual",
        "norm(sum + r * n, n, w, eps, y + r * n);",
        "norm(x + r * n, n, w, eps, y + r * n);",
        "test_fused_ops.py::test_add_rms_norm",
    ),
    Mutant(
        "native combine_experts rounds once, behind the residual",
        "load_bf16(residual + first + i) + rounded(sum)",
        "load_bf16(residual + first + i) + sum",
        "test_fused_ops.py::test_the_residual_is_added_to_what_was_rounded",
    ),
    Mutant(
        "native norm_rotate_store writes to a slot behind the cache",
        "if (slots[r] < 0 || slots[r] >= num_slots) {",
        "if (slots[r] < 0) {",
        "test_native_ops.py::test_a_slot_outside_the_cache_is_refused",
    ),
    Mutant(
        "native norm_rotate_store stores latents that were to be rounded as they are",
        "    if rounding is not None or not rows or",
        "    if not rows or",
        "test_fused_ops.py::test_latents_are_stored_as_kv_b_proj_rounds_them",
    ),
]
