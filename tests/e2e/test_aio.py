"""An asyncio host: streams of coroutines, whatever becomes of their readers, of the steps and of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer import aio
from pdinfer.pairing.health import Health, HealthState
from tests.e2e.setups import (
    PROMPT,
    Setup,
    by_request,
    hang,
    join,
    local,
    model_of,
    pool_of,
    prompt_of,
    recover,
    reference,
    request,
    tokens_of,
)
from tests.forks import FAR_S
from tests.waiting import TIMEOUT_S, wait_until

SOON_S = FAR_S
FINAL = pd.FinishReason


def check_threads_ended() -> None:
    wait_until(lambda: not [t for t in threading.enumerate() if t.name.startswith(("pdinfer-step", "pdinfer-submit"))])


def in_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the test in an event loop to its end, which comes soon, and check that no thread is left."""

    @functools.wraps(test)
    def run(*given: Any, **named: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(SOON_S):
                await test(*given, **named)

        asyncio.run(bounded())
        check_threads_ended()

    return run


@asynccontextmanager
async def hosted(setup: Setup, **more: Any) -> AsyncIterator[aio.AsyncPairing]:
    """A host of real engines; in the end nothing is left of any request."""
    async with pd.aio.AsyncPairing(setup.pairing, **more) as host:
        yield host
        assert await host.drain(SOON_S)
        await until(lambda: not any(engine.num_unfinished for engine in setup.engines))
        assert (host.num_unfinished, setup.pairing.num_unfinished) == (0, 0)
        assert setup.pairing.stats.num_queued_requests == 0
        for pool in setup.pools:
            assert (pool.num_available, pool.num_granted, pool.num_owned) == (pool.num_pages, 0, 0)


async def read(stream: AsyncIterator[pd.TokenEvent]) -> list[pd.TokenEvent]:
    return [event async for event in stream]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():  # noqa: ASYNC110 - it comes true in other threads
            await asyncio.sleep(0.002)


class Scripted:
    """A Pairing whose steps return what the test puts in `events`. What it was asked for is recorded."""

    def __init__(self) -> None:
        self.events: list[pd.TokenEvent] = []
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.is_closed = False
        self.open: set[str] = set()
        self.changed = threading.Condition()
        self.on_step: Callable[[], None] = lambda: None

    def submit(self, request: pd.Request) -> str:
        assert request.request_id is not None
        self.submitted.append(request.request_id)
        self.open.add(request.request_id)
        return request.request_id

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def emit(self, *events: pd.TokenEvent) -> None:
        with self.changed:
            self.events += events
            self.open -= {event.request_id for event in events if event.finish_reason}
            self.changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.events, timeout_s)

    def step(self) -> list[pd.TokenEvent]:
        self.on_step()
        with self.changed:
            events, self.events = self.events, []
        return events

    def close(self) -> None:
        self.is_closed = True
        for name in sorted(self.open):
            self.emit(final(name, 0, FINAL.CANCELLED))


def token(name: str, index: int) -> pd.TokenEvent:
    return pd.TokenEvent(request_id=name, token=7, index=index)


def final(name: str, index: int, reason: pd.FinishReason = FINAL.LENGTH) -> pd.TokenEvent:
    return pd.TokenEvent(
        request_id=name, token=7 if reason is FINAL.LENGTH else None, index=index, finish_reason=reason
    )


@asynccontextmanager
async def scripted(**more: Any) -> AsyncIterator[tuple[Any, aio.AsyncPairing]]:
    pairing: Any = Scripted()
    async with pd.aio.AsyncPairing(pairing, **more) as host:
        yield pairing, host


async def begun(pairing: Scripted, host: aio.AsyncPairing, name: str) -> asyncio.Task[list[pd.TokenEvent]]:
    """A task that reads a request which has been submitted."""
    before = pairing.submitted.count(name)
    task = asyncio.create_task(read(host.stream(request(name))))
    await until(lambda: pairing.submitted.count(name) > before)
    return task


# -- what readers get -------------------------------------------------------------------------------------------------


@in_a_loop
async def test_streams_at_once_give_the_tokens_of_a_model_alone() -> None:
    with local() as setup:
        async with hosted(setup) as host:
            streams = await asyncio.gather(*(read(host.stream(request(None, 3 + n))) for n in range(6)))
    for number, events in enumerate(streams):
        assert list(by_request(events).values()) == [events]
        assert tokens_of(events) == list(reference("v3", PROMPT, 3 + number).tokens)
        assert [event.finish_reason for event in events[-2:]] == [None, FINAL.LENGTH]


@in_a_loop
async def test_the_first_event_raises_what_submit_raises() -> None:
    with local(config=pd.PairingConfig(max_queued_requests=1), num_pages=8) as setup:
        async with hosted(setup) as host:
            with pytest.raises(pd.RequestError, match="prompt is empty"):
                await anext(host.stream(request("a", prompt=())))
            with pytest.raises(pd.RequestError, match="printable"):
                await anext(host.stream(request("")))
            with pytest.raises(pd.ConfigError, match="takes a Request, got 'hello'"):
                await anext(host.stream("hello"))  # type: ignore[arg-type]
            assert host.num_unfinished == 0
            many = [read(host.stream(request(str(n), 12))) for n in range(12)]
            answers = await asyncio.gather(*many, return_exceptions=True)
            refused = [answer for answer in answers if isinstance(answer, BaseException)]
            assert refused
            assert all(isinstance(error, pd.Overloaded) for error in refused)


@in_a_loop
async def test_a_stream_that_is_refused_leaves_the_request_that_has_its_id_alone() -> None:
    events: list[pd.TokenEvent] = []
    with local() as setup:
        async with hosted(setup, on_events=events.extend) as host:
            setup.pairing.submit(request("a"))
            with pytest.raises(pd.RequestError, match="'a' is in use"):
                await anext(host.stream(request("a")))
            await until(lambda: events and events[-1].finish_reason)
            assert events[-1].finish_reason is FINAL.LENGTH


@in_a_loop
async def test_an_id_is_in_use_until_its_last_event_and_then_of_another() -> None:
    async with scripted() as (pairing, host):
        first = await begun(pairing, host, "a")
        with pytest.raises(pd.RequestError, match="'a' is in use"):
            await anext(host.stream(request("a")))
        first.cancel()
        await until(lambda: pairing.cancelled == ["a"])
        with pytest.raises(pd.RequestError, match="'a' is in use"):  # its last event may be on the way
            await anext(host.stream(request("a")))
        pairing.emit(final("a", 0, FINAL.CANCELLED))
        assert await host.drain(SOON_S)
        other = host.stream(request("a"))
        pairing.submitted.clear()
        asked = asyncio.ensure_future(anext(other))
        await until(lambda: pairing.submitted)
        pairing.emit(token("a", 0), final("a", 1))
        assert await asked == token("a", 0)
        assert await anext(other) == final("a", 1)
        third = await begun(pairing, host, "a")
        await other.aclose()  # nothing is left of it that could be cancelled
        assert pairing.cancelled == ["a"]
        pairing.emit(final("a", 0))
        assert await third == [final("a", 0)]


@in_a_loop
async def test_a_host_is_entered_before_it_streams_and_is_entered_once() -> None:
    pairing: Any = Scripted()
    host = pd.aio.AsyncPairing(pairing)
    with pytest.raises(pd.ConfigError, match="was not entered"):
        await anext(host.stream(request("a")))
    async with host:
        with pytest.raises(pd.ConfigError, match="can be entered once"):
            await host.__aenter__()
    with pytest.raises(pd.RequestError, match="is closed"):
        await anext(host.stream(request("a")))
    with pytest.raises(pd.ConfigError, match="max_unread must be an int of at least 1, got 0"):
        pd.aio.AsyncPairing(pairing, max_unread=0)
    unused: Any = Scripted()
    closed = pd.aio.AsyncPairing(unused)
    await closed.close()
    assert unused.is_closed
    with pytest.raises(pd.ConfigError, match="not behind `close`; make another one"):
        await closed.__aenter__()


# -- readers that leave -----------------------------------------------------------------------------------------------


async def leave_by_break(host: aio.AsyncPairing, it: pd.Request) -> None:
    async for event in host.stream(it):
        if event.index == 2:
            break


async def leave_by_an_error(host: aio.AsyncPairing, it: pd.Request) -> None:
    with contextlib.suppress(ZeroDivisionError):
        async for event in host.stream(it):
            print(1 // (2 - event.index))


async def leave_by_closing(host: aio.AsyncPairing, it: pd.Request) -> None:
    async with contextlib.aclosing(host.stream(it)) as stream:
        await anext(stream)


async def leave_by_cancelling(host: aio.AsyncPairing, it: pd.Request) -> None:
    task = asyncio.create_task(read(host.stream(it)))
    await until(lambda: host.pairing.stats.num_unfinished_requests)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def leave_by_timeout(host: aio.AsyncPairing, it: pd.Request) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            await read(host.stream(it))


async def leave_at_once(host: aio.AsyncPairing, it: pd.Request) -> None:
    task = asyncio.create_task(read(host.stream(it)))
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


WAYS = [leave_by_break, leave_by_an_error, leave_by_closing, leave_by_cancelling, leave_by_timeout, leave_at_once]


@in_a_loop
async def test_a_reader_that_leaves_takes_its_request_along() -> None:
    with local(num_pages=256) as setup:
        async with hosted(setup) as host:
            for number, leave in enumerate(WAYS):
                await leave(host, request(leave.__name__, 480, prompt=prompt_of(9, seed=number)))
            staying = await read(host.stream(request("staying", 12)))
            assert tokens_of(staying) == list(reference("v3", PROMPT, 12).tokens)
            assert await host.drain(SOON_S)
            ended = dict(setup.pairing.stats.ended)
            assert ended.pop(FINAL.LENGTH) == 1
            assert set(ended) == {FINAL.CANCELLED}  # nobody ran to the end of 480 tokens


@in_a_loop
async def test_a_reader_that_leaves_before_its_request_is_submitted_is_not_forgotten() -> None:
    async with scripted() as (pairing, host):
        reached, held, take = threading.Event(), threading.Event(), pairing.submit
        pairing.submit = lambda it: (reached.set(), held.wait(SOON_S), take(it))
        tasks = [asyncio.create_task(read(host.stream(request(name)))) for name in "ab"]
        await until(lambda: host.num_unfinished == 2 and reached.is_set())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        pairing.cancelled.clear()
        held.set()  # "a" is being submitted now, and "b" waits for the thread
        await until(lambda: pairing.cancelled)
        assert (pairing.submitted, pairing.cancelled) == (["a"], ["a"])
        pairing.emit(final("a", 0, FINAL.CANCELLED))
        assert await host.drain(SOON_S)


# -- readers that do not read -----------------------------------------------------------------------------------------


@in_a_loop
async def test_a_reader_that_stops_reading_costs_bounded_memory_and_its_request() -> None:
    async with scripted(max_unread=100) as (pairing, host):
        stream = host.stream(request("a"))
        asked = asyncio.ensure_future(anext(stream))
        await until(lambda: pairing.submitted)
        pairing.emit(token("a", 0))
        assert await asked == token("a", 0)
        other = await begun(pairing, host, "b")
        tracemalloc.start()
        for start in range(1, 20_001, 200):
            await until(lambda: not pairing.events)
            pairing.emit(*(token("a", index) for index in range(start, start + 200)))
        pairing.emit(final("a", 20_001), final("b", 0))
        assert await other == [final("b", 0)]
        held_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert held_bytes < 1 << 20  # 20,000 events are 5 MB
        assert pairing.cancelled == ["a"]
        rest = await read(stream)
        assert [event.index for event in rest] == list(range(1, 102))
        assert rest[-1].finish_reason is FINAL.FAILED
        assert isinstance(rest[-1].error, pd.RequestError)
        assert "left 100 events unread" in str(rest[-1].error)


@in_a_loop
async def test_a_loop_that_stands_still_is_told_once() -> None:
    async with scripted() as (pairing, host):
        tasks = [await begun(pairing, host, name) for name in "abc"]
        loop, calls = asyncio.get_running_loop(), list[Any]()
        call = loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *given: (calls.append(given[0]), call(*given))[1]  # type: ignore[method-assign]
        for index in range(50):
            pairing.emit(*(token(name, index) for name in "abc"))
            end = time.monotonic() + SOON_S
            while pairing.events and time.monotonic() < end:
                time.sleep(0.001)  # noqa: ASYNC251 - this is the standstill
        time.sleep(0.01)  # noqa: ASYNC251 - until the last step's events are put
        assert calls.count(host._tell) == 1
        pairing.emit(*(final(name, 50) for name in "abc"))
        assert [len(events) for events in await asyncio.gather(*tasks)] == [51, 51, 51]


@in_a_loop
async def test_a_reader_with_a_backlog_lets_others_run() -> None:
    async with scripted() as (pairing, host):
        stream = host.stream(request("a"))
        asked = asyncio.ensure_future(anext(stream))
        await until(lambda: pairing.submitted)
        pairing.emit(*(token("a", index) for index in range(1000)), final("a", 1000))
        await asked
        await host.drain(SOON_S)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        assert len(await read(stream)) == 1000
        counting.cancel()
        assert turns >= 1000 // aio.MAX_AT_ONCE


# -- the loop goes on -------------------------------------------------------------------------------------------------


@in_a_loop
@pytest.mark.parametrize("what", ["submit", "step", "close", "add"])
async def test_the_loop_goes_on_while_the_pairing_is_busy(what: str) -> None:
    async with scripted() as (pairing, host):
        busy, released = threading.Event(), threading.Event()

        def block(*_: object) -> list[pd.TokenEvent]:
            busy.set()
            assert released.wait(SOON_S), f"{what} stopped the loop"
            return []

        at_first = getattr(pairing, what, None)
        setattr(pairing, what, block)
        if what == "submit":
            doing = asyncio.create_task(read(host.stream(request("a"))))
        elif what == "add":
            doing = asyncio.create_task(host.add(None))  # type: ignore[arg-type]
        elif what == "close":
            doing = asyncio.create_task(host.close())
        else:
            doing = asyncio.create_task(asyncio.sleep(0))
            pairing.emit(token("nobody", 0))
        await until(busy.is_set)
        released.set()
        setattr(pairing, what, at_first)
        doing.cancel()
        await asyncio.gather(doing, return_exceptions=True)


@in_a_loop
@pytest.mark.timed
async def test_a_heartbeat_is_never_10_ms_late() -> None:
    """On a busy machine any thread may be late, so that one run of several has to be quiet."""

    async def beat(lags: list[float]) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - began - 0.001)

    worst: list[float] = []
    while not worst or (min(worst) > 0.01 and len(worst) < 15):
        lags: list[float] = []
        with local(num_pages=512) as setup:
            async with hosted(setup) as host:
                beating = asyncio.create_task(beat(lags))
                streams = [host.stream(request(None, 60, prompt=prompt_of(100, seed=n))) for n in range(24)]
                await asyncio.gather(*map(read, streams))
                beating.cancel()
        worst.append(max(lags))
    assert min(worst) < 0.01, worst


# -- ends -------------------------------------------------------------------------------------------------------------


@in_a_loop
async def test_closing_ends_every_stream_once() -> None:
    with local(num_pages=512) as setup:
        async with pd.aio.AsyncPairing(setup.pairing) as host:
            hang(setup.prefills[0])  # none begins before all are submitted
            tasks = [asyncio.create_task(read(host.stream(request(str(n), 480)))) for n in range(4)]
            await until(lambda: setup.pairing.num_unfinished == 4)
            recover(setup.prefills[0])
            await until(lambda: setup.decodes[0].load().num_tokens > 8)
        streams = by_request([event for task in tasks for event in await task])
        assert len(streams) == 4
        for events in streams.values():
            assert events[-1].finish_reason is FINAL.CANCELLED
            assert tuple(tokens_of(events))[:12] == reference("v3", PROMPT, 12).tokens[: len(events) - 1]
        with pytest.raises(pd.RequestError, match="is closed"):
            await anext(host.stream(request("late")))
        await host.close()
        assert all(engine.closed for engine in setup.engines)


@in_a_loop
async def test_a_step_that_raises_ends_every_stream_once_and_says_why() -> None:
    async with scripted() as (pairing, host):
        tasks = [await begun(pairing, host, name) for name in "ab"]

        def fail() -> None:
            if not pairing.is_closed:
                raise ZeroDivisionError("a policy divides")

        pairing.on_step = fail
        pairing.emit(token("a", 0))  # it comes with the last events
        streams = [await task for task in tasks]
        assert [len(events) for events in streams] == [2, 1]
        for events in streams:
            assert events[-1].finish_reason is FINAL.FAILED
            assert str(events[-1].error) == "a step of the pairing failed: ZeroDivisionError: a policy divides"
        assert pairing.is_closed
        with pytest.raises(pd.PDInferError, match="closed: a step of the pairing failed: ZeroDiv") as refused:
            await anext(host.stream(request("c")))
        assert refused.value.code == "INTERNAL"  # a server answers 503: no other request would be served either
        with pytest.raises(pd.PDInferError, match="is closed: a step"):
            await host.remove(None, drain_s=1.0)  # type: ignore[arg-type]


@in_a_loop
async def test_a_pairing_that_cannot_even_be_closed_ends_every_stream_once() -> None:
    async with scripted() as (pairing, host):
        pairing.removal = lambda port, drain_s: iter(lambda: 1.0, None)  # one that does not end
        removing = asyncio.create_task(host.remove(None, drain_s=1.0))  # type: ignore[arg-type]
        tasks = [await begun(pairing, host, name) for name in "ab"]
        pairing.emit(token("a", 0))
        await until(lambda: not pairing.events)
        pairing.close = lambda: 1 // 0
        await host.close()
        streams = [await task for task in tasks]
        assert [[event.index for event in events] for events in streams] == [[0, 1], [0]]
        assert all(events[-1].finish_reason is FINAL.FAILED for events in streams)
        with pytest.raises(pd.RequestError, match="was closed"):
            await removing


def test_a_host_whose_loop_has_ended_closes_its_pairing() -> None:
    pairing: Any = Scripted()
    kept: list[object] = []

    async def main() -> None:
        host = await pd.aio.AsyncPairing(pairing).__aenter__()
        kept.append(host)
        await begun(pairing, host, "a")

    asyncio.run(main())
    pairing.emit(token("a", 0))
    wait_until(lambda: pairing.is_closed)
    check_threads_ended()
    gc.collect()


@in_a_loop
async def test_streams_are_read_in_the_loop_that_was_entered() -> None:
    pairing: Any = Scripted()
    async with pd.aio.AsyncPairing(pairing) as host:

        async def read() -> None:
            async with asyncio.timeout(FAR_S):
                await anext(host.stream(request("a")))

        with pytest.raises(pd.ConfigError, match="entered in another event loop; stream in that one"):
            await asyncio.to_thread(asyncio.run, read())


# -- ports ------------------------------------------------------------------------------------------------------------


@in_a_loop
async def test_ports_join_and_leave_while_streams_go_on() -> None:
    pools = [pool_of(model_of()) for _ in range(3)]
    with join(model_of(), "loopback", prefill_pools=pools[:1], decode_pools=pools[1:]) as setup:
        leaving = setup.decodes[0]
        async with hosted(setup) as host:
            tasks = [asyncio.create_task(read(host.stream(request(str(n), 12)))) for n in range(8)]
            await until(lambda: leaving.load().num_tokens)
            await host.remove(leaving, drain_s=SOON_S)
            assert leaving not in setup.pairing.ports
            assert setup.pairing.stats.num_moved == 0  # it finished what it had
            for task in tasks:
                assert tokens_of(await task) == list(reference("v3", PROMPT, 12).tokens)
            await host.add(leaving)
            assert leaving in setup.pairing.ports
            with pytest.raises(pd.ConfigError, match="is a port of this pairing already"):
                await host.add(leaving)


@in_a_loop
async def test_events_come_while_a_port_leaves() -> None:
    async with scripted() as (pairing, host):
        came = threading.Event()

        def removal(port: object, drain_s: float) -> Iterator[float]:
            end = time.monotonic() + SOON_S
            while not came.is_set() and time.monotonic() < end:
                yield 1.0

        pairing.removal = removal
        removing = asyncio.create_task(host.remove(None, drain_s=1.0))  # type: ignore[arg-type]
        reading = await begun(pairing, host, "a")
        await asyncio.sleep(2 * aio.WAIT_S)
        pairing.emit(final("a", 0))
        await reading
        assert not removing.done()
        came.set()
        await removing

        def impossible(port: object, drain_s: float) -> Iterator[float]:
            raise pd.TransferError("it is stuck")
            yield

        pairing.removal = impossible
        with pytest.raises(pd.TransferError, match="it is stuck"):
            await host.remove(None, drain_s=1.0)  # type: ignore[arg-type]


@in_a_loop
async def test_draining_ends_with_the_last_stream_or_the_time() -> None:
    async with scripted() as (pairing, host):
        assert await host.drain(0.0)
        reading = await begun(pairing, host, "a")
        assert not await host.drain(0.01)
        draining = asyncio.create_task(host.drain(SOON_S))
        await asyncio.sleep(0)
        pairing.emit(token("a", 0), final("a", 1))
        assert await draining
        assert len(await reading) == 2


# -- several requests at once, and who else gets the events ------------------------------------------------------------


@in_a_loop
async def test_several_requests_are_one_stream_and_leaving_it_leaves_all() -> None:
    seen: list[pd.TokenEvent] = []
    with local() as setup:
        async with hosted(setup, on_events=seen.extend) as host:
            events = by_request([event async for event in host.generate(request(n, 4) for n in "abc")])
            expected = list(reference("v3", PROMPT, 4).tokens)
            assert {name: tokens_of(one) for name, one in events.items()} == dict.fromkeys("abc", expected)
            async with contextlib.aclosing(host.generate([request("d", 60), request("e", 60)])) as left:
                await anext(left)
    ended = [(event.request_id, event.finish_reason) for event in seen if event.finish_reason is not None]
    assert sorted(ended, key=lambda end: end[0]) == [
        *((name, FINAL.LENGTH) for name in "abc"),
        *((name, FINAL.CANCELLED) for name in "de"),
    ]


@in_a_loop
async def test_what_one_of_several_requests_raises_is_raised_and_the_others_are_left() -> None:
    with local() as setup:
        async with hosted(setup) as host:
            with pytest.raises(pd.RequestError, match="is empty"):
                async for _ in host.generate([request("a", 60), pd.Request(prompt=())]):
                    pass


def test_who_gets_the_events_has_to_be_callable() -> None:
    nothing: Any = 3
    with pytest.raises(pd.ConfigError, match="on_events must be a function"):
        aio.AsyncPairing(Scripted(), on_events=nothing)  # type: ignore[arg-type]


# -- health -----------------------------------------------------------------------------------------------------------


@in_a_loop
async def test_health_says_whether_a_host_serves_with_all_that_it_has() -> None:
    state = HealthState
    setup = local()
    host = pd.aio.AsyncPairing(setup.pairing)
    assert (host.health().state, host.health().takes_requests) == (state.DOWN, False)
    async with host:
        assert host.health() == Health(state.READY)
        hang(setup.prefills[0])  # so that the request does not end before it is looked at
        reading = asyncio.create_task(read(host.stream(request("a"))))
        await until(lambda: host.num_unfinished)
        draining = asyncio.create_task(host.drain(SOON_S))
        await asyncio.sleep(0)
        assert host.health().state is state.DRAINING
        reading.cancel()
        assert await draining
        assert host.health().takes_requests
        setup.engines[1].close()
        await until(lambda: host.health().state is state.DOWN)
        assert host.health().reasons == ("there is no decode",)
    assert host.health().reasons == ("the host is closed",)


@in_a_loop
async def test_health_is_degraded_while_ports_are_lost_or_do_not_reach_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with hosted(local()) as host:
        pairing, (decode, prefill) = host.pairing, host.pairing.ports
        broken = attrs.evolve(
            pairing.stats, ports_away=(decode.address,), links_down=((prefill.address, decode.address),)
        )
        with monkeypatch.context() as patch:
            patch.setattr(type(pairing), "stats", property(lambda _: broken))
            health = host.health()
        assert (health.state, health.takes_requests) == (HealthState.DEGRADED, True)
        assert [str(decode.address) in reason for reason in health.reasons] == [True, True]
        async with contextlib.aclosing(host.stream(request("a", 64))) as stream:
            await anext(stream)
            old = attrs.evolve(decode.load(), step_age_s=60.0)
            monkeypatch.setattr(decode, "load", lambda: old)
            assert "has not stepped for 60 s" in host.health().reasons[0]
            monkeypatch.undo()
