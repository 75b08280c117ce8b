"""Measures what routing costs and wins, and whether bench and simulator are right: a line of JSON for each case.

    python benchmarks/goodput.py CASE [--traces DIR] [--settings conversation,azure] [--requests N]

    calibration real engines: two processes, calibrated on half of their loads, against the other half (a minute, quiet)
    checks      the honesty checks on the rows of a published study
    decisions   microseconds that a Pairing takes for each request that it sends on, at several sizes
    overload    simulated: goodput beyond the knee, with a promise and without (minutes; --settings and --requests)
    policies    simulated: the goodput of six policies on real traces (hours; --settings and --requests take some)
    queues      the simulator against the formulas of queues (half an hour)
    recording   what the bench costs while it records
    routing     simulated: six policies at one rate, on the same traces and on sessions (minutes; --settings)
    sessions    real engines: conversations with shared prefixes, 3 policies in turns (a quarter of an hour, quiet)
    speed       the simulator's, on a whole trace

Traces are not part of this repository: `mooncake_conversation.jsonl` and `mooncake_synthetic.jsonl` are
conversation_trace and synthetic_trace of github.com/kvcache-ai/Mooncake (FAST25-release/traces), `azure_2023_conv.csv`
is AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset. Seeds are fixed. Times are those of this
machine: `python` and `cores` are in each line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CASES = (
    "calibration",
    "checks",
    "decisions",
    "overload",
    "policies",
    "queues",
    "recording",
    "routing",
    "sessions",
    "speed",
)
NEED_TRACES = ("overload", "policies", "routing", "speed")


def main() -> None:
    """Run the case that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--traces", type=Path, help="the folder with the traces")
    parser.add_argument("--settings", help="settings of `policies`, separated by commas")
    parser.add_argument("--requests", type=int, help="send only so many requests of the traces of `policies`")
    asked = parser.parse_args()
    if asked.case in NEED_TRACES and asked.traces is None:
        parser.error(f"{asked.case} needs --traces")
    sys.path[:0] = [str(Path(__file__).with_suffix("")), str(ROOT)]
    case = getattr(importlib.import_module(asked.case), asked.case)
    arguments = [asked.traces] if asked.case in NEED_TRACES else []
    if asked.settings:
        arguments.append(asked.settings.split(","))
    options = {"num_requests": asked.requests} if asked.requests else {}
    about = {"python": platform.python_version(), "cores": os.cpu_count()}
    for line in case(*arguments, **options):
        print(json.dumps({"case": asked.case, **line, **about}), flush=True)


if __name__ == "__main__":
    main()
