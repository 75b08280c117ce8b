"""What DeepEP's kernels can carry. Sizes with which they would abort or hang are refused here, before one is entered.

Sources: deepseek-ai/DeepEP, docs/legacy.md and the checks in its kernels.
"""

from __future__ import annotations

import os

import attrs
import torch

from pdinfer.checks import clip
from pdinfer.errors import ConfigError

NORMAL_RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
NODE_RANKS = 8
"""So many neighbours reach each other over NVLink in its normal kernels, whatever nodes are like."""
MAX_TOP_K = 32
"""A lane of a warp for each."""
LOW_LATENCY_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
LOW_LATENCY_MAX_TOP_K = 11
LOW_LATENCY_MAX_TOKENS = 1024
"""What the flags of its kernels can count."""
HEAP_STEP_BYTES = 1 << 29
WORKSPACE_BYTES = 32 << 20
QP_DEPTH = "NVSHMEM_QP_DEPTH"
DEFAULT_QP_DEPTH = 1024
ELASTIC_MAX_RANKS = 1024
ELASTIC_MAX_EXPERTS = 2048
ELASTIC_MAX_EXPERTS_PER_RANK = 256
"""What its workspace has counters for (deep_ep/common/layout.cuh)."""
ELASTIC_ROW_STEP_BYTES = 32
ELASTIC_STEP_BYTES = 2 << 20
ELASTIC_WORKSPACE_BYTES = 14 << 20
"""1024 ranks with 1024 channels, 12 bytes for each, and 0.2 MB of counters (deep_ep/common/layout.cuh)."""
ELASTIC_CHANNELS = 8 * 160
"""Each may keep a row between nodes beside those of the step (csrc/elastic/buffer.hpp)."""


@attrs.frozen(kw_only=True)
class ExpertSizes:
    """The sizes that the kernels limit. `num_experts` counts the physical experts of all ranks."""

    num_ranks: int
    num_experts: int
    hidden_size: int
    top_k: int
    dtype: torch.dtype

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    def check_normal(self, ranks_per_node: int | None = None) -> None:
        """Raise ConfigError, with the value, for sizes that the kernels for prefill cannot serve."""
        if self.num_ranks not in NORMAL_RANKS:
            raise ConfigError(
                f"DeepEP's normal kernels exist for {', '.join(map(str, NORMAL_RANKS))} ranks, ep_size is "
                f"{self.num_ranks}"
            )
        if self.num_ranks > (on_node := ranks_per_node or self.num_ranks) and on_node % NODE_RANKS:
            raise ConfigError(
                f"DeepEP's normal kernels join {NODE_RANKS} neighbours over NVLink, ranks_per_node is {on_node} and "
                f'ep_size {self.num_ranks}: use deepep_mode "elastic"'
            )
        self._check_any()

    def check_low_latency(self, num_max_tokens: int) -> None:
        """Raise ConfigError, with the value, for sizes that the kernels for decode cannot serve."""
        if self.num_ranks < 2 or (self.num_ranks > 8 and self.num_ranks % 8):
            raise ConfigError(f"DeepEP needs 2 to 8 ranks or a multiple of 8, ep_size is {self.num_ranks}")
        if self.hidden_size not in LOW_LATENCY_HIDDEN_SIZES:
            raise ConfigError(
                f"DeepEP's low-latency kernels exist for hidden sizes {', '.join(map(str, LOW_LATENCY_HIDDEN_SIZES))}, "
                f"hidden_size is {self.hidden_size}"
            )
        if self.top_k > LOW_LATENCY_MAX_TOP_K:
            raise ConfigError(
                f"DeepEP's low-latency kernels send a token to at most {LOW_LATENCY_MAX_TOP_K} experts, "
                f"num_experts_per_tok is {self.top_k}"
            )
        most = min(LOW_LATENCY_MAX_TOKENS, (depth := qp_depth()) // 2 - 1)
        if not 1 <= num_max_tokens <= most:
            raise ConfigError(
                f"num_max_dispatch_tokens_per_rank must be from 1 to {most}, got {num_max_tokens}: it is at most "
                f"{LOW_LATENCY_MAX_TOKENS}, and 2 * (it + 1) at most {QP_DEPTH} = {depth} of the environment"
            )
        if num_max_tokens * self.num_ranks % 4:
            raise ConfigError(
                f"num_max_dispatch_tokens_per_rank * ep_size must be a multiple of 4, got {num_max_tokens} * "
                f"{self.num_ranks}"
            )
        self._check_any()

    def low_latency_bytes(self, num_max_tokens: int) -> int:
        """Return what the buffer of the kernels for decode takes of a GPU: rows that go and rows that come, for both
        batches that may be under way, with room for each expert's (csrc/legacy/config.hpp)."""
        scales = self.hidden_size // 128 * 4
        dispatched = 16 + 2 * self.hidden_size
        combined = 2 * self.hidden_size + scales
        rows = self.num_experts * num_max_tokens
        one = rows * combined + rows * max(dispatched, combined) + _up(self.num_experts * 4, 128)
        return gpu_bytes(nvlink=0, rdma=2 * one)

    def check_elastic(self, ranks_per_node: int | None = None) -> None:
        """Raise ConfigError, with the value, for sizes that the kernels of `ElasticBuffer` cannot serve."""
        if not 2 <= self.num_ranks <= ELASTIC_MAX_RANKS:
            raise ConfigError(
                f"DeepEP's elastic kernels are for 2 to {ELASTIC_MAX_RANKS} ranks, ep_size is {self.num_ranks}"
            )
        if self.num_ranks % min(self.num_ranks, ranks_per_node or self.num_ranks):
            raise ConfigError(
                f"DeepEP's elastic kernels want as many ranks on each node: ep_size {self.num_ranks} is no multiple of "
                f"ranks_per_node {ranks_per_node}"
            )
        if self.num_experts > ELASTIC_MAX_EXPERTS or self.experts_per_rank > ELASTIC_MAX_EXPERTS_PER_RANK:
            raise ConfigError(
                f"DeepEP's elastic kernels count at most {ELASTIC_MAX_EXPERTS} physical experts, "
                f"{ELASTIC_MAX_EXPERTS_PER_RANK} of a rank; there are {self.num_experts} on {self.num_ranks} ranks"
            )
        self._check_any(ELASTIC_ROW_STEP_BYTES)

    def elastic_bytes(self, num_max_tokens: int, ranks_per_node: int | None) -> int:
        """Return what an `ElasticBuffer` for rows of bfloat16 takes of a GPU, where the ranks of a node (None: all)
        reach each other over NVLink: the larger of both ways (csrc/elastic/buffer.hpp, calculate_buffer_size)."""
        tokens, on_node = num_max_tokens, min(self.num_ranks, ranks_per_node or self.num_ranks)
        nodes, top_k = self.num_ranks // on_node, self.top_k
        between = (nodes > 1) * nodes * (tokens + ELASTIC_CHANNELS)
        sent = self.num_ranks * tokens + (nodes > 1) * tokens + between
        returned = min(on_node, top_k) * nodes * tokens + (nodes > 1) * min(nodes, top_k) * tokens + between
        ways = sent * self._elastic_row(3 * top_k + 1), returned * self._elastic_row(2 * top_k)
        return _up(max(ways), ELASTIC_STEP_BYTES) + ELASTIC_WORKSPACE_BYTES

    def _elastic_row(self, num_words: int) -> int:
        """Return the bytes of a row and of what travels with it: ids, weights, and on the way there its origin."""
        step = ELASTIC_ROW_STEP_BYTES
        return _up(2 * self.hidden_size, step) + _up(4 * num_words, step)

    def _check_any(self, row_step_bytes: int = 16) -> None:
        if 2 * self.hidden_size % row_step_bytes:
            raise ConfigError(
                f"DeepEP sends rows of a multiple of {row_step_bytes} bytes here; hidden_size {self.hidden_size} in "
                f"bfloat16 is {2 * self.hidden_size}"
            )
        if self.top_k > MAX_TOP_K:
            raise ConfigError(
                f"DeepEP sends a token to at most {MAX_TOP_K} experts, num_experts_per_tok is {self.top_k}"
            )
        if self.num_experts % self.num_ranks:
            raise ConfigError(
                f"{self.num_experts} physical experts cannot be divided evenly over {self.num_ranks} ranks"
            )
        if self.dtype != torch.bfloat16:
            raise ConfigError(f"DeepEP carries rows of bfloat16, the model runs in {self.dtype}; load it in that dtype")


def gpu_bytes(*, nvlink: int, rdma: int) -> int:
    """Return what a `Buffer` takes of a GPU: the part over RDMA lies in NVSHMEM's heap, which grows in whole steps."""
    return _up(nvlink, 128) + _up(rdma, HEAP_STEP_BYTES) + WORKSPACE_BYTES


def _up(num_bytes: int, step: int) -> int:
    """Return the next multiple of a step."""
    return -(-num_bytes // step) * step


def qp_depth() -> int:
    """Return the length of NVSHMEM's queues, as DeepEP reads it. Raises ConfigError for what is no number."""
    text = os.environ.get(QP_DEPTH, str(DEFAULT_QP_DEPTH))
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"environment variable {QP_DEPTH} must be a plain number, got {clip(text)}")
    return int(text)
