"""The families beside DeepSeek's own: checkpoints written by transformers' classes give the outputs of these
classes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from pdinfer import EngineConfig, Pairing, Request, SamplingParams
from pdinfer.checkpoint.quantize import quantize_checkpoint
from pdinfer.config import CacheConfig, ModelConfig
from pdinfer.errors import CheckpointError, ConfigError
from pdinfer.model.load import load_model
from pdinfer.testing import tiny_config_dict, write_checkpoint

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES += ("num_key_value_heads", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
SIZES += ("max_position_embeddings", "bos_token_id", "eos_token_id")
DENSE = {name: value for name, value in tiny_config_dict("v3").items() if name in SIZES}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
}
GROUPED = EXPERTS | {"n_group": 4, "topk_group": 2}
INDEXER = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 8}  # scores of a few heads tie at 0
ONE_DENSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}  # written beside a first_k_dense_replace of 3
VISION = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32, "patch_size": 2}
IMAGE_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm-4.7-flash": ("Glm4MoeLite", DENSE | EXPERTS),
    "two-dense-layers": ("Glm4MoeLite", DENSE | EXPERTS | {"mlp_layer_types": ["dense", "dense", "sparse"]}),
    "deepseek-v3.2": ("DeepseekV32", DENSE | GROUPED | INDEXER | ONE_DENSE),
    "glm-5": ("GlmMoeDsa", DENSE | EXPERTS | INDEXER | ONE_DENSE),
    "youtu-llm": ("Youtu", DENSE),
    "youtu-without-query-latent": ("Youtu", DENSE | {"q_lora_rank": None, "tie_word_embeddings": False}),
    "a.x-k1": ("AXK1", DENSE | GROUPED),
    "moonlight": ("DeepseekV3", DENSE | EXPERTS | {"first_k_dense_replace": 1, "q_lora_rank": None}),
    "kimi-k2.5": (
        "Kimi_K25",
        {
            "text_config": DENSE | EXPERTS | {"model_type": "deepseek_v3", "first_k_dense_replace": 1},
            "vision_config": VISION,
            "projection_hidden_size": 16,
            "tie_word_embeddings": False,
            **{name: 90 + at for at, name in enumerate(IMAGE_TOKENS)},
        },
    ),
}
PROMPT = [3, 1, 4, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84]
NUM_TOKENS = 6


@attrs.frozen
class Case:
    """A checkpoint, the logits of its own class for PROMPT [T, vocab], and how that class continues."""

    folder: Path
    logits_TV: torch.Tensor
    greedy: list[int]


def _of_transformers(name: str) -> Any:
    """Return a model of random weights, scaled so that routing, norms and biases all matter."""
    transformers = pytest.importorskip("transformers")
    kind, fields = CASES[name]
    config = getattr(transformers, f"{kind}Config")(**json.loads(json.dumps(fields)))
    suffix = "ForConditionalGeneration" if kind == "Kimi_K25" else "ForCausalLM"
    torch.manual_seed(0)
    model = (
        getattr(transformers, f"{kind}{suffix}")
        ._from_config(config, attn_implementation="eager", experts_implementation="eager")
        .eval()
    )
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if part.endswith("norm.weight"):
                weight.uniform_(0.6, 1.4)
            else:
                weight.normal_(0, 1.0 if "embed" in part else 1.3 * weight.shape[-1] ** -0.5)
        for part, buffer in model.named_buffers():
            if part.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.15)
    return model


@torch.inference_mode()
def _case(name: str, folder: Path) -> Case:
    model = _of_transformers(name)
    model.save_pretrained(folder)
    tokens, logits = list(PROMPT), []
    for _ in range(NUM_TOKENS):
        logits.append(model(input_ids=torch.tensor([tokens])).logits[0])
        tokens.append(int(logits[-1][-1].argmax()))
    return Case(folder, logits[0], tokens[len(PROMPT) :])


@pytest.fixture(scope="module")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Make each case when it is first asked for."""
    cases: dict[str, Case] = {}

    def get(name: str) -> Case:
        if name not in cases:
            cases[name] = _case(name, tmp_path_factory.mktemp("family"))
        return cases[name]

    return get


def _rewrite(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    """Write the checkpoint in `source` with other tensors, as one file."""
    target.mkdir(exist_ok=True)
    save_file(change(load_file(source / "model.safetensors")), target / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def _greedy(folder: Path, **engine: Any) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    cache = CacheConfig(page_size=8, num_pages=16)
    with Pairing.local(folder, dtype="float32", cache=cache, engine=EngineConfig(**engine)) as pairing:
        events = pairing.generate([Request(prompt=tuple(PROMPT), sampling=sampling)])
        return [event.token for event in events if event.token is not None]


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(case_of: Callable[[str], Case], name: str) -> None:
    case = case_of(name)
    logits_TV = load_model(case.folder, dtype="float32").logits(PROMPT)
    assert case.logits_TV.abs().max() > 1
    assert float((logits_TV - case.logits_TV).abs().max()) < 1e-4
    assert _greedy(case.folder) == case.greedy


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model."])
def test_kimi_names_with_every_prefix(case_of: Callable[[str], Case], tmp_path: Path, prefix: str) -> None:
    """The names are those that Moonshot writes, those of transformers' parameters, and those of a text model of its
    own."""
    case = case_of("kimi-k2.5")

    def makers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        old = "language_model.model."
        named = {name: name.replace(f"{old}blocks.", f"{prefix}layers.").replace(old, prefix) for name in tensors}
        return {named[name]: tensor for name, tensor in tensors.items()}

    folder = _rewrite(case.folder, tmp_path / "renamed", makers)
    assert torch.allclose(load_model(folder).logits(PROMPT), case.logits_TV, rtol=0, atol=1e-4)


def test_a_tensor_under_two_prefixes_is_refused(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    embed = "model.embed_tokens.weight"
    folder = _rewrite(
        case_of("kimi-k2.5").folder, tmp_path / "twice", lambda t: t | {embed: t[f"language_model.{embed}"] + 1}
    )
    with pytest.raises(CheckpointError, match=r"under several prefixes 1: 'model\.embed_tokens\.weight'"):
        load_model(folder)


def test_a_quantized_kimi_loads(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    quantize_checkpoint(case_of("kimi-k2.5").folder, tmp_path / "int8", scheme="w8a8_dynamic")
    model = load_model(tmp_path / "int8", weights="float", dtype="float32")
    assert float((model.logits(PROMPT) - case_of("kimi-k2.5").logits_TV).abs().max()) > 1e-4
    with pytest.raises(CheckpointError, match="quantized already"):
        quantize_checkpoint(tmp_path / "int8", tmp_path / "again", scheme="w8a8_dynamic")


def test_a_router_of_axk1_without_a_correction_has_zeros(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """Its makers publish it without one. Groups are still worth their two best experts."""

    def zeros(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: 0 * value if name.endswith("bias") else value for name, value in tensors.items()}

    def absent(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value for name, value in tensors.items() if not name.endswith("bias")}

    source = case_of("a.x-k1").folder
    both = [load_model(_rewrite(source, tmp_path / change.__name__, change)) for change in (zeros, absent)]
    assert torch.equal(both[0].logits(PROMPT), both[1].logits(PROMPT))
    assert not torch.allclose(both[0].logits(PROMPT), case_of("a.x-k1").logits_TV, atol=1e-2)


def test_the_norm_of_axk1_is_of_layers_with_experts(case_of: Callable[[str], Case], tmp_path: Path) -> None:
    """Its makers store a norm for the dense layer too, which their code does not use."""
    source, norm = case_of("a.x-k1").folder, "model.layers.{}.post_mlp_layernorm.weight"
    unused = _rewrite(source, tmp_path / "unused", lambda t: t | {norm.format(0): torch.full((48,), 3.0)})
    assert torch.equal(load_model(unused).logits(PROMPT), load_model(source).logits(PROMPT))
    lacking = _rewrite(source, tmp_path / "lacking", lambda t: {n: v for n, v in t.items() if n != norm.format(1)})
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.post_mlp_layernorm\.weight"):
        load_model(lacking)


def test_drafts_of_glm_flash_change_no_token(tmp_path: Path) -> None:
    config = tiny_config_dict("v3-ungrouped", model_type="glm4_moe_lite", architectures=["Glm4MoeLiteForCausalLM"])
    del config["first_k_dense_replace"]
    config |= {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "num_nextn_predict_layers": 1}
    write_checkpoint(tmp_path, config, mtp=True)
    assert _greedy(tmp_path, num_draft_tokens=2) == _greedy(tmp_path)
    assert len(_greedy(tmp_path)) == NUM_TOKENS


INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": True}}},
}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"text_config": None}, "text_config of a kimi_k25 must be an object, got None"),
        ({"text_config": {"model_type": "kimi_linear"}}, "model_type 'kimi_linear' of text_config is not supported"),
        ({"quantization_config": INT4}, "group_size|targets"),
        (
            {"llama_4_scaling": {"beta": 0.1}},
            r"llama_4_scaling \{'beta': 0.1\}: unknown to config.json of a 'kimi_k25'",
        ),
        ({"dtype": "bfloat16"}, "dtype 'bfloat16' and 'float32' of text_config must agree"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, r"architectures \['DeepseekV3ForCausalLM'\] is not that of"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_wrapper_may_not_say(change: dict[str, Any], told: str) -> None:
    text = tiny_config_dict("v3-ungrouped", dtype="float32")
    wrapper = {"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}
    assert ModelConfig.from_dict(wrapper).n_routed_experts == 10
    with pytest.raises(ConfigError, match=told):
        ModelConfig.from_dict(wrapper | change)


@pytest.mark.parametrize(
    ("inside", "told"),
    [
        ({"quantization_config": INT4}, "group_size|targets"),
        ({"swiglu_limit": 10.0}, "swiglu_limit 10.0: unknown to"),
        ({"architectures": ["MistralLarge3ForCausalLM"]}, "architectures .* is not that of a 'deepseek_v3'"),
        ({"eos_token_id": 2}, "eos_token_id 1 and 2 of text_config must agree"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_the_text_model_of_a_wrapper_may_not_say(inside: dict[str, Any], told: str) -> None:
    text = tiny_config_dict("v3-ungrouped") | inside
    with pytest.raises(ConfigError, match=told):
        ModelConfig.from_dict({"model_type": "kimi_k25", "eos_token_id": 1, "text_config": text})


def test_the_tie_of_a_wrapper_counts() -> None:
    text = tiny_config_dict("v3-ungrouped", tie_word_embeddings=True)
    wrapper = {"model_type": "kimi_k25", "text_config": text}
    assert ModelConfig.from_dict(wrapper).tie_word_embeddings
    assert not ModelConfig.from_dict(wrapper | {"tie_word_embeddings": False}).tie_word_embeddings
