"""Whether a model can run as the ranks of a topology, and whether engines made of ranks fit each other.

Plain ints: the plan for a hundred GPUs is made and verified on any machine, before the first rank starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

import attrs

from pdinfer.checks import clip
from pdinfer.config import CacheConfig, ExpertConfig, ModelConfig
from pdinfer.errors import ConfigError
from pdinfer.kv.formats import cache_components
from pdinfer.kv.layout import MTP_PREFIX, KVLayout
from pdinfer.kv.plan import even_slices, plan_writers
from pdinfer.moe.parallel import checked_placement
from pdinfer.moe.placement import ExpertPlacement
from pdinfer.topology import Topology

GPUS_PER_NODE = 8


def check_divides(config: ModelConfig, topology: Topology) -> None:
    """Raises ConfigError with the values when ranks cannot have equal parts of the model."""
    for count, what, size, name in (
        (config.num_attention_heads, "num_attention_heads", topology.tp_size, "tp_size"),
        (config.intermediate_size, "intermediate_size", topology.moe_dense_tp_size, "moe_dense_tp_size"),
    ):
        if count % size:
            raise ConfigError(f"{name} {size} does not divide {what} = {count}; choose a divisor of it")


@attrs.frozen(kw_only=True)
class EnginePlan:
    """One engine of a cluster. One that exists can be loaded: raises ConfigError with the values where heads, MLPs or
    experts do not divide over the ranks, or an expert is placed nowhere, or twice on a rank."""

    name: str
    config: ModelConfig
    topology: Topology
    cache: CacheConfig = attrs.field(factory=CacheConfig)
    experts: ExpertConfig = attrs.field(factory=ExpertConfig)
    mtp: bool = False

    def __attrs_post_init__(self) -> None:
        try:
            check_divides(self.config, self.topology)
            _ = self.placement
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from None

    @cached_property
    def placement(self) -> ExpertPlacement | None:
        """Where experts are at first; None in a model without any."""
        return checked_placement(self.config, self.topology.ep_size, None, self.experts, mtp=self.mtp)

    @cached_property
    def layout(self) -> KVLayout:
        """What a page holds, on every rank alike; weights have no id here."""
        kv_format = self.config.dtype if self.cache.kv_format == "auto" else self.cache.kv_format
        layers = self.config.num_hidden_layers
        components = cache_components(self.config, kv_format, range(layers))
        if self.mtp:
            components += cache_components(self.config, kv_format, (layers,), prefix=MTP_PREFIX)
        return KVLayout(
            model_id=self.config.fingerprint, weights_id=b"", page_size=self.cache.page_size, components=components
        )

    @property
    def attention_groups(self) -> list[range]:
        """The ranks that have the same requests, for every data-parallel rank: who hosts talk to first."""
        size = self.topology.attention_size
        return [range(first, first + size) for first in range(0, self.topology.world_size, size)]

    def __str__(self) -> str:
        at, placement = self.topology, self.placement
        experts = "" if placement is None else f", {placement.slots_per_rank} expert slots per rank and layer"
        return (
            f"{self.name}: {at.world_size} ranks, data parallel {at.dp_size} x context parallel {at.cp_size} x tensor "
            f"parallel {at.tp_size}{experts}; pages of {self.layout.page_size} tokens, {self.layout.page_bytes} bytes"
        )


@attrs.frozen(kw_only=True)
class ClusterPlan:
    """Prefill and decode engines of which every one hands KV to every one. Raises ConfigError with the values when a
    side is empty or pages differ in size, LayoutMismatch when they mean different things."""

    prefill: tuple[EnginePlan, ...]
    decode: tuple[EnginePlan, ...]

    def __attrs_post_init__(self) -> None:
        if not self.prefill or not self.decode:
            raise ConfigError(
                f"a cluster needs engines on both sides, got {len(self.prefill)} prefill and {len(self.decode)} decode"
            )
        ours = self.prefill[0]
        for other in self.engines[1:]:
            ours.layout.compatible_with(other.layout)
            if ours.layout.page_bytes != other.layout.page_bytes:
                raise ConfigError(
                    f"a page has {ours.layout.page_bytes} bytes in {ours.name} and {other.layout.page_bytes} in "
                    f"{other.name} (page_size {ours.cache.page_size} and {other.cache.page_size}); give both the same"
                )
        for _ in self.pairs():
            pass

    @property
    def engines(self) -> tuple[EnginePlan, ...]:
        return self.prefill + self.decode

    @property
    def num_ranks(self) -> int:
        return sum(engine.topology.world_size for engine in self.engines)

    def pairs(self) -> Iterator[tuple[EnginePlan, range, EnginePlan, range]]:
        """(prefill, its ranks that write, decode, its ranks that each are written to) of every way that a request can
        take, proven to bring each of these ranks every token of every layer once."""
        for prefill in self.prefill:
            tokens = range(prefill.config.max_position_embeddings)
            plan_writers(prefill.layout.layers, tokens, even_slices(tokens, prefill.topology.attention_size))
            for decode in self.decode:
                for writers in prefill.attention_groups:
                    for written in decode.attention_groups:
                        yield prefill, writers, decode, written

    def __str__(self) -> str:
        ways = sum(1 for _ in self.pairs())
        return "\n".join([*map(str, self.engines), f"{self.num_ranks} ranks, {ways} pairs of attention groups"])


def engine_nodes(text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Nodes of each prefill and of each decode engine of a cluster as deployments are named: "P3x3D4" is three prefill
    engines of 3 nodes and a decode engine of 4, "P4D9" one of 4 and one of 9. Raises ConfigError for other text."""
    match = re.fullmatch(r"P(?:([1-9]\d?)x)?([1-9]\d?)D(?:([1-9]\d?)x)?([1-9]\d?)", text)
    if match is None:
        raise ConfigError(f'a cluster is named like "P3x3D4" or "P4D9", got {clip(text)}')
    prefills, prefill_nodes, decodes, decode_nodes = (int(number or 1) for number in match.groups())
    return (prefill_nodes,) * prefills, (decode_nodes,) * decodes


def h800_cluster(text: str, config: ModelConfig) -> ClusterPlan:
    """A cluster as a study of DeepSeek-V3 on 13 nodes of 8 H800 ran it (SGLang 0.4.8, July 2025): attention is data
    parallel and experts are spread over all ranks of an engine, with 32 redundant ones."""
    prefill_nodes, decode_nodes = engine_nodes(text)
    cache = CacheConfig(page_size=32, mem_fraction_static=0.81)
    shared = ExpertConfig(
        num_redundant_experts=32,
        ep_dispatch_algorithm="dynamic",
        ranks_per_node=GPUS_PER_NODE,
        moe_a2a_backend="deep_ep",
    )
    low_latency = attrs.evolve(shared, deepep_mode="low_latency", num_max_dispatch_tokens_per_rank=256)

    def engine(name: str, nodes: int, experts: ExpertConfig) -> EnginePlan:
        size = nodes * GPUS_PER_NODE
        topology = Topology(world_size=size, dp_size=size, ep_size=size)
        return EnginePlan(name=name, config=config, topology=topology, cache=cache, experts=experts)

    return ClusterPlan(
        prefill=tuple(engine(f"P{at}", nodes, shared) for at, nodes in enumerate(prefill_nodes)),
        decode=tuple(engine(f"D{at}", nodes, low_latency) for at, nodes in enumerate(decode_nodes)),
    )
