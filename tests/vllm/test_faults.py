"""Whatever happens to an engine or to the link, every request ends in time, what landed is what was sent, and every
block comes back."""

from __future__ import annotations

import random
import signal
import threading
import time

import pytest

from tests.vllm.conftest import prompts
from tests.vllm.engines import ready, until
from tests.vllm.faults import FLIP_BYTES, LEASE_S, MORE, TIGHT, Load, Proxy, Start, pair
from tests.vllm.runs import check_rest

SOON_S = 3.0
"""Asked is a second, of a machine that does nothing else."""


def next_lands(load: Load) -> None:
    """See that the next requests land, and that the first has its first token soon after both engines answer."""
    before = len(load.decode.moved)
    for engine in (load.prefill, load.decode):
        engine.stats()
    room = load.give(prompts(1, 9)[0], max_tokens=1)
    until(lambda: load.look() == 0, [load.prefill, load.decode], 60)
    assert load.ended[room] - load.began[room] < SOON_S
    load.run(2, {}, seed=9)
    assert len(load.decode.moved) >= before + 2


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

    load.run(60, dict.fromkeys(range(4, 60), lambda: load.abort(rng)))
    load.check()
    time.sleep(LEASE_S + 3)
    check_rest(load.decode, load.prefill)


def test_pools_of_a_tenth_of_the_need(start: Start) -> None:
    load = pair(start, **TIGHT)
    load.run(40, {})
    load.check()
    check_rest(load.decode, load.prefill)


def test_bytes_are_flipped_on_the_link(start: Start) -> None:
    load = pair(start)
    assert load.prefill.address is not None
    proxy = Proxy(load.prefill.address, FLIP_BYTES)
    load.address = proxy.address
    load.run(60, {})
    load.check()
    assert proxy.num_faults >= 3
    assert 20 <= len(load.decode.moved) < 60
    check_rest(load.decode, load.prefill)
    print(f"{proxy.num_faults} flips, {len(load.decode.moved)} of 60 landed")
