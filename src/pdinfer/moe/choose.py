"""Which dispatcher carries tokens between the ranks of a group."""

from __future__ import annotations

import torch

from pdinfer.config import ExpertConfig
from pdinfer.errors import BackendUnavailable, ConfigError
from pdinfer.groups import Group
from pdinfer.kernels.ops import Ops
from pdinfer.moe.all_to_all import AllToAllDispatcher
from pdinfer.moe.deep_ep import DeepEPLowLatency, DeepEPNormal, ExpertSizes
from pdinfer.moe.deep_ep_config import DeepEPConfig
from pdinfer.moe.dispatch import LocalDispatcher, TokenDispatcher


def choose_dispatcher(
    group: Group, sizes: ExpertSizes, options: ExpertConfig, ops: Ops, device: torch.device
) -> TokenDispatcher:
    """The one that `options.moe_a2a_backend` names; a collective. Raises BackendUnavailable where it cannot be had,
    ConfigError for sizes it cannot do."""
    backend = options.moe_a2a_backend
    if backend == "local" and group.size > 1:
        raise ConfigError(
            f'moe_a2a_backend "local" is for one rank and experts are spread over {group.size}; leave it "auto"'
        )
    if backend == "deep_ep":
        return _deep_ep(group, sizes, options, ops, device)
    if backend == "local" or (backend == "auto" and group.size == 1):
        return LocalDispatcher(sizes.num_experts, ops)
    return AllToAllDispatcher(group, sizes.experts_per_rank, ops)


def _deep_ep(
    group: Group, sizes: ExpertSizes, options: ExpertConfig, ops: Ops, device: torch.device
) -> DeepEPNormal | DeepEPLowLatency:
    if device.type != "cuda":
        raise BackendUnavailable(
            f'moe_a2a_backend "deep_ep" carries rows between GPUs, the device is {device}; use "all_to_all"'
        )
    if options.deepep_mode == "low_latency":
        return DeepEPLowLatency.connect(group, sizes, options.num_max_dispatch_tokens_per_rank, device=device)
    config = None if options.deepep_config is None else DeepEPConfig.read(options.deepep_config)
    return DeepEPNormal.connect(group, sizes, ops, config)
