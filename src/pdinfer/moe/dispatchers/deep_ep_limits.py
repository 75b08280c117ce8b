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
LOW_LATENCY_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
LOW_LATENCY_MAX_TOP_K = 11
LOW_LATENCY_MAX_TOKENS = 1024
"""What the flags of its kernels can count."""
HEAP_STEP_BYTES = 1 << 29
WORKSPACE_BYTES = 32 << 20
QP_DEPTH = "NVSHMEM_QP_DEPTH"
DEFAULT_QP_DEPTH = 1024
ELASTIC_MAX_RANKS = 2048
ELASTIC_MAX_TOP_K = 32


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

    def check_normal(self) -> None:
        """Raise ConfigError, with the value, for sizes that the kernels for prefill cannot serve."""
        if self.num_ranks not in NORMAL_RANKS:
            raise ConfigError(
                f"DeepEP's normal kernels exist for {', '.join(map(str, NORMAL_RANKS))} ranks, ep_size is "
                f"{self.num_ranks}"
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
        one = rows * combined + rows * max(dispatched, combined) + -(-self.num_experts * 4 // 128) * 128
        return gpu_bytes(nvlink=0, rdma=2 * one)

    def check_elastic(self) -> None:
        """Raise ConfigError, with the value, for sizes that the kernels of `ElasticBuffer` cannot serve."""
        if not 2 <= self.num_ranks <= ELASTIC_MAX_RANKS:
            raise ConfigError(
                f"DeepEP's elastic kernels are for 2 to {ELASTIC_MAX_RANKS} ranks, ep_size is {self.num_ranks}"
            )
        if self.top_k > ELASTIC_MAX_TOP_K:
            raise ConfigError(
                f"DeepEP's elastic kernels send a token to at most {ELASTIC_MAX_TOP_K} experts, num_experts_per_tok is "
                f"{self.top_k}"
            )
        self._check_any()

    def _check_any(self) -> None:
        if self.hidden_size % 8:
            raise ConfigError(
                f"DeepEP sends rows of a multiple of 16 bytes; hidden_size {self.hidden_size} in bfloat16 is "
                f"{2 * self.hidden_size}"
            )
        if self.num_experts % self.num_ranks:
            raise ConfigError(
                f"{self.num_experts} physical experts cannot be divided evenly over {self.num_ranks} ranks"
            )
        if self.dtype != torch.bfloat16:
            raise ConfigError(f"DeepEP carries rows of bfloat16, the model runs in {self.dtype}; load it in that dtype")


def gpu_bytes(*, nvlink: int, rdma: int) -> int:
    """Return what a `Buffer` takes of a GPU: the part over RDMA lies in NVSHMEM's heap, which grows in whole steps."""
    return -(-nvlink // 128) * 128 + -(-rdma // HEAP_STEP_BYTES) * HEAP_STEP_BYTES + WORKSPACE_BYTES


def qp_depth() -> int:
    """Return the length of NVSHMEM's queues, as DeepEP reads it. Raises ConfigError for what is no number."""
    text = os.environ.get(QP_DEPTH, str(DEFAULT_QP_DEPTH))
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"environment variable {QP_DEPTH} must be a plain number, got {clip(text)}")
    return int(text)
