"""Hosts and engines that stand still for a while: what was under way goes on or fails by name, and what comes after is
answered, by the same processes."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import pytest

import pdinfer as pd
from pdinfer.config.options import HUNG_S, hung_after_s
from pdinfer.remote import messages
from tests.e2e.setups import by_request, collect, hang, local, recover, remote, request, several
from tests.e2e.test_processes import Fleet, check_greedy, check_streams, fleet
from tests.e2e.worker import Order, Workers, work
from tests.forks import context
from tests.waiting import TIMEOUT_S, check_ends, started, wait_until

LENGTH = 60
QUICK = pd.remote.RemoteConfig(silent_s=1.0)
"""Silence that is found within less than two seconds."""


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with closing(Workers(2)) as pool:
        yield pool


def hold_the_interpreter(seconds: float) -> None:
    """No other thread of this process runs meanwhile, as in an extension that does not let go of the lock."""
    ctypes.PyDLL(None).usleep(round(seconds * 1e6))


def stop_this_process(seconds: float) -> None:
    """As a debugger or the owner of a virtual machine does."""
    pid = os.getpid()
    with subprocess.Popen(["/bin/sh", "-c", f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"]):
        time.sleep(0.2)


@pytest.mark.parametrize(
    ("pause", "seconds"),
    [
        (hold_the_interpreter, 4.0),
        pytest.param(hold_the_interpreter, 2.0, marks=pytest.mark.full),
        pytest.param(hold_the_interpreter, 20.0, marks=pytest.mark.full),
        pytest.param(stop_this_process, 2.0, marks=pytest.mark.full),
        pytest.param(stop_this_process, 4.0, marks=pytest.mark.full),
        pytest.param(stop_this_process, 20.0, marks=pytest.mark.full),
    ],
)
def test_a_host_that_pauses_loses_nothing(
    workers: Workers, slow: Path, pause: Callable[[float], None], seconds: float
) -> None:
    with fleet(workers, slow_while=slow) as processes:
        for name in "abc":
            processes.pairing.submit(request(name, LENGTH))
        events = processes.step_until(3)
        pause(seconds)
        processes.pairing.submit(request("after"))
        events += collect(processes.pairing)
        check_streams(events, *"abc", count=LENGTH)
        check_streams(events, "after")
        assert processes.pairing.stats.num_ports_lost == 0
        assert sum(event.finish_reason is not None for event in events) == 4


def step_until_lost(processes: Fleet) -> list[pd.TokenEvent]:
    pairing, events = processes.pairing, list[pd.TokenEvent]()
    wait_until(lambda: bool(events.extend(pairing.step()) or pairing.stats.num_ports_lost))
    return events


def step_until_back(processes: Fleet) -> list[pd.TokenEvent]:
    pairing, events = processes.pairing, list[pd.TokenEvent]()
    wait_until(lambda: bool(events.extend(pairing.step()) or all(lost.is_back for lost in pairing.stats.ports_lost)))
    return events


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_pauses_comes_back_and_is_used_again(workers: Workers, slow: Path, role: str) -> None:
    with fleet(workers, client_config=QUICK, slow_while=slow) as processes:
        (worker,) = processes.prefills if role == "prefill" else processes.decodes
        for name in "ab":
            processes.pairing.submit(request(name, LENGTH))
        events = processes.step_until(2)
        while {event.request_id for event in events} != {"a", "b"}:
            events += processes.step_until(1)
        began = time.monotonic()
        with worker.frozen():
            events += step_until_lost(processes)
            (lost,) = processes.pairing.stats.ports_lost
            port = processes.ports[role == "decode"]
            assert (lost.address, lost.role, lost.is_back) == (port.address, role, False)
            assert "was silent for 1 s" in lost.reason
            assert 0.0 <= lost.age_s < time.monotonic() - began
        events += step_until_back(processes)
        for name in ("after", "a2"):
            processes.pairing.submit(request(name))
        events += collect(processes.pairing)
        check_streams(events, "after", "a2")
        streams = by_request(events)
        for name in "ab":
            last = streams[name][-1]
            check_greedy(streams[name])
            assert sum(event.finish_reason is not None for event in streams[name]) == 1
            assert last.finish_reason is pd.FinishReason.LENGTH  # it has waited for the only port of its kind
        assert processes.pairing.stats.num_ports_lost == 1


def test_a_served_engine_goes_on_while_its_client_is_silent() -> None:
    config = pd.remote.RemoteConfig(silent_s=1.0)
    with local() as setup:
        decode = setup.decodes[0]
        ours, theirs = Pipe()
        thread = started(pd.remote.serve, decode, theirs, config=config)
        ours.send_bytes(messages.encode(messages.BeatMessage()))
        thread.join(2.0)
        ours.send_bytes(messages.encode(messages.CancelMessage("a")))
        thread.join(0.2)
        assert thread.is_alive()
        assert not decode.closed
        ours.close()
        check_ends(thread)


# -- connections that end -------------------------------------------------------------------------------------------


def test_a_client_whose_connection_breaks_makes_another_and_nothing_of_before_is_left() -> None:
    key = b"the same for all of them"
    with local() as setup, Listener(authkey=key) as listener:
        decode = setup.decodes[0]
        thread = started(pd.remote.serve, decode, listener)
        with pytest.raises(AuthenticationError):
            Client(listener.address, authkey=b"another")
        connections: list[Connection] = []

        def dial() -> Connection:
            connections.append(Client(listener.address, authkey=key))
            return connections[-1]

        client = pd.remote.DecodeClient(dial)
        hang(setup.prefills[0])
        for session in range(3):
            client.submit(request("a"), writers=[setup.prefills[0].address])
            client.submit(request("b"), writers=[])
            events: list[pd.types.Event] = []
            wait_until(lambda events=events: bool(events.extend(client.step()) or len(events) == 2))  # type: ignore[misc]
            assert {type(event) for event in events} == {pd.Granted, pd.Refused}, session
            (granted,) = (event for event in events if isinstance(event, pd.Granted))
            setup.prefills[0].submit(granted.request, granted.grant)
            setup.prefills[0].step()
            assert client.load().num_granted_requests == 1
            with socket.socket(fileno=os.dup(connections[-1].fileno())) as broken:
                broken.shutdown(socket.SHUT_RDWR)
            with pytest.raises(pd.TransferError, match="is gone"):
                wait_until(lambda: bool(client.wait(0.1) and client.step()))
            client.submit(request("nobody hears this"), writers=[])
            time.sleep(0.5)
            assert not client.recover()  # while a writer of before may still write
            recover(setup.prefills[0])
            wait_until(lambda: not setup.prefills[0].step() and client.recover())
            assert client.load().num_granted_requests == client.load().num_waiting_requests == 0
            assert decode.channel.pool.num_granted == 0
            assert decode.load().num_tokens == 0  # it was ended, and did not run to its end
            hang(setup.prefills[0])
        client.close()
        check_ends(thread)


@pytest.mark.parametrize("is_served", [True, False])
def test_an_end_that_nobody_comes_back_to_is_given_up(is_served: bool) -> None:
    config = pd.remote.RemoteConfig(return_s=0.5)
    with local() as setup, Listener() as listener:
        thread = started(pd.remote.serve, setup.decodes[0], listener, config=config)
        connection = Client(listener.address)
        connections = [connection]
        client = pd.remote.DecodeClient(connections.pop, config=config)
        assert client.step() == []
        if is_served:
            connection.close()
            check_ends(thread)
        else:
            setup.decodes[0].close()
        with pytest.raises(pd.TransferError, match="is gone"):
            wait_until(lambda: bool(client.wait(0.1) and client.step()))
        with pytest.raises(pd.TransferError, match="is gone"):
            wait_until(client.recover)
        client.close()


# -- steps that do not end ------------------------------------------------------------------------------------------


def test_a_step_that_hangs_costs_the_port_until_it_ends() -> None:
    """Its beats go on. Requests of a decode that hangs fail by name; those of a prefill go to another, whose rooms are
    free for it since decode closes its link to the one that hangs."""
    with several(2, 1, "tcp") as setup, ExitStack() as stack:
        limits = [pd.remote.RemoteConfig(hung_s=seconds) for seconds in (2.0, 3600.0, 3600.0)]
        ports = [stack.enter_context(one) for one in map(remote, setup.engines, limits)]
        hung, decode = setup.prefills[0], setup.decodes[0]
        with pd.Pairing(ports[:2], ports[2], policy=pd.policy.round_robin) as pairing:
            goes_on, parted, disconnect = threading.Event(), [], decode.disconnect
            decode.disconnect = lambda peer: parted.append(peer) or disconnect(peer)  # type: ignore[method-assign,func-returns-value]
            step = hung.step
            hung.step = lambda: goes_on.wait(TIMEOUT_S) and step()  # type: ignore[method-assign,assignment,return-value]
            for name in "abcd":
                pairing.submit(request(name))
            check_streams(collect(pairing), *"abcd")
            (lost,) = pairing.stats.ports_lost
            assert (lost.address, lost.role, lost.is_back) == (hung.address, "prefill", False)
            assert pairing.stats.ports_away == (hung.address,)
            assert "hangs: its step has not ended for" in lost.reason
            assert parted == [hung.address]
            assert decode.channel.pool.num_granted == 0
            goes_on.set()
            wait_until(lambda: pairing.step() == [] and pairing.stats.ports_lost[0].is_back)
            assert pairing.stats.ports_away == ()
            wait_until(lambda: all(peer.connected for port in ports for peer in port.load().kv.peers))
            for _ in range(10):  # where a step takes two seconds, the port may be gone again for a while
                for name in "abcd":
                    pairing.submit(request(name))
                check_streams(collect(pairing), *"abcd")
                if hung.load().num_tokens:
                    break
            assert hung.load().num_tokens > 0


def test_how_long_a_step_may_take_follows_from_the_warm_up() -> None:
    with local() as setup:
        decode = setup.decodes[0]
        assert hung_after_s(decode.longest_warm_up_s) == HUNG_S == 60.0
        longest_s = max(step.seconds for step in decode.warm_up().steps)
        assert decode.longest_warm_up_s == longest_s > 0
        decode.longest_warm_up_s = 4.0
        with remote(decode) as client:
            assert client.hung_s == 80.0


@pytest.mark.parametrize("end", ["dies", "closes"])
def test_a_process_whose_step_hangs_ends_when_its_client_is_gone(workers: Workers, tmp_path: Path, end: str) -> None:
    hung = tmp_path / "hung"
    (worker,) = workers.take(1)
    client = worker.serve("decode", hung_while=hung, remote=pd.remote.RemoteConfig(exit_s=0.5))
    hung.touch()
    wait_until(lambda: (client.load().step_age_s or 0.0) > 0.5)
    assert worker.process.is_alive()
    if end == "dies":
        worker.connection.close()
    client.close()
    worker.process.join(TIMEOUT_S)
    assert worker.process.exitcode == 1


def host(control: Connection, folder: Path, *, holds_gil: bool) -> None:
    """In a process of its own: forks another one, which hosts an engine, and names it once a step hangs there."""
    ours, theirs = Pipe()
    if not (child := os.fork()):
        try:
            for connection in (ours, control):
                connection.close()
            work(theirs)
        finally:
            os._exit(1)
    theirs.close()
    assert ours.recv() == "ready"
    mine, there = Pipe()
    hung = folder / "hung"
    limits = pd.remote.RemoteConfig(exit_s=0.5)
    ours.send((Order(role="decode", folder=folder, hung_while=hung, holds_gil=holds_gil, remote=limits), there))
    client = pd.remote.DecodeClient(mine)
    hung.touch()
    if holds_gil:
        time.sleep(1.0)  # no sign of life comes any more
    else:
        wait_until(lambda: (client.load().step_age_s or 0.0) > 0.5)
    control.send(child)
    signal.pause()


@pytest.mark.parametrize("interpreter", ["free", pytest.param("held", marks=pytest.mark.full)])
def test_a_process_whose_step_hangs_ends_when_its_host_is_killed(tmp_path: Path, interpreter: str) -> None:
    """Though the step should hold the interpreter; there the kernel does it, and takes longer."""
    ours, theirs = Pipe()
    more = {"holds_gil": interpreter == "held"}
    parent = context().Process(target=host, args=(theirs, tmp_path), kwargs=more)
    parent.start()
    theirs.close()
    assert ours.poll(TIMEOUT_S), "the host did not say which process it is"
    pid = ours.recv()
    os.kill(pid, 0)
    parent.kill()
    parent.join()
    wait_until(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that nobody has waited for is dead too."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
