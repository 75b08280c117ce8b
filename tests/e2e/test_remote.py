"""Clients and served engines when the other end is silent, wrong or gone: the errors say so, and no thread is left."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.process.silence import SESSIONS
from pdinfer.remote import messages
from pdinfer.remote.line import Line
from tests.e2e.setups import hang, local, model_of, pool_of, recover, remote, request, watch
from tests.waiting import TIMEOUT_S, check_ends, check_returns, started, wait_until

Engine = pd.PrefillEngine | pd.DecodeEngine


def readers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "pdinfer-remote"}


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    before = readers()  # of tests before, which may end late
    yield
    wait_until(lambda: readers() <= before)


def ready_of(engine: Engine) -> messages.Ready:
    return messages.Ready(
        engine.address, engine.limits, messages.LoadMessage.of(engine), version=messages.VERSION, hung_s=60.0
    )


def serving(engine: Engine, config: pd.remote.RemoteConfig | None = None) -> tuple[Connection, threading.Thread]:
    ours, theirs = Pipe()
    thread = started(pd.remote.serve, engine, theirs, config=config)
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
            pd.remote.PrefillClient(ours, timeout_s=TIMEOUT_S)
        check_ends(thread)


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


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_does_not_know_a_field_of_a_request_ends_that_request_alone(
    role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of an older pdinfer, which is asked for what a newer one has."""
    submit = messages.SubmitPrefillMessage if role == "prefill" else messages.SubmitDecodeMessage
    with local() as setup:
        for engine in setup.engines:
            setup.pairing.remove(engine, drain_s=0.0)
        prefill, decode = map(remote, setup.engines)
        with prefill as to_prefill, decode as to_decode, pd.Pairing(to_prefill, to_decode) as pairing:
            send = Line.submit

            def newer(line: Line, message: Any, num_tokens: int) -> None:
                if isinstance(message, submit):
                    message.request.required += ("colour",)
                send(line, message, num_tokens)

            with monkeypatch.context() as patch:
                patch.setattr(Line, "submit", newer)
                (event,) = pairing.generate([request()])
            assert event.finish_reason is pd.FinishReason.FAILED
            assert isinstance(event.error, pd.RequestError)
            assert "the request sets colour, which this engine does not know" in str(event.error)
            assert len(list(pairing.generate([request()]))) == request().sampling.max_new_tokens
            assert pairing.stats.num_retries == 0
        setup.check_pools()


def test_whatever_a_connection_raises_means_gone() -> None:
    with pytest.raises(pd.TransferError, match="is gone"):
        pd.remote.DecodeClient(Strange(), timeout_s=TIMEOUT_S)
    with local() as setup:
        check_ends(started(pd.remote.serve, setup.prefills[0], Strange()))


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x80" * 100, b"\x81\xa4type\xa6cancel"])
def test_garbage_closes_a_served_engine(garbage: bytes) -> None:
    with local() as setup:
        ours, thread = serving(setup.prefills[0])
        ours.send_bytes(garbage)
        check_ends(thread)
        ours.close()


def test_a_connection_that_ends_before_anything_was_said() -> None:
    with local() as setup:
        for engine in setup.engines:
            ours, thread = serving(engine)
            ours.close()
            check_ends(thread)


def test_an_engine_whose_client_falls_silent_is_closed_when_it_does_not_return() -> None:
    """Its host was stopped, or its machine is gone. Before its first message it may still be loading."""
    with local() as setup:
        ours, thread = serving(setup.prefills[0], pd.remote.RemoteConfig(silent_s=1.0, return_s=0.0))
        thread.join(1.5)
        assert thread.is_alive()
        began = time.monotonic()
        ours.send_bytes(messages.encode(messages.BeatMessage()))
        check_ends(thread)
        assert time.monotonic() - began > 0.99
        ours.close()


def test_a_served_engine_goes_on_while_it_waits_for_a_peer_that_does_not_answer() -> None:
    model = model_of()
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        engine = pd.DecodeEngine(model, pd.KVChannel(pool_of(model), pd.kv.SocketTransport()))
        with remote(engine) as client:
            endpoint = f"tcp://127.0.0.1:{nobody.getsockname()[1]}"
            answers: list[pd.PDInferError] = []

            def connect() -> None:
                with pytest.raises(pd.TransferError) as caught:
                    client.connect(pd.PeerAddress(b"n" * 16, 1, 0, (endpoint,)), timeout_s=TIMEOUT_S)
                answers.append(caught.value)

            asking = started(connect)
            client.submit(request(None), writers=[])
            events: list[pd.types.Event] = []
            wait_until(lambda: bool(events.extend(client.step()) or events))
            assert isinstance(events[0], pd.Refused)
            assert answers == []
            nobody.close()  # which refuses those that wait
            check_ends(asking)
            assert len(answers) == 1


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
            newer = messages.LoadMessage(prefill=attrs.evolve(load, num_tokens=number))
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
        asked, over = threading.Event(), threading.Event()

        def never(peer: pd.PeerAddress, *, timeout_s: float) -> None:
            asked.set()
            over.wait(TIMEOUT_S)

        decode.connect = never  # type: ignore[method-assign]
        with remote(decode) as client:
            closer = started(lambda: (asked.wait(TIMEOUT_S), client.close()))
            with pytest.raises(pd.TransferError, match="closed here"):
                client.connect(setup.prefills[0].address, timeout_s=2 * TIMEOUT_S)
            over.set()
            check_ends(closer)


def test_a_link_is_closed_after_it_was_opened_if_it_was_asked_for_in_that_order() -> None:
    """In the other order the link would stay, and a port that is gone would be dialled for ever."""
    with local() as setup:
        decode, peer = setup.decodes[0], setup.prefills[0].address
        others = [attrs.evolve(peer, epoch=peer.epoch + number) for number in range(1, 9)]
        begun, go, done = threading.Event(), threading.Event(), list[object]()

        def connect(peer: pd.PeerAddress, *, timeout_s: float) -> None:
            begun.set()
            go.wait(TIMEOUT_S)
            done.append("connected")

        decode.connect = connect  # type: ignore[method-assign]
        decode.disconnect = done.append  # type: ignore[method-assign]
        with remote(decode) as client:
            client.connect(peer, timeout_s=0)
            assert begun.wait(TIMEOUT_S)
            client.disconnect(peer)
            for other in others:
                client.disconnect(other)
            wait_until(lambda: all(other in done for other in others))
            assert peer not in done
            go.set()
            wait_until(lambda: peer in done)
            assert done[-2:] == ["connected", peer]


def test_a_connect_that_breaks_is_answered() -> None:
    with local() as setup:
        decode = setup.decodes[0]

        def broken(peer: pd.PeerAddress, *, timeout_s: float) -> None:
            raise RuntimeError("a driver's secret")

        decode.connect = broken  # type: ignore[method-assign]
        with remote(decode) as client, pytest.raises(pd.TransferError, match="connecting failed: RuntimeError"):
            client.connect(setup.prefills[0].address, timeout_s=TIMEOUT_S)


def test_an_engine_that_is_alive_and_does_not_get_on_shows_in_its_load() -> None:
    with local() as setup:
        decode = setup.decodes[0]
        step, stuck = decode.step, threading.Event()

        def slow() -> list[pd.types.Event]:
            stuck.wait(TIMEOUT_S)
            return step()

        with remote(decode) as client:
            assert client.load().step_age_s is not None
            decode.step = slow  # type: ignore[method-assign]
            wait_until(lambda: (client.load().step_age_s or 0.0) > SESSIONS.silent_s)
            assert client.step() == []  # not lost
            stuck.set()
            wait_until(lambda: (client.load().step_age_s or 0.0) < SESSIONS.silent_s)
            assert decode.load().step_age_s is None


@pytest.mark.parametrize("silent_s", [1.0, 3600.0])
def test_a_client_of_a_process_that_stands_still_never_waits(silent_s: float) -> None:
    """Submit, cancel and close while the engine's process stands still and the pipe is full, also where its silence
    would end no wait."""
    with local() as setup:
        ours, theirs = Pipe()
        engine = setup.prefills[0]
        theirs.send_bytes(messages.encode(ready_of(engine)))
        client = pd.remote.PrefillClient(ours, config=pd.remote.RemoteConfig(silent_s=silent_s))
        seen = watch(setup.decodes[0])
        hang(engine)
        setup.pairing.submit(request())
        setup.pairing.step()
        (granted,) = [event for event in seen if isinstance(event, pd.Granted)]
        long = attrs.evolve(request(), prompt=tuple(range(97)) * 1000)

        def submit() -> None:
            for _ in range(20):
                client.submit(long, granted.grant)
                client.cancel("a")

        check_returns(submit)
        if silent_s > TIMEOUT_S:
            assert client.load().num_queued_tokens == 20 * len(long.prompt)
            assert client.step() == []
        else:
            with pytest.raises(pd.TransferError, match="was silent"):
                wait_until(lambda: client.step() != [])
        check_returns(client.close)
        check_returns(client.close)
        theirs.close()
        recover(engine)
