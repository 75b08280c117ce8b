"""Several front ends over the same engines: each has its own requests, and its end is the end of these alone."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Client, Connection
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.remote.directory import Directory, Door, Folder
from tests.e2e.setups import (
    by_request,
    collect,
    hang,
    judged,
    local,
    model_of,
    pool_of,
    prompt_of,
    recover,
    request,
    tokens_of,
)
from tests.waiting import TIMEOUT_S, check_ends, started, wait_until

KEY = os.urandom(32)


@attrs.frozen
class Served:
    """An engine that a thread serves at a door, where clients `dial`."""

    engine: Any
    dial: Callable[[], Connection]
    thread: threading.Thread


@contextmanager
def served(role: type, *, return_s: float = TIMEOUT_S, **more: Any) -> Iterator[Served]:
    """Serve an engine until its clients have closed it."""
    model = model_of()
    engine = role(model, pd.KVChannel(pool_of(model, num_pages=64), pd.kv.SocketTransport(), key=KEY))
    with Door("127.0.0.1", 0, key=KEY) as door:
        thread = started(pd.remote.serve, engine, door, config=pd.remote.RemoteConfig(return_s=return_s), **more)
        yield Served(engine, partial(Client, door.address, authkey=KEY), thread)
        check_ends(thread)
    pool = engine.channel.pool
    assert pool.num_owned == pool.num_granted == 0


@contextmanager
def pair() -> Iterator[tuple[Served, Served]]:
    with served(pd.PrefillEngine) as prefill, served(pd.DecodeEngine) as decode:
        yield prefill, decode


def front(prefill: Served, decode: Served, connections: list[Connection] | None = None) -> pd.Pairing:
    """A front end over both. Its connections are kept, and then it makes no others."""
    if connections is None:
        return pd.Pairing(pd.remote.PrefillClient(prefill.dial), pd.remote.DecodeClient(decode.dial))
    connections += [prefill.dial(), decode.dial()]
    return pd.Pairing(pd.remote.PrefillClient(connections[0]), pd.remote.DecodeClient(connections[1]))


def break_off(connection: Connection) -> None:
    """End a connection as the death of this process would."""
    with socket.socket(fileno=os.dup(connection.fileno())) as broken:
        broken.shutdown(socket.SHUT_RDWR)


def asks(front: pd.Pairing, seed: int, names: Sequence[str], count: int = 8) -> list[pd.Request]:
    """Submit a request by each of these names."""
    asked = [request(name, count, prompt=prompt_of(9 + number, seed=seed)) for number, name in enumerate(names)]
    for one in asked:
        front.submit(one)
    return asked


def check_answers(asked: Sequence[pd.Request], events: Sequence[pd.TokenEvent]) -> None:
    """These requests and no others have ended well, with the tokens of the model in one piece."""
    streams = by_request(events)
    assert streams.keys() == {one.request_id for one in asked}
    for one in asked:
        stream = streams[str(one.request_id)]
        tokens = tokens_of(stream)
        assert stream[-1].finish_reason is pd.FinishReason.LENGTH
        assert len(tokens) == one.sampling.max_new_tokens
        assert tuple(tokens) == judged("v3", one.prompt, tokens).tokens


def step_both(*fronts: pd.Pairing) -> list[list[pd.TokenEvent]]:
    """Step front ends in turn until all of their requests have ended."""
    heard: list[list[pd.TokenEvent]] = [[] for _ in fronts]

    def stepped() -> bool:
        for one, events in zip(fronts, heard, strict=True):
            one.wait(0.01)
            events += one.step()
        return not any(one.num_unfinished for one in fronts)

    wait_until(stepped)
    return heard


def test_front_ends_have_requests_of_equal_names_at_once() -> None:
    with pair() as (prefill, decode), front(prefill, decode) as one, front(prefill, decode) as other:
        hang(decode.engine)
        wanted = [asks(each, seed, "abc") for seed, each in enumerate((one, other))]
        for each in (one, other):
            each.step()
        wait_until(lambda: len(decode.engine.request_ids) == 6)
        assert {"a", "b", "c"} < set(decode.engine.request_ids)
        recover(decode.engine)
        for asked, events in zip(wanted, step_both(one, other), strict=True):
            check_answers(asked, events)


def test_the_end_of_one_front_end_is_the_end_of_its_requests_alone() -> None:
    """It dies in the middle of its streams: its connections break. Another one comes in its place."""
    with pair() as (prefill, decode), front(prefill, decode) as stays:
        connections: list[Connection] = []
        dies = front(prefill, decode, connections)
        asks(dies, 1, "abcd", 40)
        wanted = asks(stays, 2, "abcd", 40)
        heard: dict[str, list[pd.TokenEvent]] = {"dies": [], "stays": []}

        def both_stream() -> bool:
            for name, one in (("dies", dies), ("stays", stays)):
                one.wait(0.01)
                heard[name] += one.step()
            return all(len({event.request_id for event in events}) == 4 for events in heard.values())

        wait_until(both_stream)
        for connection in connections:
            break_off(connection)
        check_answers(wanted, heard["stays"] + step_both(stays)[0])
        wait_until(lambda: not decode.engine.request_ids and not prefill.engine.request_ids)
        with front(prefill, decode) as new:
            check_answers(asks(new, 3, "abcd"), collect(new))
        dies.close()
        check_answers(asks(stays, 4, "abcd"), collect(stays))


@pytest.mark.parametrize("is_forwarded", [True, False])
def test_front_ends_that_all_die_between_grant_and_hand_off_leave_no_page_behind(is_forwarded: bool) -> None:
    """Decode has promised pages, and prefill has heard of it or not. A third front end takes over."""
    with pair() as (prefill, decode):
        connections: list[list[Connection]] = [[], []]
        fronts = [front(prefill, decode, each) for each in connections]
        hang(prefill.engine)
        for seed, each in enumerate(fronts):
            asks(each, seed, "abc")
            each.step()
        wait_until(lambda: decode.engine.load().num_granted_requests == 6)
        if is_forwarded:
            wait_until(lambda: [each.step() for each in fronts] and len(prefill.engine.request_ids) == 6)
        for connection in itertools.chain(*connections):
            break_off(connection)
        wait_until(lambda: not decode.engine.request_ids)
        recover(prefill.engine)
        with front(prefill, decode) as third:
            check_answers(asks(third, 3, "abc"), collect(third))
            assert decode.engine.channel.pool.num_granted == 0
        for each in fronts:
            each.close()


def test_who_closes_an_engine_that_others_have_leaves_it() -> None:
    with pair() as (prefill, decode), front(prefill, decode) as last:
        front(prefill, decode).close()
        check_answers(asks(last, 1, "ab"), collect(last))
        assert not decode.engine.closed


def test_a_link_that_one_front_end_distrusts_is_there_again_for_the_other() -> None:
    with pair() as (prefill, decode), front(prefill, decode) as one, front(prefill, decode) as other:
        wanted = asks(one, 1, "abcdef", 30)
        distrusts = next(port for port in other.ports if port.role == "decode")
        heard: list[pd.TokenEvent] = []
        wait_until(lambda: (one.wait(0.01), heard.extend(one.step()), heard)[-1])
        distrusts.disconnect(prefill.engine.address)
        check_answers(wanted, heard + step_both(one)[0])


def test_a_change_of_role_is_a_loss_for_the_others() -> None:
    with served(pd.PrefillEngine) as prefill:
        one, other = pd.remote.PrefillClient(prefill.dial()), pd.remote.PrefillClient(prefill.dial())
        found: list[Any] = []
        wait_until(lambda: found.append(one.become("decode")) or found[-1])
        assert found[-1].role == "decode"
        with pytest.raises(pd.TransferError, match="is gone"):
            wait_until(lambda: bool(other.wait(0.1) and other.step()))
        other.close()
        with pd.remote.DecodeClient(prefill.dial) as third:
            assert third.address == one.address
        one.close()


@pytest.mark.parametrize("breaks", [False, True])
def test_who_asked_for_a_change_and_left_before_takes_it_back(monkeypatch: pytest.MonkeyPatch, breaks: bool) -> None:
    """As the leader of some of the ranks, where the others are not asked: it waits for them."""
    monkeypatch.setattr("pdinfer.remote.served.become", lambda *_: None)
    with served(pd.PrefillEngine, return_s=0.3 if breaks else TIMEOUT_S) as prefill:
        connection = prefill.dial()
        asker = pd.remote.PrefillClient(connection)
        assert asker.become("decode") is None
        other: list[pd.remote.PrefillClient] = []
        comes = started(lambda: other.append(pd.remote.PrefillClient(prefill.dial())))
        comes.join(0.5)
        assert comes.is_alive(), "the engine waits for the others"
        if breaks:
            break_off(connection)
        else:
            asker.close()
        check_ends(comes)
        assert other[0].role == prefill.engine.role == "prefill"
        other[0].close()
        asker.close()


def test_who_finds_no_place_waits_at_the_door_until_one_leaves() -> None:
    with served(pd.DecodeEngine, max_clients=2) as decode:
        first, second = (pd.remote.DecodeClient(decode.dial) for _ in range(2))
        came: list[pd.remote.DecodeClient] = []
        waits = started(lambda: came.append(pd.remote.DecodeClient(decode.dial)))
        waits.join(0.3)
        assert waits.is_alive()
        second.close()
        check_ends(waits)
        came[0].close()
        first.close()


def test_an_engine_without_clients_is_refused() -> None:
    with local() as setup, pytest.raises(pd.ConfigError, match="max_clients is how many clients share an engine"):
        pd.remote.serve(setup.decodes[0], None, max_clients=0)


def test_front_ends_find_the_same_engines_in_one_directory(tmp_path: Any) -> None:
    directory = Directory(Folder(tmp_path), key=KEY)
    drain = threading.Event()
    with ExitStack() as stack:
        threads = []
        for role in (pd.PrefillEngine, pd.DecodeEngine):
            model = model_of()
            engine = role(model, pd.KVChannel(pool_of(model, num_pages=64), pd.kv.SocketTransport(), key=KEY))
            door = stack.enter_context(Door("127.0.0.1", 0, key=KEY))
            threads.append(started(pd.remote.serve, engine, door, directory=directory, drain=drain))
        fronts = [stack.enter_context(pd.Pairing(directory=directory)) for _ in range(2)]
        wanted = [asks(each, seed, "ab") for seed, each in enumerate(fronts)]
        for asked, events in zip(wanted, step_both(*fronts), strict=True):
            check_answers(asked, events)
        assert {port.address for port in fronts[0].ports} == {port.address for port in fronts[1].ports}
        drain.set()
        wait_until(lambda: [one.step() for one in fronts] and not any(one.ports for one in fronts))
        check_ends(*threads)
