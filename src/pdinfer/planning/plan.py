"""Whether a model can run as the ranks of a topology, and whether engines made of ranks fit each other.

Plain ints: the plan for a hundred GPUs is made and verified on any machine, before the first rank starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import attrs
import torch

from pdinfer.checks import clip, int_in
from pdinfer.config import CacheConfig, EngineConfig, ExpertConfig, ModelConfig
from pdinfer.errors import BackendUnavailable, ConfigError, PDInferError
from pdinfer.kernels.spec import DeviceSpec
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.view import DTYPES
from pdinfer.model.model import check_divides, kv_layout_of
from pdinfer.moe.dispatchers.choose import buffer_bytes
from pdinfer.moe.parallel import check_step_fits, checked_placement, expert_sizes
from pdinfer.moe.placement.placement import ExpertPlacement
from pdinfer.parallel.topology import Topology
from pdinfer.planning.rank_weights import RankWeights, rank_weights
from pdinfer.scheduling.rules import largest_decode_step, largest_prefill_step
from pdinfer.values import Value


def _device(value: str | torch.device | DeviceSpec) -> DeviceSpec:
    """Return a kind of device that `load_model` can load onto, by torch's name or the card's. Raises ConfigError."""
    try:
        device = DeviceSpec.of(value)
    except BackendUnavailable:
        device = DeviceSpec("meta")
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be 'cpu', 'cuda' or a card such as 'H200', got {clip(value)}")
    return device


def _stored(plan: EnginePlan) -> str:
    """Return how the checkpoint is stored as far as a config.json says it."""
    return "float" if plan.config.packed is None else plan.config.packed.format


@attrs.frozen(kw_only=True)
class EnginePlan(Value):
    """One engine of a cluster; each of its ranks has a `device` of `device_bytes`.

    The checkpoint is `stored` as published ones are ("float", "fp8", "w8a8_dynamic", "int4" or "mxfp4"), by default in
    four bits if the config says so and else in floats, and `weights` is the argument of `load_model`. What a rank then
    holds decides, not what lies in the files. A plan that exists can be loaded, as far as sizes say. Raises
    ConfigError, with the values, where heads, MLPs or experts do not divide over the ranks, where the dispatcher or the
    cache cannot have such sizes, and where weights and a page of KV do not fit into the memory beside DeepEP's buffer,
    or into `mem_fraction_static` of it. Without `device_bytes` memory is not checked. What drivers, NCCL and the buffer
    of "elastic" take is not known here: a pool finds that memory in use, and has fewer pages than planned.
    """

    name: str
    config: ModelConfig
    topology: Topology
    cache: CacheConfig = attrs.field(factory=CacheConfig)
    engine: EngineConfig = attrs.field(factory=EngineConfig)
    experts: ExpertConfig = attrs.field(factory=ExpertConfig)
    mtp: bool = False
    stored: str = attrs.field(default=attrs.Factory(_stored, takes_self=True))
    weights: str = "auto"
    device: DeviceSpec = attrs.field(factory=lambda: DeviceSpec.of("cuda"), converter=_device)
    device_bytes: int | None = attrs.field(default=None, validator=attrs.validators.optional(int_in(1, 1 << 50)))

    def __attrs_post_init__(self) -> None:
        try:
            check_divides(self.config, self.topology)
            if self.mtp and not self.config.num_nextn_predict_layers:
                raise ConfigError("mtp=True and the config has no MTP layer; leave it out")
            if self.engine.num_draft_tokens and not self.mtp:
                raise ConfigError(f"num_draft_tokens is {self.engine.num_draft_tokens}, which needs mtp=True")
            _ = self.layout
            self._check_memory()
        except PDInferError as error:
            raise type(error)(f"{self.name}: {error}") from None

    @cached_property
    def placement(self) -> ExpertPlacement | None:
        """The first placement of experts; None in a model without experts."""
        return checked_placement(self.config, self.topology.ep_size, None, self.experts, mtp=self.mtp)

    @cached_property
    def layout(self) -> KVLayout:
        """What a page holds, the same on every rank. It names no weights."""
        return kv_layout_of(self.config, DTYPES[self.config.dtype], self.cache, mtp=self.mtp)

    @cached_property
    def rank_weights(self) -> RankWeights:
        """How many bytes of weights each rank holds, as they are stored and in floats."""
        return self._rank_weights(self.weights)

    @property
    def weight_bytes(self) -> int:
        """How many bytes of weights each rank holds."""
        return self.rank_weights.total

    @cached_property
    def buffer_bytes(self) -> int:
        """How many bytes each rank has for DeepEP's buffer, which `mem_fraction_static` does not count."""
        if self.placement is None:
            return 0
        dtype, group = DTYPES[self.config.dtype], self.topology.apart().ep
        return buffer_bytes(expert_sizes(self.config, group, self.placement, dtype), self.experts)

    def _rank_weights(self, weights: str) -> RankWeights:
        return rank_weights(
            self.config,
            self.topology,
            stored=self.stored,
            weights=weights,
            device=self.device,
            mtp=self.mtp,
            experts=self.experts,
            placement=self.placement,
        )

    @property
    def num_pages(self) -> int | None:
        """How many pages a rank's pool has; None where neither the cache nor the device's memory says."""
        fraction = self.cache.mem_fraction_static
        if self.cache.num_pages is not None or self.device_bytes is None or fraction is None:
            return self.cache.num_pages
        room = min(int(self.device_bytes * fraction), self.device_bytes - self.buffer_bytes)
        return (room - self.weight_bytes) // self.layout.page_bytes

    def _check_memory(self) -> None:
        """Raise ConfigError where memory does not suffice. Weights are counted in any case: that checks their sizes."""
        needed = self.weight_bytes + (self.cache.num_pages or 1) * self.layout.page_bytes
        if self.device_bytes is None:
            return
        fraction = self.cache.mem_fraction_static
        if needed > min(self.device_bytes * (fraction or 1.0), self.device_bytes - self.buffer_bytes):
            pages = f"{self.cache.num_pages or 1} page{'s' if self.cache.num_pages else ''} of KV"
            of = "" if fraction is None else f"mem_fraction_static {fraction} of "
            hint = ', or weights="stored"' if self._rank_weights("stored").total < self.weight_bytes else ""
            raise ConfigError(
                f"{self._told()} and {pages}, {_gib(needed)} together, do not fit into {of}{_gib(self.device_bytes)}"
                f"{self._told_buffer(' beside ')}; use more ranks{hint}"
            )

    def _told_buffer(self, before: str) -> str:
        return f"{before}{_gib(self.buffer_bytes)} of DeepEP's buffer" if self.buffer_bytes else ""

    def _told(self) -> str:
        float_bytes = self._rank_weights("float").total
        floats = "" if self.stored == "float" else f"; {_gib(float_bytes)} as {self.config.dtype}"
        how = f'weights="{self.weights}", stored: {self.stored}{floats}'
        return f"{_gib(self.weight_bytes)} of weights per rank ({how})"

    def __str__(self) -> str:
        at, placement = self.topology, self.placement
        experts = "" if placement is None else f", {placement.slots_per_rank} expert slots per rank and layer"
        pages = "pages" if self.num_pages is None else f"{self.num_pages} pages"
        memory = "" if self.device_bytes is None else f" of {_gib(self.device_bytes)}"
        return (
            f"{self.name}: {at.world_size} ranks, data parallel {at.dp_size} x context parallel {at.cp_size} x tensor "
            f"parallel {at.tp_size}{experts}; {self._told()}{self._told_buffer(', ')}, {pages} of "
            f"{self.layout.page_size} tokens, {self.layout.page_bytes} bytes each{memory}"
        )


def _check_steps(engine: EnginePlan, num_tokens: int, told: str, *, num_queries: int = 1) -> None:
    """Raise ConfigError where a step is larger than DeepEP's kernels for few tokens can carry."""
    options = engine.experts
    if options.moe_a2a_backend == "deep_ep" and options.deepep_mode != "normal":
        most = options.num_max_dispatch_tokens_per_rank
        overlap = num_queries if options.two_batch_overlap else None
        check_step_fits(most, overlap, num_tokens, f"{engine.name}: {told}", tp_size=engine.topology.tp_size)


def _attention_groups(topology: Topology) -> list[range]:
    """Return the ranks that have the same requests, one range per data-parallel rank. Hosts talk to the first of
    each."""
    size = topology.cp_size * topology.tp_size
    return [range(first, first + size) for first in range(0, topology.world_size, size)]


def _gib(num_bytes: float) -> str:
    """Return a size as text."""
    return f"{num_bytes / 2**30:.2f} GiB"


@attrs.frozen(kw_only=True)
class ClusterPlan(Value):
    """Prefill and decode engines, where every prefill engine hands KV to every decode engine.

    Raises ConfigError, with the values, when a side is empty, when pages differ in size, and when an engine's steps are
    larger than its dispatcher can carry; LayoutMismatch when pages mean different things.
    """

    prefill: tuple[EnginePlan, ...]
    decode: tuple[EnginePlan, ...]

    def __attrs_post_init__(self) -> None:
        if not self.prefill or not self.decode:
            raise ConfigError(
                f"a cluster needs engines on both sides, got {len(self.prefill)} prefill and {len(self.decode)} decode"
            )
        for engine in self.prefill:
            _check_steps(engine, *largest_prefill_step(engine.engine, engine.config.max_position_embeddings))
        for engine in self.decode:
            num_queries = 1 + engine.engine.num_draft_tokens
            _check_steps(engine, *largest_decode_step(engine.engine), num_queries=num_queries)
        ours = self.prefill[0]
        for other in self.engines[1:]:
            ours.layout.compatible_with(other.layout)
            if ours.layout.page_bytes != other.layout.page_bytes:
                raise ConfigError(
                    f"a page has {ours.layout.page_bytes} bytes in {ours.name} and {other.layout.page_bytes} in "
                    f"{other.name} (page_size {ours.cache.page_size} and {other.cache.page_size}); give both the same"
                )

    @property
    def engines(self) -> tuple[EnginePlan, ...]:
        return self.prefill + self.decode

    @property
    def num_ranks(self) -> int:
        return sum(engine.topology.world_size for engine in self.engines)

    def pairs(self) -> Iterator[tuple[EnginePlan, range, EnginePlan, range]]:
        """Yield every way that a request can take: prefill, its writing ranks, decode, its receiving ranks."""
        for prefill in self.prefill:
            for decode in self.decode:
                for writers in _attention_groups(prefill.topology):
                    for written in _attention_groups(decode.topology):
                        yield prefill, writers, decode, written

    def __str__(self) -> str:
        ways = sum(1 for _ in self.pairs())
        return "\n".join([*map(str, self.engines), f"{self.num_ranks} ranks, {ways} pairs of attention groups"])
