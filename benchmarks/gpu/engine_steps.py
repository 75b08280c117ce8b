"""Measure steps of whole engines on a card: JSON lines, then why steps ran uncaptured.

    python benchmarks/gpu/engine_steps.py [--batches 1,32,128] [--prompt 2048] [--new 48] [--transport loopback|shm|tcp]
        [--kv-format auto|fp8] [--drafts 2] [--without deep_gemm,flash_mla]
    python benchmarks/gpu/engine_steps.py --tiny      the same at small sizes, on a CPU too

A slice of DeepSeek-V3 at full width goes through PrefillEngine, channel, DecodeEngine and Pairing, in one process. A
batch of prompts is submitted at once. A value is the median time of `Pairing.step` while all of them decode: what a
step costs with scheduling, channel and events, where `slice.py` measures the runner alone. Drafts of random weights are
never accepted: their steps cost what steps with drafts cost, and give one token each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import card
import torch
from drawn_model import drawn_model, v3_config
from pushes import transport_of
from timing import numbers

import pdinfer as pd
from pdinfer.config import ModelConfig
from pdinfer.model.model import Model

PAGE_SIZE = 64
CHUNK = 8192
TINY = {"prompt": 100, "new": 6, "batches": [1, 2]}
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
    first_s: dict[str, float] = attrs.field(factory=dict)
    num_tokens: int = 0
    failed: list[str] = attrs.field(factory=list)


def serve(pairing: pd.Pairing, batch: int, asked: Iterator[pd.Request]) -> Times:
    times, ended = Times(), 0
    for request in asked:
        pairing.submit(request)
    began = time.perf_counter()
    while pairing.num_unfinished:
        started = time.perf_counter()
        events = pairing.step()
        now = time.perf_counter()
        named = {event.request_id for event in events if event.token is not None}
        if len(times.first_s) == batch and not ended and len(named) == batch:
            times.steps.append(now - started)
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


def line_of(model: Model, times: Times, batch: int, options: argparse.Namespace) -> Line:
    name = f"B {batch}, {options.prompt}+{options.new}, {options.transport}, KV {options.kv_format}"
    drafts = f", {options.drafts} drafts" * bool(options.drafts)
    without = f", without {'+'.join(options.without)}" * bool(options.without)
    line: Line = {"bench": "gpu-engines", "case": name + drafts + without, "unit": "ms"}
    if times.failed:
        return {**line, "missing": f"{len(times.failed)} requests failed: {times.failed[0][:200]}"}
    first = sorted(times.first_s.values())
    steps = [1e3 * step for step in times.steps]
    line |= {
        "value": round(statistics.median(steps), 3) if steps else None,
        "low": round(min(steps), 3) if steps else None,
        "high": round(max(steps), 3) if steps else None,
        "steps": len(steps),
        "prefill_tok_s": round(batch * options.prompt / first[-1]),
        "ttft_ms": [round(1e3 * first[0], 2), round(1e3 * first[-1], 2)],
        "num_tokens": times.num_tokens,
        "layers": model.config.num_hidden_layers,
    }
    if model.device.type == "cuda":
        line["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return line


def run(options: argparse.Namespace, device: torch.device) -> Iterator[Line | str]:
    yield {"bench": "gpu-engines", "case": "card", "value": card.facts(device)}
    config = v3_config(tiny=options.tiny, num_nextn_predict_layers=int(options.drafts > 0))
    model = drawn_model(config, device, fp8=not options.tiny, without=options.without, mtp=options.drafts > 0)
    prefill, decode = pair_of(model, options)
    warm_s = prefill.warm_up().seconds, decode.warm_up().seconds
    told = {choice.op: choice.provider for choice in model.resolved.choices if choice.op in TOLD_OPS}
    yield {"bench": "gpu-engines", "case": "warm-up", "value": [round(each, 2) for each in warm_s], "unit": "s"}
    yield {"bench": "gpu-engines", "case": "ops", "value": told}
    with pd.Pairing(prefill, decode) as pairing:
        for batch in options.batches:
            times = serve(pairing, batch, requests(config, batch, options))
            yield line_of(model, times, batch, options)
        yield str(decode.graphs)


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
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        raise SystemExit("torch sees no card here; --tiny runs on a CPU")
    if options.tiny:
        vars(options).update(TINY)
    for line in run(options, device):
        print(line if isinstance(line, str) else json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
