"""What both engines do around a step: the threads it may use."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.engine import decode as decode_module
from pdinfer.engine import prefill as prefill_module
from pdinfer.engine.engine import full_fields
from pdinfer.execution.runner import using_threads
from pdinfer.testing import random_model

MODEL = random_model()


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def watch_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of threads at each draw of tokens: the first by prefill, the others by decode."""
    seen = []
    head = pd.Model.head

    def watched(model: pd.Model, state_TD: torch.Tensor) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return head(model, state_TD)

    monkeypatch.setattr(pd.Model, "head", watched)
    return seen


@pytest.mark.usefixtures("two_threads")
def test_each_engine_steps_with_its_threads_and_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pd.PagePool(MODEL, pd.CacheConfig(page_size=4, num_pages=16))
    prefill_end, decode_end = pd.KVChannel.loopback(pool, pool)
    prefill = pd.PrefillEngine(MODEL, prefill_end, pd.EngineConfig(num_threads=3))
    decode = pd.DecodeEngine(MODEL, decode_end, pd.EngineConfig(num_threads=1))
    seen = watch_threads(monkeypatch)
    after = []
    with pd.Pairing(prefill, decode) as pairing:
        sampling = pd.SamplingParams(max_new_tokens=3, ignore_eos=True)
        for event in pairing.generate([pd.Request(prompt=(3, 4), sampling=sampling)]):
            assert event.error is None
            after.append(torch.get_num_threads())
    assert seen == [3, 1, 1]
    assert set(after) == {2}


@pytest.mark.usefixtures("two_threads")
def test_without_a_number_the_hosts_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = watch_threads(monkeypatch)
    with pd.Pairing.local(MODEL, cache=pd.CacheConfig(page_size=4, num_pages=16)) as pairing:
        assert list(pairing.generate([pd.Request(prompt=(3,), sampling=pd.SamplingParams(max_new_tokens=1))]))
    assert seen == [2]
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("two_threads")
def test_threads_come_back_when_a_step_raises() -> None:
    seen = []

    def fail() -> None:
        with using_threads(3):
            seen.append(torch.get_num_threads())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert seen == [3]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("module", [prefill_module, decode_module])
def test_an_engine_says_every_field_of_its_load(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for `step_age_s`, which its client fills in. One that no engine says would stay at its default everywhere."""
    pools = [pd.PagePool(MODEL, pd.CacheConfig(page_size=4, num_pages=16)) for _ in range(2)]
    prefill_end, decode_end = pd.KVChannel.loopback(*pools)
    with pd.PrefillEngine(MODEL, prefill_end) as prefill, pd.DecodeEngine(MODEL, decode_end) as decode:
        engine = prefill if module is prefill_module else decode
        kind, said = type(engine.load()), {"step_age_s", *full_fields(MODEL, engine.channel, engine._rebalancing)}

        def make(**given: Any) -> Any:
            said.update(given)
            return kind(**given)

        monkeypatch.setattr(module, kind.__name__, make)
        engine.load()
    missing = {field.name for field in attrs.fields(kind)} - said
    assert not missing, f"{kind.__name__} has {missing}, and its engine never says them"
