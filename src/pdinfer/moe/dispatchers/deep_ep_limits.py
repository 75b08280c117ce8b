"""What DeepEP's kernels can carry. Sizes with which they would abort or hang are refused here, before one is entered.

`DeepEPConfig` is the tuned file that SGLang's `--deepep-config` names: how the kernels for prefill cut their traffic.

Sources: deepseek-ai/DeepEP, docs/legacy.md and the checks in its kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs
import torch

from pdinfer.checks import clip, int_field
from pdinfer.errors import ConfigError
from pdinfer.files import naming, read_json

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
        one = rows * combined + rows * max(dispatched, combined) + round_up(self.num_experts * 4, 128)
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
        return round_up(max(ways), ELASTIC_STEP_BYTES) + ELASTIC_WORKSPACE_BYTES

    def _elastic_row(self, num_words: int) -> int:
        """Return the bytes of a row and of what travels with it: ids, weights, and on the way there its origin."""
        step = ELASTIC_ROW_STEP_BYTES
        return round_up(2 * self.hidden_size, step) + round_up(4 * num_words, step)

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
    return round_up(nvlink, 128) + round_up(rdma, HEAP_STEP_BYTES) + WORKSPACE_BYTES


def round_up(num_bytes: int, step: int) -> int:
    """Return the next multiple of `step`."""
    return -(-num_bytes // step) * step


def qp_depth() -> int:
    """Return the length of NVSHMEM's queues, as DeepEP reads it. Raises ConfigError for what is no number."""
    text = os.environ.get(QP_DEPTH, str(DEFAULT_QP_DEPTH))
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise ConfigError(f"environment variable {QP_DEPTH} must be a plain number, got {clip(text)}")
    return int(text)


MAX_TOKENS = 1 << 16
MOST_BYTES = (1 << 31) - 1
"""Of either part of a buffer for ranks on several nodes: its kernels count them as int (csrc/legacy/buffer.hpp)."""
ROW_BYTES = 8 + 128 * (8 + 4 + 4)
"""Beside a row itself: where it comes from, and room for 128 ids, weights and scales."""
LIBRARY = {
    2: (256, 6, 6),
    16: (288, 20, 12),
    24: (288, 8, 8),
    96: (480, 12, 8),
    128: (560, 12, 8),
    144: (720, 12, 8),
}
"""From so many ranks on: tokens that are received over NVLink, and sent over RDMA on the way there and back."""


@attrs.frozen(kw_only=True)
class DeepEPChunks:
    """The arguments of `deep_ep.Config`: the number of streaming multiprocessors, and how many tokens are sent and
    received in one piece over NVLink and RDMA.

    DeepEP rounds a receive size of RDMA up to a multiple of the send size. Raises ConfigError where a send size is not
    less than its receive size."""

    num_sms: int = int_field(2, 1024, default=20)
    num_max_nvl_chunked_send_tokens: int = int_field(1, MAX_TOKENS, default=6)
    num_max_nvl_chunked_recv_tokens: int = int_field(1, MAX_TOKENS, default=256)
    num_max_rdma_chunked_send_tokens: int = int_field(1, MAX_TOKENS, default=6)
    num_max_rdma_chunked_recv_tokens: int = int_field(1, MAX_TOKENS, default=256)

    def __attrs_post_init__(self) -> None:
        if self.num_sms % 2:
            raise ConfigError(f"num_sms must be even, got {self.num_sms}")
        for link in ("nvl", "rdma"):
            send = getattr(self, f"num_max_{link}_chunked_send_tokens")
            receive = getattr(self, f"num_max_{link}_chunked_recv_tokens")
            if send >= receive:
                raise ConfigError(
                    f"num_max_{link}_chunked_send_tokens must be less than num_max_{link}_chunked_recv_tokens, got "
                    f"{send} and {receive}"
                )

    def buffer_bytes(self, hidden_size: int, num_ranks: int) -> int:
        """Return what a buffer for such pieces of rows takes of a GPU (csrc/legacy/config.hpp). Raises ConfigError for
        one that the kernels between nodes cannot have."""
        channels, nodes, on_node = self.num_sms // 2, max(1, num_ranks // NODE_RANKS), min(num_ranks, NODE_RANKS)
        row = 2 * hidden_size + ROW_BYTES
        nvlink = channels * on_node * (4 * (2 * nodes + 3) + self.num_max_nvl_chunked_recv_tokens * row)
        if nodes == 1:
            return gpu_bytes(nvlink=nvlink, rdma=0)
        send = self.num_max_rdma_chunked_send_tokens
        received = -(-self.num_max_rdma_chunked_recv_tokens // send) * send
        rdma = 2 * channels * nodes * (4 * (2 * NODE_RANKS + 2) + received * (row + 16))
        if max(nvlink, rdma) > MOST_BYTES:
            raise ConfigError(
                f"num_sms {self.num_sms} with pieces of {self.num_max_nvl_chunked_recv_tokens} and "
                f"{received} tokens that are received needs {nvlink} and {rdma} bytes over NVLink and RDMA for "
                f"{num_ranks} ranks, DeepEP's buffers have at most {MOST_BYTES} each: lower num_sms or what is received"
            )
        return gpu_bytes(nvlink=nvlink, rdma=rdma)


@attrs.frozen(kw_only=True)
class DeepEPConfig:
    """The content of such a file: dispatch and combine, with equal `num_sms`. Missing keys have DeepEP's defaults."""

    normal_dispatch: DeepEPChunks
    normal_combine: DeepEPChunks

    def __attrs_post_init__(self) -> None:
        if self.normal_dispatch.num_sms != self.normal_combine.num_sms:
            raise ConfigError(
                f"normal_dispatch has num_sms {self.normal_dispatch.num_sms} and normal_combine "
                f"{self.normal_combine.num_sms}: they must be equal"
            )

    @classmethod
    def of_library(cls, num_ranks: int) -> DeepEPConfig:
        """Return what DeepEP takes by itself, as far as the sizes of buffers go (deep_ep/buffers/legacy.py)."""
        most = max(ranks for ranks in LIBRARY if ranks <= num_ranks)
        nvlink, send, combine_send = LIBRARY[most]
        parts = [
            DeepEPChunks(
                num_max_nvl_chunked_recv_tokens=nvlink,
                num_max_rdma_chunked_send_tokens=sent,
                num_max_rdma_chunked_recv_tokens=128,
            )
            for sent in (send, combine_send)
        ]
        return cls(normal_dispatch=parts[0], normal_combine=parts[1])

    def buffer_bytes(self, hidden_size: int, num_ranks: int) -> int:
        """Return what the buffer for both takes of a GPU."""
        return max(part.buffer_bytes(hidden_size, num_ranks) for part in (self.normal_dispatch, self.normal_combine))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> DeepEPConfig:
        """Read a file. Raises ConfigError, which names the file."""
        fields = read_json(path)
        with naming(path):
            return cls.from_dict(fields)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> DeepEPConfig:
        """Read the fields of a file. Raises ConfigError for unknown keys and for values that DeepEP cannot use."""
        parts = [field.name for field in attrs.fields(cls)]
        for name in parts:
            if not isinstance(fields.get(name), Mapping):
                raise ConfigError(f"{name} must be an object, got {clip(fields.get(name))}")
        known = [field.name for field in attrs.fields(DeepEPChunks)]
        unknown = sorted({*fields} - {*parts}) + sorted({key for name in parts for key in fields[name]} - {*known})
        if unknown:
            raise ConfigError(f"unknown keys {clip(unknown)}; there are {', '.join((*parts, *known))}")
        return cls(**{name: DeepEPChunks(**fields[name]) for name in parts})
