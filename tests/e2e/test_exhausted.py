"""What a process is out of for a moment (memory, threads, places in the kernel's tables) costs no engine, and nothing
waits for what was not started."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.kv.channel.rooms import ReceiverRooms
from pdinfer.kv.channel.sender import Pushes
from pdinfer.pairing import following
from tests.e2e.setups import collect, join, local, model_of, pool_of, reference, request, tokens_of
from tests.e2e.test_fronts import front, pair
from tests.waiting import TIMEOUT_S, check_ends, check_returns, wait_until, without_threads

EXPECTED = list(reference("v3", request().prompt, 5).tokens)


def test_a_channel_without_a_thread_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with without_threads("pdinfer-kv-io"), pytest.raises(pd.Overloaded, match="pdinfer-kv-io cannot be started"):
        pd.KVChannel(pool_of(model_of()), pd.kv.SocketTransport(path=path))
    assert not path.exists()
    pd.KVChannel(pool_of(model_of()), pd.kv.SocketTransport(path=path)).close()


def test_a_port_that_no_thread_can_connect_joins_later() -> None:
    with local() as setup:
        port = setup.prefills[0]
        setup.pairing.remove(port, drain_s=0.0)
        with without_threads("pdinfer-join"), pytest.raises(pd.Overloaded, match="pdinfer-join"):
            setup.pairing.add(port)
        setup.pairing.add(port)
        assert tokens_of(setup.pairing.generate(request())) == EXPECTED


def test_a_host_of_streams_that_finds_no_thread_can_be_entered_later() -> None:
    async def streams(setup: Any) -> None:
        host = pd.aio.AsyncPairing(setup.pairing)
        for name in ("pdinfer-submit_0", "pdinfer-step"):
            with without_threads(name), pytest.raises(pd.Overloaded, match="cannot be started"):
                await host.__aenter__()
            assert "not entered" in host.health().reasons[0]
        async with host:
            with without_threads("pdinfer-submit_0"):
                assert tokens_of([event async for event in host.stream(request())]) == EXPECTED

    with local() as setup:
        asyncio.run(streams(setup))


class Named:
    """An entry of a directory that leads to an engine of this process. Others cannot be read."""

    is_taken = False
    identity = None

    def __init__(self, name: str, port: Any) -> None:
        self._name = name
        self.port = port

    @property
    def name(self) -> str:
        if self.port is None:
            raise OSError("the entry is torn")
        return self._name


class Names:
    """A directory."""

    def __init__(self, *entries: Named) -> None:
        self.entries = list(entries)
        self.num_looks = 0

    def watch(self) -> list[Named]:
        self.num_looks += 1
        return self.entries

    def dial(self, entry: Named) -> Any:
        return entry.port


@pytest.fixture
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "POLL_S", 0.01)
    monkeypatch.setattr(following, "DIAL_AGAIN_S", (0.01, 1.0))


@pytest.mark.usefixtures("_fast")
def test_a_directory_is_followed_on_after_an_entry_that_cannot_be_read() -> None:
    with local() as setup:
        setup.pairing.remove(setup.decodes[0], drain_s=0.0)
        names = Names(Named("torn", None))
        setup.pairing.follow(names)
        wait_until(lambda: names.num_looks > 2)
        names.entries = [Named("decode", setup.decodes[0])]
        wait_until(lambda: setup.pairing.max_tokens)
        assert tokens_of(setup.pairing.generate(request())) == EXPECTED


@pytest.mark.usefixtures("_fast")
def test_an_entry_that_no_thread_could_dial_is_dialled_again() -> None:
    with local() as setup:
        setup.pairing.remove(setup.decodes[0], drain_s=0.0)
        with without_threads("pdinfer-dial") as refused:
            setup.pairing.follow(Names(Named("decode", setup.decodes[0])))
            wait_until(lambda: len(refused) > 1)
        wait_until(lambda: setup.pairing.max_tokens)
        assert tokens_of(setup.pairing.generate(request())) == EXPECTED


def test_following_begins_with_its_thread_or_not_at_all() -> None:
    with local() as setup:
        names = Names()
        with without_threads("pdinfer-follow"), pytest.raises(pd.Overloaded, match="pdinfer-follow"):
            setup.pairing.follow(names)
        setup.pairing.remove(setup.decodes[0], drain_s=0.0)
        setup.pairing.submit(request())
        (event,) = setup.pairing.step()  # no directory will bring another one
        assert "no decode port is left" in str(event.error)


def test_a_served_engine_outlives_a_client_and_a_link_for_which_there_is_no_thread() -> None:
    with pair() as (prefill, decode), front(prefill, decode) as stays:
        with without_threads("pdinfer-remote") as refused:
            connection = decode.dial()
            wait_until(lambda: refused)
            with suppress(OSError, EOFError):
                while connection.poll(TIMEOUT_S):
                    connection.recv_bytes()
            assert not decode.engine.closed
        with without_threads("pdinfer-served") as refused, front(prefill, decode) as comes:
            assert tokens_of(comes.generate(request("theirs"))) == EXPECTED
        assert refused
        assert tokens_of(stays.generate(request())) == EXPECTED


def test_a_port_whose_connection_cannot_be_made_again_is_gone() -> None:
    """Otherwise it would be waited for until the last request that waits for it has ended."""
    with pair() as (prefill, decode):
        client = pd.remote.DecodeClient(decode.dial)
        with without_threads("pdinfer-redial") as refused:
            client._line._session.connection.close()
            wait_until(lambda: refused)
        with pytest.raises(pd.TransferError):
            client.step()
        with pytest.raises(pd.TransferError):
            client.recover()
        client.close()
        with front(prefill, decode):
            pass


def test_a_door_lets_others_in_after_one_for_whom_there_was_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair() as (prefill, decode):
        monkeypatch.setattr(threading.Timer, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start")))
        refused = []

        def dial() -> None:
            with pytest.raises((OSError, EOFError)):
                decode.dial()
            refused.append(True)

        check_returns(dial)
        assert refused
        monkeypatch.undo()
        check_returns(lambda: decode.dial().close())
        with front(prefill, decode) as comes:
            assert tokens_of(comes.generate(request())) == EXPECTED


# -- memory, in the thread that moves bytes -------------------------------------------------------------------------


@pytest.mark.parametrize(("owner", "name"), [(Pushes, "written"), (ReceiverRooms, "_settle")])
def test_memory_that_the_io_thread_lacks_costs_no_page(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [pool_of(model_of(), num_pages=64) for _ in range(2)]
    with join(model_of(), "tcp", prefill_pools=pools[:1], decode_pools=pools[1:]) as setup:
        method, lacking = getattr(owner, name), [True]

        def lacks(self: Any, *args: Any) -> Any:
            if lacking and threading.current_thread().name == "pdinfer-kv-io":
                lacking.clear()
                raise MemoryError
            return method(self, *args)

        monkeypatch.setattr(owner, name, lacks)
        setup.pairing.submit(request("hit"))
        events = collect(setup.pairing)
        assert not lacking
        assert [event.finish_reason for event in events if event.finish_reason]
        assert tokens_of(setup.pairing.generate(request("next"))) == EXPECTED
        setup.check_idle()


@pytest.mark.parametrize("role", [pd.PrefillEngine, pd.DecodeEngine])
def test_an_engine_whose_close_lacks_memory_is_closed_by_the_next(role: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    others = threading.enumerate()  # one may still be ending
    channel = pd.KVChannel(pool_of(model_of()), pd.kv.SocketTransport())
    (io,) = [thread for thread in threading.enumerate() if thread not in others]
    engine = role(model_of(), channel)

    def lacks() -> None:
        monkeypatch.undo()
        raise MemoryError

    monkeypatch.setattr(channel.transport, "close", lacks)
    with pytest.raises(MemoryError):
        engine.close()
    engine.close()
    assert engine.closed
    check_ends(io)
