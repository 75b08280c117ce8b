"""Whether engines made of ranks fit each other: pages of both sides, and the steps that each may have to carry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import attrs

from pdinfer.checks import clip
from pdinfer.errors import ConfigError, LayoutMismatch
from pdinfer.execution.warm_up import captured_sizes
from pdinfer.kv.transports.one_sided.ring import PROBE_BYTES
from pdinfer.kv.transports.one_sided.transport import NUM_SLOTS, SLOT_BYTES
from pdinfer.moe.parallel import check_step_fits
from pdinfer.parallel.topology import Topology
from pdinfer.planning.plan import EnginePlan, ranks_per_host
from pdinfer.scheduling.rules import largest_decode_step, largest_prefill_step
from pdinfer.values import Value


def _check_steps(engine: EnginePlan, num_tokens: int, told: str, *, num_queries: int = 1) -> None:
    """Raise ConfigError where a step is larger than DeepEP's kernels for few tokens can carry."""
    options = engine.experts
    if options.moe_a2a_backend == "deep_ep" and options.deepep_mode != "normal":
        most = options.num_max_dispatch_tokens_per_rank
        overlap = num_queries if options.two_batch_overlap else None
        check_step_fits(most, overlap, num_tokens, f"{engine.name}: {told}", tp_size=engine.topology.tp_size)


def capturing(decode: EnginePlan) -> EnginePlan:
    """Return the plan of a decode with the sizes of the steps that it captures. Raises ConfigError where memory does
    not suffice for them."""
    if decode.engine.graph_batch_sizes is not None:
        return decode
    sizes = tuple(captured_sizes(decode.engine))
    return attrs.evolve(decode, engine=attrs.evolve(decode.engine, graph_batch_sizes=sizes))


def _side(plans: Iterable[EnginePlan]) -> tuple[EnginePlan, ...]:
    """Return the engines of one side. Raises ConfigError for what are none."""
    side = tuple(plans) if isinstance(plans, Iterable) else (plans,)
    if not all(isinstance(plan, EnginePlan) for plan in side) or isinstance(plans, EnginePlan):
        raise ConfigError(f"a side of a cluster must be a sequence of EnginePlan, got {clip(plans)}")
    return side


def _all_capturing(decodes: Iterable[EnginePlan]) -> tuple[EnginePlan, ...]:
    return tuple(map(capturing, _side(decodes)))


def _attention_groups(topology: Topology) -> list[range]:
    """Return the ranks that have the same requests, one range per data-parallel rank. Hosts talk to the first of
    each."""
    size = topology.apart().attention.size
    return [range(first, first + size) for first in range(0, topology.world_size, size)]


@attrs.frozen(kw_only=True)
class ClusterPlan(Value):
    """Prefill and decode engines, where every prefill engine hands KV to every decode engine.

    Raises ConfigError, with the values, when a side is empty, when pages differ in size, when an engine's steps are
    larger than its dispatcher can carry, and when a decode has no memory for the steps that it captures; LayoutMismatch
    when pages mean different things.
    """

    prefill: tuple[EnginePlan, ...] = attrs.field(converter=_side)
    decode: tuple[EnginePlan, ...] = attrs.field(converter=_all_capturing)

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
            try:
                ours.layout.compatible_with(other.layout)
            except LayoutMismatch as error:
                hint = "; give both mtp=True, or neither" if ours.mtp != other.mtp else ""
                raise LayoutMismatch(f"{ours.name} and {other.name}: {error}{hint}") from None
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

    @property
    def hosts(self) -> tuple[HostMemory, ...]:
        """What links take of the hosts of each engine."""
        written = sum(engine.topology.world_size for engine in self.decode)
        return tuple(
            HostMemory(
                name=engine.name,
                is_prefill=is_prefill,
                num_links=written if is_prefill else self.num_ranks - written,
                num_ranks=ranks_per_host(engine),
            )
            for is_prefill, side in ((True, self.prefill), (False, self.decode))
            for engine in side
        )

    def __str__(self) -> str:
        ways = sum(1 for _ in self.pairs())
        lines = [*self.engines, *self.hosts, f"{self.num_ranks} ranks, {ways} pairs of attention groups"]
        return "\n".join(map(str, lines))


BLOCKS = 2
"""A link that writes gathers into one while the other is on its way (kv/transports/one_sided/transport.py)."""


@attrs.frozen(kw_only=True)
class HostMemory(Value):
    """What `MooncakeTransport` of the default sizes makes for an engine whose ranks have `num_links` each, as every
    rank of a prefill writes to every rank of a decode. `num_ranks` of them are on a host. RDMA pins this memory."""

    name: str
    is_prefill: bool
    num_links: int
    num_ranks: int

    @property
    def rank_bytes(self) -> int:
        """Return the bytes of a rank: blocks to write from in prefill, rings to be written in decode."""
        of_link = BLOCKS * SLOT_BYTES if self.is_prefill else NUM_SLOTS * SLOT_BYTES + PROBE_BYTES
        return self.num_links * of_link

    @property
    def num_threads(self) -> int:
        """Return how many threads of a rank write: one for each link, beside those that an engine has anyway."""
        return self.num_links if self.is_prefill else 0

    def __str__(self) -> str:
        threads = f"{self.num_threads} threads that write and " if self.is_prefill else ""
        what = "send blocks" if self.is_prefill else "rings"
        return (
            f"{self.name}: {self.num_links} links per rank, over MooncakeTransport {threads}"
            f"{self.rank_bytes / 2**20:.0f} MiB of {what}, {self.num_ranks * self.rank_bytes / 2**30:.2f} GiB on a "
            f"host of {self.num_ranks} ranks, pinned with RDMA"
        )
