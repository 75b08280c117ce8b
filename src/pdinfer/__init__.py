"""Disaggregated LLM inference to embed: prefill and decode as two objects that hand paged KV to each other.

Start with `pairing/pairing.py`, and follow one request down. Modules import downwards only, from the top:

    __init__      The names that hosts use.
    testing/      Tests get tiny models, virtual time and a network that fails on demand.
    planning/     A plan of many engines is checked, and a load is run through simulated ones, without a device.
    diagnosis/    A machine is examined before anything runs on it.
    metrics/      A service shows what it does: metrics for Prometheus, and spans for OpenTelemetry.
    bench/        A load is sent, every request is recorded, and the figures are checked.
    aio           Coroutines read the events of a Pairing that a thread steps.
    pairing/      A Pairing chooses a prefill and a decode for each request, and copes when one of them is lost.
    text/         Tokens come from text and from chats, text comes from tokens, and stop strings end it.
    remote/       An engine in another process takes part in a Pairing like one that is here.
    engine/       An engine decides which requests enter, what runs in this step, and which one gives way.
    execution/    One step runs on one rank: rows go in, tokens come out.
    model/        The network turns tokens into hidden states, and reads and writes pages through a view.
    moe/          Experts are placed on ranks, tokens are routed to them, and they move while engines run.
    checkpoint/   The files of a model folder are read without trust, and written shard by shard.
    layers        Linear maps, norms, the gated MLP and rotary angles are the smallest parts of a model.
    kv/           Pages of the cache have a layout, an owner, and channels that carry them between engines.
    config/       The host's choices and the model's architecture are checked and frozen.
    parallel/     Ranks are divided into groups, which act together.
    kernels/      Ops compute on tensors, and for each of them the best provider here is chosen.
    files         Files are read as if nobody vouched for them.
    trace         A profile on demand shows what the steps of an engine spend their time on.
    inbox         Any thread puts items into a box, and the one that steps takes them out.
    stats         Engines, channels and Pairings tell their loads and counts by value.
    checks        Configurations share these checks of ranges and sizes.
    types         Requests, grants, hand-offs and events are the values that travel.
    process/      Forks, locks, memory and temporary folders belong to the process around an engine.
    stop          A matcher says where a request has to stop, and an automaton finds sequences in a stream.
    bounds        Each value that a peer sends has a bound, which stands in its type.
    errors        Every error that is raised on purpose has a class and a stable code.

`kv` moves bytes and `kernels` computes; neither knows of the other.
"""

from __future__ import annotations

import logging

from pdinfer import aio, bench, kernels, kv, metrics, moe, planning, remote, testing, text
from pdinfer.bench.slo import SLO
from pdinfer.checkpoint.quantize import quantize_checkpoint
from pdinfer.config import CacheConfig, EngineConfig, ExpertConfig, ModelConfig, PairingConfig, RemoteConfig
from pdinfer.diagnosis.doctor import doctor
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
from pdinfer.execution.graphs import explain_graphs
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
from pdinfer.stop import StopMatcher
from pdinfer.trace import join_traces
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

__all__ = [  # noqa: RUF022 - in plain order
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
    "SLO",
    "SamplingParams",
    "StopMatcher",
    "TokenEvent",
    "Topology",
    "TransferError",
    "aio",
    "bench",
    "doctor",
    "explain_backends",
    "explain_graphs",
    "join_traces",
    "kernels",
    "kv",
    "load_model",
    "metrics",
    "moe",
    "planning",
    "policy",
    "quantize_checkpoint",
    "rebalance_experts",
    "remote",
    "testing",
    "text",
]

logging.getLogger("pdinfer").addHandler(logging.NullHandler())
