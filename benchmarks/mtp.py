"""Measure how much faster one request decodes when the MTP layer drafts for it: JSON lines, then a table.

    python benchmarks/mtp.py [--rounds 5] [--tokens 256] [--dtypes float32,bfloat16] [--threads 1]

The benchmark runs the tiny model of examples/, with prefill and decode in one process, batch 1, greedy. The prompt is a
page of stories and facts, and decode goes on with more of them. `decode/<dtype>/<n>`: tokens per second of decode steps
alone with n drafts per step. The baseline is 0 drafts, run next to it (A B A B), and the ratio is the median of rounds.
Below each come the parts of a step, as medians: `draft_ms` (the MTP layer: catching up, then one pass per further
draft), `verify_ms` (the model over the last token and the drafts), `engine_ms` (the rest), `accept_length` (tokens per
step).
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch

import pdinfer as pd
from pdinfer.execution import runner
from pdinfer.execution.drafting import Drafter
from pdinfer.execution.runner import ModelRunner

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from tiny_tasks import recall_prompt, text_prompt  # noqa: E402

DRAFTS = (1, 2, 3)


class Stopwatch:
    """The seconds spent in `decode` of a runner and in `propose` of its drafter, summed since `reset`."""

    def __init__(self) -> None:
        self.decode_s = self.propose_s = 0.0

    def reset(self) -> None:
        self.decode_s = self.propose_s = 0.0


STOPWATCH = Stopwatch()


class TimedDrafter(Drafter):
    """A drafter with its time measured."""

    def propose(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        proposed = super().propose(*arguments)
        STOPWATCH.propose_s += time.perf_counter() - start
        return proposed


class TimedRunner(ModelRunner):
    """A runner with its time measured."""

    def decode(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        drawn = super().decode(*arguments)
        STOPWATCH.decode_s += time.perf_counter() - start
        return drawn


class TimedDecode(pd.DecodeEngine):
    """A decode engine whose runner's time is measured."""

    def _make_runner(self) -> ModelRunner:
        return TimedRunner(self.model, self.pool.memory)


def pair(model: pd.Model, num_draft_tokens: int) -> pd.Pairing:
    """Make both engines in this process, over one pool."""
    pool = pd.PagePool(model, pd.CacheConfig(page_size=64, num_pages=64))
    ends = pd.KVChannel.loopback(pool, pool)
    config = pd.EngineConfig(num_draft_tokens=num_draft_tokens)
    return pd.Pairing(pd.PrefillEngine(model, ends[0], config), TimedDecode(model, ends[1], config))


@attrs.frozen
class Run:
    """The decode of one request: tokens per second of its steps, and the parts of a step."""

    tokens_per_s: float
    draft_ms: float
    verify_ms: float
    engine_ms: float
    accept_length: float


def prompt() -> tuple[int, ...]:
    rng = np.random.default_rng(1)
    facts, _ = recall_prompt(rng, 300)
    story, _ = text_prompt(rng)
    return (*facts, *story[1:])


class Bench:
    """A pairing for each number of drafts, over one model."""

    def __init__(self, dtype: torch.dtype, num_tokens: int) -> None:
        model = pd.load_model(EXAMPLES / "tiny", dtype=dtype, mtp=True)
        self.request = pd.Request(
            prompt=prompt(),
            sampling=pd.SamplingParams(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True),
        )
        self.pairings = {count: pair(model, count) for count in (0, *DRAFTS)}

    def run(self, count: int) -> Run:
        """Run one request, timed from its first token on, when prefill is over."""
        pairing = self.pairings[count]
        steps = num_tokens = 0
        start = 0.0
        pairing.submit(self.request)
        while pairing.num_unfinished:
            events = pairing.step()
            if start:
                steps += 1
                num_tokens += sum(event.token is not None for event in events)
            elif events:
                start = time.perf_counter()
                STOPWATCH.reset()
        seconds = time.perf_counter() - start
        draft_s, verify_s = STOPWATCH.propose_s, STOPWATCH.decode_s - STOPWATCH.propose_s
        parts = [1e3 * part / steps for part in (draft_s, verify_s, seconds - draft_s - verify_s)]
        return Run(num_tokens / seconds, *parts, accept_length=num_tokens / steps)


def median(values: list[float]) -> float:
    return statistics.median(values)


def measure(dtype: str, num_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Return a line for each number of drafts, with parts; 0 drafts run before each of the others."""
    bench = Bench(getattr(torch, dtype), num_tokens)
    for count in (0, *DRAFTS):
        bench.run(count)
    runs: dict[int, list[tuple[Run, Run]]] = {count: [] for count in DRAFTS}
    for _ in range(rounds):
        for count in DRAFTS:
            runs[count].append((bench.run(0), bench.run(count)))
    for pairing in bench.pairings.values():
        pairing.close()
    lines = []
    for count, pairs in runs.items():
        ratios = sorted(ours.tokens_per_s / plain.tokens_per_s for plain, ours in pairs)
        line = {
            "bench": "mtp",
            "case": f"decode/{dtype}/{count}",
            "value": round(median([ours.tokens_per_s for _, ours in pairs]), 1),
            "unit": "tokens/s",
            "baseline": "0 drafts",
            "baseline_value": round(median([plain.tokens_per_s for plain, _ in pairs]), 1),
            "ratio": round(median(ratios), 3),
            "ratio_low": round(ratios[0], 3),
            "ratio_high": round(ratios[-1], 3),
            "runs": len(pairs),
        }
        for part in ("draft_ms", "verify_ms", "engine_ms", "accept_length"):
            line[part] = round(median([getattr(ours, part) for _, ours in pairs]), 3)
            line[f"baseline_{part}"] = round(median([getattr(plain, part) for plain, _ in pairs]), 3)
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    runner.Drafter = TimedDrafter  # type: ignore[misc]
    lines = []
    for dtype in arguments.dtypes.split(","):
        for line in measure(dtype, arguments.tokens, arguments.rounds):
            print(json.dumps(line), flush=True)
            lines.append(line)
    print(f"\n{'case':20} {'tokens/s':>9} {'ratio':>6} {'length':>7} {'draft':>7} {'verify':>7} {'engine':>7}  ms")
    for line in lines:
        print(
            f"{line['case']:20} {line['value']:9.1f} {line['ratio']:6.2f} {line['accept_length']:7.2f} "
            f"{line['draft_ms']:7.2f} {line['verify_ms']:7.2f} {line['engine_ms']:7.2f}"
        )


if __name__ == "__main__":
    main()
