"""Bugs in how libraries for cards are called, and in the overlap of two batches."""

from __future__ import annotations

from tests.planted.mutant import Mutant

GROUPED = "test_deep_gemm.py::test_grouped_mlp_fp8"
DECODE = "test_flash_mla.py::test_mla_decode"
SPARSE = "test_flash_mla.py::test_mla_sparse"
HALVES = "test_overlap.py"
DISPATCH = "test_dispatch.py::test_on_ranks[deep_ep-elastic-fp8-2]"

MUTANTS = [
    Mutant(
        "an expert's rows begin within a tile of another expert",
        "slots_E = (counts_E + tile - 1) // tile * tile",
        "slots_E = counts_E",
        GROUPED,
    ),
    Mutant(
        "slots have too little room when every expert has a tile that is not full",
        "(num_rows + min(num_rows, last + 1) * (tile - 1)) // tile * tile",
        "(num_rows + tile - 1) // tile * tile",
        GROUPED,
    ),
    Mutant(
        "results of sorted rows are read where the rows were",
        "return y_MD.index_select(0, tiles.slot_S)",
        "return y_MD[: len(rows)]",
        GROUPED,
    ),
    Mutant(
        "counts of rows go to the library as int64",
        "counts_E, expected = counts_E.to(torch.int32), max",
        "counts_E, expected = counts_E.to(torch.int64), max",
        GROUPED,
    ),
    Mutant(
        "the build of SGLang, which has another name for the masked product, is not recognised",
        'MASKED = ("m_grouped_fp8_gemm_nt_masked", "fp8_m_grouped_gemm_nt_masked")',
        'MASKED = ("m_grouped_fp8_gemm_nt_masked",)',
        "test_deep_gemm.py::test_it_is_told_what_the_library_serves",
    ),
    Mutant(
        "the last tile of a room is written over the next one",
        "if x.ndim == 3 and x.shape[1] % ROOM_STEP:",
        "if False:",
        "test_deep_gemm.py::test_a_room_whose_last_tile_reaches_into_the_next_goes_to_the_next_provider",
    ),
    Mutant(
        "a part that ends within a block of scales is multiplied",
        "if weight.parts > 1 and outputs // weight.parts % BLOCK:",
        "if False:",
        "test_deep_gemm.py::test_what_the_kernels_do_not_take_goes_to_the_next_provider",
    ),
    Mutant(
        "earlier queries of a sequence see later ones",
        "torch.arange(1 - num_queries, 1,",
        "torch.zeros(num_queries,",
        DECODE,
    ),
    Mutant(
        "pages of another sequence's queries are read",
        "table_BM.to(torch.int32).repeat_interleave(num_queries, 0)",
        "table_BM.to(torch.int32).repeat(num_queries, 1)",
        DECODE,
    ),
    Mutant(
        "what the library lost is 0",
        "return out_T1HC + (0 * lse_TH1).mT[..., None].to(out_T1HC.dtype)",
        "return out_T1HC",
        SPARSE,
    ),
    Mutant(
        "positions beyond those chosen are read as the first slot of the pool",
        "(0, -num_chosen % SPARSE_STEP), value=-1)",
        "(0, -num_chosen % SPARSE_STEP), value=0)",
        SPARSE,
    ),
    Mutant(
        "a position is looked up in a page of twice the size",
        "positions_TS // PAGE_SIZE].long()",
        "positions_TS // (2 * PAGE_SIZE)].long()",
        SPARSE,
    ),
    Mutant(
        "the plan of sparse attention is one for dense attention",
        "num_heads_q=num_heads, is_fp8_kvcache=True, topk=slots_TS.shape[1]",
        "num_heads_q=num_heads",
        SPARSE,
    ),
    Mutant(
        "a call that the first provider declines fails",
        'if op not in getattr(module, "DECLINES", ()):\n            break',
        "break",
        "test_resolve.py::test_calls_that_a_provider_declines_go_to_the_next_one",
    ),
    Mutant(
        "rows are read before they have arrived",
        "rows, *rest, event = self.received\n        event.current_stream_wait()",
        "rows, *rest, event = self.received",
        DISPATCH,
    ),
    Mutant(
        "rows in FP8 lose their scales on the way",
        "numbers_TI=rows[0], scales_TN=rows[1]",
        "numbers_TI=rows[0], scales_TN=torch.ones_like(rows[1])",
        DISPATCH,
    ),
    Mutant(
        "the halves of a step run one after the other",
        "                if state_TD is None:\n                    break\n",
        "                if state_TD is None:\n                    continue\n",
        HALVES,
    ),
    Mutant(
        "a prompt's first half sees the tokens of its second",
        "context_lens=(*before.context_lens[:-1], before.context_lens[-1] - left),",
        "context_lens=before.context_lens,",
        HALVES,
    ),
    Mutant(
        "tokens of the second half belong to sequences of the first",
        "sequence_T=self.sequence_T[tokens] - first,",
        "sequence_T=self.sequence_T[tokens],",
        HALVES,
    ),
    Mutant(
        "a decode step is cut within a sequence",
        "middle = first * (len(self.tokens_T) // max(1, num_sequences))",
        "middle = -(-len(self.tokens_T) // 2)",
        HALVES,
    ),
    Mutant(
        "steps are halved in each layer alone",
        "if self.experts.two_batch_overlap and batch.cp.size == 1:",
        "if False:",
        HALVES,
    ),
    Mutant(
        "pieces of context-parallel ranks are halved",
        "if self.experts.two_batch_overlap and batch.cp.size == 1:",
        "if self.experts.two_batch_overlap:",
        HALVES,
    ),
]
