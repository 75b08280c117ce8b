"""Clients and served engines when the other end is silent, wrong or gone: the errors say so, and no thread is left."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import attrs
import pytest

import pdinfer as pd
from pdinfer.process.silence import SESSIONS
from pdinfer.remote import messages
from tests.e2e.setups import hang, local, model_of, pool_of, recover, request, wait_until, watch

Engine = pd.PrefillEngine | pd.DecodeEngine


def num_readers() -> int:
    return sum(thread.name == "pdinfer-remote" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    before = num_readers()
    yield
    wait_until(lambda: num_readers() == before, 5.0)


def ready_of(engine: Engine) -> messages.Ready:
    return messages.Ready(
        engine.address, engine.limits, messages.Load.of(engine), version=messages.VERSION, hung_s=60.0
    )


def serving(engine: Engine, config: pd.RemoteConfig | None = None) -> tuple[Connection, threading.Thread]:
    ours, theirs = Pipe()
    thread = threading.Thread(target=pd.remote.serve, args=(engine, theirs), kwargs={"config": config}, daemon=True)
    thread.start()
    return ours, thread


def test_a_client_that_waits_in_vain_leaves_nothing_behind() -> None:
    ours, theirs = Pipe()
    with pytest.raises(pd.TransferError, match=r"did not answer within 0\.05 s"):
        pd.remote.PrefillClient(ours, timeout_s=0.05)
    assert ours.closed
    theirs.close()


def test_a_client_for_the_other_role_is_refused() -> None:
    with local() as setup:
        ours, thread = serving(setup.decodes[0])
        with pytest.raises(
            pd.TransferError, match="a prefill engine was asked for, but the other end serves a decode engine"
        ):
            pd.remote.PrefillClient(ours, timeout_s=5.0)
        thread.join(5.0)
        assert not thread.is_alive()


class Strange:
    """A host's own kind of connection, whose reads raise an error of their own."""

    def send_bytes(self, buf: bytes, /) -> None:
        pass

    def recv_bytes(self) -> bytes:
        raise RuntimeError("the actor is dead")

    def poll(self, timeout: float, /) -> bool:
        return True

    def close(self) -> None:
        pass


def test_whatever_a_connection_raises_means_gone() -> None:
    with pytest.raises(pd.TransferError, match="is gone"):
        pd.remote.DecodeClient(Strange(), timeout_s=5.0)
    with local() as setup:
        thread = threading.Thread(target=pd.remote.serve, args=(setup.prefills[0], Strange()), daemon=True)
        thread.start()
        thread.join(5.0)
        assert not thread.is_alive()


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x80" * 100, b"\x81\xa4type\xa6cancel"])
def test_garbage_closes_a_served_engine(garbage: bytes) -> None:
    with local() as setup:
        ours, thread = serving(setup.prefills[0])
        ours.send_bytes(garbage)
        thread.join(5.0)
        assert not thread.is_alive()
        ours.close()


def test_a_connection_that_ends_before_anything_was_said() -> None:
    with local() as setup:
        for engine in setup.engines:
            ours, thread = serving(engine)
            ours.close()
            thread.join(5.0)
            assert not thread.is_alive()


def test_an_engine_whose_client_falls_silent_is_closed_when_it_does_not_return() -> None:
    """Its host was stopped, or its machine is gone. Before its first message it may still be loading."""
    with local() as setup:
        ours, thread = serving(setup.prefills[0], pd.RemoteConfig(return_s=0.0))
        thread.join(SESSIONS.silent_s + 0.5)
        assert thread.is_alive()
        ours.send_bytes(messages.encode(messages.Beat()))
        started = time.monotonic()
        thread.join(10.0)
        assert SESSIONS.silent_s - 0.01 < time.monotonic() - started < 6.0
        assert not thread.is_alive()
        ours.close()


def test_a_served_engine_goes_on_while_it_waits_for_a_peer_that_does_not_answer() -> None:
    model = model_of()
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        engine = pd.DecodeEngine(model, pd.KVChannel(pool_of(model), pd.kv.SocketTransport()))
        ours, thread = serving(engine)
        client = pd.remote.DecodeClient(ours)
        endpoint = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
        answers: list[pd.PDInferError] = []

        def connect() -> None:
            with pytest.raises(pd.TransferError) as caught:
                client.connect(pd.PeerAddress(b"n" * 16, 1, 0, (endpoint,)), timeout_s=2.0)
            answers.append(caught.value)

        asking = threading.Thread(target=connect)
        asking.start()
        started = time.monotonic()
        client.submit(request(None), writers=[])
        events: list[pd.types.Event] = []
        while not events:
            client.wait(1.0)
            events = client.step()
        assert time.monotonic() - started < 1.8
        assert isinstance(events[0], pd.Refused)
        asking.join(10.0)
        assert len(answers) == 1
        client.close()
        thread.join(5.0)
        assert not thread.is_alive()


def test_of_loads_a_client_keeps_the_newest() -> None:
    """This holds however long its host does not step. The host is woken, since it may wait for a load."""
    with local() as setup:
        engine = setup.prefills[0]
        ours, theirs = Pipe()
        load = engine.load()
        theirs.send_bytes(messages.encode(ready_of(engine)))
        client = pd.remote.PrefillClient(ours)
        assert not client.wait(0.0)
        for number in range(1, 51):
            newer = messages.Load(prefill=attrs.evolve(load, num_tokens=number))
            theirs.send_bytes(messages.encode(messages.Stepped(0, newer)))
        wait_until(lambda: client.load().num_tokens == 50)
        assert client._inbox.peek() == []
        assert client.wait(0.0)
        assert client.step() == []
        assert not client.wait(0.0)
        client.close()
        theirs.close()


def test_who_waits_for_a_connection_learns_that_the_port_was_closed() -> None:
    with local() as setup:
        decode = setup.decodes[0]
        asked = threading.Event()

        def never(peer: pd.PeerAddress, *, timeout_s: float) -> None:
            asked.set()
            time.sleep(1.0)

        decode.connect = never  # type: ignore[method-assign]
        ours, thread = serving(decode)
        client = pd.remote.DecodeClient(ours)
        closer = threading.Thread(target=lambda: (asked.wait(5.0), client.close()))
        closer.start()
        started = time.monotonic()
        with pytest.raises(pd.TransferError, match="closed here"):
            client.connect(setup.prefills[0].address, timeout_s=10.0)
        assert time.monotonic() - started < 5.0
        closer.join(5.0)
        thread.join(5.0)


def test_a_link_is_closed_after_it_was_opened_if_it_was_asked_for_in_that_order() -> None:
    """In the other order the link would stay, and a port that is gone would be dialled for ever."""
    with local() as setup:
        decode, peer = setup.decodes[0], setup.prefills[0].address
        begun, go, done = threading.Event(), threading.Event(), []

        def connect(peer: pd.PeerAddress, *, timeout_s: float) -> None:
            begun.set()
            go.wait(10.0)
            done.append("connect")

        decode.connect = connect  # type: ignore[method-assign]
        decode.disconnect = lambda peer: done.append("disconnect")  # type: ignore[method-assign]
        ours, thread = serving(decode)
        with pd.remote.DecodeClient(ours) as client:
            client.connect(peer, timeout_s=0)
            assert begun.wait(10.0)
            client.disconnect(peer)
            client.disconnect(attrs.evolve(peer, epoch=peer.epoch + 1))
            wait_until(lambda: done == ["disconnect"])  # another peer's
            go.set()
            wait_until(lambda: len(done) == 3)
            assert done[1:] == ["connect", "disconnect"]
        thread.join(5.0)


def test_a_connect_that_breaks_is_answered() -> None:
    with local() as setup:
        decode = setup.decodes[0]

        def broken(peer: pd.PeerAddress, *, timeout_s: float) -> None:
            raise RuntimeError("a driver's secret")

        decode.connect = broken  # type: ignore[method-assign]
        ours, thread = serving(decode)
        client = pd.remote.DecodeClient(ours)
        with pytest.raises(pd.TransferError, match="connecting failed: RuntimeError"):
            client.connect(setup.prefills[0].address, timeout_s=10.0)
        client.close()
        thread.join(5.0)


def test_an_engine_that_is_alive_and_does_not_get_on_shows_in_its_load() -> None:
    with local() as setup:
        decode = setup.decodes[0]
        step, stuck = decode.step, threading.Event()

        def slow() -> list[pd.types.Event]:
            stuck.wait(10.0)
            return step()

        ours, thread = serving(decode)
        client = pd.remote.DecodeClient(ours)
        age = client.load().step_age_s
        assert age is not None
        assert age < 1.0
        decode.step = slow  # type: ignore[method-assign]
        time.sleep(SESSIONS.silent_s + 0.5)
        assert client.step() == []  # not lost
        age = client.load().step_age_s
        assert age is not None
        assert age > SESSIONS.silent_s
        stuck.set()
        wait_until(lambda: (client.load().step_age_s or 0.0) < 1.0)
        assert decode.load().step_age_s is None
        client.close()
        thread.join(5.0)


def test_a_client_of_a_process_that_stands_still_never_waits() -> None:
    """Submit, cancel and close while the engine's process stands still and the pipe is full."""
    with local() as setup:
        ours, theirs = Pipe()
        engine = setup.prefills[0]
        theirs.send_bytes(messages.encode(ready_of(engine)))
        client = pd.remote.PrefillClient(ours)
        seen = watch(setup.decodes[0])
        hang(engine)
        setup.pairing.submit(request())
        setup.pairing.step()
        (granted,) = [event for event in seen if isinstance(event, pd.Granted)]
        long = attrs.evolve(request(), prompt=tuple(range(97)) * 1000)
        started = time.monotonic()
        for _ in range(20):
            client.submit(long, granted.grant)
            client.cancel("a")
        assert client.load().num_queued_tokens == 20 * len(long.prompt)
        assert time.monotonic() - started < 3.0
        with pytest.raises(pd.TransferError, match="was silent"):
            wait_until(lambda: client.step() != [])
        assert 2.0 < time.monotonic() - started < 8.0
        started = time.monotonic()
        client.close()
        client.close()
        assert time.monotonic() - started < 3.0
        theirs.close()
        recover(engine)
