"""Whatever happens to an engine or to the link, every request ends in time, what landed is what was sent, and every
block comes back."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from tests.vllm.conftest import asks, prompts
from tests.vllm.engines import Engine, ready, until
from tests.vllm.test_equal import check_rest

LEASE_S = 6.0
MORE = {"max_num_seqs": 8, "num_blocks": 512}
Start = Callable[..., Engine]


@attrs.define(eq=False)
class Load:
    """Requests to a pair, 8 at a time, each with the time at which it was given to decode."""

    prefill: Engine
    decode: Engine
    address: str = ""
    began: dict[str, float] = attrs.field(factory=dict)
    ended: dict[str, float] = attrs.field(factory=dict)

    def give(self, prompt: list[int]) -> str:
        sends, loads, _ = asks(self.prefill)
        if self.address:
            loads["prefill"] = self.address
        name = f"{len(self.began)}"
        self.prefill.say(add=name, prompt=prompt, max_tokens=1, params=sends)
        self.decode.say(add=name, prompt=prompt, max_tokens=8, params=loads)
        self.began[name] = time.monotonic()
        return name

    def look(self) -> int:
        """Note what has ended. Return how many requests decode has left."""
        for name in self.decode.done.keys() - self.ended.keys():
            self.ended[name] = time.monotonic()
        return len(self.began) - len(self.ended)

    def run(self, count: int, at: dict[int, Callable[[], Any]], seed: int = 3) -> None:
        """Give requests, and do something before some of them."""
        for number, prompt in enumerate(prompts(count, seed)):
            at.get(number, lambda: None)()
            until(lambda: self.look() < 8, [self.prefill, self.decode], 90)
            self.give(prompt)
        until(lambda: self.look() == 0, [self.prefill, self.decode], 90)

    def check(self, *, slack_s: float = 2.0) -> None:
        """See that every request ended within the lease and some seconds, and that what landed is what was sent."""
        late = {name: end - self.began[name] for name, end in self.ended.items()}
        assert max(late.values()) < LEASE_S + slack_s + 4.0, late  # 8 at a time, so some wait for others
        for room, said in self.decode.moved.items():
            if room in self.prefill.moved:
                assert said["digest"] == self.prefill.moved[room]["digest"], room


def pair(start: Start, policy: str = "recompute", **extra: Any) -> Load:
    listen = extra.pop("listen", "tcp://127.0.0.1:0")
    times = {"hold_s": 2.0, "lease_s": LEASE_S}
    prefill = start("prefill", "kv_producer", listen=listen, settings={**MORE, **extra}, **times)
    decode = start("decode", "kv_consumer", settings={**MORE, **extra}, policy=policy, **times)
    ready(prefill, decode)
    return Load(prefill, decode)


def next_lands(load: Load) -> None:
    """See that the next requests land, the first of them soon."""
    before = len(load.decode.moved)
    load.run(3, {}, seed=9)
    assert len(load.decode.moved) >= before + 2
    names = list(load.began)[-3:]
    assert min(load.ended[name] - load.began[name] for name in names) < 1.0


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_prefill_is_killed_and_started_again(start: Start, policy: str) -> None:
    load = pair(start, policy)
    address = load.prefill.address
    assert address is not None
    load.run(24, {12: load.prefill.kill})
    load.check()
    reasons = {said["reason"] for said in load.decode.done.values()}
    assert reasons == ({"length"} if policy == "recompute" else {"length", "error"})
    load.prefill = start("again", "kv_producer", listen=address, settings=MORE, lease_s=LEASE_S)
    ready(load.prefill)
    next_lands(load)
    check_rest(load.decode, load.prefill)


def test_a_decode_is_killed_and_its_prefill_goes_on(start: Start) -> None:
    load = pair(start)
    for prompt in prompts(16):
        load.give(prompt)
    until(lambda: len(load.decode.moved) >= 3, [load.prefill, load.decode], 60)
    load.decode.kill()
    until(lambda: len(load.prefill.done) == 16, [load.prefill], LEASE_S + 30)
    time.sleep(LEASE_S)
    check_rest(load.prefill)


def test_a_prefill_is_frozen_for_a_while(start: Start) -> None:
    load = pair(start)
    thaw = threading.Timer(20.0, load.prefill.kill, [signal.SIGCONT])

    def freeze() -> None:
        load.prefill.kill(signal.SIGSTOP)
        thaw.start()

    load.decode.stats()
    load.run(24, {8: freeze})
    load.check()
    hooks_ms = load.decode.stats()["hooks_ms"]
    thaw.join()
    until(lambda: len(load.prefill.done) == 24, [load.prefill], 60)
    next_lands(load)
    check_rest(load.decode, load.prefill)
    print(f"the hooks of a step at decode, while prefill was frozen: {hooks_ms} ms")
    assert hooks_ms["p99"] < 5.0


def test_requests_are_aborted_at_any_moment(start: Start) -> None:
    load, rng = pair(start), random.Random(5)

    def abort() -> None:
        for engine in (load.prefill, load.decode):
            names = [name for name in load.began if name not in engine.done]
            if names and rng.random() < 0.7:
                name = rng.choice(names)
                engine.say(abort=name)
                engine.done.setdefault(name, {"reason": "abort"})

    load.run(60, dict.fromkeys(range(4, 60), abort))
    load.check()
    time.sleep(LEASE_S + 3)
    check_rest(load.decode, load.prefill)


def test_pools_of_a_tenth_of_the_need(start: Start) -> None:
    """Eight prompts of up to 188 tokens would need 96 blocks of 16."""
    load = pair(start, num_blocks=36, more={"max_num_batched_tokens": 64, "enable_chunked_prefill": True})
    load.run(40, {})
    load.check()
    check_rest(load.decode, load.prefill)


class FlippingProxy:
    """A link to an address, one of whose bytes is flipped in every `every` that go to whoever dialled."""

    def __init__(self, address: str, every: int) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self.there, self.every, self.num_flips = (host, int(port)), every, 0
        self.door = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.door.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self.door.accept()
                there = socket.create_connection(self.there)
                for source, sink, flips in ((here, there, False), (there, here, True)):
                    threading.Thread(target=self._pass, args=(source, sink, flips), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, flips: bool) -> None:
        left = self.every
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                left -= len(data)
                if flips and left < 0 and len(data) > 4096:  # a payload: a flipped frame only closes the link
                    data[len(data) // 2] ^= 1
                    left, self.num_flips = self.every, self.num_flips + 1
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_bytes_are_flipped_on_the_link(start: Start) -> None:
    load = pair(start)
    assert load.prefill.address is not None
    proxy = FlippingProxy(load.prefill.address, 1_500_000)
    load.address = proxy.address
    load.run(60, {})
    load.check()
    assert proxy.num_flips >= 3
    assert 20 <= len(load.decode.moved) < 60
    check_rest(load.decode, load.prefill)
    print(f"{proxy.num_flips} flips, {len(load.decode.moved)} of 60 landed")
