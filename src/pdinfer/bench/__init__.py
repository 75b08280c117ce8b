"""Measures a deployment with figures that can be checked: loads, records of requests, summaries.

    from pdinfer import bench
    print(bench.run(pairing, bench.open_loop(4.0, 200, prompt_tokens=512, output_tokens=64), slo=bench.SLO(ttft_s=1.0)))

    plots/                 columns of plots, drawn when asked
    compare.py             two summaries side by side, if they can be compared
    search.py              several runs: the highest rate that keeps an SLO
    run.py                 sends a load on an absolute schedule, and reads what comes
    formats.py             result files of other tools, read
    summarize.py           from records to a summary, from repeats to intervals
    checks.py              the 10 checks that a summary has to pass
    summary.py             the figures of a run, and their JSON
    record.py              the stages of one request, recorded from its events
    load.py                what is sent when: burst, closed loop, open loop, replay; and prompts made from prefix hashes
    traces.py              readers of traces

May import: config, engine, the ground."""

from __future__ import annotations

from pdinfer.bench import plots
from pdinfer.bench.checks import check
from pdinfer.bench.compare import compare
from pdinfer.bench.formats import from_aiperf, from_genai_bench, from_sglang, from_vllm
from pdinfer.bench.load import Load, PromptMaker, burst, closed_loop, open_loop, replay
from pdinfer.bench.record import STAGES, Record, Recorder
from pdinfer.bench.run import environment, run
from pdinfer.bench.search import Goodput, find_goodput
from pdinfer.bench.summarize import merge, summarize
from pdinfer.bench.summary import SCHEMA, Summary, json_schema
from pdinfer.bench.traces import Arrival, Trace, read_trace
from pdinfer.config import SLO

__all__ = [
    "SCHEMA",
    "SLO",
    "STAGES",
    "Arrival",
    "Goodput",
    "Load",
    "PromptMaker",
    "Record",
    "Recorder",
    "Summary",
    "Trace",
    "burst",
    "check",
    "closed_loop",
    "compare",
    "environment",
    "find_goodput",
    "from_aiperf",
    "from_genai_bench",
    "from_sglang",
    "from_vllm",
    "json_schema",
    "merge",
    "open_loop",
    "plots",
    "read_trace",
    "replay",
    "run",
    "summarize",
]
