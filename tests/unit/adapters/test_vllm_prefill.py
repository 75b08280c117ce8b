"""Prefill in vLLM, decode here, without vLLM: a fake engine has the caches and the first tokens of the tiny model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.adapters.vllm.probe import Probe
from tests.forks import FAR_S
from tests.unit.adapters.cross import Cross, FakeVLLM, Network, greedy, prompt_of
from tests.waiting import without_threads


def decode_of(model: pd.Model, **cache: Any) -> pd.DecodeEngine:
    pool = pd.PagePool(model, pd.CacheConfig(**{"num_pages": 64, "page_size": 64, **cache}))
    return pd.DecodeEngine(model, pd.KVChannel(pool, pd.kv.SocketTransport()))


@pytest.fixture
def cross(model: pd.Model) -> Iterator[Cross]:
    vllm = FakeVLLM(Network(model))
    decode = decode_of(model)
    port = pd.adapters.vllm.connect(decode, kv=vllm.kv, server=vllm.complete)
    with pd.Pairing(port, decode, config=pd.PairingConfig(port_wait_s=30)) as pairing:
        yield Cross(vllm, decode, port, pairing)
    vllm.kill()


def test_what_vllm_prefills_goes_on_here(cross: Cross) -> None:
    prompts = [prompt_of(length) for length in (1, 16, 17, 64, 65)]
    for prompt, events in zip(prompts, cross.serve(prompts), strict=True):
        assert [event.token for event in events] == cross.vllm.network.alone(prompt)
        assert events[0].logprob is None
        assert all(event.logprob is not None for event in events[1:])
    cross.check_rest()
    assert cross.vllm.engine.counts.data["sent"] == len(prompts) + 1  # and the probe


def test_a_grant_that_comes_later_is_answered_with_the_token(cross: Cross, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is computed and over when the grant comes: its blocks and its first token are held."""
    channel, engine = cross.engine.channel, cross.vllm.engine
    cross.vllm.wait_at_most(hold_s=0.0, lease_s=30.0)
    real = channel.receiver.offer

    def later(grant: pd.PageGrant) -> None:
        def offer() -> None:
            while not (engine.requests and [*engine.requests.values()][-1].is_over and len(engine.requests) == 2):
                time.sleep(0.001)
            real(grant)

        threading.Thread(target=offer, daemon=True).start()

    monkeypatch.setattr(channel.receiver, "offer", later)
    (events,) = cross.serve([prompt_of(40)])
    assert [event.token for event in events] == cross.vllm.network.alone(prompt_of(40))
    assert events[-1].usage is not None
    assert events[-1].usage.num_retries == 0
    cross.check_rest()


def test_a_prompt_that_is_aborted_before_its_token_is_granted_again(cross: Cross) -> None:
    engine, real = cross.vllm.engine, cross.vllm.complete
    prompt = prompt_of(120)

    def abort() -> None:
        while "r1" not in engine.requests or not engine.requests["r1"].num_computed:
            time.sleep(0.0001)
        with cross.vllm.lock:
            engine.abort("r1")

    threading.Thread(target=abort, daemon=True).start()
    ((*_, last),) = cross.serve([prompt])
    assert last.usage is not None
    assert last.usage.num_retries <= 1
    assert cross.vllm.complete == real
    cross.check_rest()


def test_what_vllm_does_not_take_ends_at_once_with_its_reason(cross: Cross) -> None:
    cross.vllm.refuse = pd.RequestError("vLLM at http://x answered 400: the prompt is too long")
    ((event,),) = cross.serve([prompt_of(20)])
    assert isinstance(event.error, pd.RequestError)
    assert "the prompt is too long" in str(event.error)
    assert len(cross.vllm.bodies) == 2  # the probe, and one attempt
    cross.vllm.refuse = None
    assert len(cross.serve([prompt_of(20)])[0]) == 4
    cross.check_rest()


def test_what_fails_at_vllm_is_tried_again(cross: Cross) -> None:
    cross.vllm.refuse = OSError("reset")
    ((event,),) = cross.serve([prompt_of(20)])
    assert isinstance(event.error, pd.TransferError)
    assert "OSError: reset" in str(event.error)
    assert len(cross.vllm.bodies) == 1 + cross.engine.config.max_attempts
    cross.check_rest()


def test_a_cancelled_request_gives_everything_back(cross: Cross) -> None:
    """A prompt at vLLM whose grant decode has taken back is computed, and held for a lease."""
    cross.vllm.wait_at_most(hold_s=0.1, lease_s=0.5)
    pairing, ends = cross.pairing, []
    for at in range(4):
        pairing.submit(pd.Request(prompt=prompt_of(200 + at), sampling=greedy(max_new_tokens=200), request_id=str(at)))
        ends += pairing.step()
        pairing.cancel(str(at))
    assert pairing.drain(FAR_S)
    ends += pairing.step()
    assert [event.finish_reason for event in ends] == [pd.FinishReason.CANCELLED] * 4
    cross.check_rest()


def test_a_prompt_that_decode_gave_up_is_dropped_at_vllm(cross: Cross, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody tells the port of it: it sees that decode does not wait for the prompt any more."""
    dropped: list[bytes] = []
    monkeypatch.setattr(cross.port._prompts, "drop", dropped.append)
    cross.serve([prompt_of(20)])
    ends = time.monotonic() + FAR_S
    with cross.vllm.lock:  # vLLM does not come to it
        for name in "ab":
            cross.pairing.submit(pd.Request(prompt=prompt_of(50), sampling=greedy(), request_id=name))
        while len(cross.port._open) < 2:
            cross.pairing.step()
        cross.pairing.cancel("a")
        cancelled = next(iter(cross.port._open))
        while not dropped:
            assert time.monotonic() < ends
            cross.pairing.step()
        assert set(dropped) == {cancelled}
    assert cross.pairing.drain(FAR_S)
    cross.check_rest()


def test_a_vllm_that_was_restarted_is_probed_and_used_again(cross: Cross) -> None:
    prompt, listen = prompt_of(50), cross.vllm.kv
    cross.serve([prompt])
    old = cross.port.address
    cross.vllm.kill()
    cross.pairing.submit(pd.Request(prompt=prompt, sampling=greedy(), request_id="meanwhile"))
    events = []
    with without_threads("pdinfer-vllm-return") as refused:
        while not refused:
            events += cross.pairing.step()
            cross.pairing.wait(0.1)
    cross.vllm.start(listen)
    assert cross.pairing.drain(FAR_S)
    events += cross.pairing.step()
    assert [event.token for event in events] == cross.vllm.network.alone(prompt)
    assert cross.port.address != old
    assert cross.pairing.stats.ports_lost[0].is_back
    assert len(cross.vllm.bodies[-2]["prompt"]) == 272
    cross.check_rest()


def test_a_vllm_that_comes_back_wrong_is_refused(cross: Cross) -> None:
    listen = cross.vllm.kv
    cross.vllm.kill()
    cross.vllm.network = Network(cross.engine.model, spoil=lambda latents: latents[0, :, 64:].mul_(-1))
    cross.vllm.start(listen)
    cross.pairing.submit(pd.Request(prompt=prompt_of(9), sampling=greedy(), deadline_s=5))
    ends = time.monotonic() + FAR_S
    while cross.port in cross.pairing.ports or cross.pairing.stats.ports_away:
        assert time.monotonic() < ends
        cross.pairing.step()
        cross.pairing.wait(0.05)
    assert not cross.pairing.stats.ports_lost[0].is_back


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda latents: latents[0, :, 64:].mul_(-1), r"from layer 0 on, in the rotated keys \(rope\).*100%"),
        (lambda latents: latents[2, 8:, :64].add_(1), r"from layer 2 on, in component 'latent': 97% of the tokens"),
        (lambda latents: latents[0, -1:, :64].fill_(torch.nan), "from layer 0 on, in component 'latent': 0%"),
    ],
)
def test_a_vllm_that_computes_something_else_is_refused(
    model: pd.Model, spoil: Callable[[torch.Tensor], object], says: str
) -> None:
    vllm, decode = FakeVLLM(Network(model, spoil)), decode_of(model)
    try:
        with pytest.raises(pd.LayoutMismatch, match=says):
            pd.adapters.vllm.connect(decode, kv=vllm.kv, server=vllm.complete)
    finally:
        decode.close()
        vllm.kill()


def test_a_few_tokens_with_other_experts_are_no_difference(model: pd.Model) -> None:
    """Behind a router a near tie may go the other way; layer 0 has none."""
    vllm, decode = FakeVLLM(Network(model, lambda latents: latents[1:, 100:104].mul_(-1))), decode_of(model)
    try:
        pd.adapters.vllm.connect(decode, kv=vllm.kv, server=vllm.complete).close()
    finally:
        decode.close()
        vllm.kill()


def test_what_cannot_be_paired_is_refused_by_name(model: pd.Model) -> None:
    vllm = FakeVLLM(Network(model))
    fine, other = decode_of(model), decode_of(model)
    connect: Any = pd.adapters.vllm.connect
    layout = fine.pool.layout
    (latent,) = layout.components
    try:
        with pytest.raises(pd.ConfigError, match="this pool has them in uint8"):
            Probe.of(model, attrs.evolve(layout, components=(attrs.evolve(latent, dtype="uint8"),)), 512)
        with pytest.raises(pd.ConfigError, match="none was given"):
            connect([], kv=vllm.kv, server=vllm.complete)
        with pytest.raises(pd.ConfigError, match="has a URL such as"):
            connect(fine, kv=vllm.kv, server="127.0.0.1:8100")
        with pytest.raises(pd.TransferError, match="key"):
            connect(fine, kv=vllm.kv, server=vllm.complete, key=b"k" * 32)
        port = connect(fine, kv=vllm.kv, server=vllm.complete)
        with pytest.raises(pd.TransferError, match="was not connected with"):
            port.connect(other.address)
        port.close()
    finally:
        for decode in (fine, other):
            decode.close()
        vllm.kill()
