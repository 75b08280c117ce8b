"""vLLM on a CPU rotates 3-D interleaved queries and keys wrongly: those of MLA models without rope_scaling."""

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

with set_current_vllm_config(VllmConfig()):
    rope = RotaryEmbedding(64, 64, 8192, 10000.0, False, torch.float32)  # interleaved, as in DeepSeek-V3
positions = torch.arange(32)
query = torch.randn(32, 4, 64)  # [tokens, heads, rotary dimensions], as MLA gives them
rows = torch.randn(32, 704)  # a key is the end of such a row: MLA splits a projection
right = rope.forward_native(positions, query.clone(), rows[:, None, 640:].clone())
for what, key in (
    ("a strided key", rows.clone()[:, 640:].unsqueeze(1)),
    ("a contiguous key", rows[:, None, 640:].clone()),
):
    wrong = rope.forward_cpu(positions, query.clone(), key)
    for name, ours, theirs in zip(("query", "key"), right, wrong, strict=True):
        differ = sum(not torch.allclose(*pair, atol=1e-5) for pair in zip(ours, theirs, strict=True))
        print(f"with {what}: the {name} of {differ} of 32 tokens is wrong, by up to {(ours - theirs).abs().max():.1f}")
