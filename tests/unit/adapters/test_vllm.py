"""The connector inside a stand-in for vLLM: every landed byte, every block that comes back, and every way a hand-over
may end."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import time
from abc import abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdinfer.adapters.vllm.connector import Hooks
from pdinfer.adapters.vllm.loading import connector_on
from pdinfer.adapters.vllm.memory import engine_pages, layer_of
from pdinfer.adapters.vllm.messages import TransferCounts
from pdinfer.config import CacheConfig
from pdinfer.errors import ConfigError
from pdinfer.kv.transports.base import Transfer
from pdinfer.model.load import load_model
from tests.each_time import others_in_full
from tests.forks import FAR_S
from tests.unit.adapters.fake_vllm import (
    LAYERS,
    LISTEN,
    WIDTH,
    FakeBase,
    FakeEngine,
    FakeRequest,
    Pairs,
    Status,
    run,
    run_at_random,
)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1000), k=length))


def submit(
    prefill: FakeEngine, decode: FakeEngine, prompt: tuple[int, ...], name: str = "r"
) -> tuple[FakeRequest, ...]:
    """Give a prompt to both engines, as a proxy does."""
    room = os.urandom(16).hex()
    sends = {"do_remote_decode": True, "room": room}
    loads = {"do_remote_prefill": True, "room": room, "prefill": prefill.address}
    return prefill.add(f"p-{name}", prompt, sends), decode.add(f"d-{name}", prompt, loads)


def counted(engine: FakeEngine) -> dict[str, Any]:
    return engine.counts.data


def hand_over(prefill: FakeEngine, decode: FakeEngine, prompts: list[tuple[int, ...]]) -> list[FakeRequest]:
    """Hand prompts over and see that each landed whole, and that every block is back at rest."""
    both = [submit(prefill, decode, prompt, str(at)) for at, prompt in enumerate(prompts)]
    ours, theirs = zip(*both, strict=True)
    run([prefill, decode], lambda: all(request.is_over for request in (*ours, *theirs)))
    run([prefill, decode], lambda: prefill.is_at_rest and decode.is_at_rest)
    for engine in (prefill, decode):
        engine.check_free_blocks()
        engine.check_nothing_is_kept()
    assert [request.status for request in theirs] == [Status.DONE] * len(prompts)
    assert all(request.landed is not None for request in theirs)
    return list(theirs)


@pytest.mark.parametrize("listen", [LISTEN, "shm://"])
@pytest.mark.parametrize(("ours", "theirs"), [(16, 16), (16, 8), (4, 16)])
def test_prompts_land_whatever_the_block_sizes(pair: Pairs, listen: str, ours: int, theirs: int) -> None:
    prefill, decode = pair({"listen": listen}, block_size=ours, num_blocks=512 // ours, decode={"block_size": theirs})
    assert (prefill.channel.pool.memory.memfd is not None) == listen.startswith("shm")
    prompts = [prompt_of(length, length) for length in (2, 5, 16, 17, 33, 64, 65)]
    for request in hand_over(prefill, decode, prompts):
        assert request.landed is not None
    assert counted(prefill)["sent"] == len(prompts)
    assert decode.channel.stats.bytes_received == sum(len(prompt) - 1 for prompt in prompts) * LAYERS * WIDTH * 4


def test_layers_leave_as_they_are_computed(pair: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair()
    pushed: list[range] = []
    real = prefill.channel.push
    monkeypatch.setattr(
        prefill.channel, "push", lambda grant, **more: (pushed.append(more["layers"]), real(grant, **more))[1]
    )
    hand_over(prefill, decode, [prompt_of(40)])
    assert pushed == [range(layer, layer + 1) for layer in range(LAYERS)]


def test_layers_without_a_hook_are_pushed_behind_the_step(pair: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair()
    monkeypatch.setattr(prefill.worker, "save_kv_layer", lambda *_: None)
    assert hand_over(prefill, decode, [prompt_of(40)])[0].landed is not None


def test_chunks_and_local_hits_on_either_side(pair: Pairs) -> None:
    prefill, decode = pair(chunk=7, decode={"chunk": 64})
    prompt = prompt_of(50)
    prefill.remember(prompt, 2)
    decode.remember(prompt, 1)
    (request,) = hand_over(prefill, decode, [prompt])
    assert request.landed is not None
    assert decode.channel.stats.bytes_received == (49 - 16) * LAYERS * WIDTH * 4


@pytest.mark.parametrize("hold_s", [5.0, 0.0])
def test_two_ends_with_other_prompts_hand_nothing_over(pair: Pairs, hold_s: float) -> None:
    prefill, decode = pair({"hold_s": hold_s})
    prompt, room = prompt_of(40), os.urandom(16).hex()
    ours = prefill.add("p", (*prompt[:20], prompt[20] + 1, *prompt[21:]), {"do_remote_decode": True, "room": room})
    if not hold_s:
        run([prefill], lambda: ours.is_over)
    theirs = decode.add("d", prompt, {"do_remote_prefill": True, "room": room, "prefill": prefill.address})
    run([prefill, decode], lambda: ours.is_over and theirs.is_over and prefill.is_at_rest and decode.is_at_rest)
    assert theirs.landed is None
    prefill.check_nothing_is_kept()
    assert counted(prefill)["aborted_prompt"] == 1
    assert "sent" not in counted(prefill)


def test_decode_may_go_on_with_the_token_that_prefill_drew(pair: Pairs) -> None:
    prefill, decode = pair()
    prompt, room = prompt_of(40), os.urandom(16).hex()
    ours = prefill.add("p", prompt[:-1], {"do_remote_decode": True, "room": room})
    theirs = decode.add("d", prompt, {"do_remote_prefill": True, "room": room, "prefill": prefill.address})
    run([prefill, decode], lambda: ours.is_over and theirs.is_over and prefill.is_at_rest and decode.is_at_rest)
    assert theirs.landed is not None


def test_prompts_that_are_not_tokens_are_handed_over_by_nobody(pair: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair()
    monkeypatch.setattr(FakeRequest, "mm_features", ["an image"], raising=False)
    ours, theirs = submit(prefill, decode, prompt_of(40))
    run([prefill, decode], lambda: ours.is_over and theirs.is_over and prefill.is_at_rest and decode.is_at_rest)
    assert theirs.landed is None
    assert counted(decode)["aborted_refused"] == 1


def test_a_grant_that_comes_later_finds_the_blocks_held(pair: Pairs) -> None:
    prefill, decode = pair({"hold_s": 0.0})
    ours, theirs = submit(prefill, decode, prompt_of(40))
    run([prefill], lambda: ours.is_over)
    for _ in range(5):
        prefill.step()
    assert ours.blocks
    run([prefill, decode], lambda: theirs.is_over and prefill.is_at_rest)
    assert theirs.landed is not None
    assert counted(prefill)["sent"] == 1


def test_a_grant_may_come_between_two_chunks(pair: Pairs) -> None:
    prefill, decode = pair({"hold_s": 0.0}, chunk=8, decode={"chunk": 64})
    ours, theirs = submit(prefill, decode, prompt_of(60))
    for _ in range(3):
        prefill.step()
    assert 0 < ours.num_computed < 60
    run([decode], lambda: prefill.channel.has_news)
    run([prefill, decode], lambda: theirs.is_over and prefill.is_at_rest)
    assert theirs.landed is not None


def test_a_request_without_a_grant_waits_and_then_keeps_its_blocks_for_a_lease(pair: Pairs) -> None:
    prefill = pair.engine("kv_producer", {"hold_s": 0.1, "lease_s": 0.2})
    request = prefill.add("p", prompt_of(40), {"do_remote_decode": True, "room": os.urandom(16).hex()})
    plain = prefill.add("plain", prompt_of(20), None)
    began = time.monotonic()
    prefill.step()
    assert plain.is_over  # it waits for nobody
    assert not plain.blocks
    run([prefill], lambda: request.is_over)
    assert time.monotonic() - began >= 0.1
    prefill.step()
    assert request.blocks
    run([prefill], lambda: prefill.is_at_rest)
    assert counted(prefill)["aborted_lease"] == 1


def test_a_waiting_pair_hardly_steps(pair: Pairs) -> None:
    """The host steps all the time while a request waits: a step that computes nothing sleeps until there is news."""
    prefill = pair.engine("kv_producer", {"hold_s": 0.3})
    request = prefill.add("p", prompt_of(40), {"do_remote_decode": True, "room": os.urandom(16).hex()})
    num_steps = 0
    while not request.is_over:
        prefill.step()
        num_steps += 1
    assert num_steps < 40


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_prefill_that_nobody_finds_ends_the_request_by_its_policy(
    pair: Pairs, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    decode = pair.engine("kv_consumer", policy=policy)
    loads = {"do_remote_prefill": True, "room": os.urandom(16).hex(), "prefill": "tcp://127.0.0.1:1"}
    request = decode.add("d", prompt_of(40), loads)
    run([decode], lambda: request.is_over and decode.is_at_rest)
    assert request.status is (Status.FAILED if policy == "fail" else Status.DONE)
    assert counted(decode)["aborted_unreachable"] == 1
    assert "no prefill at tcp://127.0.0.1:1" in caplog.text


def test_a_prompt_that_vllm_must_compute_itself_is_not_loaded(
    pair: Pairs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = pair({"hold_s": 0.0, "lease_s": 0.0})
    monkeypatch.setattr(FakeRequest, "skip_reading_prefix_cache", True, raising=False)
    ours, theirs = submit(prefill, decode, prompt_of(40))
    run([prefill, decode], lambda: ours.is_over and theirs.is_over and prefill.is_at_rest and decode.is_at_rest)
    assert theirs.landed is None
    assert "prompt_logprobs; leave that out" in caplog.text


def test_requests_may_name_one_prefill_by_two_names(pair: Pairs) -> None:
    prefill, decode = pair()
    hand_over(prefill, decode, [prompt_of(20)])
    room, prompt = os.urandom(16).hex(), prompt_of(40)
    loads = {"do_remote_prefill": True, "room": room, "prefill": prefill.address.replace("127.0.0.1", "localhost")}
    prefill.add("p", prompt, {"do_remote_decode": True, "room": room})
    asked = decode.add("d", prompt, loads)
    run([prefill, decode], lambda: asked.is_over)
    assert asked.landed is not None
    assert len(decode.channel.snapshot().links) == 1


def test_a_lost_prefill_fails_its_loads_and_the_next_one_at_its_address_is_found(pair: Pairs) -> None:
    prefill, decode = pair()
    hand_over(prefill, decode, [prompt_of(20)])
    _, theirs = submit(prefill, decode, prompt_of(40), "lost")
    run([decode], lambda: prefill.channel.has_news)
    address = prefill.address
    prefill.close()
    run([decode], lambda: theirs.is_over and decode.is_at_rest)
    assert theirs.landed is None
    assert counted(decode)["aborted_writer"] == 1
    again = pair.engine("kv_producer", {"listen": address})
    deadline = time.monotonic() + FAR_S
    while True:  # the end of its predecessor's link may still be on its way
        _, theirs = submit(again, decode, prompt_of(40), f"next {time.monotonic()}")
        run([again, decode], lambda one=theirs: one.is_over)  # type: ignore[misc]
        if theirs.landed is not None:
            break
        assert time.monotonic() < deadline


def test_a_cancelled_load_keeps_its_blocks_until_its_writer_has_stopped(pair: Pairs) -> None:
    prefill, decode = pair(chunk=8, decode={"chunk": 64})
    ours, theirs = submit(prefill, decode, prompt_of(60))
    run([prefill, decode], lambda: ours.num_computed > 8)
    decode.abort("d-r")
    for _ in range(3):
        decode.step()
    assert theirs.blocks  # prefill has not answered: it may still write
    run([prefill, decode], lambda: decode.is_at_rest and prefill.is_at_rest)
    assert counted(decode)["aborted_cancelled"] == 1
    assert counted(prefill)["aborted_stopped"] == 1
    decode.check_free_blocks()


def test_a_load_that_is_cancelled_before_it_was_granted_ends_at_once(pair: Pairs) -> None:
    prefill, decode = pair()
    submit(prefill, decode, prompt_of(40))
    decode.step()
    decode.abort("d-r")
    run([decode], lambda: decode.is_at_rest)


def test_a_prefill_that_is_aborted_tells_decode(pair: Pairs) -> None:
    prefill, decode = pair(chunk=8, decode={"chunk": 64})
    ours, theirs = submit(prefill, decode, prompt_of(60))
    run([prefill, decode], lambda: ours.num_computed > 8)
    prefill.abort("p-r")
    run([prefill, decode], lambda: prefill.is_at_rest and theirs.is_over)
    assert theirs.status is Status.DONE  # computed here
    assert theirs.landed is None


def test_a_prefill_that_is_aborted_while_it_waits_turns_its_grant_away(pair: Pairs) -> None:
    prefill, decode = pair()
    ours, theirs = submit(prefill, decode, prompt_of(60))
    prefill.free, blocks = [], prefill.free  # there is no room to schedule it
    run([prefill, decode], lambda: prefill.worker._worker._sending._grants)
    prefill.abort("p-r")
    run([prefill, decode], lambda: theirs.is_over)
    prefill.free = blocks
    assert not ours.blocks
    assert counted(prefill)["aborted_turned_away"] == 1


@pytest.mark.parametrize("computed", ["nothing", "a chunk", "all"])
def test_a_grant_that_comes_behind_its_request_is_answered_at_once(pair: Pairs, computed: str) -> None:
    prefill, decode = pair({"hold_s": 0.0 if computed != "nothing" else 20.0, "lease_s": 20.0}, chunk=8)
    ours, theirs = submit(prefill, decode, prompt_of(60))
    if computed == "all":
        prefill.worker._worker._sending._lease_s = 0.0
        run([prefill], lambda: ours.is_over)
    else:
        run([prefill], lambda: computed == "nothing" or ours.num_computed)  # nothing: vLLM never asked about it
        prefill.abort("p-r")
    prefill.step()
    run([prefill], lambda: prefill.is_at_rest)
    prefill.check_nothing_is_kept()
    run([decode], lambda: theirs.is_over and decode.is_at_rest)  # prefill is idle, and does not step any more
    assert theirs.landed is None
    assert counted(decode)["aborted_writer"] == 1


def test_the_lease_of_decode_ends_a_wait_that_vllm_would_not(pair: Pairs) -> None:
    prefill, decode = pair({"lease_s": 0.3})
    ours, theirs = submit(prefill, decode, prompt_of(40))
    began = time.monotonic()
    run([decode], lambda: theirs.is_over)  # prefill does not step
    assert time.monotonic() - began >= 0.3
    assert counted(decode)["aborted_lease"] == 1
    assert not ours.is_over


def test_a_preempted_prefill_goes_on_where_it_was(pair: Pairs) -> None:
    prefill, decode = pair(chunk=8, decode={"chunk": 64})
    ours, theirs = submit(prefill, decode, prompt_of(60))
    for at in (8, 24):
        run([prefill, decode], lambda at=at: ours.num_computed > at)  # type: ignore[misc]
        prefill.preempt.add("p-r")
    run([prefill, decode], lambda: theirs.is_over and prefill.is_at_rest)
    assert theirs.landed is not None
    assert prefill.channel.stats.bytes_sent == 59 * LAYERS * WIDTH * 4  # nothing twice


def test_blocks_are_held_until_no_transfer_reads_them(pair: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair()
    ours, theirs = submit(prefill, decode, prompt_of(40))
    slow, real = Transfer(0), prefill.channel.finish
    monkeypatch.setattr(prefill.channel, "finish", lambda *of: (real(*of), slow)[1])
    run([prefill, decode], lambda: theirs.is_over)
    for _ in range(5):
        prefill.step()
    assert ours.blocks
    slow.complete()
    run([prefill], lambda: prefill.is_at_rest)


def test_a_peer_that_reads_preempted_blocks_for_too_long_loses_its_link(
    pair: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair(chunk=8, decode={"chunk": 64})
    ours, theirs = submit(prefill, decode, prompt_of(60))
    run([prefill, decode], lambda: ours.num_computed > 8)
    monkeypatch.setattr(prefill.channel, "drain", lambda _: False)
    prefill.preempt.add("p-r")
    run([prefill, decode], lambda: theirs.is_over and prefill.is_at_rest)
    assert theirs.landed is None
    assert theirs.status is Status.DONE


@pytest.mark.parametrize("seed", others_in_full(range(3), {0}))
def test_many_requests_with_everything_at_once(pair: Pairs, seed: int) -> None:
    """Aborts and preemptions at random, in pools that hold a few requests at a time."""
    rng = random.Random(seed)
    prefill, decode = pair(
        {"hold_s": 0.05, "lease_s": 5.0}, chunk=16, num_blocks=16, decode={"num_blocks": 20, "block_size": 8}
    )
    both = [submit(prefill, decode, prompt_of(rng.randint(2, 70), at), str(at)) for at in range(25)]
    run_at_random(rng, prefill, decode, [request for one in both for request in one])
    run([prefill, decode], lambda: not prefill.worker._worker._sending and not decode.worker._worker._receiving)
    for engine in (prefill, decode):
        engine.step()
        engine.check_nothing_is_kept()
    assert sum(theirs.landed is not None for _, theirs in both) >= 5
    assert len(prefill.free) == 16
    assert len(decode.free) == 20


@pytest.mark.parametrize("listen", [LISTEN, "shm://"])
def test_the_first_of_several_ranks_of_a_prefill_sends(pair: Pairs, listen: str) -> None:
    prefill, decode = pair({"listen": listen}, num_ranks=2, decode={"num_ranks": 1})
    hand_over(prefill, decode, [prompt_of(length, length) for length in (5, 40, 200)])
    assert counted(prefill)["sent"] == 3
    assert [hasattr(worker._worker, "channel") for worker in prefill.workers] == [True, False]


def test_an_engine_of_both_roles(pair: Pairs) -> None:
    one, other = pair.engine("kv_both"), pair.engine("kv_both")
    hand_over(one, other, [prompt_of(20)])
    hand_over(other, one, [prompt_of(30)])


def test_a_key_is_read_from_a_file_and_must_be_the_same(
    pair: Pairs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text("ab" * 32 + "\n", "ascii")
    (tmp_path / "other").write_text("cd" * 32, "ascii")
    prefill = pair.engine("kv_producer", {"key_file": str(tmp_path / "key")})
    hand_over(prefill, pair.engine("kv_consumer", {"key_file": str(tmp_path / "key")}), [prompt_of(20)])
    stranger = pair.engine("kv_consumer", {"key_file": str(tmp_path / "other"), "lease_s": 3600.0}, policy="fail")
    _, theirs = submit(prefill, stranger, prompt_of(20), "x")
    run([stranger], lambda: theirs.is_over)
    assert theirs.status is Status.FAILED
    assert "the peer's key differs" in caplog.text


@pytest.mark.parametrize(
    ("what", "more"), [("dtype", {"dtype": torch.bfloat16}), ("sampled_weights_id", {"model": "examples/other"})]
)
def test_other_weights_and_dtypes_are_refused_by_name(
    pair: Pairs, what: str, more: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if what == "sampled_weights_id":
        more = {"model": str(other_weights(tmp_path))}
    prefill, decode = pair(decode={**more, "policy": "fail"})
    _, theirs = submit(prefill, decode, prompt_of(20))
    run([decode], lambda: theirs.is_over)
    assert theirs.status is Status.FAILED
    assert what in caplog.text


def test_weights_that_begin_alike_are_not_told_apart_and_the_log_says_so(
    pair: Pairs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.pdinfer"):
        prefill, decode = pair(decode={"model": str(other_weights(tmp_path, byte=1024))})
    hand_over(prefill, decode, [prompt_of(20)])
    said = f"compare the first 1024 bytes of each tensor in {tmp_path}: weights that differ after these are not"
    assert said in caplog.text
    layout = prefill.channel.pool.layout
    assert layout.weights_id == b""
    read = load_model("examples/tiny", dtype=torch.float32).kv_layout(CacheConfig(page_size=16))
    read.compatible_with(layout)
    layout.compatible_with(read)
    assert read.weights_id


def other_weights(folder: Path, *, byte: int = 1) -> Path:
    """Copy examples/tiny with another byte in its largest tensor."""
    for file in Path("examples/tiny").iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    weights = next(folder.glob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    spans = [each["data_offsets"] for name, each in json.loads(data[8:begin]).items() if name != "__metadata__"]
    data[begin + max(spans, key=lambda span: span[1] - span[0])[0] + byte] ^= 0x01
    weights.write_bytes(data)
    return folder


BAD_REQUESTS = {
    "wrong role": (
        {"do_remote_prefill": True, "room": "ab" * 16, "prefill": LISTEN},
        "kv_producer",
        "send it to a decode",
    ),
    "no room": ({"do_remote_prefill": True, "prefill": LISTEN}, "kv_consumer", "16 random bytes"),
    "short room": ({"do_remote_prefill": True, "room": "abcd", "prefill": LISTEN}, "kv_consumer", "16 random bytes"),
    "no address": ({"do_remote_prefill": True, "room": "ab" * 16}, "kv_consumer", "must be an address"),
    "both": ({"do_remote_prefill": True, "do_remote_decode": True, "room": "ab" * 16}, "kv_both", "give one of them"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_request_that_asks_for_what_cannot_be_ends_with_a_sentence(
    pair: Pairs, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    params, role, says = BAD_REQUESTS[name]
    engine = pair.engine(role, policy="fail")
    request = engine.add("r", prompt_of(20), params)
    run([engine], lambda: request.is_over and engine.is_at_rest)
    assert request.status is Status.FAILED
    assert says in caplog.text


def test_a_request_for_decode_at_an_engine_that_only_decodes_is_served_and_warned_about(
    pair: Pairs, caplog: pytest.LogCaptureFixture
) -> None:
    engine = pair.engine("kv_consumer")
    request = engine.add("r", prompt_of(20), {"do_remote_decode": True, "room": "ab" * 16})
    run([engine], lambda: request.is_over and engine.is_at_rest)
    assert request.status is Status.DONE
    assert "send it to a prefill" in caplog.text


def test_a_room_may_be_written_in_capitals(pair: Pairs) -> None:
    prefill, decode = pair()
    ours, theirs = submit(prefill, decode, prompt_of(20))
    for request in (ours, theirs):
        assert request.kv_transfer_params is not None
        request.kv_transfer_params["room"] = ("AB" * 16) if request is ours else ("aB" * 16)
    run([prefill, decode], lambda: theirs.is_over and prefill.is_at_rest)
    assert theirs.landed is not None


def test_an_id_that_no_frame_carries_costs_nothing(pair: Pairs) -> None:
    prefill, decode = pair()
    _, theirs = submit(prefill, decode, prompt_of(20), "\n\u202e" * 200)
    run([prefill, decode], lambda: theirs.is_over and prefill.is_at_rest)
    assert theirs.landed is not None


def test_two_loads_of_one_room_cost_only_the_second(pair: Pairs) -> None:
    prefill, decode = pair()
    ours, first = submit(prefill, decode, prompt_of(40))
    second = decode.add("again", prompt_of(40), first.kv_transfer_params)
    run([prefill, decode], lambda: ours.is_over and first.is_over and second.is_over)
    assert first.landed is not None
    assert second.landed is None


BAD_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown": ({"listne": LISTEN}, "has listne; known are listen, advertise, key_file, prefills, hold_s"),
    "address": ({"listen": "127.0.0.1"}, 'listen must be "tcp://host:port"'),
    "port": ({"listen": "tcp://127.0.0.1:99999"}, 'listen must be "tcp://host:port"'),
    "a port alone": ({"listen": 5000}, "listen must be a str, got 5000"),
    "key of a kind": ({"key_file": 5}, "key_file must be the path of a file, got 5"),
    "number": ({5: LISTEN}, "has 5; known are listen"),
    "seconds": ({"lease_s": "long"}, "lease_s must be 0 to 3600 seconds, got 'long'"),
    "key": ({"key_file": "/nowhere/key"}, "no key can be read from /nowhere/key"),
    "prefills": ({"prefills": "tcp://127.0.0.1:1"}, "prefills must be a list of addresses"),
    "a prefill": ({"prefills": ["127.0.0.1:1"]}, "prefills must be a list of addresses"),
    "open to all": ({"listen": "tcp://0.0.0.0:0"}, "key"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_settings_end_at_start(pair: Pairs, name: str) -> None:
    extra, says = BAD_SETTINGS[name]
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        pair.engine("kv_producer", extra)


def test_a_prefill_without_an_address_and_two_with_one_end_at_start(pair: Pairs) -> None:
    with pytest.raises(ConfigError, match="a prefill needs an address"):
        FakeEngine("kv_producer", {})
    first = pair.engine("kv_producer")
    with pytest.raises(ConfigError, match=first.address.rpartition(":")[2]):
        pair.engine("kv_producer", {"listen": first.address})


TWO = SimpleNamespace(tensor_parallel_size=2)
BAD_SETUPS: dict[str, tuple[dict[str, Any], str]] = {
    "decodes of several ranks": ({"kv_role": "kv_both", "parallel_config": TWO}, "is 2 and kv_role is kv_both"),
    "contexts": ({"parallel_config": SimpleNamespace(decode_context_parallel_size=2)}, "decode_context_parallel_size"),
    "stages": ({"parallel_config": SimpleNamespace(pipeline_parallel_size=2)}, "pipeline_parallel_size is 2"),
    "drafts": ({"speculative_config": object()}, "caches of draft models"),
    "adapters": ({"lora_config": object()}, "LoRA"),
    "fp8": ({"cache_config": SimpleNamespace(block_size=16, cache_dtype="fp8_e4m3")}, "kv_cache_dtype is fp8_e4m3"),
    "groups": ({"groups": 2}, "one group of KV caches, and this one has 2"),
}


@pytest.mark.parametrize("role", ["SCHEDULER", "WORKER"])
@pytest.mark.parametrize("name", BAD_SETUPS)
def test_set_ups_that_are_not_served_end_at_start(name: str, role: str) -> None:
    more, says = BAD_SETUPS[name]
    role_of_engine = more.get("kv_role", "kv_producer")
    config: dict[str, Any] = {
        "kv_transfer_config": SimpleNamespace(kv_role=role_of_engine, kv_connector_extra_config={"listen": LISTEN}),
        "cache_config": SimpleNamespace(block_size=16, cache_dtype="auto"),
        "parallel_config": SimpleNamespace(),
        "model_config": SimpleNamespace(model="examples/tiny"),
    }
    groups = SimpleNamespace(kv_cache_groups=[None] * more.get("groups", 1))
    with pytest.raises(ConfigError, match=says):
        connector_on(FakeBase, "0.32.0")(SimpleNamespace(**{**config, **more}), SimpleNamespace(name=role), groups)


def caches(num_layers: int = LAYERS, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {f"model.layers.{at}.attn": torch.zeros(8, 1, 16, width, dtype=dtype) for at in range(num_layers)}


@pytest.mark.parametrize(
    ("kv_caches", "says"),
    [
        (caches(width=2 * WIDTH), "serves MLA models"),
        (caches(num_layers=3), "serves MLA models"),
        ({"model.layers.1.attn": torch.zeros(8, 1, 16, WIDTH)}, r"one cache for each layer, got layers \[1\]"),
        ({"model.layers.1.experts.2.attn": torch.zeros(1)}, "caches of one layer each"),
        ({}, "one cache for each layer"),
        ({**caches(3), "model.layers.3.attn": torch.zeros(8, 1, 16, 2 * WIDTH)}, "caches of one shape"),
        ({**caches(3), "model.layers.3.attn": torch.zeros(8, 1, WIDTH, 16).transpose(2, 3)}, "of one piece per layer"),
        ({name: cache.to("meta") for name, cache in caches().items()}, "on meta"),
    ],
    ids=["width", "number", "not from 0", "name", "none", "shapes", "interleaved", "device"],
)
def test_caches_that_are_not_served_end_at_start(kv_caches: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        engine_pages("examples/tiny", kv_caches, 16, None)


def test_the_layer_in_a_name() -> None:
    assert layer_of("model.layers.12.self_attn.attn") == 12


def test_a_base_class_of_the_future_breaks_no_start(pair: Pairs, caplog: pytest.LogCaptureFixture) -> None:
    class NextBase(FakeBase):
        @abstractmethod
        def something_new(self, amount: int) -> int: ...

        def another_hook(self) -> str:
            return "inherited"

    made = connector_on(NextBase, "0.40.1")
    assert "tested with vLLM 0.32, and this is vLLM 0.40.1" in caplog.text
    assert "vLLM 0.40.1 asks for something_new, which PDInferConnector leaves empty" in caplog.text
    assert made.something_new(None, 3) is None  # type: ignore[attr-defined]
    prefill, decode = pair(base=NextBase)
    assert prefill.worker.another_hook() == "inherited"
    hand_over(prefill, decode, [prompt_of(20)])


def test_the_tested_release_is_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for version in ("0.32", "0.32.0", "0.32.1+cpu"):
            connector_on(FakeBase, version)
    assert not caplog.records


def test_what_vllm_asks_of_the_class() -> None:
    made = connector_on(FakeBase, "0.32.0")
    assert made.requires_piecewise_for_cudagraph({})  # type: ignore[attr-defined]
    assert made.__name__ == "PDInferConnector"
    assert issubclass(made, Hooks)
    stats = made.build_kv_connector_stats({"landed": 2})  # type: ignore[attr-defined]
    assert stats.data == {"landed": 2}


def test_counts_as_vllm_reads_them(pair: Pairs) -> None:
    prefill, decode = pair()
    hand_over(prefill, decode, [prompt_of(40)])
    num_bytes = 39 * LAYERS * WIDTH * 4
    assert (counted(prefill)["sent"], counted(prefill)["bytes_sent"]) == (1, num_bytes)
    assert (counted(decode)["landed"], counted(decode)["bytes_received"]) == (1, num_bytes)
    more = TransferCounts({"receive_s": 2.0, "bytes_received": 4_000_000})
    assert more.reduce() == {"bytes_received": 4_000_000, "receive_s": 2.0, "mb_per_s": 2.0}
    assert TransferCounts().is_empty()
    assert not more.is_empty()
    more.reset()
    assert more.to_dict() == {}
    assert prefill.scheduler.get_kv_connector_stats() is None
    assert decode.worker.reset_cache()


def test_importing_the_adapter_without_vllm_says_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "import pdinfer.adapters.vllm as adapter\n"
        "from pdinfer.errors import ConfigError\n"
        "try: adapter.PDInferConnector\n"
        "except ConfigError as error: print(error)\n"
        "sys.modules['xxhash'] = None\n"
        "try: adapter.PDInferConnector\n"
        "except ConfigError as error: print(error)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "PDInferConnector needs vLLM" in said
    assert "pip install xxhash" in said
