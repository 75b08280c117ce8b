"""Make a random DeepSeek-V3 checkpoint for the CPU race: original tensor names, safetensors shards, index, config.

    python benchmarks/cpu_race/make_model.py DIR [--preset perf|tiny] [--fp8] [--yarn] [--layers N] [--seed 0]

`perf` has 1.27 B parameters, 296 M of them active per token, 2.54 GB in bfloat16, and the ratios of the real model.
`tiny` has 7 M, for a smoke test, with latents of the real size because vLLM accepts no other. A tensor's values depend
only on the seed, its name and its shape. With --fp8 linear weights are e4m3 with a scale per 128 x 128 block, as
released; all other tensors stay as they are. With --yarn positions are scaled as DeepSeek-V3 scales them; --layers
replaces the number of layers.
"""

import argparse
import json
import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

BLOCK = 128
PRESETS: dict[str, dict[str, int]] = {
    "perf": {
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 32768,
    },
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 1024,
    },
}


class Spec(NamedTuple):
    """One tensor. `kind` is linear, keep (never quantized), norm or bias."""

    shard: str
    name: str
    shape: tuple[int, ...]
    kind: str


YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 2048,
}


def config_of(preset: str, *, yarn: bool = False, layers: int | None = None) -> dict[str, Any]:
    sizes = PRESETS[preset] | ({} if layers is None else {"num_hidden_layers": layers})
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **sizes,
        "num_key_value_heads": sizes["num_attention_heads"],
        "hidden_act": "silu",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": YARN if yarn else None,
        "rope_interleave": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }


def mlp(shard: str, prefix: str, hidden: int, inner: int) -> Iterator[Spec]:
    yield Spec(shard, f"{prefix}gate_proj.weight", (inner, hidden), "linear")
    yield Spec(shard, f"{prefix}up_proj.weight", (inner, hidden), "linear")
    yield Spec(shard, f"{prefix}down_proj.weight", (hidden, inner), "linear")


def layer_specs(sizes: dict[str, Any], layer: int) -> Iterator[Spec]:
    hidden, heads, latent = sizes["hidden_size"], sizes["num_attention_heads"], sizes["kv_lora_rank"]
    nope, rope, v_dim = sizes["qk_nope_head_dim"], sizes["qk_rope_head_dim"], sizes["v_head_dim"]
    shard, at = f"layer{layer:02d}", f"model.layers.{layer}."
    attention = f"{at}self_attn."
    yield Spec(shard, f"{at}input_layernorm.weight", (hidden,), "norm")
    yield Spec(shard, f"{attention}q_a_proj.weight", (sizes["q_lora_rank"], hidden), "linear")
    yield Spec(shard, f"{attention}q_a_layernorm.weight", (sizes["q_lora_rank"],), "norm")
    yield Spec(shard, f"{attention}q_b_proj.weight", (heads * (nope + rope), sizes["q_lora_rank"]), "linear")
    yield Spec(shard, f"{attention}kv_a_proj_with_mqa.weight", (latent + rope, hidden), "linear")
    yield Spec(shard, f"{attention}kv_a_layernorm.weight", (latent,), "norm")
    yield Spec(shard, f"{attention}kv_b_proj.weight", (heads * (nope + v_dim), latent), "linear")
    yield Spec(shard, f"{attention}o_proj.weight", (hidden, heads * v_dim), "linear")
    yield Spec(shard, f"{at}post_attention_layernorm.weight", (hidden,), "norm")
    if layer < sizes["first_k_dense_replace"]:
        yield from mlp(shard, f"{at}mlp.", hidden, sizes["intermediate_size"])
        return
    num_experts, inner = sizes["n_routed_experts"], sizes["moe_intermediate_size"]
    yield Spec(shard, f"{at}mlp.gate.weight", (num_experts, hidden), "keep")
    yield Spec(shard, f"{at}mlp.gate.e_score_correction_bias", (num_experts,), "bias")
    for expert in range(num_experts):
        yield from mlp(shard, f"{at}mlp.experts.{expert}.", hidden, inner)
    yield from mlp(shard, f"{at}mlp.shared_experts.", hidden, inner * sizes["n_shared_experts"])


def specs(sizes: dict[str, Any]) -> Iterator[Spec]:
    table = (sizes["vocab_size"], sizes["hidden_size"])
    yield Spec("embed", "model.embed_tokens.weight", table, "keep")
    for layer in range(sizes["num_hidden_layers"]):
        yield from layer_specs(sizes, layer)
    yield Spec("head", "model.norm.weight", table[1:], "norm")
    yield Spec("head", "lm_head.weight", table, "keep")


def tensor(spec: Spec, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed((zlib.crc32(spec.name.encode()) << 8) ^ seed)
    values = torch.randn(spec.shape, generator=generator)
    if spec.kind == "norm":
        return (1 + 0.1 * values).to(torch.bfloat16)
    if spec.kind == "bias":
        return 0.01 * values  # float32, as released
    return (values * (0.02 if spec.kind == "linear" else 0.05)).to(torch.bfloat16)


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 values, and the inverse scale of each block."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)).clamp_min(1e-12) / 448.0
    values = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
    return values.to(torch.float8_e4m3fn).contiguous(), scales


def write(
    folder: Path, preset: str, *, fp8: bool = False, seed: int = 0, yarn: bool = False, layers: int | None = None
) -> int:
    """Write the checkpoint, shard by shard; return its bytes."""
    config = config_of(preset, yarn=yarn, layers=layers)
    if fp8:
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    shards: dict[str, list[Spec]] = {}
    for spec in specs(config):
        shards.setdefault(spec.shard, []).append(spec)
    folder.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for shard, members in shards.items():
        found = {}
        for spec in members:
            values = tensor(spec, seed)
            if fp8 and spec.kind == "linear":
                values, found[f"{spec.name}_scale_inv"] = quantized(values)
            found[spec.name] = values
        filename = f"model-{shard}.safetensors"
        save_file(found, folder / filename, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(found, filename)
        num_bytes += sum(values.numel() * values.element_size() for values in found.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=1))  # written last: a folder that has it is complete
    return num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", default="perf", choices=PRESETS)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--yarn", action="store_true")
    parser.add_argument("--layers", type=int)
    arguments = parser.parse_args()
    how = {"fp8": arguments.fp8, "seed": arguments.seed, "yarn": arguments.yarn, "layers": arguments.layers}
    num_bytes = write(arguments.folder, arguments.preset, **how)
    config = config_of(arguments.preset, layers=arguments.layers)
    num_parameters = sum(math.prod(spec.shape) for spec in specs(config))
    print(json.dumps({"case": "model", "preset": arguments.preset, "parameters": num_parameters, "bytes": num_bytes}))


if __name__ == "__main__":
    main()
