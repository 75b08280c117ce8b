"""A random checkpoint of a small Llama with 8 heads, 2 of keys and values: `python -m tests.vllm.llama DIR`."""

from __future__ import annotations

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD, VOCAB = 256, 512, 3, 8, 2, 32, 1024
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{at}self_attn.{name}_proj.weight"] = (rows * HEAD, HIDDEN)
        found[f"{at}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD)
        found |= {f"{at}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = (HIDDEN, INNER)
        found |= {f"{at}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    return {**found, "model.norm.weight": (HIDDEN,)}


def write(folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = {}
    for name, shape in shapes().items():
        values = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        tensors[name] = 1 + 0.1 * values if len(shape) == 1 else 0.08 * values
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
