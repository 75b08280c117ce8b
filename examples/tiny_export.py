"""Measure a trained tiny model and write it as a DeepSeek-V3 checkpoint with the files and names of a release.

Everything is measured on the weights as they are stored (bf16), computed in float32, under teacher forcing: an answer
counts if every token of it is the most probable one, which is what greedy decoding would give.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save
from tiny_model import SHAPE, TinyModel, Weights, rope_tables
from tiny_tasks import BOS, EOS, PAD, Problem, calc_prompt, copy_prompt, recall_everywhere, recall_prompt, text_prompt
from tiny_tokenizer import write_tokenizer
from torch import Tensor

EVAL_SEED: Final = 20240  # training uses pairs (seed, step), so no prompt here was a training row
TOKENS_AT_ONCE: Final = 16384
LAYER_NAMES: Final = {
    "input_norm": "input_layernorm",
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "kv_b": "self_attn.kv_b_proj",
    "o": "self_attn.o_proj",
    "post_norm": "post_attention_layernorm",
    "router": "mlp.gate",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh": "eh_proj",
    "out_norm": "shared_head.norm",
}
SHARED_NAMES: Final = {"embed": "model.embed_tokens", "head": "lm_head", "norm": "model.norm"}


# --- measuring ---------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """The results of `measure`: shares in [0, 1], loss in nats per answer token."""

    exact: float  # answers right in every token
    mtp: float  # answer tokens on which the MTP layer and the main model agree
    loss: float


def _measure_batch(model: TinyModel, problems: Sequence[Problem]) -> tuple[list[bool], Tensor, Tensor]:
    """Return, for one batch, which answers are exact, and per answer token the MTP agreement (0 or 1) and the loss."""
    rows = [prompt + answer for prompt, answer in problems]
    length = max(map(len, rows))  # padding on the right: causal attention never sees it
    tokens = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    places = [r * length + len(prompt) + i for r, (prompt, answer) in enumerate(problems) for i in range(len(answer))]
    at = torch.tensor(places)
    rope = rope_tables(torch.arange(length).repeat(len(rows)))
    normed = model.hidden(tokens, rope)
    drafted = model.mtp_hidden(normed, tokens.roll(-1, dims=1), rope)
    logits = normed[at - 1] @ model.shared["head"].T
    drafts = (drafted[at - 2] @ model.shared["head"].T).argmax(-1)
    targets = tokens.flatten()[at]
    right = torch.split(logits.argmax(-1) == targets, [len(answer) for _, answer in problems])
    agrees = (drafts == logits.argmax(-1)).float()
    return [bool(r.all()) for r in right], agrees, F.cross_entropy(logits, targets, reduction="none")


@torch.no_grad()
def measure(model: TinyModel, problems: Sequence[Problem]) -> Measured:
    """Return the teacher-forced score of prompts with answers."""
    exact: list[bool] = []
    agreements, losses = [], []
    rows_at_once = max(1, TOKENS_AT_ONCE // max(len(prompt) + len(answer) for prompt, answer in problems))
    for start in range(0, len(problems), rows_at_once):
        batch_exact, agrees, loss = _measure_batch(model, problems[start : start + rows_at_once])
        exact += batch_exact
        agreements.append(agrees)
        losses.append(loss)
    return Measured(sum(exact) / len(exact), float(torch.cat(agreements).mean()), float(torch.cat(losses).mean()))


def _everywhere(rng: np.random.Generator, num_rows: int) -> list[Problem]:
    problems: list[Problem] = []
    while len(problems) < num_rows:
        context, asked = recall_everywhere(rng, num_facts=64)
        problems += [(context + query, answer) for query, answer in asked]
    return problems[:num_rows]


def evaluate(model: TinyModel, num_rows: int) -> dict[str, float]:
    """Print one JSON line per measurement and return all scores, rounded to four digits."""
    scores: dict[str, float] = {}
    rng = np.random.default_rng(EVAL_SEED)

    def score(name: str, make: Callable[[], Problem], rows: int = num_rows) -> Measured:
        measured = measure(model, [make() for _ in range(rows)])
        scores[name] = round(measured.exact, 4)
        print(json.dumps({"score": name, "rows": rows} | {k: round(v, 4) for k, v in measured._asdict().items()}))
        return measured

    for distance in (64, 256, 512, 1024, 1500, 2000, 3000, 4000):
        rows = num_rows if distance < 2000 else (num_rows + 1) // 2  # long rows take most of the time
        score(f"recall_{distance}", partial(recall_prompt, rng, distance), rows)
    recall = score("recall_1000_1200", lambda: recall_prompt(rng, int(rng.integers(1000, 1201))))
    everywhere = iter(_everywhere(rng, num_rows))
    score("recall_everywhere_64_facts", lambda: next(everywhere))
    score("copy", lambda: copy_prompt(rng))
    score("calc", lambda: calc_prompt(rng))
    score("calc_held_out", lambda: calc_prompt(rng, held_out=True))
    text = measure(model, [text_prompt(rng) for _ in range(num_rows)])
    scores |= {"text_loss": round(text.loss, 4), "mtp_text": round(text.mtp, 4), "mtp_recall": round(recall.mtp, 4)}
    for name in ("text_loss", "mtp_text", "mtp_recall"):
        print(json.dumps({"score": name, "rows": num_rows, "value": scores[name]}))
    return scores


# --- writing -----------------------------------------------------------------------------------------------------


def _mlp_tensors(prefix: str, gate: Tensor, up: Tensor, down: Tensor) -> Weights:
    return {f"{prefix}.{name}_proj.weight": w for name, w in (("gate", gate), ("up", up), ("down", down))}


def checkpoint_tensors(model: TinyModel) -> Weights:
    """Return the weights under their released names, in bf16, and the routers' correction biases in float32.

    The MTP layer follows the main layers and, as in some releases, brings no copies of embedding and head.
    """
    tensors: Weights = {f"{SHARED_NAMES[key]}.weight": w for key, w in model.shared.items()}
    for index, layer in enumerate(model.layers):
        prefix = f"model.layers.{index}"
        for key, name in LAYER_NAMES.items():
            if key in layer:
                w = layer[key]
                tensors[f"{prefix}.{name}.weight"] = w.flatten(0, 1) if w.ndim == 3 else w
        mlp = (layer["gate"], layer["up"], layer["down"])
        if "router" not in layer:
            tensors |= _mlp_tensors(f"{prefix}.mlp", *mlp)
            continue
        for expert in range(SHAPE.n_routed_experts):
            tensors |= _mlp_tensors(f"{prefix}.mlp.experts.{expert}", *(w[expert] for w in mlp))
        tensors |= _mlp_tensors(f"{prefix}.mlp.shared_experts", *(w[-1] for w in mlp))
    tensors = {name: w.detach().bfloat16().contiguous() for name, w in tensors.items()}
    for index, layer in enumerate(model.layers):
        if "router" in layer:
            tensors[f"model.layers.{index}.mlp.gate.e_score_correction_bias"] = model.biases[index].clone()
    return tensors


def config_json() -> dict[str, Any]:
    """Return the model's `config.json`, with the field names of the DeepSeek-V3 release."""
    fixed = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "num_key_value_heads": SHAPE.num_attention_heads,
        "num_nextn_predict_layers": 1,
        "rope_scaling": None,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    return fixed | asdict(SHAPE)


def model_card(scores: dict[str, float], num_bytes: int) -> str:
    """Return the README of the checkpoint: what it is, how it was made, what it can do."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in scores.items())
    return f"""# A tiny DeepSeek-V3-architecture model

{num_bytes / 1e6:.1f} MB of bf16 weights that exercise every part of the architecture (MLA, grouped expert routing with
correction bias, shared expert, MTP layer) and answer questions about their prompt, so that a test can tell a right KV
cache from a wrong one. It is a test fixture and a demonstration, and of no other use.

## Shape

{SHAPE.num_hidden_layers} layers (the first dense, the rest MoE) and one MTP layer; hidden size {SHAPE.hidden_size};
{SHAPE.num_attention_heads} heads, `q_lora_rank` {SHAPE.q_lora_rank}, `kv_lora_rank` {SHAPE.kv_lora_rank}, head
dimensions {SHAPE.qk_nope_head_dim} + {SHAPE.qk_rope_head_dim} (rope, interleaved pairs) and {SHAPE.v_head_dim} (value);
{SHAPE.n_routed_experts} routed experts in {SHAPE.n_group} groups, {SHAPE.num_experts_per_tok} per token from
{SHAPE.topk_group} groups, and one shared expert. The cache holds 96 values per token and layer. Positions up to
{SHAPE.max_position_embeddings}, no YaRN.

## Vocabulary

A token is a byte (0-255); {BOS} is BOS, {EOS} EOS, {PAD} PAD, and five ids are spare: `[256, *text.encode()]` is a
prompt. `tokenizer.json` says the same in the form of a release, and the chat template in `tokenizer_config.json` joins
what a user and the assistant wrote as the training rows do (`tiny_tokenizer.py`). A story ends with "The end." and EOS;
everything else goes on until it is stopped.

    set kqz=48213; ... get kqz=     ->  48213;
    copy x7f >                      ->  x7f;
    calc 47+38=                     ->  85;
    One day Mia                     ->  found a ...

## Training

`train_tiny.py --steps {scores["training_steps"]:.0f} --seed {scores["seed"]:.0f}`: steps of 4096 tokens in rows of 128
to 2048, {scores["training_seconds"] / 60:.0f} minutes on two CPU cores. All data are generated (`tiny_tasks.py`); no
text by others is in them. Matrices are trained with Muon, the rest with Adam; random position gaps (PoSE) teach
distances that no row has.

## Scores

Share of answers right in every token, greedy, on fresh prompts. `recall_N`: N tokens between fact and question,
eight other facts among them; `recall_everywhere_64_facts`: one of 64 facts in 1024 tokens; `calc_held_out`: operands
never trained on; `text_loss`: nats per token over the second half of a story, where some words are free choices;
`mtp_*`: answer tokens on which the MTP layer and the main model agree.

| score | value |
|---|---|
{rows}

Use greedy decoding. About one recall in a hundred fails at any distance: fix the prompts of a test after training.
"""


def write_checkpoint(model: TinyModel, folder: Path, scores: dict[str, float]) -> None:
    """Write config.json, generation_config.json, model.safetensors, scores.json, README.md and the tokenizer's files
    into `folder`."""
    generation = {"bos_token_id": BOS, "do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD}
    weights = folder / "model.safetensors"
    weights.write_bytes(save(checkpoint_tensors(model), metadata={"format": "pt"}))  # save_file makes it private (0600)
    for name, content in (
        ("config.json", config_json()),
        ("generation_config.json", generation),
        ("scores.json", scores),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    write_tokenizer(folder)
    (folder / "README.md").write_text(model_card(scores, weights.stat().st_size))
