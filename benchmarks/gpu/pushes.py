"""Measure how much pushes slow prefill down: JSON lines, then a table.

    python benchmarks/gpu/pushes.py [--transports shm,tcp] [--rounds 9] [--chunk 4096] [--chunks 4]
    python benchmarks/gpu/pushes.py --tiny      the same at small sizes, on a CPU too

A slice of DeepSeek-V3 at full width prefills a prompt of some chunks in this process, and pushes the latents of every
layer to another process, which grants the pages and waits for the hand-off. "alone" is the same prompt when decode
lacks only its last page. The two take turns, A B A B. `ratio` is the time of prefill alone over that beside pushes: 1
means that nothing is lost. `landed_ms` is the time until decode has everything.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import attrs
import card
import torch
from drawn_model import drawn_model, v3_config

import pdinfer as pd
from pdinfer.config import ModelConfig
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.view import PageMemory
from pdinfer.model.model import Model, kv_layout_of
from pdinfer.types import HandoffStatus, PageGrant

PAGE_SIZE = 64
TIMEOUT_S = 120.0
LEAST = 1 / 1.05
Line = dict[str, Any]


def transport_of(name: str) -> pd.kv.Transport:
    match name:
        case "shm":
            return pd.kv.ShmTransport()
        case "tcp":
            return pd.kv.SocketTransport()
    raise SystemExit(f"no transport is called {name!r}; there are shm, tcp")


@attrs.frozen
class Pages:
    """The part of a model that the pool of the receiving process needs: pages in main memory, as those of a decode
    engine that does not compute meanwhile."""

    config: ModelConfig
    dtype: torch.dtype
    weights_id: bytes

    def kv_layout(self, cache: pd.CacheConfig) -> KVLayout:
        layout = kv_layout_of(self.config, self.dtype, cache, mtp=False)
        return attrs.evolve(layout, weights_id=self.weights_id)

    def auto_num_pages(self, layout: KVLayout, mem_fraction_static: float | None) -> int:
        raise NotImplementedError

    def allocate_pages(self, layout: KVLayout, num_pages: int, memory: str = "auto") -> PageMemory:
        return PageMemory(layout, num_pages, device=torch.device("cpu"), memory=memory)


def receive(connection: Connection, name: str, pages: Pages, num_tokens: int) -> None:
    """Grant pages for a prompt, and say when its hand-off came, until asked for None."""
    num_pages = -(-num_tokens // PAGE_SIZE)
    pool = pd.PagePool(pages, pd.CacheConfig(page_size=PAGE_SIZE, num_pages=num_pages))
    with pd.KVChannel(pool, transport_of(name)) as channel:
        connection.send(channel.address)
        writer = connection.recv()
        while (order := connection.recv()) is not None:
            request_id, tokens = order
            granted = pool.grant(-(-len(tokens) // PAGE_SIZE))
            grant = PageGrant(
                room=os.urandom(16),
                request_id=request_id,
                writers=(writer,),
                destinations=(channel.address,),
                tokens=tokens,
                pages=granted,
                generations=pool.generations(granted),
                layout_id=pool.layout.layout_id,
            )
            channel.expect(grant)
            connection.send(grant)
            while not (handoffs := channel.poll()):
                channel.wait(TIMEOUT_S)
            connection.send((time.monotonic(), handoffs[0].status, str(handoffs[0].error)))
            pool.release(granted)


def received(connection: Connection) -> Any:
    """Return what the other process sends. Ends the run when it sends nothing."""
    if not connection.poll(TIMEOUT_S):
        raise SystemExit(f"the other process sent nothing for {TIMEOUT_S:.0f} s")
    return connection.recv()


@attrs.frozen
class Prefill:
    """The prefilling process, with its end of the pipe to the other one."""

    engine: pd.PrefillEngine
    connection: Connection
    num_tokens: int
    vocab_size: int

    def run(self, number: int, *, alone: bool) -> tuple[float, float]:
        """Return the seconds from submission until the first token is drawn, and until decode has everything."""
        prompt = tuple((number * 7919 + 31 * at * at) % self.vocab_size for at in range(self.num_tokens))
        sampling = pd.SamplingParams(temperature=0.0, max_new_tokens=2, ignore_eos=True)
        first = (self.num_tokens - 1) // PAGE_SIZE * PAGE_SIZE if alone else 0
        self.connection.send((f"{number}", range(first, self.num_tokens)))
        grant = received(self.connection)
        started = time.monotonic()
        self.engine.submit(pd.Request(request_id=f"{number}", prompt=prompt, sampling=sampling), grant)
        while self.engine.load().num_queued_tokens:
            self.engine.step()
        drawn = time.monotonic()
        while self.engine.num_unfinished:
            self.engine.step()
            self.engine.wait(0.001)
            if time.monotonic() > started + TIMEOUT_S:
                raise SystemExit(f"the pages did not leave within {TIMEOUT_S:.0f} s")
        landed, status, error = received(self.connection)
        if status is not HandoffStatus.LANDED:
            raise SystemExit(f"the hand-off is {status}: {error}")
        return drawn - started, landed - started


def measure(model: Model, name: str, options: argparse.Namespace) -> Line:
    """Return the line of a transport."""
    num_tokens = options.chunk * options.chunks
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    pages = Pages(model.config, model.dtype, model.weights_id)
    process = context.Process(target=receive, args=(theirs, name, pages, num_tokens), daemon=True)
    process.start()
    theirs.close()
    num_pages = 2 * -(-num_tokens // PAGE_SIZE)
    pool = pd.PagePool(model, pd.CacheConfig(page_size=PAGE_SIZE, num_pages=num_pages, prefix_cache=False))
    config = pd.EngineConfig(chunked_prefill_size=options.chunk, max_prefill_tokens=options.chunk)
    with pd.KVChannel(pool, transport_of(name)) as channel:
        engine = pd.PrefillEngine(model, channel, config)
        destination = received(ours)
        channel.connect(destination, timeout_s=TIMEOUT_S)
        ours.send(channel.address)
        prefill = Prefill(engine, ours, num_tokens, model.config.vocab_size)
        for number in range(2):  # what a first use compiles
            prefill.run(number, alone=bool(number))
        pairs = [
            (prefill.run(2 * number, alone=True), prefill.run(2 * number + 1, alone=False))
            for number in range(1, options.rounds + 1)
        ]
        ours.send(None)
        engine.close()
    process.join(TIMEOUT_S)
    alone = [drawn for (drawn, _), _ in pairs]
    beside = [drawn for _, (drawn, _) in pairs]
    ratios = [a / b for a, b in zip(alone, beside, strict=True)]
    pushed = sum(len(part.layers) * part.token_bytes for part in pool.layout.components) * num_tokens
    return {
        "bench": "gpu-pushes",
        "case": f"{options.chunks} chunks of {options.chunk} tokens/{name}",
        "value": round(statistics.median(beside) * 1e3, 3),
        "unit": "ms",
        "baseline": "alone",
        "baseline_value": round(statistics.median(alone) * 1e3, 3),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_low": round(min(ratios), 3),
        "ratio_high": round(max(ratios), 3),
        "runs": len(ratios),
        "landed_ms": round(statistics.median(landed for _, (_, landed) in pairs) * 1e3, 3),
        "bytes": pushed,
        "goal": round(LEAST, 3),
    }


def run(options: argparse.Namespace, device: torch.device) -> Iterator[Line]:
    yield {"bench": "gpu-pushes", "case": "card", "value": card.facts(device)}
    model = drawn_model(v3_config(tiny=options.tiny), device, providers=options.providers, without=options.without)
    for name in options.transports:
        yield measure(model, name, options)


def table(lines: Sequence[Line]) -> str:
    rows = [f"{'prefill':<36}{'alone ms':>10}{'beside ms':>11}{'landed ms':>11}  ratio [low, high]"]
    rows += [
        f"{line['case']:<36}{line['baseline_value']:>10}{line['value']:>11}{line['landed_ms']:>11}  "
        f"{line['ratio']} [{line['ratio_low']}, {line['ratio_high']}], at least {line['goal']} wanted"
        for line in lines
        if "ratio" in line
    ]
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--transports", type=lambda text: text.split(","), default=["shm", "tcp"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of a chunk")
    parser.add_argument("--chunks", type=int, default=4, help="chunks of the prompt")
    parser.add_argument("--providers", help="one provider for all ops")
    parser.add_argument("--without", type=lambda text: text.split(","), default=[], help="providers to pass over")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        raise SystemExit("torch sees no card here; --tiny runs on a CPU")
    if options.tiny:
        options.chunk, options.chunks, options.rounds = min(options.chunk, 64), min(options.chunks, 2), 1
    lines = []
    for line in run(options, device):
        print(json.dumps(line), flush=True)
        lines.append(line)
    print(table(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
