"""What a rank's device holds beside weights, pages and DeepEP's buffer."""

from __future__ import annotations

from collections.abc import Collection

from pdinfer.config import ExpertConfig, ModelConfig
from pdinfer.execution.graphs import KINDS
from pdinfer.kv.view import DTYPES
from pdinfer.moe.dispatchers.deep_ep_limits import ExpertSizes

DRIVER_BYTES = 1 << 30
"""An estimate for a process on a GPU: its CUDA context, loaded kernels, libraries' workspaces and NCCL's channels. It
lies within `mem_fraction_static`, as a pool finds it in use. A study of DeepSeek-V3 saw 65 and 70 of 79 GB in use on P2
and D2; 0.81 of a card, DeepEP's buffer and the rows at experts are 64.9 and 70.3 GiB."""


def room_bytes(config: ModelConfig, sizes: ExpertSizes, options: ExpertConfig, *, is_fp8: bool) -> int:
    """Return what rows take at the experts of a layer where their number is not known before: in DeepEP's low-latency
    mode, and in captured steps of its second API.

    An expert has room for the rows of all tokens of all ranks, or a token for the experts of a rank. Rows lie there as
    they came (in FP8 with a scale for 128 numbers if experts hold FP8), multiplied by gate and up, rounded again, and
    multiplied by down. Layers take turns, so this is there once, and once more with two batches.
    """
    tokens = sizes.num_ranks * options.num_max_dispatch_tokens_per_rank
    low_latency = options.deepep_mode == "low_latency"
    rows = tokens * (sizes.experts_per_rank if low_latency else min(sizes.top_k, sizes.experts_per_rank))
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    read = hidden + inner
    row = (read + 4 * read // 128 if is_fp8 else 2 * read) + 2 * (2 * inner + hidden)
    return rows * row * (1 + options.two_batch_overlap)


def graph_bytes(config: ModelConfig, sizes: Collection[int], num_queries: int) -> int:
    """Return what captured decode steps of `sizes` sequences keep, of `num_queries` tokens each.

    A step of each size and kind of draw has logits of its own, in float32 for the whole vocabulary. All of them work in
    the memory of the largest, where most is what the head gives before it becomes float32. It is an estimate: what
    layers take in turn, and what the driver keeps of each launch, is not counted.
    """
    if not sizes:
        return 0
    kept = len(KINDS) * sum({*sizes}) * 4
    return num_queries * config.vocab_size * (kept + max(sizes) * DTYPES[config.dtype].itemsize)
