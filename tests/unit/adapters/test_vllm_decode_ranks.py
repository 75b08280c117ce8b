"""A decode of several workers: each has a cache and a room of its own, and a request has landed when all have."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from pdinfer.adapters.vllm.messages import MAX_WORKERS, Terms, room_of
from pdinfer.errors import TransferError
from pdinfer.kv.transports.base import Transfer
from tests.unit.adapters.fake_vllm import LAYERS, LISTEN, WIDTH, FakeEngine, Pairs, Status, run, run_at_random
from tests.unit.adapters.test_vllm import counted, hand_over, prompt_of, submit

TWO: dict[str, Any] = {"num_ranks": 2}
SIZES = (2, 16, 17, 40, 65)


@pytest.mark.parametrize("listen", [LISTEN, "shm://"])
@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 2), (1, 3)])
def test_prompts_land_at_every_worker(pair: Pairs, listen: str, there: int, here: int) -> None:
    prefill, decode = pair({"listen": listen}, num_ranks=there, decode={"num_ranks": here, "block_size": 8})
    for request in hand_over(prefill, decode, [prompt_of(length, length) for length in SIZES]):
        assert request.landed is not None
    num_bytes = sum(length - 1 for length in SIZES) * LAYERS * WIDTH * 4
    assert (counted(prefill)["sent"], counted(decode)["landed"]) == (here * len(SIZES), here * len(SIZES))
    assert [worker._worker.channel.stats.bytes_received for worker in decode.workers] == [num_bytes] * here
    assert [worker._worker._context is not None for worker in decode.workers] == [listen == "shm://"] * here


def test_a_listen_of_its_own_is_that_of_the_first_worker(pair: Pairs) -> None:
    first = pair.engine("kv_producer")
    port = int(first.address.rpartition(":")[2])
    first.close()
    decode = pair.engine("kv_consumer", {"listen": f"tcp://127.0.0.1:{port}"}, **TWO)
    ports = [int(worker._worker.channel.address.endpoints[0].rpartition(":")[2]) for worker in decode.workers]
    assert ports[0] == port != ports[1]


def test_layers_leave_for_every_worker_as_they_are_computed(pair: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair(decode=TWO)
    pushed: list[tuple[int, range]] = []
    real = prefill.channel.push

    def push(grant: Any, **more: Any) -> None:
        pushed.append((grant.room[-1] & 1, more["layers"]))
        real(grant, **more)

    monkeypatch.setattr(prefill.channel, "push", push)
    hand_over(prefill, decode, [prompt_of(40)])
    at_one_time = [{pushed[2 * layer], pushed[2 * layer + 1]} for layer in range(LAYERS)]
    assert at_one_time == [{(each, range(layer, layer + 1)) for each in range(2)} for layer in range(LAYERS)]


def withhold(decode: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the second worker's grants never leave."""
    monkeypatch.setattr(decode.workers[1]._worker.channel.receiver, "offer", lambda grant: None)


def test_a_prefill_waits_for_the_grants_of_all_workers(pair: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair({"hold_s": 0.5, "lease_s": 1.0}, decode=TWO)
    withhold(decode, monkeypatch)
    asked = time.monotonic()
    ours, theirs = submit(prefill, decode, prompt_of(40))
    run([prefill, decode], lambda: prefill.worker._worker._sending._grants)
    for _ in range(3):
        prefill.step()
        decode.step()
    assert not ours.num_computed or time.monotonic() - asked > 0.5  # a machine with other work may take as long
    run([prefill, decode], lambda: ours.is_over and theirs.is_over and prefill.is_at_rest and decode.is_at_rest)
    assert theirs.landed is None
    assert counted(prefill)["aborted_lease"] == 1
    assert "sent" not in counted(prefill)
    prefill.check_nothing_is_kept()
    decode.check_nothing_is_kept()


def test_a_request_has_landed_when_it_has_landed_at_the_last_worker(
    pair: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair(decode=TWO)
    ours, theirs = submit(prefill, decode, prompt_of(40))
    room, real = bytes.fromhex((theirs.kv_transfer_params or {})["room"]), prefill.channel.finish
    late: list[tuple[Any, Any]] = []

    def finish(grant: Any, handoff: Any) -> Transfer:
        if grant.room == room:
            return real(grant, handoff)
        late.append((grant, handoff))
        return Transfer(0)

    monkeypatch.setattr(prefill.channel, "finish", finish)
    run([prefill, decode], lambda: late and counted(decode).get("landed"))
    for _ in range(5):
        decode.step()
        prefill.step()
    assert theirs.status is Status.LOADING
    assert ours.blocks, "a worker still reads them"
    real(*late[0])
    run([prefill, decode], lambda: theirs.is_over)
    assert theirs.landed is not None


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_request_of_which_one_worker_lacks_pages_has_not_landed(
    pair: Pairs, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair(decode={**TWO, "policy": policy})
    ours, theirs = submit(prefill, decode, prompt_of(40))
    room, real = bytes.fromhex((theirs.kv_transfer_params or {})["room"]), prefill.channel.push

    def push(grant: Any, **more: Any) -> None:
        if grant.room != room and more["layers"].stop > 2:
            raise TransferError("the second worker is out of luck")
        real(grant, **more)

    monkeypatch.setattr(prefill.channel, "push", push)
    run([prefill, decode], lambda: ours.is_over and theirs.is_over and prefill.is_at_rest and decode.is_at_rest)
    assert theirs.landed is None
    assert theirs.status is (Status.FAILED if policy == "fail" else Status.DONE)
    assert (counted(prefill)["sent"], counted(prefill)["aborted_push"]) == (1, 1)
    assert (counted(decode)["landed"], counted(decode)["aborted_writer"]) == (1, 1)
    decode.check_free_blocks()
    prefill.check_nothing_is_kept()
    decode.check_nothing_is_kept()


def test_a_cancelled_load_keeps_its_blocks_until_all_its_writers_have_stopped(pair: Pairs) -> None:
    prefill, decode = pair(chunk=8, decode={**TWO, "chunk": 64})
    ours, theirs = submit(prefill, decode, prompt_of(60))
    run([prefill, decode], lambda: ours.num_computed > 8)
    decode.abort("d-r")
    for _ in range(3):
        decode.step()
    assert theirs.blocks
    run([prefill, decode], lambda: decode.is_at_rest and prefill.is_at_rest)
    assert counted(prefill)["aborted_stopped"] == 2
    decode.check_free_blocks()


def test_grants_that_come_behind_their_request_are_answered_at_once(pair: Pairs) -> None:
    prefill, decode = pair({"hold_s": 20.0, "lease_s": 20.0}, decode=TWO)
    hand_over(prefill, decode, [prompt_of(20)])  # from here on prefill knows how many workers a decode has
    ours, theirs = submit(prefill, decode, prompt_of(60), "late")
    prefill.abort("p-late")
    prefill.step()
    run([decode], lambda: theirs.is_over and decode.is_at_rest)  # prefill does not step any more
    assert not ours.blocks
    assert counted(decode)["aborted_writer"] == 2


def test_two_ends_with_other_prompts_hand_nothing_over(pair: Pairs) -> None:
    prefill, decode = pair(decode=TWO)
    ours, theirs = submit(prefill, decode, prompt_of(40))
    ours.prompt = (*ours.prompt[:20], ours.prompt[20] + 1, *ours.prompt[21:])
    run([prefill, decode], lambda: ours.is_over and theirs.is_over and prefill.is_at_rest and decode.is_at_rest)
    assert theirs.landed is None
    assert counted(prefill)["aborted_prompt"] == 2


def test_many_requests_with_everything_at_once(pair: Pairs) -> None:
    rng = random.Random(5)
    prefill, decode = pair(
        {"hold_s": 0.05, "lease_s": 2.0}, chunk=16, num_blocks=16, decode={**TWO, "num_blocks": 20, "block_size": 8}
    )
    both = [submit(prefill, decode, prompt_of(rng.randint(2, 70), at), str(at)) for at in range(20)]
    run_at_random(rng, prefill, decode, [request for one in both for request in one])
    run([prefill, decode], lambda: prefill.is_at_rest and decode.is_at_rest)
    run([prefill, decode], lambda: not prefill.worker._worker._sending and not any(decode.told))
    for engine in (prefill, decode):
        engine.step()
        engine.check_nothing_is_kept()
    assert sum(theirs.landed is not None for _, theirs in both) >= 4
    assert (len(prefill.free), len(decode.free)) == (16, 20)


def test_every_worker_has_a_room_of_its_own() -> None:
    room = "00ff" * 7 + "00fe"
    rooms = [room_of(room, rank) for rank in range(MAX_WORKERS)]
    assert rooms[0] == room
    assert len(set(rooms)) == MAX_WORKERS
    assert {len(each) for each in rooms} == {32}
    assert {room_of(each, rank) for rank, each in enumerate(rooms)} == {room}


def test_terms_are_read_as_they_are_written() -> None:
    assert str(Terms("ab")) == "ab"
    for terms in (Terms("ab"), Terms("ab", 0, 2), Terms("ab", 255, 256)):
        assert Terms.of(str(terms)) == terms


@pytest.mark.parametrize("text", ["ab 2/2", "ab 0/257", "ab 0/0", "ab -1/2", "ab 1", "ab x/2", "ab 0/" + "9" * 99, " "])
def test_terms_that_no_decode_has_are_no_proof(text: str) -> None:
    assert Terms.of(text) == Terms(text)
