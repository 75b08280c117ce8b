"""What the bench costs: 1000 streams of 50 tokens a second, recorded as a host would."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pdinfer as pd
from pdinfer import bench

NUM_STREAMS, TOKENS_PER_S, SECONDS = 1000, 50, 20


def recording() -> Iterator[dict[str, Any]]:
    """The share of a core that `Recorder` takes, and the seconds of a summary of all that it saw."""
    recorder = bench.Recorder()
    for at in range(NUM_STREAMS):
        recorder.sent(str(at), prompt_tokens=100)
    steps = [
        [pd.TokenEvent(request_id=str(at), token=1, index=step, at_s=step / TOKENS_PER_S) for at in range(NUM_STREAMS)]
        for step in range(TOKENS_PER_S)
    ]
    began = time.thread_time()
    for _ in range(SECONDS):
        for events in steps:
            recorder.read(events)
    recorded_s = time.thread_time() - began
    began = time.thread_time()
    bench.summarize(recorder.records())
    yield {
        "tokens": NUM_STREAMS * TOKENS_PER_S * SECONDS,
        "share_of_a_core": round(recorded_s / SECONDS, 4),
        "us_per_token": round(recorded_s / (NUM_STREAMS * TOKENS_PER_S * SECONDS) * 1e6, 3),
        "summary_s": round(time.thread_time() - began, 2),
    }
