"""DecodeEngine when a step goes wrong: who ends, who goes on, and that every page returns."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import pdinfer as pd
from pdinfer.testing import random_model

MODEL = random_model()


@pytest.fixture
def pairing() -> Iterator[pd.Pairing]:
    with pd.Pairing.local(MODEL, cache=pd.CacheConfig(page_size=4, num_pages=64)) as made:
        yield made
        (decode,) = made._roster.decodes.values()
        assert isinstance(decode, pd.DecodeEngine)
        decode.channel.pool.check()
        assert decode.channel.pool.num_available == 64


def requests(count: int = 3) -> list[pd.Request]:
    sampling = pd.SamplingParams(temperature=0.0, max_new_tokens=6, ignore_eos=True)
    return [pd.Request(request_id=str(n), prompt=(n + 2, 9, 40), sampling=sampling) for n in range(count)]


def last_events(pairing: pd.Pairing) -> dict[str, pd.TokenEvent]:
    return {event.request_id: event for event in pairing.generate(requests()) if event.finish_reason is not None}


def test_logits_that_are_not_finite_end_their_request_alone(
    pairing: pd.Pairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = pd.Model.head
    calls = []

    def damaged(model: pd.Model, state: torch.Tensor) -> torch.Tensor:
        logits = head(model, state)
        calls.append(len(state))
        if len(calls) == 4:
            logits[1, 5] = torch.nan
        return logits

    monkeypatch.setattr(pd.Model, "head", damaged)
    ends = last_events(pairing)
    assert [ends[n].finish_reason for n in "012"] == [
        pd.FinishReason.LENGTH,
        pd.FinishReason.FAILED,
        pd.FinishReason.LENGTH,
    ]
    assert "not finite" in str(ends["1"].error)


def test_a_step_that_fails_ends_its_batch_and_the_engine_goes_on(
    pairing: pd.Pairing, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(pd.DecodeEngine, "_forward", lambda *_: 1 / 0)
        ends = last_events(pairing)
    assert {event.finish_reason for event in ends.values()} == {pd.FinishReason.FAILED}
    assert all("ZeroDivisionError" in str(event.error) for event in ends.values())
    assert {event.finish_reason for event in last_events(pairing).values()} == {pd.FinishReason.LENGTH}
