"""What one Pairing takes of its core while engines in processes of their own serve it: a JSON line per case.

    python benchmarks/front_end.py [--checkpoint examples/tiny] [--decodes 1 2 4] [--streams 64 256] [--rounds 5]

`us_per_token` and `us_per_request` are processor time of the front end's process, by least squares over rounds of short
and of long answers. `tokens_per_s` is how many tokens of endless answers would fill its core, `full_at_tokens_per_s` of
answers of 256 tokens. The engines are tiny, so that they tell many tokens; what they compute does not count, but how
many sequences they tell of in a message (`tokens_per_message`) does.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "cpu_race"))

from machine import cpu_here

import pdinfer as pd

ANSWERS = (8, 64)
"""Tokens of short and of long answers."""
USUAL = 256
"""Tokens of an answer in `full_at_tokens_per_s`."""


def run(pairing: pd.Pairing, streams: int, answer: int) -> tuple[int, int, int, float]:
    """Serve so many streams, each twice -> requests, tokens, steps with events, and seconds of this process."""
    sampling = pd.SamplingParams(temperature=0, max_new_tokens=answer, ignore_eos=True)
    left, tokens, messages, running = 2 * streams, 0, 0, 0
    began = time.process_time()
    while left or running:
        while left and running < streams:
            pairing.submit(pd.Request(prompt=tuple(range(3, 19)), sampling=sampling))
            left, running = left - 1, running + 1
        events = pairing.step()
        if not events:
            pairing.wait(0.05)
            continue
        messages += 1
        for event in events:
            tokens += event.token is not None
            if event.finish_reason is not None:
                assert event.finish_reason is pd.FinishReason.LENGTH, event
                running -= 1
    return 2 * streams, tokens, messages, time.process_time() - began


def measure(checkpoint: Path, decodes: int, streams: int, rounds: int) -> dict[str, object]:
    """Return the line of a case."""
    cache, seats = pd.CacheConfig(page_size=16, num_pages=16 * streams), pd.EngineConfig(max_running_requests=streams)
    ports = [pd.remote.spawn_prefill(checkpoint, cache=cache, progress=False)]
    ports += [pd.remote.spawn_decode(checkpoint, cache=cache, engine=seats, progress=False) for _ in range(decodes)]
    with pd.Pairing(ports[0], ports[1:]) as pairing:
        run(pairing, streams, ANSWERS[0])  # engines learn their costs
        seen = [run(pairing, streams, answer) for _ in range(rounds) for answer in ANSWERS]
    work = np.array([[requests, tokens] for requests, tokens, _, _ in seen], dtype=float)
    request_s, token_s = np.linalg.lstsq(work, np.array([seconds for *_, seconds in seen]), rcond=None)[0]
    return {
        "bench": "front_end",
        "prefills": 1,
        "decodes": decodes,
        "streams": streams,
        "us_per_token": round(1e6 * token_s, 2),
        "us_per_request": round(1e6 * request_s, 1),
        "tokens_per_message": round(sum(each[1] for each in seen) / sum(each[2] for each in seen), 1),
        "tokens_per_s": round(1 / token_s),
        "full_at_tokens_per_s": round(USUAL / (USUAL * token_s + request_s)),
        "rounds": rounds,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path(__file__).parents[1] / "examples" / "tiny")
    parser.add_argument("--decodes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for decodes in options.decodes:
        for streams in options.streams:
            line = measure(options.checkpoint, decodes, streams, options.rounds)
            print(json.dumps({**line, "pdinfer": pd.__version__, "machine": cpu_here()}), flush=True)


if __name__ == "__main__":
    main()
