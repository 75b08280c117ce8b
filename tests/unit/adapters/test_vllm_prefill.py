"""Prefill in vLLM, decode here, without vLLM: a fake engine has the caches and the first tokens of the tiny model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.adapters.vllm.prefill import VLLMPrefill
from pdinfer.adapters.vllm.probe import Probe
from pdinfer.kv.view import KVView
from pdinfer.model.batch import Batch, Row
from tests.unit.adapters.fake_vllm import LAYERS, FakeEngine, FakeRequest

MODEL = "examples/tiny"
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def model() -> pd.Model:
    return pd.load_model(MODEL, device="cpu", dtype=torch.float32)


@attrs.define(eq=False)
class Network:
    """The tiny model as a vLLM sees it: the bytes that a prompt leaves, and the token behind it. `spoil` changes what
    is computed, [layers, tokens, width] in float32."""

    model: pd.Model
    spoil: Callable[[torch.Tensor], object] = lambda _: None
    known: dict[Tokens, torch.Tensor] = attrs.field(factory=dict)

    def compute(self, prompt: Tokens) -> torch.Tensor:
        if prompt not in self.known:
            layout = self.model.kv_layout(pd.CacheConfig(page_size=16))
            memory = self.model.allocate_pages(layout, layout.num_pages(len(prompt)))
            row = Row(prompt, 0, range(memory.num_pages))
            batch = Batch.build([row], page_size=16, device=self.model.device, decode=False, cp=self.model.groups.cp)
            for _ in self.model.stream_layers(batch, KVView.of(memory)):
                pass
            rows = [memory.pages("latent", layer).flatten(0, 1)[: len(prompt)] for layer in range(LAYERS)]
            latents = torch.stack(rows).clone()
            self.spoil(latents)
            self.known[prompt] = latents.view(torch.uint8)
        return self.known[prompt]

    def draw(self, prompt: Tokens) -> int:
        return int(self.model.logits(prompt)[-1].argmax())


class FakeVLLM:
    """A fake engine that a thread steps, and what stands for its server: `complete`."""

    def __init__(self, network: Network, **more: Any) -> None:
        self.network = network
        self.more = {"num_blocks": 128, "chunk": 40, **more}
        self.bodies: list[Mapping[str, Any]] = []
        self.refuse: Exception | None = None
        self.start()

    def start(self, listen: str = "tcp://127.0.0.1:0", **extra: Any) -> None:
        network = self.network
        self.engine = FakeEngine(
            "kv_producer", {"listen": listen, **extra}, compute=network.compute, draw=network.draw, **self.more
        )
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.stopped.is_set():
            with self.lock:
                self.engine.step()
            time.sleep(0.0002)

    @property
    def kv(self) -> str:
        return self.engine.address

    def complete(self, body: Mapping[str, Any]) -> None:
        self.bodies.append(body)
        if self.refuse is not None:
            raise self.refuse
        engine, stopped = self.engine, self.stopped
        with self.lock:
            name = f"r{len(engine.requests)}"
            request: FakeRequest = engine.add(name, tuple(body["prompt"]), dict(body["kv_transfer_params"]))
        while not request.is_over:
            if stopped.is_set():
                raise OSError("the connection was reset")
            time.sleep(0.0002)

    def kill(self) -> None:
        self.stopped.set()
        self.thread.join()
        self.engine.close()

    def wait_for_rest(self) -> None:
        ends = time.monotonic() + 10
        while not self.engine.is_at_rest:
            assert time.monotonic() < ends, "vLLM holds blocks for ever"
            time.sleep(0.001)
        with self.lock:
            self.engine.check_free_blocks()


@attrs.define(eq=False)
class Cross:
    """A fake vLLM, a decode here, and the Pairing that joins them."""

    vllm: FakeVLLM
    decode: pd.DecodeEngine
    port: VLLMPrefill
    pairing: pd.Pairing

    def serve(self, prompts: list[Tokens], **sampling: Any) -> list[list[pd.TokenEvent]]:
        """Return the events of each prompt, the last of them final."""
        asked = [
            pd.Request(prompt=prompt, sampling=greedy(**sampling), request_id=str(at))
            for at, prompt in enumerate(prompts)
        ]
        heard: list[list[pd.TokenEvent]] = [[] for _ in prompts]
        for event in self.pairing.generate(asked):
            heard[int(event.request_id)].append(event)
        for events in heard:
            assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [True]
        return heard

    def check_rest(self) -> None:
        self.vllm.wait_for_rest()
        ends = time.monotonic() + 10
        while self.decode.num_unfinished and time.monotonic() < ends:
            self.pairing.step()
        assert (self.decode.pool.num_owned, self.decode.pool.num_granted) == (0, 0)
        assert self.decode.num_unfinished == 0


def greedy(**more: Any) -> pd.SamplingParams:
    return pd.SamplingParams(**{"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True, **more})


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


def prompt_of(length: int) -> Tokens:
    return tuple((length * 31 + 17 * at * at) % 256 for at in range(length))


def alone(model: pd.Model, prompt: Tokens, count: int = 6) -> list[int]:
    """Return what the model says, one token after another."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_what_vllm_prefills_goes_on_here(cross: Cross, model: pd.Model) -> None:
    prompts = [prompt_of(length) for length in (1, 2, 16, 17, 63, 64, 65, 100)]
    for prompt, events in zip(prompts, cross.serve(prompts), strict=True):
        assert [event.token for event in events] == alone(model, prompt)
        assert events[0].logprob is None
        assert all(event.logprob is not None for event in events[1:])
    cross.check_rest()
    assert cross.vllm.engine.counts.data["sent"] == len(prompts) + 1  # and the probe


def test_a_grant_that_comes_later_is_answered_with_the_token(cross: Cross, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt is computed and over when the grant comes: its blocks and its first token are held."""
    channel, engine = cross.decode.channel, cross.vllm.engine
    engine.scheduler._scheduler._settings = attrs.evolve(engine.scheduler._scheduler._settings, hold_s=0.0)
    real = channel.offer

    def later(grant: pd.PageGrant) -> None:
        def offer() -> None:
            while not (engine.requests and [*engine.requests.values()][-1].is_over and len(engine.requests) == 2):
                time.sleep(0.001)
            real(grant)

        threading.Thread(target=offer, daemon=True).start()

    monkeypatch.setattr(channel, "offer", later)
    ((first, *_),) = cross.serve([prompt_of(40)])
    assert first.token == alone(cross.decode.model, prompt_of(40), 1)[0]
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
    assert len(cross.serve([prompt_of(20)])[0]) == 6
    cross.check_rest()


def test_what_fails_at_vllm_is_tried_again(cross: Cross) -> None:
    cross.vllm.refuse = OSError("reset")
    ((event,),) = cross.serve([prompt_of(20)])
    assert isinstance(event.error, pd.TransferError)
    assert "OSError: reset" in str(event.error)
    assert len(cross.vllm.bodies) == 1 + cross.decode.config.max_attempts
    cross.check_rest()


def test_a_cancelled_request_gives_everything_back(cross: Cross) -> None:
    pairing, ends = cross.pairing, []
    for at in range(4):
        pairing.submit(pd.Request(prompt=prompt_of(200 + at), sampling=greedy(max_new_tokens=200), request_id=str(at)))
        ends += pairing.step()
        pairing.cancel(str(at))
    assert pairing.drain(10)
    ends += pairing.step()
    assert [event.finish_reason for event in ends] == [pd.FinishReason.CANCELLED] * 4
    cross.check_rest()


def test_a_vllm_that_was_restarted_is_probed_and_used_again(cross: Cross) -> None:
    prompt, listen = prompt_of(50), cross.vllm.kv
    cross.serve([prompt])
    old = cross.port.address
    cross.vllm.kill()
    cross.pairing.submit(pd.Request(prompt=prompt, sampling=greedy(), request_id="meanwhile"))
    events = []
    while not cross.pairing.stats.ports_away:
        events += cross.pairing.step()
        cross.pairing.wait(0.1)
    cross.vllm.start(listen)
    assert cross.pairing.drain(20)
    events += cross.pairing.step()
    assert [event.token for event in events] == alone(cross.decode.model, prompt)
    assert cross.port.address != old
    assert cross.pairing.stats.ports_lost[0].is_back
    assert len(cross.vllm.bodies[-2]["prompt"]) == 272
    cross.check_rest()


def test_a_vllm_that_comes_back_wrong_is_refused(cross: Cross) -> None:
    listen = cross.vllm.kv
    cross.vllm.kill()
    cross.vllm.network = Network(cross.decode.model, spoil=lambda latents: latents[0, :, 64:].mul_(-1))
    cross.vllm.start(listen)
    cross.pairing.submit(pd.Request(prompt=prompt_of(9), sampling=greedy(), deadline_s=5))
    ends = time.monotonic() + 10
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
        with pytest.raises(pd.ConfigError, match="needs a decode engine"):
            connect([], kv=vllm.kv, server=vllm.complete)
        with pytest.raises(pd.ConfigError, match="has a URL such as"):
            connect(fine, kv=vllm.kv, server="127.0.0.1:8100")
        with pytest.raises(pd.TransferError, match="key"):
            connect(fine, kv=vllm.kv, server=vllm.complete, key=b"k" * 32)
        port = connect(fine, kv=vllm.kv, server=vllm.complete)
        with pytest.raises(pd.TransferError, match="was not given to"):
            port.connect(other.address)
        port.close()
    finally:
        for decode in (fine, other):
            decode.close()
        vllm.kill()
