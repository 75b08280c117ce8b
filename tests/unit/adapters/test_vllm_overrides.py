"""What a vLLM is told beside its checkpoint: a part of the model's id where it has a value, and refused elsewhere."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdinfer.adapters.vllm.loading import connector_on
from pdinfer.adapters.vllm.memory import engine_pages
from pdinfer.adapters.vllm.overrides import folded, overrides
from pdinfer.errors import ConfigError
from tests.unit.adapters.fake_vllm import LISTEN, FakeBase, Pairs, Status, run
from tests.unit.adapters.test_vllm import caches, hand_over, prompt_of, submit

MODEL = "examples/tiny"
ROPE = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000}}


def config_of(model: dict[str, Any] | None = None, cache_dtype: str = "auto", **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(**{"model": MODEL, "dtype": torch.float32, **(model or {})}),
        cache_config=SimpleNamespace(block_size=16, cache_dtype=cache_dtype),
        **more,
    )


@dataclasses.dataclass
class Scheme:
    """As vLLM keeps a quantization_config."""

    linear: tuple[torch.dtype, float] | None = None


PLAIN: dict[str, SimpleNamespace] = {
    "nothing": config_of(),
    "empty": config_of({"hf_overrides": {}, "quantization_config": None, "model_class_overrides": {}}),
    "no overrides at all": config_of({"hf_overrides": None}),
    "a quantized checkpoint": config_of(
        {"quantization": "fp8", "model_arch_config": SimpleNamespace(quantization_config={"quant_method": "fp8"})}
    ),
    "vLLM's own implementation": config_of({"model_impl": "vllm"}),
    "the model's dtype by name": config_of({"dtype": torch.bfloat16}, "bfloat16"),
    "yarn": config_of({"hf_text_config": SimpleNamespace(rope_parameters={"rope_type": "yarn"}), "max_model_len": 9}),
    "its own config": config_of({"hf_config_path": MODEL}),
    "another reader": config_of(load_config=SimpleNamespace(load_format="safetensors")),
}


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_set_up_keeps_the_id_of_the_files(name: str) -> None:
    assert overrides(PLAIN[name]) == {}
    assert folded(b"files", overrides(PLAIN[name])) == b"files"


TOLD: dict[str, tuple[SimpleNamespace, dict[str, Any]]] = {
    "overrides": (config_of({"hf_overrides": ROPE}), {"hf_overrides": ROPE}),
    "quantization": (config_of({"quantization": "fp8"}), {"quantization": "fp8"}),
    "a scheme": (
        config_of({"quantization_config": {"linear": "fp8", "ignore": ("lm_head",)}}),
        {"quantization_config": {"linear": "fp8", "ignore": ["lm_head"]}},
    ),
    "a scheme of its own": (
        config_of({"quantization_config": Scheme((torch.int8, 0.5))}),
        {"quantization_config": {"linear": ["torch.int8", 0.5]}},
    ),
    "classes": (config_of({"model_class_overrides": {"A": "b:C"}}), {"model_class_overrides": {"A": "b:C"}}),
    "another implementation": (config_of({"model_impl": "transformers"}), {"model_impl": "transformers"}),
    "rope beside it": (config_of({"rope_theta": 5000.0}), {"rope_theta": 5000}),
    "a dtype that the cache does not have": (config_of(cache_dtype="bfloat16"), {"dtype": "float32"}),
    "both ways": (config_of(attention_config=SimpleNamespace(use_non_causal=True)), {"use_non_causal": True}),
    "factors by length": (
        config_of({"hf_text_config": SimpleNamespace(rope_scaling={"type": "longrope"}), "max_model_len": 4096}),
        {"max_model_len": 4096},
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_what_changes_the_model_is_told(name: str) -> None:
    config, says = TOLD[name]
    assert overrides(config) == says
    assert folded(b"files", says) not in (b"files", folded(b"others", says))
    assert len(folded(b"files", says)) == 32


def test_every_value_that_is_told_gives_another_id() -> None:
    assert len({folded(b"files", says) for _, says in TOLD.values()}) == len(TOLD)


def test_equal_values_have_one_id_however_they_are_written() -> None:
    rope = {"rope_theta": 10000.0, "factor": 4, "rope_type": "yarn"}
    one, other = (overrides(config_of({"hf_overrides": each})) for each in (ROPE, {"rope_parameters": rope}))
    assert folded(b"files", one) == folded(b"files", other)


def a_function(config: Any) -> Any:
    return config


REFUSED: dict[str, tuple[SimpleNamespace, str]] = {
    "a function": (config_of({"hf_overrides": a_function}), "'hf_overrides' is function a_function; give it"),
    "a function within": (
        config_of({"hf_overrides": {"a": [a_function]}}),
        r"'hf_overrides\.a' is function a_function",
    ),
    "names that are none": (config_of({"hf_overrides": {"a": {1: 2}}}), r"'hf_overrides\.a' is {1: 2}; give it"),
    "random weights": (config_of(load_config=SimpleNamespace(load_format="dummy")), "load_format is 'dummy'"),
    "other files": (config_of(load_config=SimpleNamespace(load_format="sharded_state")), "load_format is 'sharded"),
    "another format": (config_of({"config_format": "mistral"}), "config_format is 'mistral'"),
    "another config": (config_of({"hf_config_path": "/else"}), "hf_config_path is '/else'; put that config.json"),
    "weights that change": (config_of(weight_transfer_config=object()), "with weight_transfer_config they change"),
    "packed caches": (config_of(cache_dtype="int4_per_token_head"), "kv_cache_dtype is int4_per_token_head"),
}


@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_value_ends_at_start(name: str, role: str) -> None:
    config, says = REFUSED[name]
    config.kv_transfer_config = SimpleNamespace(kv_role="kv_producer", kv_connector_extra_config={"listen": LISTEN})
    config.parallel_config = SimpleNamespace()
    with pytest.raises(ConfigError, match=says):
        connector_on(FakeBase, "0.32.0")(config, SimpleNamespace(name=role), None)


def test_overrides_at_one_end_are_refused_by_name_and_at_both_served(
    pair: Pairs, caplog: pytest.LogCaptureFixture
) -> None:
    more = {"model_more": {"hf_overrides": ROPE}}
    prefill, plain = pair(decode={**more, "policy": "fail"})
    _, theirs = submit(prefill, plain, prompt_of(20))
    run([plain], lambda: theirs.is_over)
    assert theirs.status is Status.FAILED
    assert "model_id (a digest of the model's config): ours" in caplog.text
    prefill, alike = pair(**more)
    assert hand_over(prefill, alike, [prompt_of(20)])[0].landed is not None


def test_overrides_may_leave_layers_out() -> None:
    """A model of 4 layers, of which vLLM was told to make 3."""
    pages = engine_pages(MODEL, caches(3), 16, None, changes={"hf_overrides": {"num_hidden_layers": 3}})
    assert pages.layout.layers == range(3)
    with pytest.raises(ConfigError, match="serves MLA models"):
        engine_pages(MODEL, caches(3), 16, None)
