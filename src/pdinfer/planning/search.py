"""Which engines of how many nodes serve a load best: what does not fit is dropped, closed forms rank the rest, and the
best of these are simulated with the same seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from statistics import fmean

import attrs

from pdinfer.bench.load import Load, replay
from pdinfer.bench.summary import Summary
from pdinfer.bench.traces import Trace
from pdinfer.checks import check_int, typed
from pdinfer.config import SLO, CacheConfig, EngineConfig, ExpertConfig, ModelConfig, PairingConfig
from pdinfer.errors import ConfigError
from pdinfer.execution.warm_up import captured_sizes
from pdinfer.parallel.topology import Topology
from pdinfer.planning.calibration import Cost, StepCost
from pdinfer.planning.cluster_plan import ClusterPlan
from pdinfer.planning.parts import Hardware
from pdinfer.planning.plan import EnginePlan
from pdinfer.planning.roofline import Roofline, roofline
from pdinfer.planning.simulation import Cluster, StepRows, cluster, simulate
from pdinfer.progress import Progress, Tell, telling
from pdinfer.values import Value

PREFILL_TOKENS = 16_384
"""A prefill step of a rank."""
SLOTS = 128
"""Sequences that a rank decodes at once, as in the published deployments."""
MEM_FRACTION = 0.85
REDUNDANT = 32
"""At least so many copies of experts beside one of each."""
STEP_CV = 0.1
"""How simulated steps scatter, which only the seeds draw."""
SEEDS = (0, 1, 2)
ALONE = 32
"""Requests that are simulated one by one where none keeps the SLO."""


@attrs.frozen(kw_only=True)
class SearchedPlan(Value):
    """A cluster and what is expected of it.

    `name` is "P3x3D4" for three prefills of 3 nodes and a decode of 4. `capacity` is the most requests per second by
    closed forms, `binding` what limits it there. `attainment` and `goodput` (requests per second) are means over seeds,
    None for a plan that was not simulated. No other plan is as good as one that `is_pareto` in attainment, capacity,
    TTFT and TPOT and better in one of them. `why_not` says why a better one is better. It is empty for the best, unless
    no request of the load keeps the SLO: then it says whether any would that is alone. `runs` are the simulations, one
    of each seed: `bench.plots.goodput_frontier({plan.name: plan.runs, …})` draws them."""

    name: str
    cluster: ClusterPlan
    capacity: float
    binding: str
    attainment: float | None = None
    goodput: float | None = None
    mean_ttft_ms: float | None = None
    mean_tpot_ms: float | None = None
    is_pareto: bool = False
    why_not: str = ""
    runs: tuple[Summary, ...] = ()


@attrs.frozen(kw_only=True)
class _Side:
    """Engines of one size: its plan, the seconds of its steps by rows of a rank, and requests per second."""

    plan: EnginePlan
    step_s: Callable[[StepRows], float]
    rate: float
    binding: str


@typed
def search(
    config: ModelConfig,
    hardware: Hardware,
    load: Trace | Load,
    *,
    nodes: int,
    slo: SLO,
    ranks_per_node: int = 8,
    stored: str = "fp8",
    weights: str = "auto",
    cost: Cost | None = None,
    keep: int = 6,
    progress: Progress = None,
) -> tuple[SearchedPlan, ...]:
    """Return plans that use all `nodes` for a load, best first: by attainment, then by capacity.

    Every way to divide the nodes into equal prefills and equal decodes is tried, experts spread over all ranks of an
    engine. Sizes that memory does not hold, or whose pages hold no request, are dropped. Closed forms rank the others:
    prefill steps of at most PREFILL_TOKENS, the largest batch that keeps the SLO's TPOT, has slots, and fits the pages.
    The `keep` best are simulated: a rank is a port, and a step of an engine lasts as long as that of its fullest rank.
    `stored` is how the checkpoint is, unless the config says that it has four bits, and `weights` the argument of
    `load_model`: "stored" keeps INT8 on an A3, of whose ops pdinfer knows none. `cost` has calibrated factors; without
    it steps are those of the roofline. A trace is simulated whole: `bench.replay(trace, num_requests=…)` takes
    less of it. `progress` is called with the nodes of prefill that were tried, and then with simulated runs. Raises
    ConfigError where no division fits, with the reason of the last size that did not, of the role of which none does.
    """
    check_int("nodes", nodes, 2, 128)
    check_int("keep", keep, 1, 1000)
    check_int("ranks_per_node", ranks_per_node, 1, 1024)
    wanted = load if isinstance(load, Load) else replay(load)
    if not wanted.arrivals:
        raise ConfigError("search: the load has no request")
    sides = _Sides(config, hardware, wanted, slo, ranks_per_node, stored, weights, cost)
    with telling(progress, "planning", "divisions") as tell:
        ranked = sorted(_plans(sides, nodes, tell), key=lambda found: -found[0].capacity)
    if not ranked:
        raise ConfigError(f"no prefill and decode share {nodes} nodes of {hardware.name}: {sides.refusal}")
    with telling(progress, "searching", "runs") as tell:
        made = [(plan, _cluster(plan.name, prefill, decode, hardware)) for plan, prefill, decode in ranked[:keep]]
        simulated = _simulated(made, wanted, slo, tell)
    best, least = simulated[0], ranked[min(keep, len(ranked)) - 1][0].capacity
    allowed = (
        f"closed forms allow {least:.3g} req/s or more those that were simulated, and {best.capacity:.3g} the best"
    )
    rest = [
        attrs.evolve(plan, why_not=f"{allowed}; this one {plan.capacity:.3g} ({plan.binding})")
        for plan, *_ in ranked[keep:]
    ]
    return (*simulated, *rest)


@attrs.define
class _Sides:
    """Engines by role and number of nodes, each made once; None where memory does not hold one."""

    config: ModelConfig
    hardware: Hardware
    load: Load
    slo: SLO
    ranks_per_node: int
    stored: str
    weights: str
    cost: Cost | None
    _made: dict[tuple[str, int], _Side | None] = attrs.field(factory=dict)
    _refusals: dict[str, str] = attrs.field(factory=dict)

    def side(self, role: str, num_nodes: int) -> _Side | None:
        """Return an engine of so many nodes."""
        key = role, num_nodes
        if key not in self._made:
            try:
                plan = self._plan(role, num_nodes)
                self._made[key] = self._prefill(plan) if role == "prefill" else self._decode(plan)
            except ConfigError as error:
                self._made[key], self._refusals[role] = None, str(error)
        return self._made[key]

    @property
    def refusal(self) -> str:
        """Why the last size of a role did not fit: of one of which none did, if there is such a role."""
        some = {role for (role, _), side in self._made.items() if side is not None}
        none = [reason for role, reason in self._refusals.items() if role not in some]
        return "; ".join(none or self._refusals.values())

    def _plan(self, role: str, num_nodes: int) -> EnginePlan:
        """Return an engine with attention data parallel and experts spread over all ranks, as in the published
        deployments."""
        ranks, is_prefill = num_nodes * self.ranks_per_node, role == "prefill"
        experts = self.config.n_routed_experts if ranks > 1 else 0  # what is spread
        engine = EngineConfig(
            chunked_prefill_size=PREFILL_TOKENS, max_prefill_tokens=PREFILL_TOKENS, max_running_requests=SLOTS
        )
        if not is_prefill:  # captured from the start, as weights are counted anew for another engine
            engine = attrs.evolve(engine, graph_batch_sizes=tuple(captured_sizes(engine)))
        redundant = (-(-(experts + REDUNDANT) // ranks) * ranks - experts) if experts else 0
        spread = ExpertConfig(
            num_redundant_experts=redundant,
            ranks_per_node=self.ranks_per_node,
            moe_a2a_backend="deep_ep" if experts else "auto",
            deepep_mode="normal" if is_prefill else "low_latency",
            num_max_dispatch_tokens_per_rank=SLOTS,
            two_batch_overlap=bool(experts),
        )
        return EnginePlan(
            name=f"{role} of {num_nodes} node{'s' * (num_nodes > 1)}",
            config=self.config,
            topology=Topology(world_size=ranks, dp_size=ranks, ep_size=ranks if experts else 1),
            cache=CacheConfig(mem_fraction_static=MEM_FRACTION),
            engine=engine,
            experts=spread,
            stored=self.stored if self.config.packed is None else self.config.packed.format,
            weights=self.weights,
            device=self.hardware.device,
            device_bytes=int(self.hardware.memory_bytes),
        )

    def _step_s(self, plan: EnginePlan, factors: StepCost | None) -> tuple[Roofline, Callable[[StepRows], float]]:
        prior = roofline(plan, self.hardware)
        return prior, prior if factors is None else factors.over(prior)

    @property
    def _means(self) -> tuple[float, float]:
        """The mean tokens of prompts and answers."""
        arrivals = self.load.arrivals
        return fmean(each.prompt_tokens for each in arrivals), fmean(each.output_tokens for each in arrivals)

    def _held(self, plan: EnginePlan) -> int:
        """Return how many mean requests the pages of a rank hold: at prefill, too, with the tokens of their answers."""
        size, room = sum(self._means), (plan.num_pages or 0) * plan.layout.page_size
        if room < size:
            raise ConfigError(f"{plan.name}: {room} tokens of KV per rank hold no request of {size:.0f}")
        return int(room / size)

    def _prefill(self, plan: EnginePlan) -> _Side:
        prior, step_s = self._step_s(plan, self.cost.prefill if self.cost else None)
        tokens = max(1, round(self._means[0]))
        count = min(self._held(plan), max(1, PREFILL_TOKENS // tokens))
        rows = StepRows(count, count * tokens, count * tokens, count * tokens * (tokens + 1) // 2)
        rate = plan.topology.dp_size * count / float(step_s(rows))
        return _Side(plan=plan, step_s=step_s, rate=rate, binding=f"prefill: {prior.bound(rows)}")

    def _decode(self, plan: EnginePlan) -> _Side:
        """The largest batch that keeps TPOT, has slots and fits pages decides."""
        prior, step_s = self._step_s(plan, self.cost.decode if self.cost else None)
        prompt, output = self._means
        context = prompt + output / 2

        def rows(count: int) -> StepRows:
            return StepRows(count, count, count * context, count * context)

        fits = min(SLOTS, self._held(plan))
        limit_s = self.slo.tpot_s or math.inf
        keeps = next((count for count in range(fits, 0, -1) if float(step_s(rows(count))) <= limit_s), 0)
        most = max(1, keeps)
        limit = "TPOT, " + prior.bound(rows(most)) if keeps < fits else "slots" if fits == SLOTS else "KV pages"
        if not keeps:
            limit = f"a step of one sequence takes longer than TPOT, {prior.bound(rows(most))}"
        rate = plan.topology.dp_size * keeps / float(step_s(rows(most))) / output
        return _Side(plan=plan, step_s=step_s, rate=rate, binding=f"decode: {limit}")


def _plans(sides: _Sides, nodes: int, tell: Tell) -> Iterator[tuple[SearchedPlan, _Side, _Side]]:
    """Yield every division of the nodes that fits, with its prefill and decode engines."""
    for of_prefill in range(1, nodes):
        of_decode = nodes - of_prefill
        for sizes in product(_divisors(of_prefill), _divisors(of_decode)):
            prefill, decode = sides.side("prefill", sizes[0]), sides.side("decode", sizes[1])
            if prefill is None or decode is None:
                continue
            counts = of_prefill // sizes[0], of_decode // sizes[1]
            rates = counts[0] * prefill.rate, counts[1] * decode.rate
            told = [f"{count}x{size}" if count > 1 else f"{size}" for count, size in zip(counts, sizes, strict=True)]
            plan = SearchedPlan(
                name=f"P{told[0]}D{told[1]}",
                cluster=ClusterPlan(prefill=(prefill.plan,) * counts[0], decode=(decode.plan,) * counts[1]),
                capacity=min(rates),
                binding=prefill.binding if rates[0] < rates[1] else decode.binding,
            )
            yield plan, prefill, decode
        tell(of_prefill, nodes - 1)


def _divisors(count: int) -> list[int]:
    return [size for size in range(1, count + 1) if count % size == 0]


def _cluster(shape: str, prefill: _Side, decode: _Side, hardware: Hardware) -> Cluster:
    """Return what to simulate: each rank of an engine is a port with its own pool and NIC, as in a Pairing, and they
    step together."""
    layout = prefill.plan.layout
    return cluster(
        shape,
        prefill_s=prefill.step_s,
        decode_s=decode.step_s,
        prefill={
            "ranks": prefill.plan.topology.dp_size,
            "num_pages": prefill.plan.num_pages,
            "chunked_prefill_size": -1,
            "max_prefill_tokens": PREFILL_TOKENS,
        },
        decode={"ranks": decode.plan.topology.dp_size, "num_pages": decode.plan.num_pages},
        max_running_requests=SLOTS,
        page_size=layout.page_size,
        bytes_per_s=hardware.nic_bytes_per_s,
        token_bytes=layout.token_bytes,
        num_pushes=len(layout.layers),
        pairing=PairingConfig(max_queued_requests=1 << 20),
        step_cv=STEP_CV,
    )


def _simulated(ranked: Sequence[tuple[SearchedPlan, Cluster]], load: Load, slo: SLO, tell: Tell) -> list[SearchedPlan]:
    """Return the plans with what simulations saw, best first, and why the others are not."""
    seen = []
    for at, (plan, made) in enumerate(ranked):
        runs = list[Summary]()
        for seed in SEEDS:
            runs.append(simulate(made, load, slo=slo, seed=seed, num_gpus=plan.cluster.num_ranks, name=plan.name))
            tell(at * len(SEEDS) + seed + 1, len(ranked) * len(SEEDS))
        attained, good, ttft_ms, tpot_ms = (
            fmean(missing if (value := getattr(run, name)) is None else value for run in runs)
            for name, missing in (
                ("attainment", 0.0),
                ("request_goodput", 0.0),
                ("mean_ttft_ms", math.inf),
                ("mean_tpot_ms", math.inf),
            )
        )
        seen.append(
            attrs.evolve(
                plan, attainment=attained, goodput=good, mean_ttft_ms=ttft_ms, mean_tpot_ms=tpot_ms, runs=tuple(runs)
            )
        )
    seen.sort(key=lambda plan: (-(plan.attainment or 0.0), -plan.capacity))
    best, clusters = seen[0], {plan.name: made for plan, made in ranked}

    def why_not(plan: SearchedPlan) -> str:
        allowed = f"closed forms allow {plan.capacity:.3g} req/s ({plan.binding})"
        if not best.attainment:
            return f"{_alone(clusters[plan.name], load, slo)}; {allowed}"
        if plan is best:
            return ""
        attained = f"attains {plan.attainment:.3f} where {best.name} attains {best.attainment:.3f}"
        return f"{attained}; {allowed} and {best.capacity:.3g}"

    return [
        attrs.evolve(plan, is_pareto=not any(_is_better(other, plan) for other in seen), why_not=why_not(plan))
        for plan in seen
    ]


def _alone(made: Cluster, load: Load, slo: SLO) -> str:
    """Return whether requests of a load, of which none keeps the SLO, keep it one after another."""
    one_by_one = attrs.evolve(load, mode="closed_loop", max_concurrency=1, arrivals=load.arrivals[:ALONE])
    alone = simulate(made, one_by_one, slo=slo)
    if alone.attainment:
        return f"no request keeps the SLO at this load, and {alone.attainment:.0%} of those that are alone do"
    if alone.mean_ttft_ms is None:
        return "none of the requests ends even alone: they are refused, or their deadlines pass"
    tpot = "" if alone.mean_tpot_ms is None else f" and {alone.mean_tpot_ms:.4g} ms for each other one"
    return (
        f"the SLO cannot be met at any rate: a request that is alone takes {alone.mean_ttft_ms:.4g} ms to its first "
        f"token{tpot}; loosen a limit, or send shorter requests"
    )


def _is_better(one: SearchedPlan, other: SearchedPlan) -> bool:
    """Return whether one is as good in all that counts, and better in something."""
    ours, theirs = (
        (-(plan.attainment or 0.0), -plan.capacity, plan.mean_ttft_ms or 0.0, plan.mean_tpot_ms or 0.0)
        for plan in (one, other)
    )
    return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))
