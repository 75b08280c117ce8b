"""Measure decode steps of a slice of DeepSeek-V3 at full width: JSON lines, then a table.

    python benchmarks/gpu/slice.py [--minutes 8] [--batches 1,8,32,128,256] [--contexts 1024,4096,16384,65536]
    python benchmarks/gpu/slice.py --tiny       the same at small sizes, on a CPU too

The slice has one dense layer, three layers with 32 experts each, the embedding and the head; weights are FP8 blocks
drawn on the card, and pages hold random latents. Steps run as engines run them, captured, each with its wait for the
tokens. `step_us` is the time from step to step, `device_us` that of the replay by events, and `host_us` the rest.
`kernels_us` is the sum of the kernels of a step, as torch's profiler tells them: the gaps are the difference. A
sentence behind each line says what the step must cost (`floors`), and which goals it misses.

Two more slices, of the dense layer once and twice, tell what a layer of each kind and the rest take. From these follows
`whole_us`, the step of all 61 layers on a rank of eight, without the time that rows travel between ranks.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import card
import floors
import torch
from case import Ceilings
from drawn_model import NUM_DENSE, NUM_LAYERS, drawn_model, fill, v3_config
from timing import numbers, sentence, watch

import pdinfer as pd
from pdinfer.execution.drafting import Draft
from pdinfer.execution.runner import ModelRunner
from pdinfer.execution.sampling import Draw
from pdinfer.model.batch import Row
from pdinfer.model.model import Model

PAGE_SIZE = 64
WARM_STEPS, STEPS, PROFILED_STEPS = 3, 15, 3
GREEDY = pd.SamplingParams(temperature=0.0, max_new_tokens=STEPS, ignore_eos=True)
POOL_FRACTION = 0.9
TINY_BATCH, TINY_CONTEXT = 3, 200
Line = dict[str, Any]


@attrs.define
class Steps:
    """Decode steps of a batch whose sequences all have one length, in the pages of a pool."""

    runner: ModelRunner
    rows: list[Row]
    drafts: list[Draft]
    outputs: list[list[int]]
    draws: list[Draw]
    replays: list[tuple[Any, Any]] = attrs.field(factory=list)
    """The events around each replay of a captured step."""

    @classmethod
    def of(cls, model: Model, pool: pd.PagePool, batch: int, context: int) -> Steps:
        pages_each = -(-(context + WARM_STEPS + STEPS + PROFILED_STEPS) // PAGE_SIZE)
        tables = [range(index * pages_each, (index + 1) * pages_each) for index in range(batch)]
        rows = [Row((index % model.config.vocab_size,), context - 1, table) for index, table in enumerate(tables)]
        outputs: list[list[int]] = [[] for _ in rows]
        draws = [
            Draw(sampling=GREEDY, prompt=row.tokens, output=output) for row, output in zip(rows, outputs, strict=True)
        ]
        steps = cls(ModelRunner(model, pool.memory), rows, [Draft() for _ in rows], outputs, draws)
        for _ in steps.runner.resident.capture([batch], batch):
            pass
        if model.device.type == "cuda":
            steps.watch()
        return steps

    def watch(self) -> None:
        """Put events around every replay from now on."""
        self.replays = watch(self.runner.resident.graphs)

    def run(self) -> None:
        """Run one step and let every sequence grow by its token."""
        drawn = self.runner.decode(self.rows, self.draws, self.drafts)
        for (token,), output in zip(drawn, self.outputs, strict=True):
            output.append(token.token)
        self.rows = [
            Row((output[-1],), row.stop, row.pages) for row, output in zip(self.rows, self.outputs, strict=True)
        ]

    def seconds(self) -> list[float]:
        """Return the times of steps, the first ones left out."""
        for _ in range(WARM_STEPS):
            self.run()
        self.replays.clear()
        times = []
        for _ in range(STEPS):
            started = time.perf_counter()
            self.run()
            times.append(time.perf_counter() - started)
        return times

    def kernels_us(self) -> float | None:
        """Return the sum of the times of a step's kernels. None on a CPU."""
        if not self.replays:
            return None
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(PROFILED_STEPS):
                self.run()
        kernels = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
        return sum(event.device_time_total for event in kernels) / PROFILED_STEPS


def parts_of(model: Model) -> dict[str, Model]:
    """Return the slice, and its dense layer once and twice. All share weights and pages."""
    dense, *_ = model.blocks
    one, two = (attrs.evolve(model, blocks=(dense,) * count) for count in (1, 2))
    return {"slice": model, "dense": one, "2 x dense": two}


def whole_us(step_us: dict[str, float], num_moe: int) -> dict[str, float]:
    """Return what a layer of each kind and the rest of a step take, and the step of the whole model."""
    dense = step_us["2 x dense"] - step_us["dense"]
    moe = (step_us["slice"] - step_us["dense"]) / num_moe
    rest = step_us["dense"] - dense
    whole = rest + NUM_DENSE * dense + (NUM_LAYERS - NUM_DENSE) * moe
    told = {"dense_us": dense, "moe_us": moe, "rest_us": rest, "whole_us": whole}
    return {name: round(value, 1) for name, value in told.items()}


def measure(parts: dict[str, Model], pool: pd.PagePool, batch: int, context: int) -> Line:
    """Return what a line says of a batch of sequences of one length."""
    found: dict[str, float] = {}
    line: Line = {}
    for name, model in parts.items():
        steps = Steps.of(model, pool, batch, context)
        times = steps.seconds()
        found[name] = statistics.median(times) * 1e6
        if name == "slice":
            line |= {"step_us": found[name], "step_us_low": min(times) * 1e6, "step_us_high": max(times) * 1e6}
            line |= {"steps": len(times), "captured": len(steps.replays)}
            if steps.replays:
                device_us = statistics.median(a.elapsed_time(b) for a, b in steps.replays) * 1e3
                kernels_us = steps.kernels_us() or 0.0
                line |= {"device_us": device_us, "host_us": found[name] - device_us, "kernels_us": kernels_us}
        del steps
    num_moe = len(parts["slice"].blocks) - 1
    rounded = {name: round(value, 1) if isinstance(value, float) else value for name, value in line.items()}
    if line.get("kernels_us"):
        rounded["over_kernels"] = round(line["device_us"] / line["kernels_us"], 3)
    return {
        **rounded,
        **whole_us(found, num_moe),
        "tok_s_whole": round(batch / whole_us(found, num_moe)["whole_us"] * 1e6),
    }


def run(options: argparse.Namespace, device: torch.device, deadline: float) -> Iterator[Line]:
    yield {"bench": "gpu-slice", "case": "card", "value": card.facts(device)}
    ceilings = card.measure(device, tiny=options.tiny)
    config = v3_config(tiny=options.tiny)
    model = drawn_model(config, device, fp8=not options.floats, providers=options.providers, without=options.without)
    cache = pd.CacheConfig(page_size=PAGE_SIZE, num_pages=num_pages(model, options), kv_format=options.kv_format)
    pool = pd.PagePool(model, cache)
    fill(pool, config, model.dtype)
    yield {"bench": "gpu-slice", "case": "ops", "value": {one.op: one.provider for one in model.resolved.choices}}
    for context in options.contexts:
        for batch in options.batches:
            step = floors.Step(config, batch, context, fp8=not options.floats, packed=options.kv_format == "fp8")
            name = f"decode B {batch}, context {context}{', packed' * step.packed}"
            head = {"bench": "gpu-slice", "case": name, "unit": "us"}
            if time.monotonic() > deadline:
                yield {**head, "missing": "no time left"}
            elif pages_of(batch, context) > pool.num_pages:
                yield {**head, "missing": f"{pages_of(batch, context)} pages are needed, {pool.num_pages} fit"}
            else:
                yield tried(head, partial(measured, head, parts_of(model), pool, step, ceilings))
                gc.collect()


def measured(head: Line, parts: dict[str, Model], pool: pd.PagePool, step: floors.Step, ceilings: Ceilings) -> Line:
    line = measure(parts, pool, step.batch, step.context)
    return {**head, **line, **floors.floor_of(line["step_us"], step, ceilings)}


def tried(head: Line, run_it: Callable[[], Line]) -> Line:
    try:
        return run_it()
    except Exception as error:  # noqa: BLE001 other sizes are still worth measuring
        return {**head, "wrong": sentence(error)}


def pages_of(batch: int, context: int) -> int:
    """Return the pages of a batch that grows by all steps."""
    return batch * -(-(context + WARM_STEPS + STEPS + PROFILED_STEPS) // PAGE_SIZE)


def num_pages(model: Model, options: argparse.Namespace) -> int:
    """Return as many pages as the largest batch needs, or as fit."""
    wanted = max(pages_of(batch, context) for batch in options.batches for context in options.contexts)
    if model.device.type == "cpu":
        return wanted
    layout = model.kv_layout(pd.CacheConfig(page_size=PAGE_SIZE, kv_format=options.kv_format))
    return min(wanted, model.auto_num_pages(layout, POOL_FRACTION))


COLUMNS = (
    "step_us",
    "device_us",
    "kernels_us",
    "over_kernels",
    "over_floor",
    "host_us",
    "moe_us",
    "dense_us",
    "whole_us",
    "tok_s_whole",
)


def table(lines: Sequence[Line]) -> str:
    rows = [f"{'step':<32}" + "".join(f"{name:>13}" for name in COLUMNS)]
    for line in lines:
        if "step_us" in line:
            rows.append(f"{line['case']:<32}" + "".join(f"{line.get(name) or '':>13}" for name in COLUMNS))
        else:
            rows += [f"{line['case']:<32}  {kind}: {line[kind]}" for kind in ("wrong", "missing") if kind in line]
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", type=numbers, default=[1, 8, 32, 128, 256])
    parser.add_argument("--contexts", type=numbers, default=[1024, 4096, 16384, 65536])
    parser.add_argument("--kv-format", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--providers", help="one provider for all ops")
    parser.add_argument("--without", type=lambda text: text.split(","), default=[], help="providers to pass over")
    parser.add_argument("--floats", action="store_true", help="weights in bfloat16")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        raise SystemExit("torch sees no card here; --tiny runs on a CPU")
    if options.tiny:
        options.batches = sorted({min(batch, TINY_BATCH) for batch in options.batches})
        options.contexts = sorted({min(context, TINY_CONTEXT) for context in options.contexts})
    lines = []
    for line in run(options, device, deadline):
        floors.tell(line)
        lines.append(line)
    print(table(lines))
    return int(any("wrong" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
