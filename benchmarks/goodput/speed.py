"""How fast the simulator is: the whole conversation trace through 4 prefills and 4 decodes, on one core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import policies

import pdinfer as pd
from pdinfer import bench
from pdinfer.planning import Simulator

ROUNDS = 5


def speed(folder: Path) -> Iterator[dict[str, Any]]:
    """Seconds of a run at the trace's own speed, of CPU time; events are steps of engines and what happens between."""
    setting = policies.SETTINGS["conversation"]
    load = bench.replay(bench.read_trace(folder / setting.trace))
    for name in ("round_robin", "least_tokens", "traffic_aware"):
        took = []
        for _ in range(ROUNDS):
            began = time.process_time()
            simulator = Simulator(setting.cluster(), load, policy=getattr(pd.policy, name))
            records = simulator.run()
            took.append(time.process_time() - began)
        num_events = simulator.world.num_events + simulator.num_steps
        yield {
            "policy": name,
            "num_requests": len(records),
            "output_tokens": sum(record.output_tokens for record in records),
            "seconds": round(statistics.median(took), 2),
            "events_per_s": round(num_events / statistics.median(took)),
        }
