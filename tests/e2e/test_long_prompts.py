"""The memory of a step does not grow with the context behind it; the KV pages themselves are what grows."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pdinfer as pd
from pdinfer.batch import Batch, Row
from pdinfer.config import CacheConfig
from pdinfer.kernels import torch_ops
from pdinfer.kv.view import KVView
from pdinfer.testing import random_model, tiny_config

CPU = torch.device("cpu")
CHUNK = 64


class LargestTensor(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes, views not counted."""

    num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.num_bytes = max(self.num_bytes, leaf.untyped_storage().nbytes())
        return out


def largest_of_a_chunk(model: pd.Model, context: int) -> int:
    """Bytes of the largest tensor made for a prompt's last chunk; what the cache holds before it does not matter."""
    layout = model.kv_layout(CacheConfig(page_size=16))
    pages = range(layout.num_pages(context))
    view = KVView.of(model.allocate_pages(layout, len(pages)))
    row = Row([1] * CHUNK, context - CHUNK, pages)
    batch = Batch.build([row], page_size=16, device=CPU, absorbed=False)
    with LargestTensor() as largest:
        model.forward(batch, view)
    return largest.num_bytes


@pytest.mark.parametrize("family", ["v3", "v32", "glm"])
def test_a_chunk_needs_no_more_memory_behind_a_longer_context(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_ops, "SCORE_BLOCK_BYTES", 1 << 17)
    monkeypatch.setattr(torch_ops, "CONTEXT_BLOCK_BYTES", 1 << 17)
    model = random_model(tiny_config(family, max_position_embeddings=1 << 17, num_hidden_layers=2, indexer_types=None))
    short, long = (largest_of_a_chunk(model, context) for context in (512, 4096))
    assert long < 1.5 * short
    assert long < 4096 * model.config.num_attention_heads * model.config.qk_nope_head_dim * 4


CHILD = """
import sys
from tests.e2e.test_long_prompts import print_growth
print_growth(int(sys.argv[1]))
"""


def print_growth(num_tokens: int) -> None:
    """Generates behind a prompt of that many tokens; prints how many bytes the process grew by beyond its KV pages."""
    torch.set_num_threads(1)
    changes = {"max_position_embeddings": 1 << 17, "num_hidden_layers": 2, "index_topk": 256}
    model = random_model(tiny_config("glm", **changes, indexer_types=["full", "shared"]))
    cache = pd.CacheConfig(num_pages=num_tokens // 64 + 2)
    engine = pd.EngineConfig(chunked_prefill_size=2048)
    request = pd.Request(prompt=(1, 2, 3, 4) * (num_tokens // 4), sampling=pd.SamplingParams(max_new_tokens=2))
    with pd.Pairing.local(model, cache=cache, engine=engine) as pairing:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        events = list(pairing.generate([request]))
    assert events[-1].error is None
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(grown - model.kv_layout(cache).page_bytes * (num_tokens // 64 + 2))


@pytest.mark.full
def test_a_prompt_of_32k_tokens_peaks_like_one_of_8k() -> None:
    short, long = (
        int(subprocess.run([sys.executable, "-c", CHILD, str(count)], check=True, capture_output=True).stdout)
        for count in (8192, 32768)
    )
    assert 0 < long < 1.5 * short
