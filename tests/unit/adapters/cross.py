"""A fake vLLM whose caches and tokens are those of the tiny model, stepped by a thread as vLLM's engine core is."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch

import pdinfer as pd
from pdinfer.adapters.vllm.prompts import Piece
from pdinfer.kv.view import KVView
from pdinfer.model.batch import Batch, Row
from tests.forks import FAR_S
from tests.unit.adapters.fake_vllm import LAYERS, FakeEngine, FakeRequest, Status

Tokens = tuple[int, ...]


@functools.cache
def latents_of(model: pd.Model, prompt: Tokens) -> torch.Tensor:
    """Return what a prompt leaves in the cache [layers, tokens, width]: the same for every test, as is the probe."""
    layout = model.kv_layout(pd.CacheConfig(page_size=16))
    memory = model.allocate_pages(layout, layout.num_pages(len(prompt)))
    row = Row(prompt, 0, range(memory.num_pages))
    batch = Batch.build([row], page_size=16, device=model.device, decode=False, cp=model.groups.cp)
    for _ in model.stream_layers(batch, KVView.of(memory)):
        pass
    return torch.stack([memory.pages("latent", layer).flatten(0, 1)[: len(prompt)] for layer in range(LAYERS)])


@functools.cache
def next_of(model: pd.Model, prompt: Tokens) -> int:
    return int(model.logits(prompt)[-1].argmax())


@attrs.define(eq=False)
class Network:
    """The tiny model as a vLLM sees it: the bytes that a prompt leaves, and the token behind it. `spoil` changes what
    is computed, [layers, tokens, width] in float32."""

    model: pd.Model
    spoil: Callable[[torch.Tensor], object] = lambda _: None
    known: dict[Tokens, torch.Tensor] = attrs.field(factory=dict)

    def compute(self, prompt: Tokens) -> torch.Tensor:
        if prompt not in self.known:
            latents = latents_of(self.model, prompt).clone()
            self.spoil(latents)
            self.known[prompt] = latents.view(torch.uint8)
        return self.known[prompt]

    def draw(self, prompt: Tokens) -> int:
        return next_of(self.model, prompt)

    def alone(self, prompt: Tokens, count: int = 4) -> list[int]:
        """Return what the model says, one token after another."""
        tokens = prompt
        for _ in range(count):
            tokens = (*tokens, self.draw(tokens))
        return [*tokens[len(prompt) :]]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether caches are equal but for what another order of sums makes of them."""
    return bool(torch.isclose(ours.view(torch.float32), theirs.view(torch.float32), atol=1e-4, equal_nan=True).all())


class FakeVLLM:
    """A fake engine that a thread steps, and what stands for its server: `complete`."""

    def __init__(self, network: Network, **more: Any) -> None:
        self.network = network
        self.more = {"num_blocks": 128, "chunk": 40, **more}
        self.bodies: list[Mapping[str, Any]] = []
        self.refuse: Exception | None = None
        self.landed: list[FakeRequest] = []
        self.num_said = 0
        self.start()

    def start(self, listen: str = "tcp://127.0.0.1:0", **extra: Any) -> None:
        network = self.network
        self.engine = FakeEngine(
            "kv_both", {"listen": listen, **extra}, compute=network.compute, draw=network.draw, equal=close, **self.more
        )
        self.lock, self.stopped = threading.Lock(), threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                with self.lock:
                    self.engine.step()
                time.sleep(0.002)
        finally:  # a check of the fake that fails must not leave its callers waiting
            self.stopped.set()

    @property
    def kv(self) -> str:
        return self.engine.address

    def complete(self, body: Mapping[str, Any]) -> FakeRequest:
        """Compute a prompt, as vLLM's server does."""
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
            time.sleep(0.001)
        return request

    def stream(self, body: Mapping[str, Any]) -> Iterator[Piece]:
        """Compute a prompt, loaded or not, and say what the model says, one token after another."""
        request = self.complete(body)
        if request.status is Status.FAILED:
            raise OSError("the load failed")
        self.landed.append(request)
        tokens, asked = list(request.prompt), body["max_tokens"]
        for left in range(asked)[::-1]:
            tokens.append(self.network.draw(tuple(tokens)))
            is_last = tokens[-1] in body["stop_token_ids"]
            self.num_said += 1
            yield Piece((tokens[-1],), (-0.5,), "stop" if is_last else "length" if not left else None)
            if is_last:
                return

    def kill(self) -> None:
        self.stopped.set()
        self.thread.join()
        self.engine.close()

    def wait_at_most(self, *, hold_s: float, lease_s: float) -> None:
        """Change how long a prompt waits for its grant before it is computed, and behind that."""
        scheduler = self.engine.scheduler._scheduler
        scheduler._settings = attrs.evolve(scheduler._settings, hold_s=hold_s)
        self.engine.worker._worker._sending._lease_s = lease_s

    def check_free_blocks(self) -> None:
        with self.lock:
            self.engine.check_free_blocks()


def prompt_of(length: int) -> Tokens:
    return tuple((length * 31 + 17 * at * at) % 256 for at in range(length))


def greedy(**more: Any) -> pd.SamplingParams:
    return pd.SamplingParams(**{"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True, **more})


def serve(pairing: pd.Pairing, prompts: list[Tokens], **sampling: Any) -> list[list[pd.TokenEvent]]:
    """Return the events of each prompt, the last of them final."""
    heard: list[list[pd.TokenEvent]] = [[] for _ in prompts]
    asked = (
        pd.Request(prompt=each, sampling=greedy(**sampling), request_id=str(at)) for at, each in enumerate(prompts)
    )
    for event in pairing.generate(asked):
        heard[int(event.request_id)].append(event)
    for events in heard:
        assert [event.finish_reason is not None for event in events] == [False] * (len(events) - 1) + [True]
    return heard


@attrs.define(eq=False)
class Cross:
    """A fake vLLM, an engine here, and the Pairing that joins them."""

    vllm: FakeVLLM
    engine: pd.PrefillEngine | pd.DecodeEngine
    port: Any
    pairing: pd.Pairing

    def serve(self, prompts: list[Tokens], **sampling: Any) -> list[list[pd.TokenEvent]]:
        return serve(self.pairing, prompts, **sampling)

    def check_rest(self) -> None:
        """Wait until nothing runs, and see that nothing is held."""
        ends = time.monotonic() + FAR_S
        while self.engine.num_unfinished or not self.vllm.engine.is_at_rest:
            assert time.monotonic() < ends, "something is held for ever"
            self.pairing.step()
            time.sleep(0.001)
        self.vllm.check_free_blocks()
        assert (self.engine.num_unfinished, self.engine.pool.num_owned, self.engine.pool.num_granted) == (0, 0, 0)
        load = self.port.load()
        assert not isinstance(load, pd.policy.DecodeLoad) or load.num_running_requests == 0
