"""Run prefill and decode as two processes, with KV in shared memory; print text as it comes, then the numbers.

    python examples/02_two_processes.py [CHECKPOINT]

Each process loads the model, makes a pool and an end of the channel, and serves its engine over a pipe. The Pairing in
this process holds no tensor: it sends requests one way and gets tokens the other; the KV never passes through it.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from tiny_tasks import BOS, decode, encode

import pdinfer as pd
from pdinfer.stats import DecodeLoad, PrefillLoad

CHECKPOINT = Path(__file__).parent / "tiny"
PAGES = pd.CacheConfig(page_size=16, num_pages=1024)
ENGINE = pd.EngineConfig(num_threads=1)  # a small model, and two processes that share a small machine
STORY = "One morning Tom found an old key by the river. He "
FILLER = "Zoe gave the lamp to Ben, and Ben smiled. "
FACTS = "set tom=4821; set ann=x7f3; set ben=90210; set mia=k2k2; set zoe=314159; "
QUESTIONS = (FACTS + "get ben=", FACTS + FILLER * 20 + "get zoe=", "copy q8w2e5r1 > ", "calc 47+38=", "calc 9*7=")


def request_of(prompt: str) -> pd.Request:
    sampling = pd.SamplingParams(temperature=0, max_new_tokens=200, stop_token_ids=(ord(";"),))
    return pd.Request(request_id=prompt[-44:], prompt=(BOS, *encode(prompt)), sampling=sampling)


def stream_one(pairing: pd.Pairing, prompt: str) -> None:
    """Print the prompt, then every token the moment it comes."""
    print(prompt, end="\033[1m", flush=True)
    for event in pairing.generate([request_of(prompt)]):
        print(decode([event.token] if event.token is not None else []), end="", flush=True)
    print("\033[0m\n")


def serve_all(pairing: pd.Pairing, prompts: Sequence[str]) -> dict[str, list[float]]:
    """Serve the prompts together and print each answer as it ends; return when each token came."""
    times: dict[str, list[float]] = {prompt[-44:]: [time.perf_counter()] for prompt in prompts}
    output: dict[str, list[int]] = defaultdict(list)
    for event in pairing.generate(map(request_of, prompts)):
        if event.token is not None:
            times[event.request_id].append(time.perf_counter())
            output[event.request_id].append(event.token)
        if event.error is not None:
            raise SystemExit(f"a request failed: {event.error}")
        if event.finish_reason is not None:
            print(f"  {event.request_id:>44}\033[1m{decode(output[event.request_id])}\033[0m")
    return times


def table(times: dict[str, list[float]], prefill: PrefillLoad, decode_load: DecodeLoad) -> None:
    """Print the measurements of the run."""
    first = [1e3 * (stamps[1] - stamps[0]) for stamps in times.values()]
    gaps = [1e3 * gap for stamps in times.values() for gap in np.diff(stamps[1:])]
    kv = decode_load.kv
    rows = [
        ("TTFT", f"{np.mean(first):.1f} ms mean, {max(first):.1f} ms worst of {len(first)} requests"),
        ("ITL", f"{np.mean(gaps):.2f} ms mean, {np.percentile(gaps, 99):.2f} ms p99"),
        ("prefill", f"{prefill.tokens_per_s:,.0f} tokens/s over {prefill.num_tokens} tokens"),
        ("decode", f"{decode_load.tokens_per_s:,.0f} tokens/s over {decode_load.num_tokens} tokens"),
        ("KV moved", f"{kv.bytes_received:,} bytes at {kv.bytes_received / 1e6 / max(kv.receive_s, 1e-9):,.0f} MB/s"),
        ("transport", decode_load.transport),
        ("ops", ops_in_c({op for op, provider in prefill.providers + decode_load.providers if provider == "native"})),
    ]
    print()
    for name, value in rows:
        print(f"  {name:<10}{value}")


def ops_in_c(names: set[str]) -> str:
    """Tell which ops ran in C, or why none did and what to do."""
    if names:
        return f"in C: {', '.join(sorted(names))}"
    told = (line.strip() for line in pd.explain_backends("cpu").splitlines())
    why = next((line.removeprefix("not native: ") for line in told if line.startswith("not native: ")), "not asked for")
    return f"none in C, which is slower, and `python -m pdinfer doctor` says how to mend it: the library {why}"


def main(checkpoint: Path) -> None:
    with ThreadPoolExecutor() as threads:  # so that both load at the same time
        loading = threads.submit(pd.remote.spawn_prefill, checkpoint, cache=PAGES, engine=ENGINE)
        decode_port = pd.remote.spawn_decode(checkpoint, cache=PAGES, engine=ENGINE)
        prefill = loading.result()
    with pd.Pairing(prefill, decode_port) as pairing:
        stream_one(pairing, STORY)
        times = serve_all(pairing, QUESTIONS)
        table(times, prefill.load(), decode_port.load())


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else CHECKPOINT)
