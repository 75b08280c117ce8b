"""Config.json files of small models, one for each family: every field that a model needs, and few others."""

from __future__ import annotations

from typing import Any

from tests.unit.config.published_configs import KIMI_K2, V3

BASE: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 24,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "num_nextn_predict_layers": 1,
}
V2 = BASE | {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "scoring_func": "softmax",
    "topk_method": "group_limited_greedy",
    "norm_topk_prob": False,
}
V2_LITE = V2 | {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "q_lora_rank": None}
YARN = V3["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 0.707}
KIMI_YARN = KIMI_K2["rope_scaling"]
FAMILIES = {
    "v3": BASE,
    "v3-no-q-lora": BASE | {"q_lora_rank": None},
    "v3-yarn": BASE | {"rope_scaling": YARN},
    "v3-all-dense": BASE | {"first_k_dense_replace": 4},
    "v2": V2,
    "v2-lite": V2_LITE | {"n_shared_experts": 2},
    "v2-tied": V2 | {"tie_word_embeddings": True},
}
SPARSE = {"index_n_heads": 8, "index_head_dim": 32, "index_topk": 16}
GLM_TYPE = {"model_type": "glm_moe_dsa", "architectures": ["GlmMoeDsaForCausalLM"], "n_group": 1, "topk_group": 1}
GLM_LITE = BASE | GLM_TYPE | {"model_type": "glm4_moe_lite", "architectures": ["Glm4MoeLiteForCausalLM"]}
EXPERTS = ("moe_intermediate_size", "first_k_dense_replace", "n_routed_experts", "n_shared_experts", "n_group")
EXPERTS += ("num_experts_per_tok", "topk_group", "topk_method", "scoring_func", "norm_topk_prob")
EXPERTS += ("routed_scaling_factor", "num_nextn_predict_layers")
YOUTU = {name: value for name, value in BASE.items() if name not in EXPERTS} | {
    "model_type": "youtu",
    "architectures": ["YoutuForCausalLM"],
    "tie_word_embeddings": True,
}
FAMILIES |= {
    "v3.2": BASE | SPARSE | {"model_type": "deepseek_v32", "architectures": ["DeepseekV32ForCausalLM"]},
    "glm": BASE | SPARSE | GLM_TYPE | {"rms_norm_eps": 1e-5},
    "glm-5.2": BASE | SPARSE | GLM_TYPE | {"indexer_types": ["full", "shared", "shared", "full"]},
    "glm-schedule": BASE
    | SPARSE
    | GLM_TYPE
    | {"num_hidden_layers": 9, "index_topk_freq": 4, "index_skip_topk_offset": 3},
    "glm-lite": GLM_LITE,
    "youtu": YOUTU,
    "youtu-no-q-lora": YOUTU | {"q_lora_rank": None, "tie_word_embeddings": False},
    "axk1": BASE | {"model_type": "axk1", "architectures": ["AXK1ForCausalLM"]},
}
