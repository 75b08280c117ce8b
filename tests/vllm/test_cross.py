"""One of the two engines is vLLM and the other one ours: together they say what ours, or vLLM, says alone."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import pdinfer as pd
from pdinfer.adapters.vllm.prompts import Complete, Piece, Stream
from tests.vllm.conftest import prompts
from tests.vllm.engines import ROOT, Engine, ready, until

NUM_PROMPTS = 200
NUM_TOKENS = 8


def asked(vllm: Engine) -> Complete:
    """Return what has a child compute the body of a completion."""

    def complete(body: Mapping[str, Any]) -> None:
        name = uuid.uuid4().hex
        vllm.say(add=name, prompt=body["prompt"], max_tokens=1, params=body["kv_transfer_params"])
        until(lambda: name in vllm.done, [vllm], 120)

    return complete


def greedy(prompt: list[int], at: int) -> pd.Request:
    sampling = pd.SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True)
    return pd.Request(prompt=prompt, sampling=sampling, request_id=str(at))


def said(pairing: pd.Pairing, asked: list[list[int]]) -> list[list[int]]:
    """Return the tokens of each prompt. Every request must end well."""
    tokens: list[list[int]] = [[] for _ in asked]
    for event in pairing.generate(greedy(prompt, at) for at, prompt in enumerate(asked)):
        assert event.error is None, event
        assert event.token is not None
        tokens[int(event.request_id)].append(event.token)
    return tokens


def decode_of(model: pd.Model, transport: Any) -> pd.DecodeEngine:
    pool = pd.PagePool(model, pd.CacheConfig(num_pages=128))
    return pd.DecodeEngine(model, pd.KVChannel(pool, transport))


@pytest.fixture
def ours(model: Path) -> pd.Model:
    return pd.load_model(model, device="cpu", dtype=torch.float32)


def alone(model: pd.Model, asked: list[list[int]]) -> list[list[int]]:
    with pd.Pairing.local(model, cache=pd.CacheConfig(num_pages=128)) as pairing:
        return said(pairing, asked)


@pytest.mark.parametrize(("listen", "max_num_seqs"), [("tcp://127.0.0.1:0", 1), ("shm://", 8)])
def test_prefill_in_vllm_and_decode_here(
    start: Callable[..., Engine], ours: pd.Model, listen: str, max_num_seqs: int
) -> None:
    settings = {"max_num_seqs": max_num_seqs, "num_blocks": 512}
    vllm = start("prefill", "kv_producer", listen=listen, settings=settings)
    ready(vllm)
    transport = pd.kv.ShmTransport() if listen == "shm://" else pd.kv.SocketTransport()
    decode = decode_of(ours, transport)
    port = pd.adapters.vllm.connect(decode, kv=vllm.address or "", server=asked(vllm))
    many = prompts(NUM_PROMPTS, seed=3)
    with pd.Pairing(port, decode) as pairing:
        together = said(pairing, many)
        assert (decode.pool.num_owned, decode.pool.num_granted) == (0, 0)
    assert [at for at, pair in enumerate(zip(together, alone(ours, many), strict=True)) if pair[0] != pair[1]] == []
    until(lambda: (stats := vllm.stats())["free"] == stats["all"], [vllm], 10)
    assert vllm.stats()["bad_frees"] == 0


def streamed(vllm: Engine) -> Stream:
    """Return what has a child go on from a prompt, and says all of it at its end."""

    def stream(body: Mapping[str, Any]) -> Iterator[Piece]:
        name = uuid.uuid4().hex
        vllm.say(add=name, prompt=body["prompt"], max_tokens=body["max_tokens"], params=body["kv_transfer_params"])
        until(lambda: name in vllm.done, [vllm], 120)
        done = vllm.done[name]
        yield Piece(tuple(done["tokens"]), finish_reason=done["reason"])

    return stream


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "shm://"])
def test_prefill_here_and_decode_in_vllm(start: Callable[..., Engine], ours: pd.Model, listen: str) -> None:
    vllm, one = start("decode", "kv_both", listen=listen, policy="fail", lease_s=300), start("alone")
    ready(vllm, one)
    transport = pd.kv.ShmTransport() if listen == "shm://" else pd.kv.SocketTransport()
    pool = pd.PagePool(ours, pd.CacheConfig(num_pages=128))
    prefill = pd.PrefillEngine(ours, pd.KVChannel(pool, transport, takes_offers=True))
    port = pd.adapters.vllm.connect_decode(prefill, kv=vllm.address or "", server=streamed(vllm), max_concurrent=16)
    many = prompts(NUM_PROMPTS, seed=4)
    with pd.Pairing(prefill, port) as pairing:
        together = said(pairing, many)
        assert prefill.pool.num_owned == 0
    for at, prompt in enumerate(many):
        one.say(add=str(at), prompt=prompt, max_tokens=NUM_TOKENS, params=None)
    until(lambda: len(one.done) == NUM_PROMPTS, [one], 300)
    assert len(vllm.moved) == NUM_PROMPTS + 1  # and the probe
    assert [at for at, tokens in enumerate(together) if tokens != one.done[str(at)]["tokens"]] == []
    until(lambda: (stats := vllm.stats())["free"] == stats["all"], [vllm], 10)
    assert vllm.stats()["bad_frees"] == 0


@pytest.fixture
def wrong_rope(tmp_path: Path) -> Iterator[Path]:
    """Make a checkpoint without YaRN, whose keys vLLM 0.32 rotates wrongly on a CPU."""
    script = ROOT / "benchmarks" / "cpu_race" / "make_model.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "wrong"), "--preset", "tiny"], check=True)
    return tmp_path / "wrong"


def test_a_vllm_that_rotates_wrongly_is_refused(start: Callable[..., Engine], wrong_rope: Path) -> None:
    vllm = start("prefill", "kv_producer", listen="tcp://127.0.0.1:0", settings={"model": str(wrong_rope)})
    ready(vllm)
    decode = decode_of(pd.load_model(wrong_rope, device="cpu", dtype=torch.float32), pd.kv.SocketTransport())
    with pytest.raises(pd.LayoutMismatch, match=r"from layer 0 on, in the rotated keys \(rope\)"):
        pd.adapters.vllm.connect(decode, kv=vllm.address or "", server=asked(vllm))
    decode.close()


def test_other_weights_and_dtypes_are_refused_by_name(
    start: Callable[..., Engine], model: Path, wrong_rope: Path
) -> None:
    vllm = start("prefill", "kv_producer", listen="tcp://127.0.0.1:0")
    ready(vllm)
    for folder, dtype, says in ((wrong_rope, torch.float32, "model_id"), (model, torch.bfloat16, "bfloat16")):
        decode = decode_of(pd.load_model(folder, device="cpu", dtype=dtype), pd.kv.SocketTransport())
        with pytest.raises(pd.LayoutMismatch, match=says):
            pd.adapters.vllm.connect(decode, kv=vllm.address or "", server=asked(vllm))
        decode.close()
