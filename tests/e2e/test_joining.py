"""A port joins while work is running, with the links that can be made now, whatever else happens meanwhile."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.inbox import Inbox
from pdinfer.pairing import joining
from pdinfer.pairing.joining import FIRST_TRY_S, link
from pdinfer.pairing.ports import LOOK_S
from pdinfer.testing import VirtualClock
from tests.e2e import setups
from tests.e2e.setups import PROMPT, Setup, by_request, collect, hang, model_of, pool_of, reference, request, tokens_of
from tests.waiting import TIMEOUT_S, check_ends, check_returns, started, wait_until

EXPECTED = list(reference("v3", PROMPT, 5).tokens)


def several(num_prefill: int, num_decode: int, transport: str = "tcp", **more: Any) -> Setup:
    return setups.several(num_prefill, num_decode, transport, **more)


def newcomer(role: type = pd.PrefillEngine) -> Any:
    return role(model_of(), pd.KVChannel(pool_of(model_of(), num_pages=64), pd.kv.SocketTransport()))


class Held:
    """A port whose `connect` waits until the test lets it go on."""

    def __init__(self, port: Any) -> None:
        self.asked, self.go = threading.Event(), threading.Event()
        self._port = port
        connect = port.connect

        def wait(peer: pd.PeerAddress, *, timeout_s: float = 10.0) -> None:
            self.asked.set()
            assert self.go.wait(TIMEOUT_S)
            connect(peer, timeout_s=timeout_s)

        port.connect = wait

    def restore(self) -> None:
        """Restore the port's own `connect`."""
        del self._port.connect


@contextmanager
def held_joining() -> Iterator[tuple[Setup, Any, Held, Any]]:
    """A pairing, a newcomer, what holds it, and its joining, which waits for the newcomer's `connect`."""
    with several(1, 1) as setup, newcomer() as port:
        held, joining = Held(port), setup.pairing.joining(port)
        next(joining)
        assert held.asked.wait(TIMEOUT_S)
        yield setup, port, held, joining


@contextmanager
def adding(pairing: pd.Pairing, port: Any) -> Iterator[tuple[threading.Thread, list[Exception]]]:
    """Call `add` in a thread of its own. The list gets what it raised."""
    errors: list[Exception] = []

    def add() -> None:
        try:
            pairing.add(port)
        except pd.PDInferError as error:
            errors.append(error)

    thread = started(add)
    yield thread, errors
    check_ends(thread)


def unplug(prefill: pd.PrefillEngine, *addresses: pd.PeerAddress) -> Callable[[], None]:
    """Make a prefill unable to dial these until the returned function is called."""
    transport = prefill.channel.transport
    dial = transport.connect

    def refuse(endpoints: Sequence[str], *, timeout_s: float) -> object:
        if tuple(endpoints) in [address.endpoints for address in addresses]:
            raise pd.TransferError("the cable is unplugged")
        return dial(endpoints, timeout_s=timeout_s)

    transport.connect = refuse  # type: ignore[method-assign,assignment]

    def plug() -> None:
        transport.connect = dial  # type: ignore[method-assign]

    return plug


# -- beside the running work --------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [pd.PrefillEngine, pd.DecodeEngine])
def test_every_call_goes_on_while_a_port_is_connected(role: type) -> None:
    with several(1, 1) as setup, newcomer(role) as port:
        held = Held(port if role is pd.PrefillEngine else setup.prefills[0])
        with adding(setup.pairing, port) as (thread, errors):
            assert held.asked.wait(TIMEOUT_S)
            setup.pairing.submit(request("a", 12))
            setup.pairing.submit(request("b", 12))
            setup.pairing.cancel("b")
            setup.pairing.wait(0.0)
            assert setup.pairing.stats.links_down == ()
            events = [event for event in collect(setup.pairing) if event.request_id == "a"]
            assert tokens_of(events) == list(reference("v3", PROMPT, 12).tokens)
            assert thread.is_alive()  # none of these calls has waited for it
            held.go.set()
        assert errors == []
        assert port in setup.pairing.ports


def worst_gap_s(pairing: pd.Pairing, name: str) -> float:
    """Return the longest time between two tokens of a stream of 200."""
    times = []
    for event in pairing.generate([request(name, 200)]):
        assert event.finish_reason in (None, pd.FinishReason.LENGTH), event
        times.append(time.monotonic())
    return max(later - earlier for earlier, later in itertools.pairwise(times))


@pytest.mark.timed
@pytest.mark.parametrize("role", [pd.PrefillEngine, pd.DecodeEngine])
def test_the_worst_gap_of_a_stream_grows_by_a_tenth_of_a_second_at_most(role: type) -> None:
    """Compares the medians of a few runs."""
    without, beside = [], []
    with several(1, 1) as setup:
        for turn in range(5):
            without.append(worst_gap_s(setup.pairing, f"without {turn}"))
            with newcomer(role) as port:
                held = Held(port if role is pd.PrefillEngine else setup.prefills[0])
                with adding(setup.pairing, port) as (thread, errors):
                    assert held.asked.wait(TIMEOUT_S)
                    beside.append(worst_gap_s(setup.pairing, f"beside {turn}"))
                    assert thread.is_alive()
                    held.go.set()
                assert errors == []
                held.restore()
                setup.pairing.remove(port, drain_s=0.0)
    assert statistics.median(beside) <= statistics.median(without) + 0.1, (without, beside)


def test_a_pair_that_cannot_be_linked_now_is_down_until_it_can() -> None:
    clock = VirtualClock()
    with several(1, 2, clock=clock) as setup, newcomer() as port:
        unreachable = setup.decodes[0].address
        plug, woken = unplug(port, unreachable), threading.Event()
        setup.pairing._intake.inbox.listen(woken.set)
        setup.pairing.add(port)
        assert woken.is_set()  # or a host that sleeps would have it dialled when it wakes for something else
        pair = port.address, unreachable
        assert setup.pairing.stats.links_down == (pair,)
        setup.pairing.remove(setup.prefills[0], drain_s=0.0)
        for name in "abcd":
            setup.pairing.submit(request(name))
        streams = by_request(collect(setup.pairing))
        assert {name: tokens_of(stream) for name, stream in streams.items()} == dict.fromkeys("abcd", EXPECTED)
        assert setup.pairing.stats.links_down == (pair,)
        plug()
        wait_until(lambda: setup.decodes[0].channel.connected(port.address) and port.channel.connected(unreachable))
        clock.advance(LOOK_S)
        setup.pairing.submit(request())
        collect(setup.pairing)
        assert setup.pairing.stats.links_down == ()


def test_a_port_that_reaches_nobody_does_not_join() -> None:
    with several(1, 2) as setup, newcomer() as port:
        unplug(port, *(decode.address for decode in setup.decodes))
        with pytest.raises(pd.TransferError, match="unplugged"):
            setup.pairing.add(port)
        assert setup.pairing.stats.links_down == ()
        setup.pairing.submit(request())
        assert tokens_of(collect(setup.pairing)) == EXPECTED


class Stub:
    """A port that records how long it may take to connect, and cannot reach some peers."""

    def __init__(self, name: bytes, role: str, unreachable: Sequence[Any] = ()) -> None:
        self.role = role
        self.address = pd.PeerAddress(name * 16, 1, 0)
        self.addresses = (self.address,)
        self.asked: list[tuple[bytes, float]] = []
        self._unreachable = [one.address for one in unreachable]

    def connect(self, peer: pd.PeerAddress, *, timeout_s: float = 10.0) -> None:
        self.asked.append((peer.engine_id[:1], timeout_s))
        if peer in self._unreachable:
            raise pd.TransferError("nobody answers")


def test_a_port_that_does_not_answer_costs_a_second_and_not_the_whole_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "time", SimpleNamespace(monotonic=VirtualClock()))
    others = [Stub(name, "decode") for name in (b"x", b"y", b"z")]
    port = Stub(b"p", "prefill", others[:1])
    assert list(link(port, others, timeout_s=10.0)) == [others[0].address]  # type: ignore[arg-type,list-item]
    assert port.asked == [(b"x", FIRST_TRY_S), (b"y", FIRST_TRY_S), (b"z", FIRST_TRY_S)]
    port = Stub(b"p", "prefill", others)
    assert len(link(port, others, timeout_s=9.0)) == 3  # type: ignore[arg-type]
    assert [timeout_s for _, timeout_s in port.asked] == [FIRST_TRY_S] * 3 + [3.0] * 3


# -- races --------------------------------------------------------------------------------------------------------


def test_of_two_calls_that_add_one_port_one_does() -> None:
    with several(1, 1) as setup, newcomer() as port:
        held = Held(port)
        with adding(setup.pairing, port) as (_, errors):
            assert held.asked.wait(TIMEOUT_S)
            with pytest.raises(pd.ConfigError, match="is a port of this pairing already"):
                setup.pairing.add(port)
            held.go.set()
        assert errors == []
        assert [port.role for port in setup.pairing.ports].count("prefill") == 2


def test_ports_of_both_sides_that_join_at_once_are_linked_to_each_other() -> None:
    with several(1, 1) as setup, newcomer() as prefill, newcomer(pd.DecodeEngine) as decode:
        held = Held(prefill)
        with adding(setup.pairing, prefill) as (_, errors):
            assert held.asked.wait(TIMEOUT_S)
            setup.pairing.add(decode)
            held.go.set()
        assert errors == []
        assert prefill.channel.connected(decode.address)
        assert len(setup.pairing.ports) == 4


def test_a_port_whose_pairing_is_closed_meanwhile_stays_open() -> None:
    with several(1, 1) as setup, newcomer() as port:
        held = Held(port)
        with adding(setup.pairing, port) as (_, errors):
            assert held.asked.wait(TIMEOUT_S)
            setup.pairing.close()
            held.go.set()
        (error,) = errors
        assert "pairing was closed while the port was connected" in str(error)
        assert not port.closed
        with pytest.raises(pd.TransferError, match="closed"):
            setup.pairing.add(port)


def test_a_port_that_is_removed_while_it_is_added_does_not_join_and_may_later() -> None:
    with several(1, 1) as setup, newcomer() as port:
        held = Held(port)
        with adding(setup.pairing, port) as (_, errors):
            assert held.asked.wait(TIMEOUT_S)
            setup.pairing.remove(port, drain_s=0.0)
            held.go.set()
        (error,) = errors
        assert "port was removed while the port was connected" in str(error)
        assert port not in setup.pairing.ports
        setup.pairing.add(port)
        assert port in setup.pairing.ports


def test_a_known_port_that_is_removed_meanwhile_is_no_reason_to_refuse_a_new_one() -> None:
    with several(1, 2) as setup, newcomer() as port:
        unplug(port, setup.decodes[0].address)
        held = Held(port)
        with adding(setup.pairing, port) as (_, errors):
            assert held.asked.wait(TIMEOUT_S)
            for decode in setup.decodes:
                setup.pairing.remove(decode, drain_s=0.0)
            held.go.set()
        assert errors == []
        assert setup.pairing.stats.links_down == ()


# -- in the thread that steps ---------------------------------------------------------------------------------------


def connects_late(port: Any, pairing: pd.Pairing, clock: VirtualClock) -> None:
    """Make a port connect when every request has ended, which takes the thread that steps and 10 s."""
    stepping, connect = threading.current_thread(), port.connect

    def wait(peer: pd.PeerAddress, *, timeout_s: float = 10.0) -> None:
        assert threading.current_thread() is not stepping, "nobody steps meanwhile"
        clock.advance(10.0)
        wait_until(lambda: not pairing.num_unfinished)
        connect(peer, timeout_s=timeout_s)

    port.connect = wait


def test_deadlines_are_kept_while_the_thread_that_steps_adds_a_port() -> None:
    clock = VirtualClock()
    with several(2, 1, "loopback", clock=clock) as setup:
        port = setup.prefills[1]
        setup.pairing.remove(port, drain_s=0.0)
        hang(setup.prefills[0])
        setup.pairing.submit(request(deadline_s=5.0))
        events = setup.pairing.step()
        connects_late(port, setup.pairing, clock)
        setup.pairing.add(port)
        assert port in setup.pairing.ports
        (end,) = events + setup.pairing.step()
        assert end.finish_reason is pd.FinishReason.DEADLINE


def test_a_host_that_steps_itself_gets_the_events_of_streams_while_a_port_joins() -> None:
    clock = VirtualClock()
    with several(2, 1, "loopback", clock=clock) as setup:
        port = setup.prefills[1]
        setup.pairing.remove(port, drain_s=0.0)
        setup.pairing.submit(request())
        events = setup.pairing.step()
        connects_late(port, setup.pairing, clock)
        for left_s in setup.pairing.joining(port):
            assert 0.0 <= left_s <= setup.pairing.config.connect_timeout_s
            events += setup.pairing.step()
            setup.pairing.wait(0.05)
        assert port in setup.pairing.ports
        assert tokens_of(events + setup.pairing.step()) == EXPECTED


def test_a_port_whose_joining_is_given_up_stays_out_and_may_join_later() -> None:
    with held_joining() as (setup, port, held, joining):
        joining.close()
        held.go.set()
        assert port not in setup.pairing.ports
        with pd.Pairing(port, newcomer(pd.DecodeEngine)) as other:
            other.remove(port, drain_s=0.0)
        setup.pairing.add(port)
        assert port in setup.pairing.ports


def test_a_joining_that_is_dropped_waits_for_no_lock() -> None:
    """Garbage collection closes its iterator in any thread, also in one that has a lock for which another waits."""
    with held_joining() as (setup, port, held, joining):
        with setup.pairing._intake.lock:
            check_returns(joining.close)
        held.go.set()
        wait_until(lambda: port not in setup.pairing._joining._owners)  # another pairing may have it
        assert port not in setup.pairing.ports
        setup.pairing.add(port)
        assert port in setup.pairing.ports


def test_what_add_raises_is_raised_in_the_thread_that_steps() -> None:
    with several(1, 1) as setup, newcomer() as port:
        setup.pairing.step()
        with pytest.raises(pd.ConfigError, match="is a port of this pairing already"):
            setup.pairing.add(setup.prefills[0])
        with pytest.raises(pd.ConfigError, match="is a port of this pairing already"):
            list(setup.pairing.joining(setup.prefills[0]))
        plug = unplug(port, setup.decodes[0].address)
        with pytest.raises(pd.TransferError, match="unplugged"):
            setup.pairing.add(port)
        assert port not in setup.pairing.ports
        plug()
        setup.pairing.add(port)
        assert port in setup.pairing.ports


def test_a_port_may_be_added_from_inside_a_step() -> None:
    """A policy of the host's, say, that wants more ports: no step runs inside another."""
    added: list[Any] = []

    def wanting(*arguments: Any) -> pd.Choice | None:
        if added:
            pairing.add(added.pop())
        return pd.policy.round_robin(*arguments)

    with several(1, 1, policy=wanting) as setup, newcomer() as port:
        pairing = setup.pairing
        pairing.step()
        added.append(port)
        pairing.submit(request())
        assert tokens_of(collect(pairing)) == EXPECTED
        assert port in pairing.ports


# -- clients ------------------------------------------------------------------------------------------------------


def test_a_client_that_connects_leaves_what_its_engine_says_to_who_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise two threads would take events, and those of one request would change places."""
    with several(1, 1) as setup, several(1, 1) as other:
        decode = setup.decodes[0]
        held = Held(decode)
        ours, theirs = Pipe()
        serving = started(pd.remote.serve, decode, theirs)
        client = pd.remote.DecodeClient(ours)
        take, takers = Inbox.take, set()

        def taken(inbox: Inbox[Any]) -> Any:
            takers.add(threading.current_thread())
            return take(inbox)

        monkeypatch.setattr(Inbox, "take", taken)
        peer = other.prefills[0].address
        asking = started(client.connect, peer)
        assert held.asked.wait(TIMEOUT_S)
        client.submit(request(None), writers=[])
        events: list[pd.types.Event] = []
        while not events:
            client.wait(0.1)
            events = client.step()
        held.go.set()
        check_ends(asking)
        assert takers == {threading.current_thread(), serving}  # which takes what comes to the engine itself
        assert decode.channel.connected(peer)
        client.close()
        check_ends(serving)


@pytest.mark.parametrize("role", [pd.PrefillEngine, pd.DecodeEngine])
def test_a_port_that_joins_while_requests_are_dispatched_is_chosen_at_the_next_step(role: type) -> None:
    config = pd.PairingConfig(max_queued_per_decode=1)  # the first request fills the decode that was there before
    with several(1, 1, config=config) as setup, newcomer(role) as third:

        def policy(*asked: Any) -> pd.policy.Choice | None:
            if third not in setup.pairing.ports:
                check_ends(started(setup.pairing.add, third))
            return pd.policy.least_tokens(*asked)

        setup.pairing._broker._chooser._policy = policy
        for count in (5, 4):  # each looks for the ports that can hold it
            setup.pairing.submit(request(str(count), count))
        setup.pairing.step()
        assert third in setup.pairing.ports
        streams = by_request(collect(setup.pairing))
        assert [tokens_of(streams[name]) for name in ("5", "4")] == [EXPECTED, EXPECTED[:4]]
