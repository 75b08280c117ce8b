"""The tuned file that SGLang's `--deepep-config` names: how DeepEP's kernels for prefill cut their traffic."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import attrs

from pdinfer.checks import clip, int_field
from pdinfer.errors import ConfigError
from pdinfer.files import naming, read_json

MAX_TOKENS = 1 << 16


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
