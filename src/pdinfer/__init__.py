"""Disaggregated LLM inference to embed: prefill and decode as two objects that hand paged KV to each other.

Modules import downwards only. From the top: this file; `testing`; the pairing and its ports (`pairing`, `remote`);
the engines (`prefill`, `decode`); what an engine is made of (`schedule`, `sampling`, `weights`, `policy`, `inbox`);
`model`, `block`; attention and experts (`mla`, `moe`); `layers`, `batch`; the two folders that know nothing of each
other, `kernels` (compute) and `kv` (bytes); `config`, `topology`, `checkpoint`; `groups`; `types`; `errors`.
"""

from __future__ import annotations

import logging

from pdinfer import kernels, kv, moe, remote, testing
from pdinfer.checkpoint.quantize import quantize_checkpoint
from pdinfer.config import CacheConfig, EngineConfig, ExpertConfig, ModelConfig, PairingConfig, RemoteConfig
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    Forked,
    LayoutMismatch,
    Overloaded,
    PDInferError,
    RankLost,
    RequestError,
    TransferError,
)
from pdinfer.kernels.ops import Ops
from pdinfer.kernels.resolve import explain_backends
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.pool import PagePool
from pdinfer.model.load import load_model
from pdinfer.model.model import Model
from pdinfer.moe.balance.deepseek import rebalance_experts
from pdinfer.moe.placement.placement import ExpertPlacement
from pdinfer.pairing import policy
from pdinfer.pairing.pairing import Pairing
from pdinfer.parallel.topology import Topology
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
    "CacheConfig",
    "CheckpointError",
    "ConfigError",
    "DecodeEngine",
    "EngineConfig",
    "ExpertConfig",
    "ExpertPlacement",
    "FinishReason",
    "Forked",
    "Granted",
    "Handoff",
    "KVChannel",
    "LayoutMismatch",
    "Model",
    "ModelConfig",
    "Ops",
    "Overloaded",
    "PDInferError",
    "PageGrant",
    "PagePool",
    "Pairing",
    "PairingConfig",
    "PeerAddress",
    "PrefillEngine",
    "RankLost",
    "Refused",
    "RemoteConfig",
    "Request",
    "RequestError",
    "SamplingParams",
    "TokenEvent",
    "Topology",
    "TransferError",
    "explain_backends",
    "kernels",
    "kv",
    "load_model",
    "moe",
    "policy",
    "quantize_checkpoint",
    "rebalance_experts",
    "remote",
    "testing",
]

logging.getLogger("pdinfer").addHandler(logging.NullHandler())
