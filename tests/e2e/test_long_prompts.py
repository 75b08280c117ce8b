"""The memory of a step does not grow with the context behind it; the KV pages themselves are what grows."""

from __future__ import annotations

import resource
import subprocess
import sys
from itertools import accumulate

import pytest
import torch

import pdinfer as pd
from pdinfer.config import CacheConfig
from pdinfer.kernels.torch import attention as torch_attention
from pdinfer.kv.view import KVView
from pdinfer.model.batch import Batch, Row
from pdinfer.testing import random_model, tiny_config

CPU = torch.device("cpu")
CHUNK = 64


def peak_of_a_chunk(model: pd.Model, context: int) -> int:
    """Most bytes of tensors alive at once in a prompt's last chunk; what the cache holds before it does not matter."""
    layout = model.kv_layout(CacheConfig(page_size=16))
    pages = range(layout.num_pages(context))
    view = KVView.of(model.allocate_pages(layout, len(pages)))
    row = Row([1] * CHUNK, context - CHUNK, pages)
    batch = Batch.build([row], page_size=16, device=CPU, decode=False)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        model.forward(batch, view)
    events = sorted(profile.function_events, key=lambda event: event.time_range.start)
    return max(accumulate(event.self_cpu_memory_usage for event in events))


@pytest.mark.parametrize("family", ["v3", "v32"])
def test_a_chunk_needs_no_more_memory_behind_a_longer_context(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "SCORE_BLOCK_BYTES", 1 << 18)
    monkeypatch.setattr(torch_attention, "CONTEXT_BLOCK_BYTES", 1 << 18)
    model = random_model(tiny_config(family, max_position_embeddings=1 << 17, num_hidden_layers=1))
    short, long = (peak_of_a_chunk(model, context) for context in (512, 4096))
    assert 1 << 18 < long < 1.5 * short


CHILD = """
import sys
from tests.e2e.test_long_prompts import print_peak
print_peak(int(sys.argv[1]))
"""


def print_peak(num_tokens: int) -> None:
    """Generates behind a prompt of that many tokens; prints the most bytes the process ever had, KV pages left out."""
    torch.set_num_threads(1)
    changes = {"max_position_embeddings": 1 << 17, "num_hidden_layers": 2, "index_topk": 256}
    model = random_model(tiny_config("glm", **changes, indexer_types=["full", "shared"]))
    cache = pd.CacheConfig(num_pages=num_tokens // 64 + 2)
    engine = pd.EngineConfig(chunked_prefill_size=2048)
    request = pd.Request(prompt=(1, 2, 3, 4) * (num_tokens // 4), sampling=pd.SamplingParams(max_new_tokens=2))
    with pd.Pairing.local(model, cache=cache, engine=engine) as pairing:
        events = list(pairing.generate([request]))
    assert events[-1].error is None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(peak - model.kv_layout(cache).page_bytes * (num_tokens // 64 + 2))


@pytest.mark.full
def test_a_prompt_of_32k_tokens_peaks_like_one_of_8k() -> None:
    short, long = (
        int(subprocess.run([sys.executable, "-c", CHILD, str(count)], check=True, capture_output=True).stdout)
        for count in (8192, 32768)
    )
    assert 0 < long < 1.5 * short
