"""Measure steps of whole engines on a card: JSON lines, each with what the step must cost and misses.

    python benchmarks/gpu/engine_steps.py [--batches 1,32,128] [--prompt 2048] [--new 48] [--transport loopback|shm|tcp]
        [--kv-format auto|fp8] [--drafts 2] [--without deep_gemm,flash_mla]
    python benchmarks/gpu/engine_steps.py --tiny      the same at small sizes, on a CPU too
    python benchmarks/gpu/engine_steps.py --dry-run [--card H800]     the floors of such steps, on any machine

A slice of DeepSeek-V3 at full width goes through PrefillEngine, channel, DecodeEngine and Pairing, in one process. A
batch of prompts is submitted at once. A value is the median time of `Pairing.step` while all of them decode: what a
step costs with scheduling, channel and events, where `slice.py` measures the runner alone. `floor_us` is what its
kernels take at least (`floors`), and `host_us` what the step takes beside its replay. Drafts of random weights are
never accepted: their steps cost what steps with drafts cost, and give one token each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import card
import floors
import torch
from case import Ceilings
from drawn_model import drawn_model, v3_config
from pushes import transport_of
from timing import numbers, watch

import pdinfer as pd
from pdinfer.config import ModelConfig
from pdinfer.execution.graphs import DecodeGraphs
from pdinfer.model.model import Model

PAGE_SIZE = 64
CHUNK = 8192
TINY = {"prompt": 100, "new": 12, "batches": [1, 2]}
TOLD_OPS = ("mla_decode", "mla_prefill", "linear[fp8]", "grouped_mlp[fp8]")
Line = dict[str, Any]


def pair_of(model: Model, options: argparse.Namespace) -> tuple[pd.PrefillEngine, pd.DecodeEngine]:
    """Return two engines with a pool each, and room for the largest batch."""
    most = max(options.batches)
    pages = most * -(-(options.prompt + options.new + 1 + options.drafts) // PAGE_SIZE) + 8
    cache = pd.CacheConfig(page_size=PAGE_SIZE, num_pages=pages, kv_format=options.kv_format, prefix_cache=False)
    pools = [pd.PagePool(model, cache) for _ in range(2)]
    if options.transport == "loopback":
        ends = pd.KVChannel.loopback(*pools)
    else:
        ends = tuple(pd.KVChannel(pool, transport_of(options.transport)) for pool in pools)
    config = pd.EngineConfig(
        max_running_requests=most,
        chunked_prefill_size=CHUNK,
        graph_batch_sizes=tuple(options.batches),
        num_draft_tokens=options.drafts,
        target_itl_s=None,
    )
    return pd.PrefillEngine(model, ends[0], config), pd.DecodeEngine(model, ends[1], config)


def requests(config: ModelConfig, batch: int, options: argparse.Namespace) -> Iterator[pd.Request]:
    chance = torch.Generator().manual_seed(batch)
    for number in range(batch):
        prompt = torch.randint(3, config.vocab_size, (options.prompt,), generator=chance).tolist()
        sampling = pd.SamplingParams(temperature=0.0, max_new_tokens=options.new, ignore_eos=True)
        yield pd.Request(request_id=f"{batch}/{number}", prompt=tuple(prompt), sampling=sampling)


@attrs.define
class Times:
    """Steps of a batch in which every request got a token and none began or ended, and when first tokens came."""

    steps: list[float] = attrs.field(factory=list)
    replays: list[Sequence[tuple[Any, Any]]] = attrs.field(factory=list)
    """The events around what was replayed in each of these steps."""
    num_captured: int = 0
    first_s: dict[str, float] = attrs.field(factory=dict)
    num_tokens: int = 0
    failed: list[str] = attrs.field(factory=list)

    def host_us(self) -> float | None:
        """Return the time of a step beside its replay. None where nothing was replayed."""
        replayed = [(step, events) for step, events in zip(self.steps, self.replays, strict=True) if events]
        beside = [1e6 * step - 1e3 * sum(a.elapsed_time(b) for a, b in events) for step, events in replayed]
        return round(statistics.median(beside), 1) if beside else None


def serve(
    pairing: pd.Pairing,
    batch: int,
    asked: Iterator[pd.Request],
    graphs: DecodeGraphs,
    replays: list[tuple[Any, Any]],
) -> Times:
    times, ended = Times(), 0
    for request in asked:
        pairing.submit(request)
    began = time.perf_counter()
    while pairing.num_unfinished:
        replays.clear()
        captured, started = graphs.num_steps[""], time.perf_counter()
        events = pairing.step()
        now = time.perf_counter()
        named = {event.request_id for event in events if event.token is not None}
        if len(times.first_s) == batch and not ended and len(named) == batch:
            times.steps.append(now - started)
            times.replays.append([*replays])
            times.num_captured += graphs.num_steps[""] - captured
        for event in events:
            if event.token is not None:
                times.first_s.setdefault(event.request_id, now - began)
                times.num_tokens += 1
            if event.error is not None:
                times.failed.append(str(event.error))
        ended += sum(event.finish_reason is not None for event in events)
        if not events:
            pairing.wait(0.001)
    return times


def step_of(config: ModelConfig, batch: int, options: argparse.Namespace) -> floors.Step:
    """Return what the median of the steps computes: half of the answers is there."""
    return floors.Step(
        config,
        batch,
        options.prompt + options.new // 2,
        fp8=not options.tiny,
        packed=options.kv_format == "fp8",
        num_drafts=options.drafts,
    )


def line_of(model: Model, times: Times, batch: int, options: argparse.Namespace, ceilings: Ceilings) -> Line:
    name = f"B {batch}, {options.prompt}+{options.new}, {options.transport}, KV {options.kv_format}"
    drafts = f", {options.drafts} drafts" * bool(options.drafts)
    without = f", without {'+'.join(options.without)}" * bool(options.without)
    line: Line = {"bench": "gpu-engines", "case": name + drafts + without, "unit": "ms"}
    if times.failed:
        return {**line, "wrong": f"{len(times.failed)} requests failed: {times.failed[0][:200]}"}
    if not times.steps:
        return {**line, "wrong": "no step gave all requests a token"}
    first = sorted(times.first_s.values())
    median = statistics.median(times.steps)
    line |= {
        "value": round(1e3 * median, 3),
        "low": round(1e3 * min(times.steps), 3),
        "high": round(1e3 * max(times.steps), 3),
        **floors.floor_of(1e6 * median, step_of(model.config, batch, options), ceilings),
        "host_us": times.host_us(),
        "steps": len(times.steps),
        "captured": times.num_captured,
        "prefill_tok_s": round(batch * options.prompt / first[-1]),
        "ttft_ms": [round(1e3 * first[0], 2), round(1e3 * first[-1], 2)],
        "num_tokens": times.num_tokens,
        "layers": model.config.num_hidden_layers,
    }
    if model.device.type == "cuda":
        line["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return line


def config_of(options: argparse.Namespace) -> ModelConfig:
    return v3_config(tiny=options.tiny, num_nextn_predict_layers=int(options.drafts > 0))


def run(options: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    yield {"bench": "gpu-engines", "case": "card", "value": card.facts(device)}
    ceilings, config = card.measure(device, tiny=options.tiny), config_of(options)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model = drawn_model(config, device, fp8=not options.tiny, without=options.without, mtp=options.drafts > 0)
    prefill, decode = pair_of(model, options)
    warm_s = prefill.warm_up().seconds, decode.warm_up().seconds
    told = {choice.op: choice.provider for choice in model.resolved.choices if choice.op in TOLD_OPS}
    yield {"bench": "gpu-engines", "case": "warm-up", "value": [round(each, 2) for each in warm_s], "unit": "s"}
    yield {"bench": "gpu-engines", "case": "ops", "value": told}
    replays = watch(decode.graphs)
    with pd.Pairing(prefill, decode) as pairing:
        for batch in options.batches:
            times = serve(pairing, batch, requests(config, batch, options), decode.graphs, replays)
            yield line_of(model, times, batch, options, ceilings)
        yield {"bench": "gpu-engines", "case": "captured steps", "value": str(decode.graphs)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batches", type=numbers, default=[1, 32, 128])
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=48, help="tokens of each answer")
    parser.add_argument("--transport", default="loopback", choices=("loopback", "shm", "tcp"))
    parser.add_argument("--kv-format", default="auto", choices=("auto", "fp8"))
    parser.add_argument("--drafts", type=int, default=0, help="tokens that the MTP layer drafts for each step")
    parser.add_argument("--without", type=lambda text: text.split(","), default=[], help="providers to pass over")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--card", default="H200", choices=sorted(card.NOMINAL))
    options = parser.parse_args(arguments)
    if options.dry_run:
        for batch in options.batches:
            print(f"B {batch}\n{floors.table(step_of(config_of(options), batch, options), card.NOMINAL[options.card])}")
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        raise SystemExit("torch sees no card here; --tiny runs on a CPU")
    if options.tiny:
        vars(options).update(TINY)
    lines = []
    for line in run(options, device):
        floors.tell(line)
        lines.append(line)
    return int(any("wrong" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
