"""Which prefills a decode inside vLLM dials, and how many at a time: requests name them."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

from pdinfer.adapters.vllm.receiving import AGAIN_S, MAX_DIALS, Doors
from pdinfer.adapters.vllm.settings import Settings
from pdinfer.errors import Overloaded, TransferError
from pdinfer.types import PeerAddress
from tests.forks import FAR_S
from tests.unit.adapters.fake_vllm import Pairs, run
from tests.waiting import without_threads

ELSEWHERE = "tcp://192.0.2.1:7100"
NEARBY = "tcp://127.0.0.1:1"


@pytest.mark.parametrize(
    ("prefill", "prefills", "dials"),
    [
        (ELSEWHERE, None, False),
        ("tcp://127.0.0.1#.example.com:7100", None, False),
        (NEARBY, None, True),
        ("tcp://[::1]:1", None, True),
        ("shm:///run/prefill", None, True),
        (ELSEWHERE, [NEARBY, ELSEWHERE], True),
        (NEARBY, [ELSEWHERE], False),
        (NEARBY, [], False),
    ],
)
def test_a_request_chooses_among_the_prefills_that_its_decode_may_dial(
    pair: Pairs, prefill: str, prefills: list[str] | None, dials: bool, caplog: pytest.LogCaptureFixture
) -> None:
    extra: dict[str, Any] = {} if prefills is None else {"prefills": prefills}
    decode, dialled = pair.engine("kv_consumer", extra, policy="fail"), []

    def dial(endpoint: str, **_: Any) -> PeerAddress:
        dialled.append(endpoint)
        raise TransferError("nobody is there")

    decode.channel.links.dial = dial
    request = decode.add("d", tuple(range(40)), {"do_remote_prefill": True, "room": "ab" * 16, "prefill": prefill})
    run([decode], lambda: request.is_over)
    assert dialled == [prefill] * dials
    assert ("which this decode does not dial: set prefills" in caplog.text) == (not dials)


def test_with_a_key_a_request_may_name_any_prefill(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("ab" * 32, "ascii")
    keyed = Settings(sends=False, receives=True, key_file=str(tmp_path / "key"))
    assert keyed.may_dial(ELSEWHERE)
    assert not attrs.evolve(keyed, prefills=[NEARBY]).may_dial(ELSEWHERE)


def test_so_many_addresses_are_dialled_at_a_time() -> None:
    answered, dialled = threading.Event(), []

    class Slow:
        def dial(self, endpoint: str, *, timeout_s: float) -> PeerAddress:
            dialled.append(endpoint)
            assert answered.wait(FAR_S)
            raise TransferError(f"{endpoint} does not answer")

    woken: queue.SimpleQueue[None] = queue.SimpleQueue()
    channel: Any = SimpleNamespace(links=Slow())
    doors = Doors(channel, lambda: woken.put(None), clock=lambda: 0.0)
    addresses = [f"tcp://127.0.0.1:{port}" for port in range(1, MAX_DIALS + 3)]
    assert {doors.at(address) for address in (*addresses, *addresses)} == {None}
    answered.set()
    for _ in addresses[:MAX_DIALS]:
        woken.get(timeout=FAR_S)
    assert sorted(dialled) == sorted(addresses[:MAX_DIALS])
    assert all(isinstance(doors.at(address), TransferError) for address in addresses[:MAX_DIALS])
    assert {doors.at(address) for address in addresses[MAX_DIALS:]} == {None}
    for _ in range(2):
        woken.get(timeout=FAR_S)
    assert len(dialled) == len(addresses)


def test_an_address_that_no_thread_could_dial_is_dialled_again() -> None:
    class Quick:
        def dial(self, endpoint: str, *, timeout_s: float) -> PeerAddress:
            raise TransferError(f"{endpoint} does not answer")

    now, woken = [0.0], threading.Event()
    channel: Any = SimpleNamespace(links=Quick())
    doors = Doors(channel, woken.set, clock=lambda: now[0])
    with without_threads("pdinfer-dial"):
        for _ in range(2 * MAX_DIALS):  # none of these keeps its turn
            now[0] += AGAIN_S
            assert isinstance(doors.at(NEARBY), Overloaded)
    now[0] += AGAIN_S
    assert doors.at(NEARBY) is None
    assert woken.wait(FAR_S)
    assert "does not answer" in str(doors.at(NEARBY))
