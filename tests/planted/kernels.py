"""Bugs in ops, in their bounds, and with values that are not finite."""

from __future__ import annotations

from tests.planted.mutant import Mutant

S = "src/pdinfer/execution/sampling.py"
US = "tests/unit/execution/test_sampling.py"
C = "src/pdinfer/kernels/native/native.c"
N = "src/pdinfer/kernels/native/ops.py"
R = "src/pdinfer/kernels/reference.py"
T = "src/pdinfer/kernels/torch_ops.py"
W = "src/pdinfer/kernels/weight_formats.py"
OPS = "tests/conformance/test_ops.py"
QUANTIZED = "tests/conformance/test_quantized_ops.py"
ATTENTION = "tests/conformance/test_attention_ops.py"
ROUTING = "tests/conformance/test_routing_ops.py"
NATIVE_OPS = "tests/conformance/test_native_ops.py"
BAD = "tests/conformance/test_not_finite.py"
SPARSE = "tests/conformance/test_sparse_ops.py"

MUTANTS = [
    Mutant(
        "native mla_decode joins parts without rescaling",
        C,
        "sums[k * heads + h] * maxima[k * heads + h];",
        "sums[k * heads + h];",
        f"{ATTENTION}::test_long_contexts_are_decoded_in_parts",
    ),
    Mutant(
        "native mla_decode joins the values of parts without rescaling",
        C,
        "maxima[k * heads + h] = expf(maxima[k * heads + h] - top);",
        "maxima[k * heads + h] = 1;",
        f"{ATTENTION}::test_long_contexts_are_decoded_in_parts",
    ),
    Mutant(
        "native mla_decode loses the last token of a part",
        C,
        "first, MIN(first + part, lens[b]),",
        "first, MIN(first + part - 1, lens[b]),",
        f"{ATTENTION}::test_long_contexts_are_decoded_in_parts",
    ),
    Mutant(
        "native combine_rows drops a choice when k > 7",
        C,
        "for (i64 n = t * k; n < (t + 1) * k; n++)\n                sum = _mm512",
        "for (i64 n = t * k; n < t * k + MIN(k, 7); n++)\n                sum = _mm512",
        f"{OPS}::test_rows_of_experts",
    ),
    Mutant(
        "torch combine_rows drops a choice when k > 7",
        T,
        "zip(row_TK.unbind(1), weights_TK.unbind(1), strict=True)",
        "zip(row_TK[:, :7].unbind(1), weights_TK[:, :7].unbind(1), strict=True)",
        f"{OPS}::test_rows_of_experts",
    ),
    Mutant(
        "native linear takes any dtype",
        N,
        "if x_TI.dtype not in _LINEARS or not _are(x_TI.dtype, weight_OI) or not fits",
        "if not fits",
        f"{NATIVE_OPS}::test_native_ops_leave_other_dtypes_to_torch",
    ),
    Mutant(
        "native linear takes a weight of another dtype",
        N,
        "or not _are(x_TI.dtype, weight_OI) or not fits",
        "or not fits",
        f"{NATIVE_OPS}::test_native_products_of_two_dtypes_are_refused_as_torch_does",
    ),
    Mutant(
        "native heads_out takes any dtype",
        N,
        "readable = packed and _are(torch.bfloat16, x_THC, weight_HVC)",
        "readable = packed",
        f"{NATIVE_OPS}::test_native_ops_leave_other_dtypes_to_torch",
    ),
    Mutant(
        "native rms_norm takes elements that lie apart",
        N,
        "if x_TD.stride(-1) != 1 or not _are",
        "if not _are",
        f"{NATIVE_OPS}::test_native_ops_read_strided_rows",
    ),
    Mutant(
        "native route takes the highest of equal experts",
        C,
        "(best < 0 || choice[e] > choice[best])",
        "(best < 0 || choice[e] >= choice[best])",
        f"{ROUTING}::test_ties_of_a_router_are_broken_alike",
    ),
    Mutant(
        "native route drops the first of equal groups",
        C,
        "worth[g] <= worth[least]",
        "worth[g] < worth[least]",
        f"{ROUTING}::test_ties_of_a_router_are_broken_alike",
    ),
    Mutant(
        "native route computes scores in float32",
        C,
        "1 / (1 + exp(-(double)in[e]))",
        "1 / (1 + expf(-in[e]))",
        f"{ROUTING}::test_ties_of_a_router_are_broken_alike",
    ),
    Mutant(
        "torch route computes scores in float32",
        R,
        "exact = logits_TE.double()",
        "exact = logits_TE",
        f"{ROUTING}::test_equal_logits_are_equal_scores_wherever_they_stand",
    ),
    Mutant(
        "ties of a router depend on topk",
        R,
        "return values.sort(descending=True, stable=True).indices[:, :count]",
        "return values.topk(count, -1).indices",
        f"{ROUTING}::test_ties_of_a_router_are_broken_alike",
    ),
    Mutant(
        "native route does not see a logit that is not finite",
        C,
        "lost += 0 * in[e] + (bias",
        "lost += (bias",
        f"{BAD}::test_a_router_with_a_logit_that_is_not_finite_weighs_nothing",
    ),
    Mutant(
        "native route does not see a bias that is not finite",
        C,
        "lost += 0 * in[e] + (bias ? 0 * bias[e] : 0);",
        "lost += 0 * in[e];",
        f"{BAD}::test_a_router_with_a_logit_that_is_not_finite_weighs_nothing",
    ),
    Mutant(
        "torch route does not see a bias that is not finite",
        R,
        "choice, lost = scores + bias_E, lost + not_finite(bias_E)",
        "choice = scores + bias_E",
        f"{BAD}::test_a_router_with_a_logit_that_is_not_finite_weighs_nothing",
    ),
    Mutant(
        "native attention gives a score of -inf no weight",
        C,
        "total = _mm512_mask3_fmadd_ps(s[k], zero, total, there);",
        "",
        f"{BAD}::test_a_cached_row_that_is_not_finite_is_seen_by_all_who_read_it",
    ),
    Mutant(
        "native attention forgets a first block without a finite score",
        C,
        "        *sum += _mm512_reduce_add_ps(total);\n        return;",
        "        return;",
        f"{BAD}::test_a_bad_row_in_a_long_prompt_is_seen_by_all_behind_it {BAD}::test_a_bad_row_is_seen_in_every_part_of_a_long_context",
    ),
    Mutant(
        "torch attention gives a score of -inf no weight",
        T,
        "return scores.amin(-1, keepdim=True) * 0",
        "return scores[..., :1] * 0",
        f"{BAD}::test_a_cached_row_that_is_not_finite_is_seen_by_all_who_read_it",
    ),
    Mutant(
        "torch attention in blocks gives a score of -inf no weight",
        T,
        "weights.sum(-1, keepdim=True) + lost_HT1",
        "weights.sum(-1, keepdim=True)",
        f"{BAD}::test_a_bad_row_in_a_long_prompt_is_seen_by_all_behind_it",
    ),
    Mutant(
        "attention to nothing is zero",
        R,
        "out = torch.full_like(q_latent_THC, torch.nan)",
        "out = torch.zeros_like(q_latent_THC)",
        f"{BAD}::test_attention_to_nothing_is_nan",
    ),
    Mutant(
        "an index key of infinity is a score of 0",
        T,
        "keys_SY = keys_SY + reference.not_finite(keys_SY)",
        "pass",
        f"{BAD}::test_a_token_whose_index_scores_are_not_finite_chooses_nothing",
    ),
    Mutant(
        "a bad key spoils tokens before it",
        T,
        "lost_T1 = ~scores_TS.masked_fill_(future_TS, 0).isfinite()",
        "lost_T1 = ~scores_TS.isfinite()",
        f"{BAD}::test_a_token_whose_index_scores_are_not_finite_chooses_nothing",
    ),
    Mutant(
        "native rms_norm makes zeros of what overflows",
        C,
        "+ eps) + 0 * total;",
        "+ eps);",
        f"{BAD}::test_squares_that_overflow_are_no_row_of_zeros",
    ),
    Mutant(
        "norms make zeros of what overflows",
        R,
        "return torch.rsqrt(mean + eps) + 0 * mean",
        "return torch.rsqrt(mean + eps)",
        f"{BAD}::test_squares_that_overflow_are_no_row_of_zeros",
    ),
    Mutant(
        "NaN of e4m3 is 480",
        W,
        "bits ^= (bits + 0x80).bitwise_and_(0x4000)",
        "bits &= ~0x4000",
        f"{BAD}::test_every_fp8_number_is_worth_what_it_says",
    ),
    Mutant(
        "static int8 forgets that a token was not finite",
        T,
        "return (y + reference.not_finite(x_TI)).to(x_TI.dtype)",
        "return y.to(x_TI.dtype)",
        f"{BAD}::test_a_row_that_is_not_finite_stays_so",
    ),
    Mutant(
        "native linear leaves out the end of a row",
        C,
        "for (; i < n; i += 32) {",
        "for (; i + 32 <= n; i += 32) {",
        f"{OPS}::test_linear",
    ),
    Mutant(
        "native experts activate all rows but the last",
        C,
        "for (i64 r = 0; r < rows; r++)\n            silu_times(wide",
        "for (i64 r = 0; r < rows - 1; r++)\n            silu_times(wide",
        f"{OPS}::test_grouped_mlp",
    ),
    Mutant(
        "native prefill shifts what a later block of queries sees",
        C,
        "values, offset + first, scale,",
        "values, offset, scale,",
        f"{ATTENTION}::test_attention",
    ),
    Mutant(
        "native prefill does not rescale earlier sums when the maximum rises",
        C,
        "        *sum *= shrink;\n",
        "",
        f"{ATTENTION}::test_attention",
    ),
    Mutant(
        "native router's product leaves out the last columns",
        C,
        "left >= 16 ? 0xFFFF : left > 0 ? (1u << left) - 1 : 0;\n                    const float",
        "left >= 16 ? 0xFFFF : 0;\n                    const float",
        f"{OPS}::test_a_router_stays_float32",
    ),
    Mutant(
        "+inf on a forbidden token does not end the request",
        "src/pdinfer/execution/sampling.py",
        "if not math.isfinite(normalizer):",
        "if normalizer != normalizer:",
        "tests/unit/execution/test_sampling.py::test_a_spoilt_logit_ends_its_request_whatever_else_is_asked tests/e2e/test_not_finite.py::test_a_logit_of_infinity_ends_a_request_that_may_not_take_it",
    ),
    Mutant(
        "a token that the model rules out is emitted",
        "src/pdinfer/execution/sampling.py",
        "elif error is None and not math.isfinite(logprob):",
        "elif error is None and logprob != logprob:",
        "tests/unit/execution/test_sampling.py::test_a_processor_cannot_bring_back_what_the_model_rules_out",
    ),
    Mutant(
        "pages of a failed request stay known to decode",
        "src/pdinfer/engine/decode.py",
        "        if not isinstance(error, RequestError):\n            self._tables.forget(sequence)\n        self._end(",
        "        self._end(",
        "tests/e2e/test_not_finite.py::test_a_bad_page_that_was_cached_fails_one_request_and_is_forgotten",
    ),
    Mutant(
        "pages of a failed prompt stay known to prefill",
        "src/pdinfer/engine/prefill.py",
        "            self.pool.forget(prompt.pages)\n",
        "            pass\n",
        "tests/e2e/test_not_finite.py::test_a_bad_page_that_was_cached_fails_one_request_and_is_forgotten",
    ),
    Mutant(
        "drafts after an error count as accepted",
        "src/pdinfer/execution/runner.py",
        "drawn[right].error is None and ",
        "",
        "tests/unit/execution/test_runner.py",
    ),
    Mutant(
        "native route divides by a sum that may be 0",
        C,
        "(normalize ? sum + 1e-20f : 1.0f)",
        "(normalize ? sum : 1.0f)",
        f"{ROUTING}::test_ties_of_a_router_are_broken_alike",
    ),
    Mutant(
        "route divides by a sum that may be 0",
        R,
        "(weights.sum(-1, keepdim=True) + 1e-20)",
        "weights.sum(-1, keepdim=True)",
        f"{ROUTING}::test_ties_of_a_router_are_broken_alike",
    ),
    Mutant(
        "native route weighs with the bias", C, "sum += scores[best];", "sum += choice[best];", f"{ROUTING}::test_route"
    ),
    Mutant(
        "native router values a group by its best alone",
        C,
        "worth[g] = bias && size > 1 ? first + second : first;",
        "worth[g] = first;",
        f"{ROUTING}::test_route",
    ),
    Mutant(
        "native softmax forgets that its maximum rose",
        C,
        "        *maximum = now;\n",
        "        *maximum = before;\n",
        f"{ATTENTION}::test_attention",
    ),
    Mutant(
        "native prefill cuts a context inside a page",
        N,
        "step = 0, KEYS // page_size * page_size",
        "step = 0, KEYS",
        f"{ATTENTION}::test_native_prefill_expands_a_context_piece_by_piece",
    ),
    Mutant(
        "native prefill forgets where a piece starts",
        N,
        "context - num_queries - start,",
        "context - num_queries,",
        f"{ATTENTION}::test_native_prefill_expands_a_context_piece_by_piece",
    ),
    Mutant(
        "an FP8 matrix in blocks takes the scales of its first rows",
        T,
        "dequantize_fp8(weight.numbers[rows], scale_of_row[rows], floats_OI)",
        "dequantize_fp8(weight.numbers[rows], scale_of_row[: len(floats_OI)], floats_OI)",
        f"{QUANTIZED}::test_rows_of_an_fp8_matrix_become_floats_block_by_block",
    ),
    Mutant(
        "a stop token may come one token early",
        S,
        "if len(self.output) >= self.sampling.min_new_tokens:",
        "if len(self.output) + 1 >= self.sampling.min_new_tokens:",
        US,
    ),
    Mutant(
        "ignore_eos is not checked",
        S,
        "*(() if self.sampling.ignore_eos else self.eos_token_ids)",
        "*self.eos_token_ids",
        US,
    ),
    Mutant(
        "a processor's error is overwritten",
        S,
        "errors.setdefault(row, _nothing_left(some[row]))",
        "errors[row] = _nothing_left(some[row])",
        US,
    ),
]
