"""The tuned file that SGLang's `--deepep-config` names: how DeepEP's kernels for prefill cut their traffic."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs

from pdinfer.checks import clip, int_field
from pdinfer.errors import ConfigError
from pdinfer.files import naming, read_json
from pdinfer.moe.dispatchers.deep_ep_limits import NODE_RANKS, gpu_bytes

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
    less than its receive size.
    """

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
