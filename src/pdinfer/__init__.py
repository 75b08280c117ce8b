"""Disaggregated LLM inference to embed: prefill and decode as two objects that hand paged KV to each other.

Modules import downwards only. From the top: this file; `testing`; the pairing and its ports (`pairing`, `remote`);
the engines (`prefill`, `decode`); what an engine is made of (`schedule`, `graphs`, `sampling`, `weights`, `policy`);
`model`, `mtp`, `block`; attention and experts (`mla`, `dsa`, `moe`); `layers`, `batch`; the two folders that know
nothing of each other, `kernels` (compute) and `kv` (bytes); `config`, `topology`, `checkpoint`; `types`; `errors`.
"""

from __future__ import annotations

from pdinfer.errors import (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    LayoutMismatch,
    Overloaded,
    PDInferError,
    RequestError,
    TransferError,
)
from pdinfer.topology import Topology
from pdinfer.types import (
    FinishReason,
    Granted,
    Handoff,
    PageGrant,
    PeerAddress,
    Refused,
    Request,
    SamplingParams,
    TokenEvent,
)

__all__ = [
    "BackendUnavailable",
    "CheckpointError",
    "ConfigError",
    "FinishReason",
    "Granted",
    "Handoff",
    "LayoutMismatch",
    "Overloaded",
    "PDInferError",
    "PageGrant",
    "PeerAddress",
    "Refused",
    "Request",
    "RequestError",
    "SamplingParams",
    "TokenEvent",
    "Topology",
    "TransferError",
]
