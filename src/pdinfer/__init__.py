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
    identity      The weights of an engine are told from others, and the tensors that differ are found.
    progress      Long work tells how far it is: to a function, or in a line on stderr.
    checks        Public names share these checks of ranges, sizes and kinds of arguments.
    types         Requests, grants, hand-offs and events are the values that travel.
    process/      Forks, locks, memory and temporary folders belong to the process around an engine.
    stop          A matcher says where a request has to stop, and an automaton finds sequences in a stream.
    bounds        Each value that a peer sends has a bound, which stands in its type.
    tokens        Token ids come in any sequence of ints, and are kept as a tuple.
    values        A value is shown in one short line or a table, and told as plain data.
    errors        Every error that is raised on purpose has a class and a stable code.

`kv` moves bytes and `kernels` computes; neither knows of the other.
"""

from __future__ import annotations

import importlib.util
import logging
import typing

if typing.TYPE_CHECKING:
    from pdinfer import adapters, aio, bench, kernels, kv, metrics, moe, planning, remote, testing, text
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
    from pdinfer.execution.sampling import LogitsProcessor
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
    from pdinfer.stats import DecodeLoad, PairingStats, PrefillLoad
    from pdinfer.stop import StopMatcher
    from pdinfer.trace import join_traces
    from pdinfer.types import (
        Event,
        FinishReason,
        Granted,
        Handoff,
        HandoffStatus,
        PageGrant,
        PeerAddress,
        Refused,
        Request,
        SamplingParams,
        Timeline,
        TokenEvent,
        Usage,
    )
    from pdinfer.values import asdict

    __version__: str

__all__ = [  # noqa: RUF022 - in plain order
    "BackendUnavailable",
    "CacheConfig",
    "CheckpointError",
    "ConfigError",
    "DecodeEngine",
    "DecodeLoad",
    "EngineConfig",
    "Event",
    "ExpertConfig",
    "ExpertPlacement",
    "FinishReason",
    "Forked",
    "Granted",
    "Handoff",
    "HandoffStatus",
    "KVChannel",
    "LayoutMismatch",
    "LogitsProcessor",
    "Model",
    "ModelConfig",
    "Ops",
    "Overloaded",
    "PDInferError",
    "PageGrant",
    "PagePool",
    "Pairing",
    "PairingConfig",
    "PairingStats",
    "PeerAddress",
    "PrefillEngine",
    "PrefillLoad",
    "RankLost",
    "Refused",
    "RemoteConfig",
    "Request",
    "RequestError",
    "SLO",
    "SamplingParams",
    "StopMatcher",
    "Timeline",
    "TokenEvent",
    "Topology",
    "TransferError",
    "Usage",
    "adapters",
    "aio",
    "asdict",
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

_HOMES: dict[str, tuple[str, ...]] = {
    "pdinfer.bench.slo": ("SLO",),
    "pdinfer.checkpoint.quantize": ("quantize_checkpoint",),
    "pdinfer.config": (
        "CacheConfig",
        "EngineConfig",
        "ExpertConfig",
        "ModelConfig",
        "PairingConfig",
        "RemoteConfig",
    ),
    "pdinfer.diagnosis.doctor": ("doctor",),
    "pdinfer.engine.decode": ("DecodeEngine",),
    "pdinfer.engine.prefill": ("PrefillEngine",),
    "pdinfer.errors": (
        "BackendUnavailable",
        "CheckpointError",
        "ConfigError",
        "Forked",
        "LayoutMismatch",
        "Overloaded",
        "PDInferError",
        "RankLost",
        "RequestError",
        "TransferError",
    ),
    "pdinfer.execution.graphs": ("explain_graphs",),
    "pdinfer.execution.sampling": ("LogitsProcessor",),
    "pdinfer.kernels.ops": ("Ops",),
    "pdinfer.kernels.resolve": ("explain_backends",),
    "pdinfer.kv.channel.channel": ("KVChannel",),
    "pdinfer.kv.pool": ("PagePool",),
    "pdinfer.model.load": ("load_model",),
    "pdinfer.model.model": ("Model",),
    "pdinfer.moe.balance.deepseek": ("rebalance_experts",),
    "pdinfer.moe.placement.placement": ("ExpertPlacement",),
    "pdinfer.pairing.pairing": ("Pairing",),
    "pdinfer.parallel.topology": ("Topology",),
    "pdinfer.stats": (
        "DecodeLoad",
        "PairingStats",
        "PrefillLoad",
    ),
    "pdinfer.stop": ("StopMatcher",),
    "pdinfer.trace": ("join_traces",),
    "pdinfer.types": (
        "Event",
        "FinishReason",
        "Granted",
        "Handoff",
        "HandoffStatus",
        "PageGrant",
        "PeerAddress",
        "Refused",
        "Request",
        "SamplingParams",
        "Timeline",
        "TokenEvent",
        "Usage",
    ),
    "pdinfer.values": ("asdict",),
}
"""Where each name lives. Its module is imported when the name is first used, so that `import pdinfer` costs nothing and
a program pays only for the parts that it uses."""


def _version() -> str:
    """Return the version of what is installed; "0+checkout" for sources that were not installed."""
    from importlib import metadata

    try:
        return metadata.version("pdinfer")
    except metadata.PackageNotFoundError:
        return "0+checkout"


if not typing.TYPE_CHECKING:  # or a type checker would believe in every name

    def __getattr__(name: str) -> object:
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is not None:
            value = getattr(importlib.import_module(home), name)
        elif name == "policy":
            value = importlib.import_module("pdinfer.pairing.policy")
        elif name == "__version__":
            value = _version()
        elif not name.startswith("_") and importlib.util.find_spec(f"pdinfer.{name}") is not None:
            return importlib.import_module(f"pdinfer.{name}")
        else:
            raise AttributeError(f"module 'pdinfer' has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]


logging.getLogger("pdinfer").addHandler(logging.NullHandler())
