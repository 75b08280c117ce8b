"""The connector over caches with keys and values per head, whose blocks are packed: they land whole, or not at all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pdinfer.adapters.vllm.memory import engine_pages
from pdinfer.adapters.vllm.settings import check_setup
from pdinfer.errors import ConfigError
from tests.unit.adapters.fake_vllm import LAYERS, LISTEN, WIDTH, Pairs, run
from tests.unit.adapters.test_vllm import counted, hand_over, prompt_of, submit

BLOCK = 16
FORM = "vllm 0.32.0 cpu_attn vec AVX2"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder that says of itself that it is a Llama."""
    folder = tmp_path_factory.mktemp("llama")
    write(folder)
    return folder


def write(folder: Path, **more: Any) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "num_key_value_heads": 2, "rope_theta": 10000.0, **more}
    folder.joinpath("config.json").write_text(json.dumps(config))
    save_file({"a": torch.ones(3)}, folder / "model.safetensors")


def packed(llama: Path, isa: str | None = "vec", **more: Any) -> dict[str, Any]:
    """Return the settings of an engine whose attention packs blocks."""
    layers = {f"model.layers.{at}.self_attn.attn": SimpleNamespace(isa=isa) for at in range(LAYERS)}
    compilation = SimpleNamespace(static_forward_context=layers)
    return {"model": str(llama), "num_heads": 2, "config_more": {"compilation_config": compilation}, **more}


@pytest.mark.parametrize("listen", [LISTEN, "shm://"])
@pytest.mark.parametrize("extra", [{}, {"hold_s": 0}], ids=["grant first", "grant late"])
def test_packed_blocks_land_whole(pair: Pairs, llama: Path, listen: str, extra: dict[str, Any]) -> None:
    """Prompts that end inside of blocks, in chunks that do."""
    prefill, decode = pair({"listen": listen, **extra}, chunk=24, **packed(llama))
    prompts = [prompt_of(length, length) for length in (2, 16, 17, 18, 33, 64, 65, 100)]
    for request in hand_over(prefill, decode, prompts):
        assert request.landed is not None
    num_blocks = sum(-(-(len(prompt) - 1) // BLOCK) for prompt in prompts)
    assert decode.channel.stats.bytes_received == num_blocks * BLOCK * LAYERS * WIDTH * 4


def test_blocks_of_which_decode_has_the_first_land_behind_them(pair: Pairs, llama: Path) -> None:
    prefill, decode = pair(chunk=24, **packed(llama))
    prompt = prompt_of(90)
    decode.remember(prompt, 2)
    (request,) = hand_over(prefill, decode, [prompt])
    assert request.landed is not None
    assert decode.channel.stats.bytes_received == 4 * BLOCK * LAYERS * WIDTH * 4


def test_ranks_that_hold_some_heads_each_are_refused_at_start(pair: Pairs, llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"those of an MLA model .* tensor_parallel_size is 2"):
        pair.engine("kv_producer", num_ranks=2, **packed(llama))


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"isa": "amx"}, "components.kv.format: ours vllm 0.32.0 cpu_attn amx .*, theirs vllm 0.32.0 cpu_attn vec "),
        ({"block_size": 8}, "page_size: ours 8, theirs 16"),
        ({"num_heads": 4}, "components.kv.num_heads: ours 4, theirs 2"),
    ],
    ids=["instruction set", "block size", "heads"],
)
def test_blocks_of_another_form_are_refused_by_name(
    pair: Pairs, llama: Path, other: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = pair.engine("kv_producer", {"hold_s": 0.2}, **packed(llama))
    decode = pair.engine("kv_consumer", **packed(llama, **other))
    _, request = submit(prefill, decode, prompt_of(40))
    run([prefill, decode], lambda: request.is_over)
    assert request.landed is None
    assert counted(decode)["aborted_unreachable"] == 1
    (said,) = [record.getMessage() for record in caplog.records if "was not loaded" in record.getMessage()]
    assert re.search(says, said), said


def test_another_model_has_another_id(llama: Path, tmp_path: Path) -> None:
    def id_of(folder: Path) -> bytes:
        return engine_pages(str(folder), caches(), BLOCK, None, FORM).layout.layout_id

    write(tmp_path, rope_theta=500000.0)
    assert id_of(tmp_path) != id_of(llama)
    write(tmp_path, transformers_version="9.9")
    assert id_of(tmp_path) == id_of(llama)


def caches(shape: tuple[int, ...] = (8, 2, BLOCK, 32)) -> dict[str, torch.Tensor]:
    return {f"model.layers.{at}.attn": torch.zeros(shape) for at in range(LAYERS)}


@pytest.mark.parametrize(
    ("shape", "form", "says"),
    [
        ((8, 2, BLOCK, 32), "", "as vLLM's CPU_ATTN packs them"),
        ((8, 2, 2 * BLOCK, 32), FORM, r"serves caches of \(blocks, heads, 16, keys and values\)"),
        ((8, BLOCK, 32), FORM, r"some of \(8, 16, 32\)"),
    ],
    ids=["no form", "block size", "no heads"],
)
def test_caches_with_heads_that_are_not_served_end_at_start(
    llama: Path, shape: tuple[int, ...], form: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        engine_pages(str(llama), caches(shape), BLOCK, None, form)


def test_caches_of_a_part_of_the_prompt_are_refused_at_start() -> None:
    class SlidingWindowSpec: ...

    class FullAttentionSpec: ...

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(model="examples/tiny"),
    )
    for spec in (FullAttentionSpec, SlidingWindowSpec):
        groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec())])
        if spec is FullAttentionSpec:
            check_setup(config, groups)
        else:
            with pytest.raises(ConfigError, match="all tokens of a prompt, and this model has SlidingWindowSpec"):
                check_setup(config, groups)
