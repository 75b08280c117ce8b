"""How long the way of tokens to experts and back takes, and the sums of ranks that share heads."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from pdinfer.kv.view import DTYPES
from pdinfer.planning.parts import Hardware, parts
from pdinfer.planning.plan import EnginePlan

_TABLE_TOKENS, _TABLE_TOP_K, _TABLE_HIDDEN = 128, 8, 7168
_TABLE_NIC = 50e9
"""The sizes and the NIC of DeepEP's published times."""


@attrs.frozen
class Traffic:
    """What an engine's ranks send in a step."""

    plan: EnginePlan
    hardware: Hardware

    def seconds(self, num_tokens: Any, *, imbalance: float) -> dict[str, Any]:
        """Return the seconds that a step of so many tokens in each attention group sends, all layers together: to
        experts and back, and for sums. The fullest rank of experts has `imbalance` times the mean of rows."""
        config, at = self.plan.config, self.plan.topology
        group = at.tp_size * at.cp_size
        num_moe = (config.num_hidden_layers - config.first_k_dense_replace) * (self.plan.placement is not None)
        return {
            "all-to-all": num_moe * self._all_to_all_s(num_tokens / group * imbalance),
            "all-reduce": config.num_hidden_layers * self._sums_s(num_tokens / at.cp_size),
        }

    @property
    def takes_multiprocessors(self) -> bool:
        """Whether kernels that send run beside those that compute."""
        return self.plan.topology.ep_size > 1 and not self._is_low_latency

    @property
    def _is_low_latency(self) -> bool:
        experts = self.plan.experts
        return experts.moe_a2a_backend == "deep_ep" and experts.deepep_mode == "low_latency"

    @property
    def _scale_up_ranks(self) -> int:
        """The ranks that reach each other over the scale-up network. Where it does not connect hosts, those of one."""
        part, on_host = self.hardware, self.plan.experts.ranks_per_node
        joins_hosts = part.scale_up_ranks > part.host_ranks
        return part.scale_up_ranks if joins_hosts or on_host is None else min(on_host, part.scale_up_ranks)

    @cached_property
    def _row_bytes(self) -> int:
        """The bytes of a token there, in FP8 with a scale for 128 numbers where experts take that, and back."""
        hidden, floats = self.plan.config.hidden_size, int(DTYPES[self.plan.config.dtype].itemsize)
        is_fp8 = self.plan.stored == "fp8" and self.plan.rank_weights.quantized > 0
        return (hidden + 4 * hidden // 128 if is_fp8 else floats * hidden) + floats * hidden

    def _all_to_all_s(self, num_tokens: Any) -> Any:
        """Return the seconds of one layer's dispatch and combine, of `num_tokens` that each rank sends."""
        num_ranks, part = self.plan.topology.ep_size, self.hardware
        if num_ranks == 1:
            return 0.0
        num_nodes = -(-num_ranks // self._scale_up_ranks)
        over_scale_up = part.scale_up_bytes_per_s * part.factors.scale_up
        latency_s = 2 * part.factors.message_s
        if num_nodes == 1:
            copies = _distinct(num_ranks, self.plan.config.num_experts_per_tok)
            return latency_s + num_tokens * copies * self._row_bytes / over_scale_up
        slower = _TABLE_NIC / part.nic_bytes_per_s
        if not self._is_low_latency:
            bytes_per_s = parts().normal.at(num_ranks) / slower
            return latency_s + num_tokens * self._nodes_touched(num_nodes) * self._row_bytes / bytes_per_s
        remote = 1.0 - 1.0 / num_nodes
        size = self.plan.config.num_experts_per_tok * self.plan.config.hidden_size / (_TABLE_TOP_K * _TABLE_HIDDEN)
        published_s = parts().low_latency.at(num_ranks) * size * (1.0 - remote + remote * slower)
        return latency_s + np.maximum(0.0, published_s - latency_s) * num_tokens / _TABLE_TOKENS

    def _nodes_touched(self, num_nodes: int) -> float:
        """Return how many nodes a token's experts are on: those of the groups that it may choose from, of which a node
        has several, or as many as independent choices touch."""
        config = self.plan.config
        if config.n_group % num_nodes:
            return _distinct(num_nodes, config.num_experts_per_tok)
        on_others = config.n_group - config.n_group // num_nodes
        missed = math.comb(on_others, config.topk_group) / math.comb(config.n_group, config.topk_group)
        return min(num_nodes * (1.0 - missed), config.num_experts_per_tok)

    def _sums_s(self, num_tokens: Any) -> Any:
        """Return the seconds of one layer's all-reduce over the ranks that share heads."""
        at, part, config = self.plan.topology, self.hardware, self.plan.config
        if at.tp_size == 1:
            return 0.0
        num_bytes = num_tokens * config.hidden_size * int(DTYPES[config.dtype].itemsize) * 2 * (1 - 1 / at.tp_size)
        is_inside = at.tp_size <= self._scale_up_ranks
        rate = part.scale_up_bytes_per_s * part.factors.scale_up if is_inside else part.nic_bytes_per_s
        return 2 * part.factors.message_s + num_bytes / rate


def _distinct(places: int, draws: int) -> float:
    """Return how many of so many places independent draws are expected to touch."""
    return places * (1.0 - (1.0 - 1.0 / places) ** draws)
