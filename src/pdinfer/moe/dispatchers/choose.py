"""Which dispatcher carries tokens between the ranks of a group."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from pdinfer.config import ExpertConfig
from pdinfer.errors import BackendUnavailable, ConfigError
from pdinfer.kernels.ops import Ops
from pdinfer.moe.dispatchers.all_to_all import AllToAllDispatcher, Int8AllToAllDispatcher
from pdinfer.moe.dispatchers.base import LocalDispatcher, TokenDispatcher
from pdinfer.moe.dispatchers.deep_ep import DeepEPLowLatency, DeepEPNormal
from pdinfer.moe.dispatchers.deep_ep_elastic import DeepEPElastic
from pdinfer.moe.dispatchers.deep_ep_limits import DeepEPConfig, ExpertSizes
from pdinfer.parallel.groups import Group

_Kind = (
    type[LocalDispatcher]
    | type[AllToAllDispatcher]
    | type[Int8AllToAllDispatcher]
    | type[DeepEPNormal]
    | type[DeepEPLowLatency]
    | type[DeepEPElastic]
)
DEEP_EP: Mapping[str, _Kind] = MappingProxyType(
    {"normal": DeepEPNormal, "low_latency": DeepEPLowLatency, "elastic": DeepEPElastic}
)
"""The dispatchers of DeepEP by `deepep_mode`."""


def check_dispatcher(sizes: ExpertSizes, options: ExpertConfig, device: torch.device) -> None:
    """Check that `options.moe_a2a_backend` can carry rows of these sizes between ranks on such a device.

    Raises ConfigError, with the values, for sizes or a number of ranks it cannot serve, and BackendUnavailable for a
    device it cannot serve."""
    backend = options.moe_a2a_backend
    if backend == "local" and sizes.num_ranks > 1:
        raise ConfigError(
            f'moe_a2a_backend "local" is for one rank and experts are spread over {sizes.num_ranks}; leave it "auto"'
        )
    if backend == "deep_ep" and device.type != "cuda":
        raise BackendUnavailable(
            f'moe_a2a_backend "deep_ep" carries rows between GPUs, the device is {device}; use "all_to_all"'
        )
    if backend == "deep_ep" and options.deepep_mode == "low_latency":
        sizes.check_low_latency(options.num_max_dispatch_tokens_per_rank)
    elif backend == "deep_ep" and options.deepep_mode == "elastic":
        sizes.check_elastic(options.ranks_per_node)
    elif backend == "deep_ep":
        sizes.check_normal(options.ranks_per_node)
        buffer_bytes(sizes, options)  # which refuses what is too large


def buffer_bytes(sizes: ExpertSizes, options: ExpertConfig) -> int:
    """Return what the buffer of a dispatcher takes of a GPU, beside the tensors of torch."""
    if options.moe_a2a_backend != "deep_ep":
        return 0
    if options.deepep_mode == "elastic":
        return sizes.elastic_bytes(options.num_max_dispatch_tokens_per_rank, options.ranks_per_node)
    if options.deepep_mode == "low_latency":
        return sizes.low_latency_bytes(options.num_max_dispatch_tokens_per_rank)
    path = options.deepep_config
    config = DeepEPConfig.of_library(sizes.num_ranks) if path is None else DeepEPConfig.read(path)
    return config.buffer_bytes(sizes.hidden_size, sizes.num_ranks)


def graph_safe(num_ranks: int, options: ExpertConfig) -> bool:
    """Return whether decode steps with the dispatcher of so many ranks can be captured."""
    return _kind(num_ranks, options).graph_safe


def _kind(num_ranks: int, options: ExpertConfig) -> _Kind:
    backend = options.moe_a2a_backend
    if backend == "deep_ep":
        return DEEP_EP[options.deepep_mode]
    if backend == "all_to_all_int8":
        return Int8AllToAllDispatcher
    return LocalDispatcher if backend == "local" or (backend == "auto" and num_ranks == 1) else AllToAllDispatcher


def choose_dispatcher(
    group: Group, sizes: ExpertSizes, options: ExpertConfig, ops: Ops, device: torch.device
) -> TokenDispatcher:
    """Return the dispatcher that `options.moe_a2a_backend` names. A collective.

    Raises BackendUnavailable where it is not available, ConfigError for sizes it cannot serve."""
    check_dispatcher(sizes, options, device)
    kind, room = _kind(group.size, options), options.num_max_dispatch_tokens_per_rank
    if kind is LocalDispatcher:
        return LocalDispatcher(sizes.num_experts, ops)
    if kind is AllToAllDispatcher:
        return AllToAllDispatcher(group, sizes.experts_per_rank, ops)
    if kind is Int8AllToAllDispatcher:
        return Int8AllToAllDispatcher(AllToAllDispatcher(group, sizes.experts_per_rank, ops))
    if kind is DeepEPElastic:
        return DeepEPElastic.connect(group, sizes, room, options.deepep_num_sms, device=device)
    if kind is DeepEPLowLatency:
        return DeepEPLowLatency.connect(group, sizes, room, device=device)
    config = None if options.deepep_config is None else DeepEPConfig.read(options.deepep_config)
    return DeepEPNormal.connect(group, sizes, ops, config, device=device)
