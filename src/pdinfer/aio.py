"""A Pairing for asyncio: one thread steps it, and coroutines read the events of their requests.

    stream ──► a thread that submits ──► Pairing ◄── a thread that steps ──► a buffer per request
       ▲                                                                            │
       └───────────────── one call of the loop for all events of a step ◄───────────┘

The event loop belongs to the host and is never waited for, and no call of it waits for the Pairing.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from pdinfer.checks import clip, is_int, typed
from pdinfer.errors import ConfigError, Overloaded, PDInferError, RequestError
from pdinfer.log import log
from pdinfer.pairing.health import Health, HealthState
from pdinfer.pairing.pairing import Pairing
from pdinfer.pairing.port import DecodePort, PrefillPort
from pdinfer.pairing.request import failed
from pdinfer.process.forked import NotCopied
from pdinfer.process.threads import start, starting
from pdinfer.types import FinishReason, Request, TokenEvent

MAX_UNREAD = 4096
WAIT_S = 0.05
"""How long the stepping thread sleeps at most. A change of ports, or the end, may be noticed this late."""
MAX_AT_ONCE = 32
"""After so many events that were there already, a reader lets other tasks run."""


class AsyncPairing(NotCopied):
    """Serves the requests of coroutines with a Pairing, which it steps in a thread of its own and closes in the end:

        async with pd.aio.AsyncPairing(pairing) as host:
            async for event in host.stream(request):
                ...

    It belongs to the event loop in which it is entered. `pairing.cancel`, `pairing.stats` and `pairing.ports` may be
    used meanwhile. A stream whose reader has left `max_unread` events unread is ended, so that memory is bounded by the
    number of streams. When a step raises, every stream ends FAILED with that error and the Pairing is closed.

    `on_events` gets the events of every step in the thread that steps, those of streams that were left included: for
    example `metrics.Recorder().read`. When it raises, so does the step. Raises ConfigError for a bad `max_unread`, and
    for an `on_events` that cannot be called.
    """

    def __init__(
        self,
        pairing: Pairing,
        *,
        max_unread: int = MAX_UNREAD,
        on_events: Callable[[list[TokenEvent]], object] | None = None,
    ) -> None:
        if not is_int(max_unread) or max_unread < 1:
            raise ConfigError(f"max_unread must be an int of at least 1, got {clip(max_unread)}")
        if on_events is not None and not callable(on_events):
            raise ConfigError(f"on_events must be a function of a list of events or None, got {clip(on_events)}")
        self.pairing = pairing
        self._on_events = on_events
        self._max_unread = max_unread
        self._streams: dict[str, _Stream] = {}  # until the last event of each has come
        self._fresh: dict[_Stream, None] = {}
        self._is_told = False
        self._changes: deque[tuple[Iterator[float], asyncio.Future[Any]]] = deque()
        self._failure: PDInferError | None = None
        self._is_closing = False
        self._num_drains = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news = asyncio.Event()
        self._submitting = ThreadPoolExecutor(1, thread_name_prefix="pdinfer-submit")
        self._stepping = threading.Thread(target=self._run, name="pdinfer-step", daemon=True)

    def __repr__(self) -> str:
        return f"AsyncPairing({self.num_unfinished} streams, {self.pairing!r})"

    async def __aenter__(self) -> AsyncPairing:
        if self._loop is not None or self._is_closing:
            raise ConfigError("an AsyncPairing can be entered once, and not behind `close`; make another one")
        self._loop = asyncio.get_running_loop()
        try:
            with starting("pdinfer-submit"):
                self._submitting.submit(int)  # or else a stream could find that there is no thread for it
            start(self._stepping)
        except Overloaded:
            self._loop = None
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def num_unfinished(self) -> int:
        """How many streams have begun whose last event has not come yet, read or not."""
        return len(self._streams)

    def health(self) -> Health:
        """Return how the host does now, see `Pairing.health`. DRAINING while `drain` waits, DOWN when the host was not
        entered, is closed, or a step has failed."""
        if self._failure is not None:
            return Health(HealthState.DOWN, (str(self._failure),))
        if self._is_closing or self._loop is None:
            return Health(HealthState.DOWN, ("the host is closed" if self._is_closing else "the host was not entered",))
        health = self.pairing.health()
        if self._num_drains and health.takes_requests:
            return Health(HealthState.DRAINING, (f"{self.num_unfinished} streams have not ended",))
        return health

    async def stream(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Submit the request when the first event is asked for, and yield its events. The last one, and no other, has a
        `finish_reason`.

        The request is cancelled when the iterator is left by a break or an exception, closed, or when the task that
        waits for an event is cancelled. An iterator that a variable holds is left when it is closed: use
        `contextlib.aclosing`. Where `max_unread` events wait, a last one, FAILED with RequestError, replaces the next.

        The first event raises what `Pairing.submit` raises (RequestError, Overloaded); RequestError when the host is
        closed, and PDInferError when a failed step has closed it; ConfigError for what is no Request or when the host
        was not entered.
        """
        stream = self._begin(request)
        loop = asyncio.get_running_loop()
        try:
            submitted = loop.run_in_executor(self._submitting, self._submit, request, stream)
            error = await asyncio.shield(submitted)  # or else one that waits for the thread would never be submitted
            if error is not None:
                raise error
            while True:
                event = await stream.next()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            if stream.leave():
                self.pairing.cancel(stream.request_id)

    @typed
    async def generate(self, requests: Iterable[Request]) -> AsyncGenerator[TokenEvent, None]:
        """Stream several requests at once, and yield their events as they come: several answers to one question, say.
        Every request ends in an event with a `finish_reason`, which has its `request_id`. Leaving the iterator leaves
        all of the streams. What one of them raises is raised, and the others are left."""
        streams = [self.stream(request) for request in requests]
        reading = {asyncio.ensure_future(anext(stream)): stream for stream in streams}
        try:
            while reading:
                for read in (await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED))[0]:
                    event, stream = read.result(), reading.pop(read)
                    if event.finish_reason is None:
                        reading[asyncio.ensure_future(anext(stream))] = stream
                    yield event
        finally:
            for read in reading:
                read.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            for stream in streams:
                await stream.aclose()

    async def add(self, port: PrefillPort | DecodePort) -> None:
        """Connect a port and use it; streams go on meanwhile. Raises what `Pairing.add` raises. Cancelling the task
        does not undo it."""
        await asyncio.to_thread(self.pairing.add, port)

    async def remove(self, port: PrefillPort | DecodePort, *, drain_s: float) -> None:
        """Let go of a port as `Pairing.remove` does; streams go on meanwhile. Raises as `stream` does when the host is
        closed before. Cancelling the task does not stop it."""
        self._check_open()
        await self._changed(self.pairing.removal(port, drain_s=drain_s))

    async def switch(
        self, port: PrefillPort | DecodePort, role: str, *, drain_s: float, leaves_none: bool = False
    ) -> PrefillPort | DecodePort:
        """Let a port serve the other role, and return the one that it has become, as `Pairing.switch` does; in all else
        like `remove`."""
        self._check_open()
        switching = self.pairing.switching(port, role, drain_s=drain_s, leaves_none=leaves_none)
        changed: PrefillPort | DecodePort = await self._changed(switching)
        return changed

    async def _changed(self, change: Iterator[float]) -> Any:
        """Have the thread that steps go on with a change of ports, and return what came of it."""
        changed = asyncio.get_running_loop().create_future()
        self._changes.append((change, changed))
        return await asyncio.shield(changed)

    @typed
    async def drain(self, timeout_s: float) -> bool:
        """Wait until the last event of every stream has come or `timeout_s` is over, and return whether they all have.
        Streams may begin meanwhile, and `health` says that they should not."""
        self._num_drains += 1
        try:
            async with asyncio.timeout(timeout_s):
                while self._streams:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
        finally:
            self._num_drains -= 1
        return not self._streams

    async def close(self) -> None:
        """End unfinished streams with CANCELLED and close the Pairing, after a step that is under way. Readers still
        get what they have not read. A second call waits for the first."""
        self._is_closing = True
        # in a thread, since the loop that it was entered in may be another one, and gone
        await asyncio.to_thread(self.pairing.close if self._loop is None else self._stepping.join)
        self._submitting.shutdown(wait=False)

    # -- in the loop --------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._loop is None:
            raise ConfigError("the AsyncPairing was not entered; write `async with AsyncPairing(pairing) as host`")
        if asyncio.get_running_loop() is not self._loop:  # whose readers are woken
            raise ConfigError("the AsyncPairing was entered in another event loop; stream in that one")
        if self._failure is not None:
            raise PDInferError(f"the host of the pairing is closed: {self._failure}")  # the request is not to blame
        if self._is_closing:
            raise RequestError("the host of the pairing is closed")

    def _begin(self, request: Request) -> _Stream:
        """Make a place for the events before the first can come."""
        self._check_open()
        if not isinstance(request, Request):
            raise ConfigError(f"stream takes a Request, got {clip(request)}")
        request_id = request.request_id
        if request_id in self._streams:
            raise RequestError(f"request_id {request_id!r} is in use by a request that has not ended")
        if not isinstance(request_id, str):
            request_id = os.urandom(8).hex()
        stream = _Stream(request_id, len(request.output), self._max_unread)
        self._streams[request_id] = stream
        return stream

    def _tell(self) -> None:
        """Wake the readers for whom events have come."""
        self._is_told = False  # first, so that what comes from now on is told again
        while self._fresh:
            stream, _ = self._fresh.popitem()
            stream.came.set()
        self._news.set()

    def _stop(self) -> None:
        """Note that nothing will come any more."""
        closed = self._failure or RequestError("the host of the pairing was closed")
        for request_id in list(self._streams):
            stream = self._streams.pop(request_id)
            stream.fail(closed)
            stream.came.set()
        for _, changed in self._changes:
            changed.set_exception(closed)
        self._news.set()

    # -- in other threads ---------------------------------------------------------------------------------------------

    def _submit(self, request: Request, stream: _Stream) -> Exception | None:
        """Submit a request, unless its reader has left already, and return the error. A long prompt takes a while to
        check, and the seconds of a request count from here, so neither the loop nor a step may be waited for."""
        error: Exception | None = None
        try:
            if stream.has_reader():
                if request.request_id is None:
                    request = attrs.evolve(request, request_id=stream.request_id)
                self.pairing.submit(request)
                stream.is_submitted = True  # before the look: a reader that leaves now cancels it, or we do
                if not stream.has_reader():  # it left
                    self.pairing.cancel(stream.request_id)
                return None
        except Exception as problem:  # noqa: BLE001 - raised in the coroutine
            error = problem
        self._streams.pop(stream.request_id, None)
        self._call(self._news.set)
        return error

    def _run(self) -> None:
        assert self._loop is not None
        try:
            while not self._is_closing and not self._loop.is_closed():
                self._change()
                if self.pairing.wait(WAIT_S):
                    self._deliver(self.pairing.step())
        except BaseException as error:  # noqa: BLE001 - whatever it is, readers must not wait for ever
            log.exception("a step of an AsyncPairing failed; it is closed")
            self._failure = PDInferError(f"a step of the pairing failed: {type(error).__name__}: {error}")
        try:
            self.pairing.close()
            self._deliver(self.pairing.step())
        except BaseException:  # noqa: BLE001 - as above
            log.exception("an AsyncPairing could not be closed whole")
        self._submitting.shutdown(wait=False)  # the loop may be gone, and nobody else ends it then
        self._call(self._stop)

    def _change(self) -> None:
        """Go on with each change of ports, and settle those that have ended."""
        for _ in range(len(self._changes)):
            change, changed = self._changes.popleft()
            try:
                next(change)
            except StopIteration as ended:
                self._call(changed.set_result, ended.value)
            except Exception as error:  # noqa: BLE001 - raised in the coroutine
                self._call(changed.set_exception, error)
            else:
                self._changes.append((change, changed))

    def _deliver(self, events: list[TokenEvent]) -> None:
        """Put events where their readers find them, and have the loop tell them once."""
        if self._on_events is not None and events:
            self._on_events(events)
        for event in events:
            stream = self._streams.get(event.request_id)
            if stream is None:  # of a request that the host submitted beside its streams
                continue
            if event.finish_reason is not None:
                del self._streams[event.request_id]
                if self._failure is not None and event.finish_reason is FinishReason.CANCELLED:
                    event = attrs.evolve(event, finish_reason=FinishReason.FAILED, error=self._failure)
            if not stream.put(event):
                self.pairing.cancel(event.request_id)
            self._fresh[stream] = None
        if events and not self._is_told:
            self._is_told = True
            self._call(self._tell)

    def _call(self, callback: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed, and nobody reads any more
            self._is_closing = True


class _Stream:
    """The events of one request on their way from the thread that steps to the reader in the loop."""

    def __init__(self, request_id: str, index: int, max_unread: int) -> None:
        self.request_id = request_id
        self.came = asyncio.Event()
        self.is_submitted = False  # until then the id may be that of a request of somebody else
        self._is_left = False
        self._index = index
        self._max_unread = max_unread
        self._unread: deque[TokenEvent] = deque()
        self._has_ended = False
        self._num_at_once = 0

    def put(self, event: TokenEvent) -> bool:
        """Take an event, unless nobody reads it any more. Return False, and end the stream, when there is no place for
        it."""
        if self._is_left or self._has_ended:
            return True
        self._index = event.index
        if event.finish_reason is None and len(self._unread) >= self._max_unread:
            self.fail(
                RequestError(
                    f"the reader of the stream left {self._max_unread} events unread, so the request was cancelled; "
                    "read faster, or raise max_unread"
                )
            )
            return False
        self._index += event.token is not None
        self._has_ended = event.finish_reason is not None
        self._unread.append(event)
        return True

    def fail(self, error: PDInferError) -> None:
        """End the stream, if it has not ended."""
        if not self._has_ended:
            self._has_ended = True
            self._unread.append(failed(self.request_id, error, index=self._index))

    def has_reader(self) -> bool:
        return not self._is_left

    def leave(self) -> bool:
        """Drop what has come and what may come. Return whether the request goes on for nobody."""
        self._is_left = True
        self._unread.clear()
        return self.is_submitted and not self._has_ended

    async def next(self) -> TokenEvent:
        """Wait for the next event."""
        if self._num_at_once == MAX_AT_ONCE:
            self._num_at_once = 0
            await asyncio.sleep(0)
        while not self._unread:
            self._num_at_once = 0
            self.came.clear()
            await self.came.wait()
        self._num_at_once += 1
        return self._unread.popleft()
