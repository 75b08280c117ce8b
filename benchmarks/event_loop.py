"""How long an event loop stands still while bodies of calls are read beside it: a JSON line per size and kind.

    python benchmarks/event_loop.py [--checkpoint examples/tiny] [--kib 1 64 1024 4096] [--rounds 5]

Each body is a chat of one long message, or a prompt of tokens, and goes through `Call.parse_async`. `longest_gap_ms` is
the longest time between two turns of a task that only sleeps for no time, the median over the rounds; `idle_gap_ms` is
that of as many turns beside nothing. `read_ms` is what the body takes.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cpu_race"))

from machine import cpu_here

import pdinfer as pd
from pdinfer.text.openai import Call

WORDS = "the loop of a server turns while prompts are read, and no stream may wait for them; "
LIMIT = 1 << 24


async def gap_of(work: asyncio.Task | None, seconds: float) -> tuple[float, float]:
    """Return the longest time between two turns until the work is done, or for so long, and how long that took."""
    began = last = time.perf_counter()
    longest = 0.0
    while (work is not None and not work.done()) or (work is None and last - began < seconds):
        await asyncio.sleep(0)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    if work is not None:
        await work
    return longest, last - began


def body_of(kind: str, kib: int) -> tuple[bytes, bool]:
    """Return a body of about so many KiB, and whether it is a chat."""
    if kind == "tokens":
        return json.dumps({"prompt": [number % 256 for number in range(kib * 200)]}).encode(), False
    text = (WORDS * (kib * 1024 // len(WORDS) + 1))[: kib * 1024]
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode(), True


async def measure(tokenizer: pd.text.Tokenizer, kind: str, kib: int, rounds: int) -> dict[str, object]:
    """Return the line of a size."""
    data, is_chat = body_of(kind, kib)
    gaps, idle, took = [], [], []
    for _ in range(rounds):
        parsing = Call.parse_async(data, tokenizer, is_chat=is_chat, model="m", limit=LIMIT)
        gap_s, read_s = await gap_of(asyncio.ensure_future(parsing), 0.0)
        gaps.append(1e3 * gap_s)
        took.append(1e3 * read_s)
        idle.append(1e3 * (await gap_of(None, read_s))[0])
    names = {"longest_gap_ms": gaps, "idle_gap_ms": idle, "read_ms": took}
    medians = {name: round(statistics.median(values), 2) for name, values in names.items()}
    return {"bench": "event_loop", "kind": kind, "kib": kib, "bytes": len(data), **medians, "rounds": rounds}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path(__file__).parents[1] / "examples" / "tiny")
    parser.add_argument("--kib", type=int, nargs="+", default=[1, 64, 1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    tokenizer = pd.text.Tokenizer.load(options.checkpoint)
    for kind in ("chat", "tokens"):
        for kib in options.kib:
            line = asyncio.run(measure(tokenizer, kind, kib, options.rounds))
            print(json.dumps({**line, "pdinfer": pd.__version__, "machine": cpu_here()}), flush=True)


if __name__ == "__main__":
    main()
