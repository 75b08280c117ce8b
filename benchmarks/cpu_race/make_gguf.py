"""Write a checkpoint of make_model.py (without --fp8) as a GGUF of the architecture deepseek2: absorbed MLA, no
tokenizer.

    python benchmarks/cpu_race/make_gguf.py DIR OUT.gguf [--type bfloat16|float32]

Run it where `gguf`, torch and safetensors are installed. Tensors are written one by one, so memory use stays small.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from safetensors import safe_open

TYPES = {"bfloat16": gguf.GGMLQuantizationType.BF16, "float32": gguf.GGMLQuantizationType.F32}
FILE_TYPES = {"bfloat16": gguf.LlamaFileType.MOSTLY_BF16, "float32": gguf.LlamaFileType.ALL_F32}
LAYER_NAMES = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.o_proj": "attn_output",
}
NORM_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "post_attention_layernorm": "ffn_norm",
}


class Entry(NamedTuple):
    """One tensor of the GGUF; norms and the router are float32 in a file of any type."""

    name: str
    read: Callable[[], torch.Tensor]
    is_float32: bool = False


class Checkpoint:
    """The tensors of a folder of safetensors shards, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.shards: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]

    def get(self, name: str) -> torch.Tensor:
        with safe_open(self.folder / self.shards[name], "pt") as shard:
            return shard.get_tensor(name)

    def experts(self, prefix: str, part: str) -> torch.Tensor:
        names = [
            f"{prefix}mlp.experts.{expert}.{part}_proj.weight" for expert in range(self.config["n_routed_experts"])
        ]
        with safe_open(self.folder / self.shards[names[0]], "pt") as shard:  # a layer is one shard
            return torch.stack([shard.get_tensor(name) for name in names])

    def kv_b(self, prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Split `kv_b` per head into the part that makes keys, transposed, and the part that makes values."""
        nope, v_dim = self.config["qk_nope_head_dim"], self.config["v_head_dim"]
        whole = self.get(f"{prefix}self_attn.kv_b_proj.weight")
        heads = whole.view(self.config["num_attention_heads"], nope + v_dim, self.config["kv_lora_rank"])
        return heads[:, :nope].transpose(1, 2).contiguous(), heads[:, nope:].contiguous()

    def entries(self) -> Iterator[Entry]:
        yield Entry("token_embd.weight", lambda: self.get("model.embed_tokens.weight"))
        yield Entry("output_norm.weight", lambda: self.get("model.norm.weight"), True)
        yield Entry("output.weight", lambda: self.get("lm_head.weight"))
        for layer in range(self.config["num_hidden_layers"]):
            yield from self.layer_entries(layer, f"model.layers.{layer}.", f"blk.{layer}.")

    def layer_entries(self, layer: int, ours: str, theirs: str) -> Iterator[Entry]:
        def entry(to: str, name: str, is_float32: bool = False) -> Entry:
            return Entry(theirs + to, lambda: self.get(ours + name), is_float32)

        for name, to in LAYER_NAMES.items():
            yield entry(f"{to}.weight", f"{name}.weight")
        for name, to in NORM_NAMES.items():
            yield entry(f"{to}.weight", f"{name}.weight", True)
        yield Entry(f"{theirs}attn_k_b.weight", lambda: self.kv_b(ours)[0])
        yield Entry(f"{theirs}attn_v_b.weight", lambda: self.kv_b(ours)[1])
        if layer < self.config["first_k_dense_replace"]:
            for part in ("gate", "up", "down"):
                yield entry(f"ffn_{part}.weight", f"mlp.{part}_proj.weight")
            return
        yield entry("ffn_gate_inp.weight", "mlp.gate.weight", True)
        yield entry("exp_probs_b.bias", "mlp.gate.e_score_correction_bias", True)
        for part in ("gate", "up", "down"):
            yield Entry(f"{theirs}ffn_{part}_exps.weight", lambda part=part: self.experts(ours, part))  # type: ignore[misc]
            yield entry(f"ffn_{part}_shexp.weight", f"mlp.shared_experts.{part}_proj.weight")


def describe(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the metadata that llama.cpp reads for deepseek2."""
    rope, latent = config["qk_rope_head_dim"], config["kv_lora_rank"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(rope)
    if (scaling := config["rope_scaling"]) is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        # llama.cpp scales scores by the square of 1 + this times ln(factor), DeepSeek's code with 0.1 * mscale_all_dim
        writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(latent)
    writer.add_key_length(latent + rope)
    writer.add_value_length(latent)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_tokenizer_model("no_vocab")


def stored(tensor: torch.Tensor, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    if kind == gguf.GGMLQuantizationType.BF16 and tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.uint8).numpy()
    return np.ascontiguousarray(gguf.quants.quantize(tensor.float().numpy(), kind))


def write(folder: Path, out: Path, dtype: str) -> None:
    checkpoint = Checkpoint(folder)
    entries = list(checkpoint.entries())
    kinds = [TYPES["float32" if entry.is_float32 else dtype] for entry in entries]
    unfinished = out.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, "deepseek2")
    describe(writer, checkpoint.config)
    writer.add_file_type(FILE_TYPES[dtype])
    for entry, kind in zip(entries, kinds, strict=True):  # all headers come before all data
        shape = list(entry.read().shape)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = int(np.prod(shape)) * block_bytes // block
        if kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor_info(entry.name, shape, np.dtype(np.float32), num_bytes)
        else:
            raw = gguf.quant_shape_to_byte_shape(shape, kind)
            writer.add_tensor_info(entry.name, raw, np.dtype(np.uint8), num_bytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry, kind in zip(entries, kinds, strict=True):
        writer.write_tensor_data(stored(entry.read(), kind))
    writer.close()
    unfinished.rename(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", default="bfloat16", choices=TYPES)
    arguments = parser.parse_args()
    write(arguments.folder, arguments.out, arguments.type)
    print(json.dumps({"case": "gguf", "type": arguments.type, "bytes": arguments.out.stat().st_size}))


if __name__ == "__main__":
    main()
