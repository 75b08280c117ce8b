"""One of the two engines is vLLM and the other one ours: together they say what ours, or vLLM, says alone."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pdinfer as pd
from pdinfer.adapters.vllm.prompts import Complete, Piece, Stream
from tests.vllm import runs
from tests.vllm.conftest import prompts
from tests.vllm.engines import ROOT, Engine, ready, until
from tests.vllm.runs import check_rest
from tests.vllm.ties import Comparison, Said, margin_of, some_of

NUM_PROMPTS = 200
NUM_TOKENS = 8
Start = Callable[..., Engine]


def asked(vllm: Engine) -> Complete:
    """Return what has a child compute the body of a completion."""

    def complete(body: Mapping[str, Any]) -> None:
        name = uuid.uuid4().hex
        vllm.say(add=name, prompt=body["prompt"], max_tokens=1, params=body["kv_transfer_params"])
        until(lambda: name in vllm.done, [vllm], 120)

    return complete


def greedy(prompt: list[int], at: int, logprobs: int | None = None) -> pd.Request:
    sampling = pd.SamplingParams(temperature=0.0, max_new_tokens=NUM_TOKENS, ignore_eos=True, logprobs=logprobs)
    return pd.Request(prompt=prompt, sampling=sampling, request_id=str(at))


def events(pairing: pd.Pairing, asked: list[list[int]], logprobs: int | None = None) -> list[list[pd.TokenEvent]]:
    """Return the tokens of each prompt, as events. Every request must end well."""
    heard: list[list[pd.TokenEvent]] = [[] for _ in asked]
    for event in pairing.generate(greedy(prompt, at, logprobs) for at, prompt in enumerate(asked)):
        assert event.error is None, event
        assert event.token is not None
        heard[int(event.request_id)].append(event)
    return heard


def said(pairing: pd.Pairing, asked: list[list[int]]) -> list[list[int]]:
    """Return the tokens of each prompt. Every request must end well."""
    return [[int(event.token or 0) for event in each] for each in events(pairing, asked)]


def transport_of(listen: str) -> pd.kv.Transport:
    return pd.kv.ShmTransport() if listen == "shm://" else pd.kv.SocketTransport()


def decode_of(model: pd.Model, transport: Any) -> pd.DecodeEngine:
    pool = pd.PagePool(model, pd.CacheConfig(num_pages=128))
    return pd.DecodeEngine(model, pd.KVChannel(pool, transport))


@pytest.fixture
def ours(model: Path) -> pd.Model:
    return pd.load_model(model, device="cpu", dtype=torch.float32)


def alone(model: pd.Model, asked: list[list[int]]) -> list[Said]:
    with pd.Pairing.local(model, cache=pd.CacheConfig(num_pages=128)) as pairing:
        heard = events(pairing, asked, logprobs=2)
    return [
        Said(
            tuple(int(event.token or 0) for event in each),
            tuple(margin_of([logprob for _, logprob in event.top_logprobs]) for event in each),
        )
        for each in heard
    ]


def prefilled_there(
    start: Start, ours: pd.Model, many: list[list[int]], listen: str, settings: dict[str, Any]
) -> list[list[int]]:
    """Return what a vLLM that prefills and an engine of ours that decodes say to prompts."""
    vllm = start("prefill", "kv_producer", listen=listen, settings={"num_blocks": 512, **settings})
    ready(vllm)
    decode = decode_of(ours, transport_of(listen))
    port = pd.adapters.vllm.connect(decode, kv=vllm.address or "", server=asked(vllm))
    with pd.Pairing(port, decode) as pairing:
        together = said(pairing, many)
        assert (decode.pool.num_owned, decode.pool.num_granted) == (0, 0)
    check_rest(vllm)
    vllm.close()
    return together


def compared(together: Iterable[Sequence[int]], ones: Iterable[Said]) -> Comparison:
    found = Comparison()
    for at, (tokens, one) in enumerate(zip(together, ones, strict=True)):
        found.add(at, tokens, one)
    print(found)
    return found


def check_near(found: Comparison) -> None:
    """See that runs differ at near ties only, and of all prompts hardly any in the first token."""
    assert found.far == []
    assert found.num_prompts < NUM_PROMPTS or found.num_first <= 0.03 * NUM_PROMPTS


@pytest.mark.parametrize(("listen", "max_num_seqs"), [("tcp://127.0.0.1:0", 1), ("shm://", 8)])
def test_prefill_in_vllm_and_decode_here(start: Start, ours: pd.Model, listen: str, max_num_seqs: int) -> None:
    many = prompts(NUM_PROMPTS, seed=3)
    together = prefilled_there(start, ours, many, listen, {"max_num_seqs": max_num_seqs})
    assert compared(together, alone(ours, many)).num_different == 0


def test_prefill_in_vllm_and_decode_here_in_bfloat16(start: Start, model: Path) -> None:
    ours = pd.load_model(model, device="cpu", dtype=torch.bfloat16)
    many = prompts(some_of(NUM_PROMPTS, 60), seed=3)
    together = prefilled_there(start, ours, many, "shm://", {"dtype": "bfloat16", "max_num_seqs": 8})
    check_near(compared(together, alone(ours, many)))


def streamed(vllm: Engine) -> Stream:
    """Return what has a child go on from a prompt, and says all of it at its end."""

    def stream(body: Mapping[str, Any]) -> Iterator[Piece]:
        name = uuid.uuid4().hex
        vllm.say(add=name, prompt=body["prompt"], max_tokens=body["max_tokens"], params=body["kv_transfer_params"])
        until(lambda: name in vllm.done, [vllm], 120)
        done = vllm.done[name]
        yield Piece(tuple(done["tokens"]), finish_reason=done["reason"])

    return stream


def prefilled_here(
    start: Start, ours: pd.Model, many: list[list[int]], listen: str, settings: dict[str, Any]
) -> list[list[int]]:
    """Return what an engine of ours that prefills and a vLLM that decodes say to prompts."""
    vllm = start("decode", "kv_both", listen=listen, policy="fail", lease_s=300, settings=settings)
    ready(vllm)
    pool = pd.PagePool(ours, pd.CacheConfig(num_pages=128))
    prefill = pd.PrefillEngine(ours, pd.KVChannel(pool, transport_of(listen), takes_offers=True))
    port = pd.adapters.vllm.connect_decode(prefill, kv=vllm.address or "", server=streamed(vllm), max_concurrent=16)
    with pd.Pairing(prefill, port) as pairing:
        together = said(pairing, many)
        assert prefill.pool.num_owned == 0
    assert len(vllm.moved) == len(many) + 1  # and the probe
    check_rest(vllm)
    vllm.close()
    return together


def vllm_alone(start: Start, many: list[list[int]], settings: dict[str, Any]) -> list[Said]:
    one = start("alone", settings=settings)
    ready(one)
    return [Said.of(done) for done in runs.alone(one, many)]


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:0", "shm://"])
def test_prefill_here_and_decode_in_vllm(start: Start, ours: pd.Model, listen: str) -> None:
    many = prompts(NUM_PROMPTS, seed=4)
    together = prefilled_here(start, ours, many, listen, {})
    assert compared(together, vllm_alone(start, many, {})).num_different == 0


def test_prefill_here_and_decode_in_vllm_in_bfloat16(start: Start, model: Path) -> None:
    ours = pd.load_model(model, device="cpu", dtype=torch.bfloat16)
    many, settings = prompts(some_of(NUM_PROMPTS, 60), seed=4), {"dtype": "bfloat16"}
    together = prefilled_here(start, ours, many, "shm://", settings)
    check_near(compared(together, vllm_alone(start, many, settings)))


@pytest.fixture
def wrong_rope(tmp_path: Path) -> Iterator[Path]:
    """Make a checkpoint without YaRN, whose keys vLLM 0.32 rotates wrongly on a CPU."""
    script = ROOT / "benchmarks" / "cpu_race" / "make_model.py"
    subprocess.run([sys.executable, str(script), str(tmp_path / "wrong"), "--preset", "tiny"], check=True)
    return tmp_path / "wrong"


def test_a_vllm_that_rotates_wrongly_is_refused(start: Start, wrong_rope: Path) -> None:
    vllm = start("prefill", "kv_producer", listen="tcp://127.0.0.1:0", settings={"model": str(wrong_rope)})
    ready(vllm)
    decode = decode_of(pd.load_model(wrong_rope, device="cpu", dtype=torch.float32), pd.kv.SocketTransport())
    with pytest.raises(pd.LayoutMismatch, match=r"from layer 0 on, in the rotated keys \(rope\)"):
        pd.adapters.vllm.connect(decode, kv=vllm.address or "", server=asked(vllm))
    decode.close()


def test_other_weights_and_dtypes_are_refused_by_name(start: Start, model: Path, wrong_rope: Path) -> None:
    vllm = start("prefill", "kv_producer", listen="tcp://127.0.0.1:0")
    ready(vllm)
    for folder, dtype, says in ((wrong_rope, torch.float32, "model_id"), (model, torch.bfloat16, "bfloat16")):
        decode = decode_of(pd.load_model(folder, device="cpu", dtype=dtype), pd.kv.SocketTransport())
        with pytest.raises(pd.LayoutMismatch, match=says):
            pd.adapters.vllm.connect(decode, kv=vllm.address or "", server=asked(vllm))
        decode.close()
