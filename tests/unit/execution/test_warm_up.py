"""A warm-up runs every size of step, reports them, and leaves everything else as it was."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import pdinfer as pd
from pdinfer.execution.warm_up import WarmUp, batch_sizes
from pdinfer.model.batch import Batch
from pdinfer.testing import random_model, tiny_config, tiny_config_dict, write_checkpoint
from tests.backends import ROOT
from tests.unit.engine.test_engine import watch_threads

MODEL = random_model()
DRAFTING = random_model(tiny_config("v3"), mtp=True)
PROMPT = tuple(range(2, 15))


@contextmanager
def engines(
    model: pd.Model = MODEL, *, num_pages: int = 64, page_size: int = 4, **config: Any
) -> Iterator[tuple[pd.PrefillEngine, pd.DecodeEngine, pd.Pairing]]:
    """Yield a pair of engines over one pool."""
    pool = pd.PagePool(model, pd.CacheConfig(page_size=page_size, num_pages=num_pages))
    prefill_end, decode_end = pd.KVChannel.loopback(pool, pool)
    chosen = pd.EngineConfig(**config)
    prefill, decode = pd.PrefillEngine(model, prefill_end, chosen), pd.DecodeEngine(model, decode_end, chosen)
    with pd.Pairing(prefill, decode) as pairing:
        yield prefill, decode, pairing
    pool.check()
    assert (pool.num_owned, pool.num_granted) == (0, 0)


def serve(pairing: pd.Pairing) -> tuple[list[int | None], int]:
    """Return the tokens after PROMPT, and how many tokens of PROMPT were cached."""
    sampling = pd.SamplingParams(temperature=0.0, max_new_tokens=5, ignore_eos=True)
    events = list(pairing.generate([pd.Request(prompt=PROMPT, sampling=sampling)]))
    assert events[-1].usage is not None
    return [event.token for event in events], events[-1].usage.cached_tokens


def ran(report: WarmUp) -> list[tuple[str, int]]:
    return [(step.kind, step.size) for step in report.steps]


def watch_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many tokens go through the model at a time."""
    seen = []
    stream = pd.Model.stream_layers

    def watched(model: pd.Model, batch: Batch, *more: Any) -> Any:
        seen.append(len(batch.tokens_T))
        return stream(model, batch, *more)

    monkeypatch.setattr(pd.Model, "stream_layers", watched)
    return seen


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9])]
)
def test_batch_sizes_are_powers_of_two_and_the_most(most: int, sizes: list[int]) -> None:
    assert batch_sizes(most) == sizes


def test_the_report_says_what_was_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_tokens(monkeypatch)
    with engines(max_running_requests=6, chunked_prefill_size=40) as (prefill, decode, _):
        report = prefill.warm_up()
        assert ran(report) == [("prefill", 16), ("prefill", 40)]
        assert seen == [16, 40]
        assert all(step.seconds > 0 for step in report.steps)
        assert report.seconds == sum(step.seconds for step in report.steps)
        seen.clear()
        assert ran(decode.warm_up()) == [("decode", 1), ("decode", 2), ("decode", 4), ("decode", 6)]
        assert seen == [6, 1, 2, 4, 6]  # first what the six have in their pages


@pytest.mark.parametrize("providers", [None, "torch"])
def test_models_whose_steps_are_recorded_are_warmed_too(providers: str | None) -> None:
    """The kernels in C serve bfloat16 alone, and a CPU records their steps instead of capturing them."""
    model = pd.load_model(ROOT / "examples" / "tiny", providers=providers)
    with engines(model, max_running_requests=4) as (_, decode, pairing):
        assert ran(decode.warm_up()) == [("decode", 1), ("decode", 2), ("decode", 4)]
        assert len(serve(pairing)[0]) == 5


def test_drafts_are_warmed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_tokens(monkeypatch)
    with engines(DRAFTING, max_running_requests=2, num_draft_tokens=3, page_size=2) as (_, decode, _):
        assert ran(decode.warm_up()) == [("decode", 1), ("draft", 1), ("decode", 2), ("draft", 2)]
    assert seen == [2, 1, 4, 2, 8]


@pytest.mark.parametrize(
    ("num_pages", "config", "prefilled", "decoded"),
    [
        (3, {}, [12], [1, 2, 3]),
        (1, {"chunked_prefill_size": -1}, [4], [1]),
        (64, {"chunked_prefill_size": -1, "max_prefill_tokens": 20}, [16, 20], [1, 2, 4, 8, 16, 32, 64]),
        (64, {"chunked_prefill_size": 5, "max_running_requests": 1}, [5], [1]),
    ],
)
def test_sizes_that_can_never_run_are_left_out(
    num_pages: int, config: dict[str, int], prefilled: list[int], decoded: list[int]
) -> None:
    with engines(num_pages=num_pages, **config) as (prefill, decode, _):
        assert [step.size for step in prefill.warm_up().steps] == prefilled
        assert [step.size for step in decode.warm_up().steps] == decoded


@pytest.mark.parametrize("model", [MODEL, DRAFTING], ids=["plain", "drafting"])
def test_nothing_else_changes(model: pd.Model) -> None:
    config = {"num_draft_tokens": 2} if model is DRAFTING else {}
    with engines(model, num_pages=12, **config) as (prefill, decode, pairing):
        tokens, cached = serve(pairing)
        assert cached == 0
        pool = decode.channel.pool
        assert pool.num_cached > 0
        before = (prefill.load(), decode.load(), pool.num_free, set(pool._index._nodes))
        prefill.warm_up()
        decode.warm_up()
        assert (prefill.load(), decode.load(), pool.num_free, set(pool._index._nodes)) == before
        pool.check()
        assert prefill.step() == decode.step() == []
        assert serve(pairing) == (tokens, 12)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> pd.Model:
    """Return a model that counts which experts are chosen."""
    folder = tmp_path_factory.mktemp("recording")
    write_checkpoint(folder, tiny_config_dict("v3"))
    return pd.load_model(folder, experts=pd.moe.ExpertConfig(expert_distribution_recorder_mode="stat"))


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_a_warm_up_makes_routers_choose_is_forgotten(
    recording: pd.Model, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = recording.experts.recorder
    assert recorder is not None
    with engines(recording, max_running_requests=2, chunked_prefill_size=16) as (prefill, decode, pairing):
        recorder.reset()
        engine = prefill if role == "prefill" else decode
        engine.warm_up()
        assert not recorder.counts().any()
        serve(pairing)
        counted = recorder.counts()
        recorder.reset()
        with monkeypatch.context() as patched:
            patched.setattr(pd.Model, "head", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.warm_up()
        recorder.end_step()
        assert not recorder.counts().any()
    with engines(recording, max_running_requests=2, chunked_prefill_size=16) as (_, _, pairing):
        serve(pairing)
        assert (recorder.counts() == counted).all()
        recorder.reset()


def test_an_engine_with_requests_refuses() -> None:
    with engines() as (prefill, decode, pairing):
        request = pd.Request(request_id="a", prompt=PROMPT)
        decode.submit(request, writers=(prefill.address,))
        with pytest.raises(pd.Overloaded, match="decode engine has 1 unfinished requests"):
            decode.warm_up()
        (granted,) = decode.step()
        assert isinstance(granted, pd.Granted)
        prefill.submit(granted.request, granted.grant)
        with pytest.raises(pd.Overloaded, match="prefill engine has 1 unfinished requests"):
            prefill.warm_up()
        decode.cancel("a")
        assert serve(pairing)[1] == 0


def test_an_engine_without_a_free_page_refuses_rather_than_evicts() -> None:
    with engines(num_pages=4) as (prefill, decode, _):
        pool = decode.channel.pool
        pages = pool.own(4)
        for engine in (prefill, decode):
            with pytest.raises(pd.Overloaded, match="0 of 4 are free"):
                engine.warm_up()
        pool.release(pages)


def test_a_closed_engine_refuses() -> None:
    with engines() as (prefill, decode, _):
        pass
    for engine in (prefill, decode):
        with pytest.raises(pd.RequestError, match="is closed"):
            engine.warm_up()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_pages_come_back_when_a_step_fails(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with engines() as (prefill, decode, pairing):
        with monkeypatch.context() as patched:
            patched.setattr(pd.Model, "head", broken)
            with pytest.raises(ZeroDivisionError):
                (prefill if role == "prefill" else decode).warm_up()
        assert decode.channel.pool.num_free == 64
        assert len(serve(pairing)[0]) == 5


def test_threads_and_trace_are_those_of_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = watch_threads(monkeypatch)
    with engines(num_threads=2, trace=tmp_path, max_running_requests=1, chunked_prefill_size=1) as (prefill, decode, _):
        prefill.warm_up()
        decode.warm_up()
    assert set(threads) == {2}
    assert torch.get_num_threads() == 1
    for file in tmp_path.iterdir():
        events = json.loads(file.read_text())["traceEvents"]
        (whole,) = [event for event in events if event["name"] == "warm_up"]
        parts = [event for event in events if event["ph"] == "X" and event is not whole]
        assert all(whole["ts"] <= part["ts"] < whole["ts"] + whole["dur"] for part in parts)
        assert {"embed", "attention", "experts", "sample"} <= {part["name"] for part in parts}
