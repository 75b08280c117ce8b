"""The 93 rows of a study that prints figures of which 28 are none, as summaries."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from pdinfer import bench
from pdinfer.bench import Summary

STUDY = Path(__file__).with_name("study.csv")
WRONG = {"artefact_output_tput", "stall", "suspect", "osl1_output_tput_meaningless"}
FASTEST_STEP_S = 0.036
"""The shortest decode step of the study's honest rows."""


def rows() -> list[tuple[dict[str, str], Summary]]:
    """The rows that have data, each with the summary that comes of it. Two of the tables were printed to 0.01 s."""
    found = []
    for row in csv.DictReader(STUDY.read_text("utf-8").splitlines()):
        if row["class"] == "no_data":
            continue
        if row["class"] == "closed_loop":
            summary = Summary(
                name=row["config"],
                mode="closed_loop",
                duration_s=float(row["latency"]),
                input_throughput=float(row["input_throughput"]),
                output_throughput=float(row["output_throughput"]),
                max_concurrency=float(row["batch_size"]),
            )
        else:
            figures = {name: float(text) for name, text in list(row.items())[4:] if text}
            line = json.dumps({"run_name": f"{row['table']} {row['config']}", **figures})
            summary = bench.from_sglang(line, resolution_s=0.01, fastest_step_s=FASTEST_STEP_S)
        found.append((row, summary))
    return found
