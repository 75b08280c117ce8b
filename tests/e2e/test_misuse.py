"""What a host does by mistake is told at once, and costs no other request anything."""

from __future__ import annotations

import asyncio
import copy
import errno
import gc
import logging
import multiprocessing
import pickle
import selectors
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pdinfer as pd
from tests.e2e.setups import (
    PROMPT,
    by_request,
    collect,
    join,
    local,
    model_of,
    pool_of,
    reference,
    remote,
    request,
    several,
    tokens_of,
)
from tests.forks import FAR_S
from tests.waiting import check_ends, started


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_its_host_closes_is_a_lost_port_at_once(role: str) -> None:
    model = model_of()
    pools = [[pool_of(model) for _ in range(2)] for _ in range(2)]
    with join(model, "loopback", prefill_pools=pools[0], decode_pools=pools[1]) as setup:
        closed = {"prefill": setup.prefills, "decode": setup.decodes}[role][0]
        tokens = tokens_of(setup.pairing.generate([request("before")]))
        closed.close()
        assert tokens_of(setup.pairing.generate([request("behind")])) == tokens
        (lost,) = setup.pairing.stats.ports_lost
        assert (lost.role, lost.address) == (role, closed.address)
        assert lost.reason == f"its {role} engine was closed, and not by its pairing"
        assert setup.pairing.stats.num_ports_lost == 1


def test_without_another_engine_the_request_fails_and_names_the_closed_one() -> None:
    with local() as setup:
        (decode,) = setup.decodes
        decode.close()
        (last,) = setup.pairing.generate([request("a")])
        assert f"; the last that was lost is {decode.address}: its decode engine was closed" in str(last.error)


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_engines_that_a_host_drops_give_back_their_thread_and_their_pages(kind: str) -> None:
    """A cell of a notebook that runs again has dropped those that it made before."""

    def dropped() -> list[weakref.ref[object]]:
        setup = join(model_of(), kind, prefill_pools=[pool_of(model_of())], decode_pools=[pool_of(model_of())])
        assert tokens_of(setup.pairing.generate([request("a")]))
        ends = [engine.channel for engine in (*setup.prefills, *setup.decodes)]
        return [weakref.ref(each) for end in ends for each in (end, end.pool)]

    gone = dropped()
    until = time.monotonic() + FAR_S
    while any(each() for each in gone) and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert not any(each() for each in gone)


def test_a_pool_forgets_the_engines_that_have_used_it() -> None:
    pool = pool_of(model_of())
    gone = []
    for is_closed in (True, False):
        ends = pd.KVChannel.loopback(pool, pool)
        engines = [kind(model_of(), end) for kind, end in zip((pd.PrefillEngine, pd.DecodeEngine), ends, strict=True)]
        gone += map(weakref.ref, engines)
        while engines:
            engine = engines.pop()
            if is_closed:
                engine.close()
    del ends, engine
    gc.collect()
    assert [each() for each in gone] == [None] * 4
    pool.rebuild()
    assert pool.num_free == pool.num_pages


def test_an_engine_is_a_port_of_one_pairing() -> None:
    with local() as setup:
        (prefill,), (decode,) = setup.prefills, setup.decodes
        with pytest.raises(
            pd.ConfigError, match="is a port of another pairing; remove it there, or close that pairing"
        ):
            pd.Pairing(prefill, decode)
        assert len(tokens_of(setup.pairing.generate([request("a")]))) == 5
        setup.pairing.remove(prefill, drain_s=0.0)
        setup.pairing.remove(decode, drain_s=0.0)
        other = pd.Pairing(prefill, decode)
        assert len(tokens_of(other.generate([request("a")]))) == 5
        other.close()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_belongs_to_a_process_is_not_copied(copied: Callable[[object], object]) -> None:
    with local() as setup:
        channel = setup.decodes[0].channel
        own = setup.pairing, setup.prefills[0], setup.decodes[0].pool, channel, channel.transport
        for each in (*own, pd.kv.SocketTransport(), pd.aio.AsyncPairing(setup.pairing)):
            with pytest.raises(pd.ConfigError, match=rf"{type(each).__name__} belongs to its process, and cannot be"):
                copied(each)
    asked = request("a")
    assert copied(asked)
    assert repr(copy.deepcopy(model_of())) == repr(model_of())


def test_a_transport_that_the_system_refuses_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    def ends() -> None:
        pd.KVChannel(pool_of(model_of()), pd.kv.ShmTransport())

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for owner, name, told in (
        (selectors, "DefaultSelector", "cannot serve shm://.*Too many open files"),
        (socket, "socket", "cannot make a socket: .*Too many open files"),
        (tempfile, "mkdtemp", "cannot make a folder for a socket: .*set TMPDIR to a short one that you may write"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(pd.ConfigError, match=told):
                ends()
        assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing, "Pipe", full)
        with pytest.raises(pd.TransferError, match=r"a process for the decode engine cannot be started: .*Too many"):
            pd.remote.spawn_decode("a checkpoint")


def test_a_host_of_asyncio_may_be_closed_in_another_loop_than_its_own() -> None:
    async def close(host: pd.aio.AsyncPairing) -> None:
        async with asyncio.timeout(FAR_S):
            await host.close()

    with local() as setup:
        asyncio.run(close(asyncio.run(pd.aio.AsyncPairing(setup.pairing).__aenter__())))
        assert "closed" in repr(setup.pairing)


def test_a_policy_that_returns_no_choice_is_told() -> None:
    with (
        local(policy=lambda *_: 5) as setup,
        pytest.raises(pd.ConfigError, match=r"a policy returns a Choice.* returned 5"),
    ):
        list(setup.pairing.generate([request("a")]))
    with (
        local(policy=lambda *_: pd.policy.Choice(prefill=[], decode={})) as setup,  # type: ignore[arg-type]
        pytest.raises(pd.ConfigError, match=r"prefill must be a PeerAddress, got \[\]"),
    ):
        list(setup.pairing.generate([request("a")]))


def test_a_closed_engine_refuses_what_comes_later() -> None:
    with several(1, 1) as setup:
        (prefill,), (decode,) = setup.prefills, setup.decodes
        prefill.close()
        decode.close()
        decode.submit(request("late"), writers=[prefill.address])
        (refused,) = decode.step()
        assert isinstance(refused, pd.Refused)
        assert (refused.request_id, str(refused.error)) == ("late", "the decode engine is closed")
        assert decode.num_unfinished == 0


def test_a_prompt_that_no_engine_can_hold_is_refused_before_it_is_copied() -> None:
    with pytest.raises(pd.ConfigError, match="at most 16777216 tokens, got 16777217"):
        pd.Request(prompt=range(2**24 + 1))


@pytest.mark.parametrize("call", ["step", "generate", "drain", "remove"])
def test_a_pairing_that_is_stepped_from_inside_its_step_says_so_and_loses_nothing(call: str) -> None:
    """Here by its policy; handlers of signals do it, too."""
    tried = []

    def steps(*given: Any) -> Any:
        with pytest.raises(pd.ConfigError, match="has called a Pairing from inside its own step"):
            calls[call]()
        tried.append(call)
        return pd.policy.least_tokens(*given)

    with local(policy=steps) as setup:
        pairing = setup.pairing
        calls: dict[str, Callable[[], object]] = {
            "step": pairing.step,
            "generate": lambda: list(pairing.generate([request("inner")])),
            "drain": lambda: pairing.drain(1.0),
            "remove": lambda: pairing.remove(setup.decodes[0], drain_s=1.0),
        }
        pairing.submit(request("outer"))
        streams = by_request(collect(pairing))
        assert tried
        assert tokens_of(streams["outer"]) == list(reference("v3", PROMPT, 5).tokens)
        setup.check_idle()


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_what_a_listener_of_the_host_raises_costs_no_link(transport: str, caplog: pytest.LogCaptureFixture) -> None:
    """One that steps from inside the step that calls it, or beside it from the transport's thread, among them."""
    model = model_of()
    refused, others = [], []
    with join(model, transport, prefill_pools=[pool_of(model)], decode_pools=[pool_of(model)]) as setup:
        (decode,), stepping = setup.decodes, threading.get_ident()
        step = decode.step

        def listen() -> None:
            if threading.get_ident() != stepping:
                others.append(1)
                raise ValueError("a fault of the host")
            if decode._unfinished_call:
                try:
                    step()
                except pd.ConfigError as error:
                    refused.append(str(error))
                    raise

        decode.channel.notify(listen)
        decode.notify(listen)
        setup.pairing.submit(request("a"))
        assert tokens_of(by_request(collect(setup.pairing))["a"]) == list(reference("v3", PROMPT, 5).tokens)
        setup.check_idle()
    assert all("has called a DecodeEngine from inside its own step" in said for said in refused)
    assert others if transport == "tcp" else refused
    assert "a listener failed" in caplog.text


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_what_a_handler_of_logs_raises_costs_only_its_line(
    transport: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no space for a line")

    model, left = model_of(), ["a step", "an arrival"]

    def fails_once(owner: Any, name: str, what: str) -> None:
        method = getattr(owner, name)

        def fail(*args: Any) -> Any:
            if what in left:
                left.remove(what)
                raise ValueError(f"{what} fails")
            return method(*args)

        monkeypatch.setattr(owner, name, fail)

    handler = Broken()
    logging.getLogger("pdinfer").addHandler(handler)
    try:
        with join(model, transport, prefill_pools=[pool_of(model)], decode_pools=[pool_of(model)]) as setup:
            (decode,) = setup.decodes
            fails_once(decode._runner, "decode", "a step")
            fails_once(decode.channel.receiver, "placed", "an arrival")
            (*_, last) = setup.pairing.generate(request("hit"))
            assert "the decode step failed: ValueError: a step fails" in str(last.error)
            assert tokens_of(setup.pairing.generate(request("next"))) == list(reference("v3", PROMPT, 5).tokens)
            assert (left, setup.pairing.stats.num_ports_lost) == ([], 0)
            setup.check_idle()
    finally:
        logging.getLogger("pdinfer").removeHandler(handler)
    assert "no space for a line" in capsys.readouterr().err


def test_a_sleep_ends_where_a_hosts_tests_have_stopped_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    with local() as setup:
        monkeypatch.setattr(time, "monotonic", lambda: 5.0)
        for each in (setup.pairing, *setup.engines):
            check_ends(started(each.wait, 0.01))


@pytest.mark.parametrize("forever_s", [float("inf"), 1e10, 2**62], ids=str)
def test_a_host_may_wait_for_ever(forever_s: float) -> None:
    """Python raises OverflowError for more seconds than the calls of the system take."""
    prefill, decode, third = (pool_of(model_of()) for _ in range(3))
    with join(model_of(), "tcp", prefill_pools=[prefill], decode_pools=[decode]) as setup:
        ends = [engine.channel for engine in setup.engines]
        with remote(pd.DecodeEngine(model_of(), pd.KVChannel(third, pd.kv.SocketTransport()))) as client:
            client.connect(ends[0].address, timeout_s=forever_s)
            ends[1].connect(client.address, timeout_s=forever_s)
            assert ends[1].links.dial(*client.address.endpoints, timeout_s=forever_s) == client.address
            sleeping = [started(each.wait, forever_s) for each in (setup.pairing, *setup.engines, *ends, client)]
            assert all(end.drain(forever_s) for end in ends)
    for each in sleeping:
        check_ends(each)
