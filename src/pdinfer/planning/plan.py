"""Whether a model can run as the ranks of a topology.

Plain ints: the plan for a hundred GPUs is made and verified on any machine, before the first rank starts."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import cached_property

import attrs
import torch
from attrs.validators import optional

from pdinfer.checks import a_bool, clip, instance_of, int_in
from pdinfer.config import CacheConfig, EngineConfig, ExpertConfig, ModelConfig
from pdinfer.diagnosis.affinity import AFFINITIES, CpuAffinity, in_words
from pdinfer.errors import BackendUnavailable, ConfigError, PDInferError
from pdinfer.kernels.spec import DeviceSpec
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.view import DTYPES
from pdinfer.model.model import check_divides, kv_layout_of
from pdinfer.moe.dispatchers.choose import buffer_bytes, graph_safe
from pdinfer.moe.dispatchers.deep_ep_limits import ExpertSizes
from pdinfer.moe.parallel import checked_placement, expert_sizes
from pdinfer.moe.placement.placement import ExpertPlacement
from pdinfer.parallel.topology import Topology
from pdinfer.planning.rank_memory import DRIVER_BYTES, RankWeights, graph_bytes, rank_weights, room_bytes
from pdinfer.values import Value

PLACES = range(2, 16)
"""The decimal places that a fraction is told with: the fewest with which what is told of it is true."""


def _device(value: str | torch.device | DeviceSpec) -> DeviceSpec:
    """Return a kind of device that `load_model` can load onto, by torch's name or the card's. Raises ConfigError."""
    device = DeviceSpec("meta")
    if isinstance(value, str | torch.device | DeviceSpec):
        with contextlib.suppress(BackendUnavailable):
            device = DeviceSpec.of(value)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be 'cpu', 'cuda' or a card such as 'H200', got {clip(value)}")
    return device


def _stored(plan: EnginePlan) -> str:
    """Return how the checkpoint is stored as far as a config.json says it."""
    packed = getattr(plan.config, "packed", None)  # what is no config is refused after the defaults
    return "float" if packed is None else str(packed.format)


@attrs.frozen(kw_only=True)
class EnginePlan(Value):
    """One engine of a cluster; each of its ranks has a `device` of `device_bytes`.

    The checkpoint is `stored` as published ones are ("float", "fp8", "w8a8_dynamic", "int4" or "mxfp4"), by default in
    four bits if the config says so and else in floats, and `weights` is the argument of `load_model`. What a rank then
    holds decides, not what lies in the files. A plan that exists can be loaded, as far as sizes say. Raises
    ConfigError, with the values, where heads, MLPs or experts do not divide over the ranks, where the dispatcher or the
    cache cannot have such sizes, and where memory does not suffice: for weights, drivers and a page of KV, within
    `mem_fraction_static` if it is given, and beside these for DeepEP's buffer, the rows at experts and captured steps.
    What a step of prefill takes beside is not counted. Nor are captured steps where `graph_batch_sizes` is None, as a
    prefill captures none: `ClusterPlan` gives its decodes the sizes that they capture then. Without `device_bytes`
    memory is not checked. `prompt_tokens` is the longest prompt that it is for: text says where a pool is smaller, and
    where ranks of a host run, if `cpu_affinity` has that for each of its GPUs. One with `other_engine` may change its
    role, and then runs with that; memory is that of the role which needs more. Only an engine of one rank can."""

    name: str = attrs.field(validator=instance_of(str))
    config: ModelConfig = attrs.field(validator=instance_of(ModelConfig))
    topology: Topology = attrs.field(validator=instance_of(Topology))
    cache: CacheConfig = attrs.field(factory=CacheConfig, validator=instance_of(CacheConfig))
    engine: EngineConfig = attrs.field(factory=EngineConfig, validator=instance_of(EngineConfig))
    other_engine: EngineConfig | None = attrs.field(default=None, validator=optional(instance_of(EngineConfig)))
    experts: ExpertConfig = attrs.field(factory=ExpertConfig, validator=instance_of(ExpertConfig))
    mtp: bool = attrs.field(default=False, validator=a_bool)
    stored: str = attrs.field(default=attrs.Factory(_stored, takes_self=True), validator=instance_of(str))
    weights: str = attrs.field(default="auto", validator=instance_of(str))
    device: DeviceSpec = attrs.field(factory=lambda: DeviceSpec.of("cuda"), converter=_device)
    device_bytes: int | None = attrs.field(default=None, validator=optional(int_in(1, 1 << 50)))
    prompt_tokens: int | None = attrs.field(default=None, validator=optional(int_in(1, 1 << 30)))
    cpu_affinity: tuple[CpuAffinity | None, ...] = attrs.field(default=(), validator=AFFINITIES)

    def __attrs_post_init__(self) -> None:
        try:
            check_divides(self.config, self.topology)
            if self.mtp and not self.config.num_nextn_predict_layers:
                raise ConfigError("mtp=True and the config has no MTP layer; leave it out")
            if (num_drafts := max(one.num_draft_tokens for one in self._engines)) and not self.mtp:
                raise ConfigError(f"num_draft_tokens is {num_drafts}, which needs mtp=True")
            if self.other_engine is not None and (num_ranks := self.topology.world_size) > 1:
                raise ConfigError(f"other_engine is for one rank, and one of {num_ranks} keeps its role: leave it out")
            if self.cpu_affinity and (num_ranks := ranks_per_host(self)) > len(self.cpu_affinity):
                raise ConfigError(
                    f"{num_ranks} ranks run on a host, and cpu_affinity is that of {len(self.cpu_affinity)} GPUs: set "
                    "ranks_per_node of the experts, or ask a host that shows all of its GPUs"
                )
            _ = self.layout
            self._check_slots()
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

    @property
    def driver_bytes(self) -> int:
        """How many bytes CUDA and NCCL take of each rank's device: an estimate. A pool finds them in use."""
        return DRIVER_BYTES if self.device.type == "cuda" else 0

    @cached_property
    def buffer_bytes(self) -> int:
        """How many bytes each rank has for DeepEP's buffer, which `mem_fraction_static` does not count."""
        return 0 if self._sizes is None else buffer_bytes(self._sizes, self.experts)

    @cached_property
    def room_bytes(self) -> int:
        """How many bytes rows take at a rank's experts in DeepEP's low-latency mode, and in its second API for steps of
        `graph_batch_sizes`. `mem_fraction_static` does not count them."""
        mode = self.experts.deepep_mode if self.experts.moe_a2a_backend == "deep_ep" else ""
        if self._sizes is None or not (mode == "low_latency" or (mode == "elastic" and self.engine.graph_batch_sizes)):
            return 0
        is_fp8 = self.stored == "fp8" and self.rank_weights.quantized > 0
        return room_bytes(self.config, self._sizes, self.experts, is_fp8=is_fp8)

    @cached_property
    def graph_bytes(self) -> int:
        """How many bytes captured steps of `graph_batch_sizes` keep where they can be captured: an estimate.
        `mem_fraction_static` does not count them."""
        has_experts = self.placement is not None
        if self.device.type != "cuda" or (has_experts and not graph_safe(self.topology.ep_size, self.experts)):
            return 0
        captured = [(one.graph_batch_sizes or (), 1 + one.num_draft_tokens) for one in self._engines]
        return max(graph_bytes(self.config, sizes, num_queries) for sizes, num_queries in captured)

    @property
    def _engines(self) -> tuple[EngineConfig, ...]:
        return (self.engine,) if self.other_engine is None else (self.engine, self.other_engine)

    @property
    def _beside_bytes(self) -> int:
        """What a rank has beside weights, drivers and pages."""
        return self.buffer_bytes + self.room_bytes + self.graph_bytes

    @property
    def _sizes(self) -> ExpertSizes | None:
        if self.placement is None:
            return None
        return expert_sizes(self.config, self.topology.apart().ep, self.placement, DTYPES[self.config.dtype])

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
        if self.cache.num_pages is not None or self._page_room is None:
            return self.cache.num_pages
        return self._page_room // self.layout.page_bytes

    @property
    def _page_room(self) -> int | None:
        """The bytes that `mem_fraction_static` leaves for pages, as a pool finds them."""
        fraction = self.cache.mem_fraction_static
        if self.device_bytes is None or fraction is None:
            return None
        return int(self.device_bytes * fraction) - self._fixed_bytes

    @property
    def _fixed_bytes(self) -> int:
        return self.weight_bytes + self.driver_bytes

    def _check_slots(self) -> None:
        """Raise ConfigError where ranks have no equal numbers of expert slots. The next number is named if it does for
        the plan, and else with what is in its way."""
        try:
            _ = self.placement
        except ConfigError:
            ep_size, redundant = self.topology.ep_size, self.experts.num_redundant_experts
            slots = self.config.n_routed_experts + redundant
            more = redundant + -slots % ep_size
            try:
                attrs.evolve(self, experts=attrs.evolve(self.experts, num_redundant_experts=more))
            except PDInferError as error:
                why = str(error).removeprefix(f"{self.name}: ")
                raise type(error)(
                    f"ep_size {ep_size} does not divide {slots} slots of experts, and with num_redundant_experts = "
                    f"{more}, the next that it divides: {why}"
                ) from None
            raise

    def _check_memory(self) -> None:
        """Raise ConfigError where memory does not suffice. Weights are counted in any case: that checks their sizes."""
        needed = self._fixed_bytes + (self.cache.num_pages or 1) * self.layout.page_bytes
        if self.device_bytes is None:
            return
        fraction, beside = self.cache.mem_fraction_static, self._beside_bytes
        if needed > min(self.device_bytes * (fraction or 1.0), self.device_bytes - beside):
            pages = f"{self.cache.num_pages or 1} page{'s' if self.cache.num_pages else ''} of KV"
            is_beyond = fraction is not None and needed > self.device_bytes * fraction
            of = f"mem_fraction_static {fraction} of " if is_beyond else ""
            told = " and ".join([self._told(), *self._told_drivers(), pages])
            raise ConfigError(
                f"{told}, {_gib(needed)} together, do not fit into {of}{_gib(self.device_bytes)}"
                f"{' beside ' * bool(beside)}{' and '.join(self._told_beside())}; use "
                f"{', or '.join(self._ways_to_fit(of_beside=not is_beyond))}"
            )
        if fraction is not None and beside > self.device_bytes - int(self.device_bytes * fraction):
            size, left = self.device_bytes, 1 - beside / self.device_bytes
            most = _rounded(left, math.floor, lambda share: needed <= size * share) or left
            raise ConfigError(
                f"mem_fraction_static {fraction} of {_gib(size)} leaves {_gib(size * (1 - fraction))} beside weights "
                f"and pages, less than {' and '.join(self._told_beside())}; it may be at most {most}"
            )

    def _told_drivers(self) -> list[str]:
        return [f"{_gib(self.driver_bytes)} of drivers and NCCL (an estimate)"] * bool(self.driver_bytes)

    def _told_beside(self) -> list[str]:
        buffer = [f"{_gib(self.buffer_bytes)} of DeepEP's buffer"] * bool(self.buffer_bytes)
        room = [f"{_gib(self.room_bytes)} of rows at experts"] * bool(self.room_bytes)
        return buffer + room + [f"{_gib(self.graph_bytes)} of captured steps (an estimate)"] * bool(self.graph_bytes)

    def _ways_to_fit(self, *, of_beside: bool) -> list[str]:
        """Return what makes room: for weights and pages, and of what is beside them."""
        ways = ["more ranks"]
        if self._fits_with_fewer_experts():
            ways.append("fewer num_redundant_experts")
        if self._rank_weights("stored").total < self.weight_bytes:
            ways.append('weights="stored"')
        if self.cache.num_pages is not None:
            ways.append("fewer num_pages")
        if of_beside and self.buffer_bytes and self.experts.deepep_mode != "normal":
            ways.append("a lower num_max_dispatch_tokens_per_rank")
        if of_beside and self.graph_bytes:
            ways.append("fewer graph_batch_sizes")
        return ways

    def _fits_with_fewer_experts(self) -> bool:
        """Return whether the fewest copies of experts that divide over the ranks are fewer, and fit."""
        fewest = self.experts.num_redundant_experts % self.topology.ep_size
        if fewest == self.experts.num_redundant_experts:
            return False
        with contextlib.suppress(PDInferError):
            attrs.evolve(self, experts=attrs.evolve(self.experts, num_redundant_experts=fewest))
            return True
        return False

    def _told_pages(self) -> str:
        """Return what a pool will have, and what is left then."""
        layout, pages, room = self.layout, self.num_pages, self._page_room
        told = f"{layout.page_size} tokens, {layout.page_bytes} bytes each"
        if pages is None:
            return f"pages of {told}" + ("" if self.device_bytes is None else f" of {_gib(self.device_bytes)}")
        told = f"{pages} pages of {told}, {pages * layout.page_size} tokens"
        if room is not None:
            told = f"{_gib(room)} remain of mem_fraction_static {self.cache.mem_fraction_static} for {told}"
        if self.device_bytes is not None:
            used = self._fixed_bytes + pages * layout.page_bytes + self._beside_bytes
            told += f"; {_gib(self.device_bytes - used)} of {_gib(self.device_bytes)} are left for steps"
        return told + self._told_prompt(pages)

    def _told_prompt(self, pages: int) -> str:
        """Return a sentence where the longest prompt does not fit the pool, with a fraction that holds it."""
        if self.prompt_tokens is None or (wanted := self.layout.num_pages(self.prompt_tokens)) <= pages:
            return ""
        told = f"; a prompt of {self.prompt_tokens} tokens does not fit: it needs {wanted} pages"
        if self._page_room is None or self.device_bytes is None:
            return told
        size, beside = self.device_bytes, self._beside_bytes
        needed = (self._fixed_bytes + wanted * self.layout.page_bytes) / size
        share = _rounded(needed, math.ceil, lambda share: share < 1 and share * size + beside <= size)
        return f"{told}, " + (f"which mem_fraction_static {share} holds" if share else "more than the device has")

    def _told(self) -> str:
        float_bytes = self._rank_weights("float").total
        floats = "" if self.stored == "float" else f"; {_gib(float_bytes)} as {self.config.dtype}"
        how = f'weights="{self.weights}", stored: {self.stored}{floats}'
        return f"{_gib(self.weight_bytes)} of weights per rank ({how})"

    def __str__(self) -> str:
        at, placement = self.topology, self.placement
        experts = "" if placement is None else f", {placement.slots_per_rank} expert slots per rank and layer"
        held = ", ".join([self._told(), *self._told_drivers(), *self._told_beside()])
        cpus = in_words(self.cpu_affinity[: ranks_per_host(self)])
        return (
            f"{self.name}: {at.world_size} ranks, data parallel {at.dp_size} x context parallel {at.cp_size} x tensor "
            f"parallel {at.tp_size}{experts}; {held}; {self._told_pages()}{'; CPUs of a host: ' * bool(cpus)}{cpus}"
        )


def _rounded(share: float, to_int: Callable[[float], int], fits: Callable[[float], bool]) -> float | None:
    """Return a share that fits with the fewest decimal places, rounded by `to_int`; None where PLACES are too few."""
    return next(filter(fits, (to_int(share * 10**places) / 10**places for places in PLACES)), None)


def ranks_per_host(engine: EnginePlan) -> int:
    """Return how many ranks of an engine run on one host."""
    size = engine.topology.world_size
    return min(size, engine.experts.ranks_per_node or size)


def _gib(num_bytes: float) -> str:
    """Return a size as text."""
    return f"{num_bytes / 2**30:.2f} GiB"
