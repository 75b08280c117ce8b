"""One call from a cluster and a load to a summary."""

from __future__ import annotations

from importlib.metadata import version

from pdinfer.bench.load import Load
from pdinfer.bench.slo import SLO
from pdinfer.bench.summarize import summarize
from pdinfer.bench.summary import EngineUse, Summary
from pdinfer.pairing.policy import Policy, traffic_aware
from pdinfer.planning.simulation.deployment import Cluster
from pdinfer.planning.simulation.simulator import Simulator
from pdinfer.progress import Progress, telling


def simulate(
    cluster: Cluster,
    load: Load,
    *,
    policy: Policy = traffic_aware,
    slo: SLO | None = None,
    seed: int = 0,
    num_gpus: int | None = None,
    name: str = "",
    progress: Progress = None,
) -> Summary:
    """Run a load through a simulated cluster and return the summary. Equal arguments give equal bytes.

    The Pairing's host takes no time, except where the cluster says that it stalls. `seed` draws how steps scatter
    (`step_cv`); loads are drawn by their own. `progress(ended, requests)` is called when a
    request has ended; True draws a line on stderr. Raises ConfigError for an empty load, for a policy that names a port
    that it was not shown, and for step times that are no seconds.
    """
    with telling(progress, "simulating", "requests") as tell:
        simulator = Simulator(cluster, load, policy=policy, seed=seed, progress=tell)
        records = simulator.run()
    return summarize(
        records,
        slo=slo,
        num_gpus=num_gpus,
        max_concurrency=load.max_concurrency,
        environment={"pdinfer": version("pdinfer"), "cluster": cluster.name, **dict(load.environment)},
        engines=_engines(simulator),
        max_step_ms=max(decode.max_step_s for decode in simulator.decodes) * 1e3,
        source="simulated",
        mode=load.mode,
        request_rate=load.request_rate,
        speed=load.speed,
        seed=seed,
        name=name or load.name,
        notes=load.notes,
    )


def _engines(simulator: Simulator) -> tuple[EngineUse, ...]:
    """Return the use of slots and pages, one value per engine."""
    slots, decodes = simulator.cluster.decode.engine.max_running_requests, simulator.decodes
    whole_s = max((decode.ends[-1] for decode in decodes if decode.ends), default=0.0)
    prefills = [] if simulator.cluster.colocated else simulator.prefills
    return (
        *(
            EngineUse(name=f"P{at}", role="prefill", max_pages=each.pages.most_used / each.pages.num_pages)
            for at, each in enumerate(prefills)
        ),
        *(
            EngineUse(
                name=f"D{at}",
                role="decode",
                mean_slots=each.slot_s / whole_s / slots if whole_s else None,
                max_slots=each.most_slots / slots,
                max_pages=each.pages.most_used / each.pages.num_pages,
            )
            for at, each in enumerate(decodes)
        ),
    )
