"""Prefill here, decode in vLLM, without vLLM: what lands in the fake engine is what it would have computed itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch

import pdinfer as pd
from tests.forks import FAR_S
from tests.unit.adapters.cross import Cross, FakeVLLM, Network, greedy, prompt_of


def prefill_of(model: pd.Model, *, takes_offers: bool = True) -> pd.PrefillEngine:
    pool = pd.PagePool(model, pd.CacheConfig(num_pages=64, page_size=64))
    return pd.PrefillEngine(model, pd.KVChannel(pool, pd.kv.SocketTransport(), takes_offers=takes_offers))


@pytest.fixture
def cross(model: pd.Model) -> Iterator[Cross]:
    vllm = FakeVLLM(Network(model), policy="fail")
    prefill = prefill_of(model)
    port = pd.adapters.vllm.connect_decode(prefill, kv=vllm.kv, server=vllm.stream)
    vllm.landed.clear()
    with pd.Pairing(prefill, port, config=pd.PairingConfig(port_wait_s=30)) as pairing:
        yield Cross(vllm, prefill, port, pairing)
    vllm.kill()


def until(is_so: Callable[[], bool], pairing: pd.Pairing) -> list[pd.TokenEvent]:
    """Step until it is, and return the events."""
    events, ends = list[pd.TokenEvent](), time.monotonic() + FAR_S
    while not is_so():
        assert time.monotonic() < ends
        events += pairing.step()
        time.sleep(0.001)
    return events


def test_what_is_prefilled_here_goes_on_in_vllm(cross: Cross) -> None:
    prompts = [prompt_of(length) for length in (1, 2, 17, 65)]
    for prompt, events in zip(prompts, cross.serve(prompts), strict=True):
        assert [event.token for event in events] == cross.vllm.network.alone(prompt)
        assert [event.finish_reason for event in events] == [None] * 3 + [pd.FinishReason.LENGTH]
        assert [event.logprob for event in events] == [-0.5] * 4
        assert events[-1].usage is not None
    loaded = [request for request in cross.vllm.landed if request.landed is not None]
    assert len(loaded) == len(prompts) - 1  # one token is computed by vLLM
    for request in loaded:
        ours, theirs = (
            each.view(torch.float32) for each in (request.landed, cross.vllm.network.compute(request.prompt))
        )
        assert (ours - theirs[:, : len(request.prompt) - 1]).abs().max() < 1e-4
    cross.check_rest()


def test_a_stop_token_ends_a_request(cross: Cross) -> None:
    third = cross.vllm.network.alone(prompt_of(30))[2]
    (events,) = cross.serve([prompt_of(30)], stop_token_ids=(third,))
    assert (events[-1].token, events[-1].finish_reason) == (third, pd.FinishReason.STOP)
    cross.check_rest()


def test_a_resumed_request_goes_on_behind_its_output(cross: Cross) -> None:
    said = cross.vllm.network.alone(prompt_of(40))
    request = pd.Request(prompt=prompt_of(40), output=tuple(said[:2]), sampling=greedy())
    events = list(cross.pairing.generate(request))
    assert [event.token for event in events] == said[2:]
    assert [event.index for event in events] == [2, 3]
    cross.check_rest()


def test_a_failure_of_vllm_is_the_end_of_its_request(cross: Cross) -> None:
    cross.vllm.refuse = pd.RequestError("vLLM answered 400")
    ((event,),) = cross.serve([prompt_of(20)])
    assert (event.finish_reason, type(event.error)) == (pd.FinishReason.FAILED, pd.RequestError)
    cross.vllm.refuse = None
    assert len(cross.serve([prompt_of(20)])[0]) == 4
    cross.check_rest()


def test_cancels_and_deadlines_end_once(cross: Cross) -> None:
    ends = []
    for at in range(4):
        deadline_s = 0.02 if at % 2 else None
        asked = pd.Request(
            prompt=prompt_of(300 + at), sampling=greedy(max_new_tokens=500), request_id=str(at), deadline_s=deadline_s
        )
        cross.pairing.submit(asked)
        ends += cross.pairing.step()
        if deadline_s is None:
            cross.pairing.cancel(str(at))
    assert cross.pairing.drain(FAR_S)
    ends += cross.pairing.step()
    final = {event.request_id: event.finish_reason for event in ends if event.finish_reason is not None}
    cancelled, deadline = pd.FinishReason.CANCELLED, pd.FinishReason.DEADLINE
    assert final == {"0": cancelled, "1": deadline, "2": cancelled, "3": deadline}
    assert sum(event.finish_reason is not None for event in ends) == 4
    cross.check_rest()


def test_a_grant_that_comes_after_its_request_has_ended_is_turned_away(
    cross: Cross, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages of a room stay reserved until its writer says that it will not write them."""
    cross.vllm.engine.worker._worker._receiving._lease_s = 2 * FAR_S  # which would end the wait as well
    channel, poll, held = cross.engine.channel, cross.engine.channel.poll_offers, list[pd.PageGrant]()

    def late(rooms: Collection[bytes]) -> list[pd.PageGrant]:
        held.extend(poll(rooms))
        return []

    monkeypatch.setattr(channel, "poll_offers", late)
    cross.pairing.submit(pd.Request(prompt=prompt_of(40), sampling=greedy(), request_id="r"))
    ends = until(lambda: bool(held), cross.pairing)
    cross.pairing.cancel("r")
    ends += until(lambda: not cross.pairing.stats.num_unfinished_requests, cross.pairing)
    assert [event.finish_reason for event in ends] == [pd.FinishReason.CANCELLED]
    assert not cross.vllm.engine.is_at_rest
    monkeypatch.setattr(channel, "poll_offers", lambda _: [held.pop()] if held else [])
    cross.check_rest()


def test_a_prompt_that_fails_here_fails_there(cross: Cross, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr(cross.engine._model_runner, "prefill", broken)
    ((event,),) = cross.serve([prompt_of(20)])
    assert event.finish_reason is pd.FinishReason.FAILED
    monkeypatch.undo()
    assert len(cross.serve([prompt_of(20)])[0]) == 4
    cross.check_rest()


def test_what_cannot_be_paired_is_refused_by_name(cross: Cross, model: pd.Model) -> None:
    deaf = prefill_of(model, takes_offers=False)
    connect: Any = pd.adapters.vllm.connect_decode
    with pytest.raises(pd.ConfigError, match="takes_offers=True"):
        connect(deaf, kv=cross.vllm.kv, server=cross.vllm.stream)
    deaf.close()
    processor = pd.SamplingParams(logits_processor="json")
    cross.port.submit(pd.Request(prompt=(1,), sampling=processor, request_id="r"), writers=(cross.engine.address,))
    (refused,) = cross.port.step()
    assert isinstance(refused, pd.Refused)
    assert "logits_processor='json' cannot be sent to vLLM" in str(refused.error)
