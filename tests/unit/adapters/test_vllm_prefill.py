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

    def start(self, listen: str = "tcp://127.0.0.1:0") -> None:
        network = self.network
        self.engine = FakeEngine(
            "kv_producer", {"listen": listen}, compute=network.compute, draw=network.draw, **self.more
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
    with pd.Pairing(port, decode) as pairing:
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
