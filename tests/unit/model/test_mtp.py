"""The MTP layer: what it computes, what a checkpoint must hold for it, and what travels for it."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch
from safetensors.torch import load, save_file

import pdinfer as pd
from pdinfer.execution.drafting import STATE, Draft, pack_state, unpack_state
from pdinfer.layers import RMSNorm
from pdinfer.model.mtp import copy_names
from pdinfer.testing import random_model, tiny_config, tiny_config_dict, write_checkpoint
from tests.rounding import difference_of_models

CONFIG = tiny_config_dict(num_nextn_predict_layers=1)
LAYER = "model.layers.3"
CPU = torch.device("cpu")
TOKENS, NEXT = [3, 1, 4, 1, 5, 9, 2, 6, 53, 58, 9], 79


@pytest.fixture(scope="module")
def model() -> pd.Model:
    return random_model(tiny_config(num_nextn_predict_layers=1), mtp=True)


def states(model: pd.Model) -> torch.Tensor:
    """Return the model's states of TOKENS after its final norm. A head of ones and zeros lets them through."""
    return attrs.evolve(model, lm_head_VD=torch.eye(model.config.hidden_size)).logits(TOKENS)


def test_it_is_one_more_block_over_a_token_and_the_state_before_it(model: pd.Model) -> None:
    """Compare it with a model of one layer and the same weights, whose embedding holds what the MTP layer joins."""
    assert model.mtp is not None
    joined = torch.cat(
        (
            rms_norm(model.mtp.tied.embed_VD[[*TOKENS[1:], NEXT]], model.mtp.token_norm),
            rms_norm(states(model), model.mtp.state_norm),
        ),
        -1,
    )
    config = attrs.evolve(model.config, num_hidden_layers=1, first_k_dense_replace=0)
    alone = attrs.evolve(
        model,
        config=config,
        embed_VD=model.mtp.join(joined),
        blocks=(attrs.evolve(model.mtp.block, layer=0),),
        norm=model.mtp.norm,
        mtp=None,
    )
    expected = alone.logits(range(len(TOKENS)))
    atol = difference_of_models(config, len(TOKENS), float(expected.abs().max()))
    torch.testing.assert_close(model.mtp_logits(TOKENS, NEXT), expected, rtol=0, atol=atol)


def rms_norm(x_TD: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    return x_TD / (x_TD.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight_D


def test_a_model_with_it_is_otherwise_the_same(model: pd.Model) -> None:
    plain = random_model(tiny_config(num_nextn_predict_layers=1))
    assert torch.equal(model.logits(TOKENS), plain.logits(TOKENS))
    with pytest.raises(pd.ConfigError, match="mtp=True"):
        plain.mtp_logits(TOKENS, NEXT)
    with pytest.raises(pd.RequestError, match="token 97 at index 11"):
        model.mtp_logits(TOKENS, 97)


# -- checkpoints ------------------------------------------------------------------------------------------------------


def put(folder: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Add a tensor to a checkpoint of one file, or remove it."""
    (file,) = folder.glob("*.safetensors")
    tensors = load(file.read_bytes())
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, file, metadata={"format": "pt"})
    folder.joinpath("model.safetensors.index.json").unlink(missing_ok=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, CONFIG, num_shards=1, mtp=True)
    return tmp_path


def test_it_loads_when_asked_for(folder: Path, model: pd.Model) -> None:
    loaded = pd.load_model(folder, mtp=True)
    assert torch.equal(loaded.mtp_logits(TOKENS, NEXT), model.mtp_logits(TOKENS, NEXT))
    assert pd.load_model(folder).mtp is None


def test_equal_copies_of_embedding_and_head_take_no_memory(folder: Path, model: pd.Model) -> None:
    for copy, main in zip(copy_names(model.config), (model.embed_VD, model.lm_head_VD), strict=True):
        put(folder, copy, main)
    loaded = pd.load_model(folder, mtp=True)
    assert loaded.mtp is not None
    assert loaded.mtp.tied.embed_VD is loaded.embed_VD
    assert loaded.mtp.tied.head_VD is loaded.lm_head_VD


@pytest.mark.parametrize("which", [0, 1])
def test_copies_of_its_own_are_used(folder: Path, model: pd.Model, which: int) -> None:
    own = torch.randn(97, 48, generator=torch.Generator().manual_seed(3))
    put(folder, copy_names(model.config)[which], own)
    loaded = pd.load_model(folder, mtp=True)
    assert model.mtp is not None
    changed = {"embed_VD": own} if which == 0 else {"head_VD": own}
    expected = attrs.evolve(model, mtp=attrs.evolve(model.mtp, tied=attrs.evolve(model.mtp.tied, **changed)))
    assert torch.equal(loaded.mtp_logits(TOKENS, NEXT), expected.mtp_logits(TOKENS, NEXT))
    assert torch.equal(loaded.logits(TOKENS), model.logits(TOKENS))


def test_a_promised_layer_that_is_absent_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIG)
    with pytest.raises(pd.CheckpointError, match=rf"missing: {LAYER}\.enorm\.weight.*mtp=False") as caught:
        pd.load_model(tmp_path, mtp=True)
    assert str(tmp_path) in str(caught.value)
    pd.load_model(tmp_path)


@pytest.mark.parametrize("name", ["eh_proj.weight", "shared_head.norm.weight", "mlp.experts.5.up_proj.weight"])
def test_one_tensor_that_is_absent_is_named(folder: Path, name: str) -> None:
    put(folder, f"{LAYER}.{name}", None)
    with pytest.raises(pd.CheckpointError, match=rf"1 tensors.*{LAYER}\.{name}"):
        pd.load_model(folder, mtp=True)


def test_a_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config_dict())
    with pytest.raises(pd.ConfigError, match="has no MTP layer"):
        pd.load_model(tmp_path, mtp=True)


# -- between two ends -------------------------------------------------------------------------------------------------


def engines(prefill: pd.Model, decode: pd.Model, num_draft_tokens: int) -> pd.Pairing:
    ends = pd.KVChannel.loopback(*(pd.PagePool(one, pd.CacheConfig(num_pages=8)) for one in (prefill, decode)))
    config = pd.EngineConfig(num_draft_tokens=num_draft_tokens)
    return pd.Pairing(pd.PrefillEngine(prefill, ends[0], config), pd.DecodeEngine(decode, ends[1], config))


@pytest.mark.parametrize("with_it", ["prefill", "decode"])
def test_on_one_side_alone_it_is_refused_by_name(model: pd.Model, with_it: str) -> None:
    plain = random_model(tiny_config(num_nextn_predict_layers=1))
    sides = (model, plain) if with_it == "prefill" else (plain, model)
    with pytest.raises(pd.LayoutMismatch, match=r"mtp\.latent") as caught:
        engines(*sides, num_draft_tokens=0)
    assert ("components.mtp.latent.layers", "absent", "3") in [
        (name, *sorted(texts, reverse=True)) for name, *texts in caught.value.fields
    ]


def test_drafting_without_it_is_refused() -> None:
    plain = random_model()
    with pytest.raises(pd.ConfigError, match=r"num_draft_tokens is 2.*mtp=True"):
        engines(plain, plain, num_draft_tokens=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_arrives_as_it_left(dtype: torch.dtype) -> None:
    state = torch.randn(48).to(dtype)
    other = pd.types.NamedState(name="of the future", version=7, dtype="int4", shape=(1,), data=b"?")
    arrived = unpack_state((other, pack_state(state)), 48, dtype, CPU)
    assert arrived is not None
    assert torch.equal(arrived, state[None])


WRONG = {
    "another version": {"version": 2},
    "another dtype": {"dtype": "bfloat16"},
    "no dtype": {"dtype": "float31"},
    "another size": {"shape": (47,)},
    "another shape": {"shape": (1, 48)},
    "too short": {"data": bytes(4 * 48 - 1)},
    "too long": {"data": bytes(4 * 48 + 1)},
    "not a number": {"data": torch.full((48,), torch.nan).numpy().tobytes()},
    "infinite": {"data": torch.full((48,), -torch.inf).numpy().tobytes()},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_state_that_cannot_be_used_is_not(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    state = attrs.evolve(pack_state(torch.ones(48)), **WRONG[wrong])
    assert unpack_state((state,), 48, torch.float32, CPU) is None
    assert STATE in caplog.text


def test_no_state_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    assert unpack_state((), 48, torch.float32, CPU) is None
    assert Draft().state is None
    assert not caplog.text
