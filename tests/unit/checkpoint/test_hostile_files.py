"""Hostile config.json, safetensors and index files: each gives one typed error that says what is wrong.

The ids begin with the number of the threat, so that `-k` finds a row of the threat list.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from pdinfer.checkpoint.header import HeaderSource, header_bytes, parse_header
from pdinfer.checkpoint.reader import Checkpoint
from pdinfer.checks import check_fits, clip
from pdinfer.config import ModelConfig
from pdinfer.errors import CheckpointError, ConfigError
from pdinfer.files import parse_json, read_json
from pdinfer.model.destinations import Destinations
from pdinfer.model.load import load_model
from pdinfer.process.memory import main_memory_bytes
from pdinfer.testing import tiny_config_dict
from tests.slices import examples
from tests.unit.config.small_configs import BASE, YARN

IMPLIED = ("architectures", "attention_bias", "hidden_act", "moe_layer_freq", "num_nextn_predict_layers")
IMPLIED += ("rope_scaling", "scoring_func", "tie_word_embeddings", "topk_method", "torch_dtype")
CONFIG = {name: value for name, value in BASE.items() if name not in IMPLIED}

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}

# (id, fields changed, what the message must contain beside the field's name and value)
BAD_FIELDS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    *(
        (f"H03-num_hidden_layers={value!r}", {"num_hidden_layers": value}, ("num_hidden_layers", "int from 1 to 1024"))
        for value in (0, -1, 1.5, "32", True, 2**31, 1431655766, None, [4])
    ),
    ("H04-hidden_size=0", {"hidden_size": 0}, ("hidden_size", "got 0")),
    ("H05-kv_heads=0", {"num_key_value_heads": 0}, ("num_key_value_heads", "divide num_attention_heads = 4", "got 0")),
    ("H05-kv_heads=3", {"num_key_value_heads": 3}, ("num_key_value_heads", "divide num_attention_heads = 4", "got 3")),
    ("H05-kv_heads=2", {"num_key_value_heads": 2}, ("num_key_value_heads", "equal it", "got 2")),
    ("H05-kv_heads=true", {"num_key_value_heads": True, "num_attention_heads": 1}, ("num_key_value_heads", "True")),
    ("H05-heads=0", {"num_attention_heads": 0, "num_key_value_heads": 0}, ("num_attention_heads", "from 1 to 4096")),
    ("H06-vocab_size=10**12", {"vocab_size": 10**12}, ("vocab_size", "from 1 to 16777216", "1000000000000")),
    ("H06-vocab_size=0", {"vocab_size": 0}, ("vocab_size", "from 1 to 16777216", "got 0")),
    ("H07-n_routed_experts=0", {"n_routed_experts": 0}, ("n_routed_experts", "at least 1", "got 0")),
    ("H07-per_tok-over-experts", {"num_experts_per_tok": 17}, ("num_experts_per_tok", "at most 8", "16 / 4 * 2", "17")),
    ("H07-per_tok-over-groups", {"num_experts_per_tok": 9}, ("num_experts_per_tok", "at most 8", "got 9")),
    ("H07-groups-not-dividing", {"n_group": 5}, ("n_group must divide n_routed_experts = 16", "got 5")),
    ("H07-topk_group-over-groups", {"topk_group": 5}, ("topk_group must be at most n_group = 4", "got 5")),
    ("H07-one-expert-per-group", {"n_group": 16, "topk_group": 8}, ("n_group", "2 experts per group")),
    ("H07-dense-over-layers", {"first_k_dense_replace": 5}, ("first_k_dense_replace", "num_hidden_layers = 4")),
    ("H08-q_lora_rank=-1", {"q_lora_rank": -1}, ("q_lora_rank", "from 1 to", "got -1")),
    ("H08-kv_lora_rank=-1", {"kv_lora_rank": -1}, ("kv_lora_rank", "from 1 to", "got -1")),
    ("H08-kv_lora_rank=10**9", {"kv_lora_rank": 10**9}, ("kv_lora_rank", "to 65536", "1000000000")),
    ("H08-rope-dim=-2", {"qk_rope_head_dim": -2}, ("qk_rope_head_dim", "from 2 to 1024", "got -2")),
    ("H08-rope-dim=odd", {"qk_rope_head_dim": 15}, ("qk_rope_head_dim", "even", "got 15")),
    ("H08-rope-dim-over-head", {"qk_rope_head_dim": 64, "qk_head_dim": 48}, ("qk_head_dim", "32 + 64", "got 48")),
    ("H08-rope-dim=4096", {"qk_rope_head_dim": 4096}, ("qk_rope_head_dim", "from 2 to 1024", "got 4096")),
    ("H09-type-unknown", {"rope_scaling": {"type": "ntk"}}, ("rope_type 'ntk'", "default, yarn")),
    ("H09-type-list", {"rope_scaling": {"type": ["yarn"]}}, ("rope_type ['yarn']", "default, yarn")),
    ("H09-not-an-object", {"rope_scaling": "yarn"}, ("rope_scaling", "object", "'yarn'")),
    ("H09-types-disagree", {"rope_scaling": YARN | {"rope_type": "default"}}, ("rope_type", "twice", "'yarn'")),
    ("H09-theta-twice", {"rope_parameters": {"rope_theta": 5.0}}, ("rope_theta", "twice", "10000.0", "5.0")),
    ("H09-factor=0", {"rope_scaling": YARN | {"factor": 0}}, ("factor", "finite", "got 0.0")),
    ("H09-factor=1e308", {"rope_scaling": YARN | {"factor": 1e308}}, ("factor", "at most 65536", "1e+308")),
    ("H09-factor=nan", {"rope_scaling": YARN | {"factor": float("nan")}}, ("factor", "finite", "got nan")),
    ("H09-factor-missing", {"rope_scaling": {"type": "yarn"}}, ("factor", "missing")),
    (
        "H09-original=0",
        {"rope_scaling": YARN | {"original_max_position_embeddings": 0}},
        ("original_max_position_embeddings", "from 1 to", "got 0"),
    ),
    ("H09-betas", {"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 2}}, ("beta_fast", "beta_slow = 2", "got 1")),
    ("H09-beta-tiny", {"rope_scaling": YARN | {"beta_slow": 5e-324}}, ("beta_slow", "at least 0.001")),
    ("H09-attention_factor", {"rope_scaling": YARN | {"attention_factor": 2}}, ("attention_factor 2", "absent")),
    ("H09-theta=0", {"rope_theta": 0}, ("rope_theta", "greater than 1", "got 0.0")),
    ("H09-theta=inf", {"rope_theta": float("inf")}, ("rope_theta", "finite", "inf")),
    ("H09-not-interleaved", {"rope_interleave": False}, ("rope_interleave False", "must be True")),
    ("H10-positions=2**63", {"max_position_embeddings": 2**63}, ("max_position_embeddings", "16777216", str(2**63))),
    ("H11-eps=0", {"rms_norm_eps": 0}, ("rms_norm_eps", "finite", "greater than 0", "got 0.0")),
    ("H11-eps=nan", {"rms_norm_eps": float("nan")}, ("rms_norm_eps", "finite", "nan")),
    ("H11-eps=inf", {"rms_norm_eps": json.loads("1e999")}, ("rms_norm_eps", "finite", "inf")),
    ("H11-eps=text", {"rms_norm_eps": "1e-6\n"}, ("rms_norm_eps", "finite", r"'1e-6\n'")),
    ("H11-eps=true", {"rms_norm_eps": True}, ("rms_norm_eps", "finite", "True")),
    ("H11-eps=huge-int", {"rms_norm_eps": 10**400}, ("rms_norm_eps", "an int of 1329 bits")),
    (
        "H12-block-0x0",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 0]}},
        ("quantization_config", "weight_block_size [0, 0]", "must be [128, 128]", "bfloat16, float16, float32"),
    ),
    ("H12-block-none", {"quantization_config": {"quant_method": "fp8"}}, ("weight_block_size is missing", "128 x 128")),
    ("H12-fmt", {"quantization_config": FP8 | {"fmt": "e5m2"}}, ("fmt 'e5m2'", "must be 'e4m3'")),
    ("H12-static", {"quantization_config": FP8 | {"activation_scheme": "static"}}, ("activation_scheme 'static'",)),
    ("H12-scale_fmt", {"quantization_config": FP8 | {"scale_fmt": "ue4m3"}}, ("scale_fmt", "ue8m0", "'ue4m3'")),
    (
        "H12-int4",
        {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
        ("quantization_config of compressed-tensors", "config_groups", "must be one group, got None"),
    ),
    ("H12-method-unknown", {"quantization_config": {"quant_method": "x" * 500}}, ("quantization_config", "supported:")),
    ("H12-no-object", {"quantization_config": "int3"}, ("quantization_config", "'int3'", "supported:")),
    ("H12-quantize", {"quantize": "w4a8_dynamic"}, ("quantize 'w4a8_dynamic'", "supported:")),
    ("H12-mla_quantize", {"mla_quantize": "w4a8"}, ("mla_quantize 'w4a8'", "supported:")),
    ("H12-quantize-number", {"quantize": 8}, ("quantize 8", "supported:")),
    ("H12-dtype", {"torch_dtype": "float64"}, ("dtype", "bfloat16, float16, float32", "'float64'")),
    ("H12-dtypes-disagree", {"torch_dtype": "float16", "dtype": "bfloat16"}, ("dtype", "'float16'", "must agree")),
    ("H15-unknown", {"model_type": "llama"}, ("model_type 'llama'", "deepseek_v2, deepseek_v3")),
    ("H15-v4-later", {"model_type": "deepseek_v4"}, ("model_type 'deepseek_v4'", "deepseek_v2, deepseek_v3")),
    ("H15-v32-index", {"model_type": "deepseek_v32"}, ("index_n_heads is missing", "deepseek_v32")),
    ("H15-list", {"model_type": ["deepseek_v3"]}, ("model_type ['deepseek_v3']", "deepseek_v2, deepseek_v3")),
    ("H15-null", {"model_type": None}, ("model_type None", "deepseek_v2, deepseek_v3")),
    ("H15-scoring_func", {"scoring_func": "tanh"}, ("scoring_func", "softmax, sigmoid", "'tanh'")),
    ("H15-scoring_func-of-v2", {"scoring_func": "softmax"}, ("scoring_func", "deepseek_v3", "sigmoid", "softmax")),
    ("H15-topk_method", {"topk_method": "greedy"}, ("topk_method", "noaux_tc", "greedy")),
    ("H15-hidden_act", {"hidden_act": "gelu"}, ("hidden_act 'gelu'", "'silu'")),
    ("H15-attention_bias", {"attention_bias": True}, ("attention_bias True", "False")),
    ("H15-v2-norm_topk_prob", {"model_type": "deepseek_v2"}, ("norm_topk_prob", "deepseek_v2", "false")),
    ("H18-eos-over-vocabulary", {"eos_token_id": [1, 512]}, ("eos_token_id", "511", "got 512")),
    ("H18-eos-text", {"eos_token_id": "1"}, ("eos_token_id", "'1'")),
    ("H18-eos-many", {"eos_token_id": [1] * 1000}, ("eos_token_id", "at most 64")),
    ("H18-bos-negative", {"bos_token_id": -1}, ("bos_token_id", "got -1")),
    ("H18-tied-text", {"tie_word_embeddings": "yes"}, ("tie_word_embeddings", "true or false", "'yes'")),
]


@pytest.mark.parametrize(("changes", "promised"), [pytest.param(c, p, id=i) for i, c, p in BAD_FIELDS])
def test_bad_field(changes: dict[str, Any], promised: tuple[str, ...]) -> None:
    if changes.get("model_type") == "deepseek_v2":
        changes = changes | {"scoring_func": "softmax", "topk_method": "greedy"}
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(CONFIG | changes)
    message = str(caught.value)
    assert all(part in message for part in promised), message
    assert len(message) < 320
    assert "\n" not in message


OPTIONAL = ("num_key_value_heads", "n_shared_experts", "n_group", "topk_group", "norm_topk_prob", "bos_token_id")


@pytest.mark.parametrize("name", [name for name in CONFIG if name not in (*OPTIONAL, "eos_token_id")])
def test_missing_field(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} "):
        ModelConfig.from_dict({key: value for key, value in CONFIG.items() if key != name})


def test_h04_hidden_size_needs_no_multiple_of_heads() -> None:
    """Latent attention gives heads their own widths, so the classic rule does not apply (H04)."""
    config = ModelConfig.from_dict(CONFIG | {"hidden_size": 200, "num_attention_heads": 3, "num_key_value_heads": 3})
    assert config.hidden_size == 200


def test_h13_model_code_is_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    code = {"auto_map": {"AutoModel": "evil.Evil"}, "trust_remote_code": True}
    with caplog.at_level(logging.WARNING, logger="pdinfer"):
        assert ModelConfig.from_dict(CONFIG | code) == ModelConfig.from_dict(CONFIG)
    assert len(caplog.records) == 1
    assert "auto_map, trust_remote_code" in caplog.text
    assert "evil" not in caplog.text


def test_h14_what_does_not_fit_is_refused_with_the_estimate() -> None:
    config = ModelConfig.from_dict(CONFIG | {"hidden_size": 2**20, "vocab_size": 2**24})
    available = main_memory_bytes()
    with pytest.raises(ConfigError) as caught:
        check_fits(config.num_parameters * 2000, available, "this model")
    assert all(
        part in str(caught.value) for part in ("this model needs", "GiB", str(available), "nothing was allocated")
    )
    check_fits(available, available, "a model that just fits")


# (id, content of config.json, promised words)
BAD_JSON: list[tuple[str, bytes, tuple[str, ...]]] = [
    ("H01-over-16MiB", b'{"a":"' + b"x" * 2**24 + b'"}', ("too large", "16777224", "16777216", "not parsed")),
    ("H01-depth-65", b'{"a":' + b"[" * 64 + b"]" * 64 + b"}", ("too deep", "64", "position 68")),
    ("H01-depth-200000", b"[" * 200_000, ("too deep", "64", "position 64")),
    ("H01-containers", b'{"a":[' + b"[]," * 20_000 + b"[]]}", ("more than 10000", "position")),
    ("H02-duplicate", b'{"a": 1, "b": {"a": 2}, "a": 3}', ("'a' appears twice", "position 24")),
    ("H02-duplicate-escaped", rb'{"a": 1, "\u0061": 3}', ("'a' appears twice", "position 9")),
    ("H02-duplicate-inner", b'{"x": [{"a": 1, "a" : 3}]}', ("'a' appears twice", "position 16")),
    ("H02-trailing", b'{"a": 1} {"b": 2}', ("Extra data", "position 9")),
    ("H02-bom", b"\xef\xbb\xbf{}", ("byte order mark", "position 0")),
    ("H02-utf16", '{"a": 1}'.encode("utf-16"), ("not UTF-8", "position 0")),
    ("H02-utf16-no-bom", '{"a": 1}'.encode("utf-16-le"), ("strict JSON", "position 1")),
    ("H02-invalid-utf8", b'{"a": "\xff"}', ("not UTF-8", "position 7")),
    ("H02-nan", b'{"a": NaN}', ("NaN", "position 6")),
    ("H02-infinity", b'{"a": -Infinity}', ("Infinity", "position 7")),
    ("H02-10000-digits", b'{"a": ' + b"9" * 10_000 + b"}", ("more than 20 digits", "position 6")),
    ("H02-empty", b"", ("strict JSON", "position 0")),
    ("H02-list", b"[1]", ("one JSON object",)),
    ("H02-unterminated", b'{"a": "x\\"', ("strict JSON", "position")),
    ("H02-comment", b'{"a": 1} // x', ("strict JSON", "position 9")),
    ("H02-bad-escape", rb'{"\x": 1}', ("strict JSON", "position")),
]


@pytest.mark.parametrize(("content", "promised"), [pytest.param(c, p, id=i) for i, c, p in BAD_JSON])
def test_bad_json(tmp_path: Path, content: bytes, promised: tuple[str, ...]) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_checkpoint(tmp_path)
    message = str(caught.value).replace(str(tmp_path), "")
    assert message.startswith("/config.json")
    assert all(part in message for part in promised), message
    assert len(message) < 250


def test_marks_inside_strings_are_text(tmp_path: Path) -> None:
    content = {"a": "[{" * 100 + "NaN" + "9" * 30, "b": 'x"]\\', "c": [], "d": {"a": 1}, "\\": '"a":1,"a":2'}
    (tmp_path / "x.json").write_text(json.dumps(content))
    assert read_json(tmp_path / "x.json") == content


@pytest.mark.parametrize(
    ("content", "promised"),
    [
        pytest.param({"temperature": -1}, ("temperature", "0 to 100", "-1"), id="H18-temperature=-1"),
        pytest.param({"temperature": "hot"}, ("temperature", "'hot'"), id="H18-temperature=hot"),
        pytest.param({"top_p": 1.5}, ("top_p", "to 1", "1.5"), id="H18-top_p=1.5"),
        pytest.param({"eos_token_id": 512}, ("eos_token_id", "511", "512"), id="H18-eos=512"),
        pytest.param({"eos_token_id": [1, True]}, ("eos_token_id", "ints", "True"), id="H18-eos=true"),
    ],
)
def test_bad_generation_config(tmp_path: Path, content: dict[str, Any], promised: tuple[str, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "generation_config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_checkpoint(tmp_path)
    assert "generation_config.json" in str(caught.value)
    assert all(part in str(caught.value) for part in promised)


def _file(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


A, B = _entry(0, 8), _entry(8, 16)
PAIRS = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}'
BAD_HEADERS: list[tuple[str, bytes, tuple[str, ...]]] = [
    ("H48-empty-file", b"", ("0 bytes long", "at least 8")),
    ("H48-7-bytes", b"1234567", ("7 bytes long", "at least 8")),
    ("H48-length-0", _file(b"", length=0), ("header of 0 bytes", "16777216")),
    ("H48-length-2**63", _file(b"{}", length=2**63), (f"header of {2**63} bytes", "16777216")),
    ("H48-length-over-file", _file(b"{}", length=3), ("header of 3 bytes", "file of 10 bytes")),
    ("H48-length-over-16MiB", _file(b"{}", length=2**24 + 1), ("header of 16777217 bytes", "16777216")),
    ("H49-not-an-object", _file(b"[]"), ("must start with {", "position 0", "'['")),
    ("H49-space-first", _file(b" {}"), ("must start with {", "position 0")),
    ("H49-invalid-utf8", _file(b'{"\xff":1}'), ("not UTF-8", "position 2")),
    ("H49-duplicate-name", _file(PAIRS, b"ab"), ("'a' appears twice", "position 53")),
    ("H49-duplicate-field", _file(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1]}}', b"a"), ("'a'", "once each")),
    ("H49-depth-bomb", _file(b'{"a":' + b"[" * 100_000 + b"}"), ("'a'", "1024 characters")),
    ("H49-depth-bomb-short", _file(b'{"a":' + b"[" * 1000 + b"}}"), ("'a'", "strict JSON")),
    ("H49-metadata-bomb", _file(b'{"__metadata__":{"a":' + b"[" * 1000 + b"}}"), ("__metadata__", "too deep")),
    ("H49-metadata-numbers", _file(b'{"__metadata__":{"a":1}}'), ("__metadata__", "strings only")),
    ("H49-metadata-endless", _file(b'{"__metadata__":{"a":"}'), ("__metadata__", "no end")),
    ("H49-metadata-twice", _file(b'{"__metadata__":{},"__metadata__":{}}'), ("'__metadata__' appears twice",)),
    ("H49-trailing", _file(b"{} x"), ("extra data", "position 2")),
    ("H49-no-comma", _file(b'{"__metadata__":{} "a":{}}'), ("expected , or }", "position 19")),
    ("H49-comma-last", _file(b'{"__metadata__":{},}'), ("tensor name", "position 19")),
    ("H49-no-colon", _file(b'{"a" {}}'), ("expected :", "position 5")),
    ("H49-name-of-1MiB", _file(b'{"' + b"x" * 2**20 + b'":{}}'), ("tensor name", "512")),
    ("H49-name-with-newline", _file({"a\nb": A}, bytes(8)), ("tensor name", "printable")),
    ("H49-name-with-surrogate", _file({"a\ud800": A}, bytes(8)), ("tensor name", "printable")),
    ("H49-fields-missing", _file({"a": {"dtype": "F32"}}), ("'a'", "dtype, shape and data_offsets")),
    ("H49-fields-more", _file({"a": A | {"more": 1}}, bytes(8)), ("'a'", "dtype, shape and data_offsets")),
    ("H49-no-tensor", _file({}), ("no tensors",)),
    ("H50-negative", _file({"a": _entry(-4, 4, [2])}, bytes(8)), ("'a'", "[-4, 4]", "not negative")),
    ("H50-reversed", _file({"a": _entry(8, 0, [2])}, bytes(8)), ("'a'", "[8, 0]", "in order")),
    ("H50-overlap", _file({"a": A, "b": _entry(4, 12)}, bytes(12)), ("'b'", "overlaps", "start at 4", "expected 8")),
    ("H50-same-span", _file({"a": A, "b": A}, bytes(8)), ("'b'", "overlaps", "start at 0", "expected 8")),
    ("H50-hole", _file({"a": A, "b": _entry(12, 20)}, bytes(20)), ("'b'", "hole", "start at 12", "expected 8")),
    ("H50-hole-first", _file({"b": B}, bytes(16)), ("'b'", "hole", "expected 0")),
    ("H50-past-end", _file({"a": A, "b": B}, bytes(12)), ("'b'", "[8, 16]", "within the 12 bytes")),
    ("H50-data-left", _file({"a": A}, bytes(9)), ("9 bytes of data", "cover 8")),
    ("H50-overflow", _file({"a": _entry(2**63, 2**64, [2**61])}, bytes(8)), ("'a'", str(2**63), "within the 8 bytes")),
    ("H50-huge", _file({"a": _entry(0, 10**30, [10**30], "U8")}), ("'a'", "within the 0 bytes")),
    ("H50-floats", _file({"a": A | {"data_offsets": [0.0, 8.0]}}, bytes(8)), ("'a'", "two ints")),
    ("H50-bools", _file({"a": A | {"data_offsets": [False, True]}}, bytes(8)), ("'a'", "two ints")),
    ("H50-three", _file({"a": A | {"data_offsets": [0, 4, 8]}}, bytes(8)), ("'a'", "two ints")),
    ("H51-span", _file({"a": _entry(0, 8, [3])}, bytes(8)), ("'a'", "span 8 bytes", "takes 12")),
    ("H51-product-overflow", _file({"a": _entry(0, 8, [2**33, 2**33])}, bytes(8)), ("'a'", "8 bytes", str(2**68))),
    ("H51-rank-100", _file({"a": _entry(0, 8, [1] * 100)}, bytes(8)), ("'a'", "at most 8 dimensions")),
    ("H51-zero-size", _file({"a": A, "b": _entry(8, 8, [0])}, bytes(8)), ("'b'", "[0]", "at least 1")),
    ("H51-negative-size", _file({"a": _entry(0, 8, [-1, -2])}, bytes(8)), ("'a'", "[-1, -2]", "at least 1")),
    ("H51-bool-size", _file({"a": _entry(0, 4, [True])}, bytes(4)), ("'a'", "[True]")),
    ("H52-F64", _file({"a": _entry(0, 8, [1], "F64")}, bytes(8)), ("'a'", "'F64'", "F32, BF16, F16")),
    ("H52-unknown", _file({"a": _entry(0, 8, [2], "f32")}, bytes(8)), ("'a'", "'f32'", "allowed")),
    ("H52-not-text", _file({"a": A | {"dtype": ["F32"]}}, bytes(8)), ("'a'", "['F32']", "allowed")),
]


@pytest.mark.parametrize(("content", "promised"), [pytest.param(c, p, id=i) for i, c, p in BAD_HEADERS])
def test_bad_safetensors(tmp_path: Path, content: bytes, promised: tuple[str, ...]) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    message = str(caught.value).replace(str(tmp_path), "")
    assert "/model.safetensors" in message or "no tensors" in message
    assert all(part in message for part in promised), message
    assert len(message) < 300


def test_h53_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(_file({"a": A, "b": _entry(8, 4096)}, bytes(4096)))
    with Checkpoint.open(tmp_path) as checkpoint:
        os.truncate(path, path.stat().st_size - 1)
        assert checkpoint.read(checkpoint.tensors["a"]).tolist() == [0.0, 0.0]
        with pytest.raises(CheckpointError, match=r"'b' needs bytes .*restore the file"):
            checkpoint.read(checkpoint.tensors["b"])
        os.truncate(path, 16)
        with pytest.raises(CheckpointError, match="cut short"):
            checkpoint.sample_digest()


SHARD = _file({"a": A}, bytes(8))


def _with_index(folder: Path, weight_map: object, **files: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, content in files.items():
        (folder / f"{name}.safetensors").write_bytes(content)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("/etc/passwd", id="H54-absolute"),
        pytest.param("../outside.safetensors", id="H54-dotdot"),
        pytest.param("..", id="H54-parent"),
        pytest.param("a\\b.safetensors", id="H54-backslash"),
        pytest.param("sub/m.safetensors", id="H54-slash"),
        pytest.param("https://example.org/m.safetensors", id="H54-url"),
        pytest.param("m\0.safetensors", id="H54-nul"),
        pytest.param("", id="H54-empty"),
        pytest.param(5, id="H54-int"),
        pytest.param(None, id="H54-null"),
        pytest.param("x" * 5000 + ".safetensors", id="H54-long"),
    ],
)
def test_index_names_other_places(tmp_path: Path, name: object) -> None:
    (tmp_path / "outside.safetensors").write_bytes(SHARD)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(_with_index(tmp_path / "model", {"a": name}))
    assert "plain file name inside the model folder" in str(caught.value)
    assert clip(name) in str(caught.value)


def _link_out(path: Path) -> None:
    outside = path.parent.parent / "outside"
    outside.write_bytes(SHARD)
    path.symlink_to(outside)


@pytest.mark.parametrize(
    ("make", "promised"),
    [
        pytest.param(_link_out, "outside the model folder", id="H54-link-out"),
        pytest.param(lambda path: path.symlink_to("/dev/zero"), "outside the model folder", id="H54-link-to-device"),
        pytest.param(lambda path: path.symlink_to("nowhere"), "No such file", id="H54-link-to-nothing"),
        pytest.param(lambda path: path.symlink_to(path.name), "cannot open", id="H54-link-to-itself"),
        pytest.param(os.mkfifo, "not a regular file", id="H54-fifo"),
        pytest.param(os.mkdir, "not a regular file", id="H54-folder"),
    ],
)
@pytest.mark.parametrize("kind", ["config", "generation", "single", "shard", "index"])
def test_not_a_file_of_the_folder(tmp_path: Path, make: Callable[[Path], None], promised: str, kind: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    names = {
        "config": "config.json",
        "generation": "generation_config.json",
        "single": "m.safetensors",
        "shard": "m.safetensors",
        "index": "m.safetensors.index.json",
    }
    if kind == "generation":
        (folder / "config.json").write_text(json.dumps(CONFIG))
    if kind == "shard":
        _with_index(folder, {"a": "m.safetensors"})
    make(folder / names[kind])
    of_config = kind in ("config", "generation")
    with pytest.raises(ConfigError if of_config else CheckpointError) as caught:
        ModelConfig.from_checkpoint(folder) if of_config else Checkpoint.open(folder)
    assert promised in str(caught.value)
    assert names[kind] in str(caught.value)


@pytest.mark.parametrize(
    ("weight_map", "promised"),
    [
        pytest.param(
            {f"t{place}": f"m{place:02}.safetensors" for place in range(12)},
            ("lacks files", "12: 'm00.safetensors'", "'m09.safetensors' and 2 more"),
            id="H55-missing-shards",
        ),
        pytest.param(
            {"a": "one.safetensors"} | {f"t{place:02}": "one.safetensors" for place in range(11)},
            ("lacks tensors", "11: 't00'", "'t09' and 1 more"),
            id="H56-missing-tensors",
        ),
        pytest.param({"a": "two.safetensors"}, ("lacks tensors", "1: 'a'"), id="H56-other-shard"),
        pytest.param(
            {"a": "one.safetensors", "b": "three.safetensors"}, ("more than one of 1: 'a'",), id="H56-duplicated"
        ),
        pytest.param({}, ("weight_map", "1 to 1000000", "{}"), id="H55-empty"),
        pytest.param(["a"], ("weight_map", "['a']"), id="H55-list"),
        pytest.param({"a": "config.json"}, ("weight_map of 'a'", "*.safetensors"), id="H55-other-format"),
    ],
)
def test_index_disagrees(tmp_path: Path, weight_map: object, promised: tuple[str, ...]) -> None:
    both = _file({"a": A, "b": B}, bytes(16))
    folder = _with_index(tmp_path, weight_map, one=SHARD, two=_file({"b": A}, bytes(8)), three=both)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert all(part in str(caught.value) for part in promised), str(caught.value)


def test_h55_extra_tensors_are_named_and_left_out(tmp_path: Path) -> None:
    folder = _with_index(tmp_path, {"a": "one.safetensors"}, one=_file({"a": A, "extra": B}, bytes(16)))
    with Checkpoint.open(folder) as checkpoint:
        assert list(checkpoint.tensors) == ["a"]
        assert checkpoint.unlisted == ("extra",)
        assert checkpoint.total_bytes == 8


def test_two_indexes_or_several_files_without_one(tmp_path: Path) -> None:
    _with_index(tmp_path, {"a": "one.safetensors"}, one=SHARD, two=SHARD)
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"more than one \*\.safetensors\.index\.json, 2: 'model"):
        Checkpoint.open(tmp_path)
    for index in tmp_path.glob("*.json"):
        index.unlink()
    with pytest.raises(CheckpointError, match=r"several \*\.safetensors, 2: 'one\.safetensors', 'two\.safetensors'"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl", "model-Q4_K_M.gguf", "MODEL.PTH"])
def test_h58_other_formats_are_named_and_never_opened(tmp_path: Path, name: str) -> None:
    # Opening a FIFO to read would hang or fail, and a pickle would be code: the name alone is enough.
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    assert all(part in str(caught.value) for part in (f"'{name}'", "not accepted", "not opened", "convert"))


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        Checkpoint.open(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        ModelConfig.from_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "promises",
    [
        {"n_routed_experts": 16384, "num_hidden_layers": 40, "n_group": 1, "topk_group": 1},
        {"n_routed_experts": 16384, "num_hidden_layers": 1024, "n_group": 1, "topk_group": 1},
        {"num_hidden_layers": 1024},
        {"num_hidden_layers": 1024, "first_k_dense_replace": 1024},
    ],
    ids=["experts", "experts-and-layers", "layers", "dense-layers"],
)
def test_promises_are_counted_against_the_files_before_anything_is_made(
    tmp_path: Path, promises: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config_dict(**promises)))
    (tmp_path / "model.safetensors").write_bytes(SHARD)
    monkeypatch.setattr(Destinations, "take", lambda *_, **__: pytest.fail("a tensor was made"))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=r"at least \d+ tensors, and the files hold 1"):
            load_model(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("part", ['"":0,', '"a":0,', '"a":"b",', '"', '"",'])
def test_strings_are_counted_before_any_is_looked_at(tmp_path: Path, part: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(SHARD)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map":{' + part * (2 << 20) + '"a":0}}')
    with pytest.raises(CheckpointError, match="more than 1048576 strings"):
        Checkpoint.open(tmp_path)


def test_an_index_of_very_many_files_opens_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _with_index(tmp_path, {f"t{at}": f"{at}.safetensors" for at in range(4097)})
    monkeypatch.setattr("pdinfer.checkpoint.reader.open_regular", lambda *_: pytest.fail("a file was opened"))
    with pytest.raises(CheckpointError, match="names 4097 files; at most 4096 are opened"):
        Checkpoint.open(folder)


FLOODS = {
    "H01-config-over-limit": b" " * (8 << 20),
    "H01-config-brackets": b'{"a":[' + b"[]," * 340_000 + b"[]]}",
    "H02-config-digits": b'{"a":' + b"9" * 1_000_000 + b"}",
    "H49-header-quotes": _file(b'{"' + b'""' * (1 << 20) + b"}"),
    "H49-header-lists": _file(b'{"a":' + b"[]," * (1 << 20) + b"}}"),
    "H49-header-metadata": _file(b'{"__metadata__":{' + b'"a":"b",' * (1 << 18) + b'"a":"b"}}'),
    "H48-header-length": _file(b"{}", length=2**40),
    "H51-shape": _file({"a": _entry(0, 2**62, [2**60])}, bytes(64)),
}


@pytest.mark.parametrize("name", FLOODS)
def test_memory_stays_bounded(tmp_path: Path, name: str) -> None:
    """At most twice the input and 16 MiB, whatever the file promises."""
    content = FLOODS[name]
    of_config = "config" in name
    (tmp_path / ("config.json" if of_config else "model.safetensors")).write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises((ConfigError, CheckpointError)):
            ModelConfig.from_checkpoint(tmp_path) if of_config else Checkpoint.open(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 2 * len(content) + (16 << 20)


_PARTS = [b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\", b" ", b"0", b"8", b"-1", b"1e9", b"NaN", b"\xff", b'"a":']
_FIELDS = [
    b'"dtype":"F32"',
    b'"shape":[2]',
    b'"data_offsets":[0,8]',
    b'"__metadata__":{',
    json.dumps({"b": A}).encode(),
]
_JSON_BYTES = st.lists(st.sampled_from(_PARTS + _FIELDS), max_size=24).map(b"".join)


@examples(150, suppress_health_check=[HealthCheck.too_slow])
@given(body=st.one_of(st.binary(max_size=200), _JSON_BYTES, _JSON_BYTES.map(lambda body: b'{"a":' + body)))
@example(body=b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}')
@example(body=b'{"a":' + b"[" * 1020 + b"}")
def test_any_header_is_tensors_or_a_checkpoint_error(body: bytes) -> None:
    try:
        tensors = parse_header(body, HeaderSource(file="file", path="path", data_start=8 + len(body), data_bytes=8))
    except CheckpointError:
        return
    assert sum(info.num_bytes for info in tensors.values()) == 8


@examples(100)
@given(prefix=st.binary(max_size=10), size=st.integers(0, 2**40))
def test_any_prefix_is_a_length_or_a_checkpoint_error(prefix: bytes, size: int) -> None:
    try:
        length = header_bytes(prefix, size, "source")
    except CheckpointError:
        return
    assert 2 <= length <= min(size - 8, 16 << 20)


@examples(150)
@given(data=st.one_of(st.binary(max_size=100), _JSON_BYTES))
def test_any_json_is_an_object_or_a_config_error(data: bytes) -> None:
    try:
        value = parse_json(data, "source", ConfigError)
    except ConfigError:
        return
    assert value == json.loads(data)
