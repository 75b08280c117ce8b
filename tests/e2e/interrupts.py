"""A host that is interrupted at any line of pdinfer, or at any call, in the thread that serves."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import attrs

import pdinfer as pd
from tests.e2e.setups import PROMPT, Setup, by_request, collect, prompt_of, reference, request, tokens_of

LIBRARY = str(Path(pd.__file__).parent)
FACTORY = {"KeyboardInterrupt": KeyboardInterrupt, "SystemExit": SystemExit, "MemoryError": MemoryError}


@attrs.define
class Interrupter:
    """Raises `error` at the `at`-th line of the library that this thread comes to; never when `at` is negative, which
    counts lines, nor when `where` says that somebody else does."""

    at: int
    error: type[BaseException] = KeyboardInterrupt
    counts: Callable[[CodeType], bool] = lambda code: code.co_filename.startswith(LIBRARY)
    num_lines: int = 0
    where: str = ""

    @contextmanager
    def active(self) -> Iterator[None]:
        before = sys.gettrace()
        if not self.where:
            sys.settrace(self._call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if self.counts(frame.f_code) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            if self.num_lines == self.at:
                self.where = f"{frame.f_code.co_filename.removeprefix(LIBRARY)}:{frame.f_lineno}"
                sys.settrace(None)
                raise self.error
            self.num_lines += 1
        return self._line


class Alarm(Exception):
    """What a handler of the host raises."""


@attrs.define
class Signaller(Interrupter):
    """Sends this process a signal at that line, or behind the last one of a call, and its handler raises. Not where
    handlers are set: there Python calls one at fewer places than lines, and tests of their own say at which. Nor where
    a generator yields or ends: Python calls none there, and up to 3.11 an error of the trace drops the generator then
    without its `finally`."""

    counts: Callable[[CodeType], bool] = lambda code: (
        code.co_filename.startswith(LIBRARY) and not code.co_filename.endswith("process/locks.py")
    )

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" or (event == "return" and not frame.f_code.co_flags & CO_GENERATOR):
            if self.num_lines == self.at:
                self.where = f"{frame.f_code.co_filename.removeprefix(LIBRARY)}:{frame.f_lineno} ({event})"
                sys.settrace(None)
                signal.raise_signal(signal.SIGUSR1)
            self.num_lines += 1
        return self._line


@contextmanager
def alarming() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        yield
        assert signal.getsignal(signal.SIGUSR1) is ring, "a step left its own handler behind"
    finally:
        signal.signal(signal.SIGUSR1, before)


def serve(setup: Setup, name: str, events: list[pd.TokenEvent], *, count: int = 4) -> None:
    """Three prompts through `submit`, `step` and `wait`, one of which stops and one is cancelled, and then one through
    `generate`."""
    pairing = setup.pairing
    for at in range(2):
        prompt = prompt_of(7 + 6 * at, seed=at)
        stop = (reference("v3", prompt, 4).tokens[1:3],) if at else ()
        pairing.submit(request(f"{name}/{at}", count, prompt=prompt, stop=stop))
    for at in range(60):
        events += pairing.step()
        if not pairing.num_unfinished:
            break
        if at == 3:
            pairing.submit(request(f"{name}/cancelled", 40))
        if at == 6:
            pairing.cancel(f"{name}/cancelled")
        pairing.wait(0.05)
    for event in pairing.generate([request(f"{name}/generated", count)]):
        events.append(event)


def check_goes_on(setup: Setup, name: str, events: list[pd.TokenEvent]) -> None:
    """What was hit ends once, by name and with right tokens so far; the next request is answered rightly; no page is
    lost."""
    setup.pairing.submit(request(f"{name}/next", 4))
    streams = by_request(events + collect(setup.pairing))
    assert tokens_of(streams.pop(f"{name}/next")) == list(reference("v3", PROMPT, 4).tokens)
    for request_id, stream in streams.items():
        # nobody reads on where `generate` was left
        assert stream[-1].finish_reason is not None or request_id.endswith("/generated"), (request_id, stream[-1])
        if "/cancelled" not in request_id:
            at = request_id[-1]
            prompt = PROMPT if at == "d" else prompt_of(7 + 6 * int(at), seed=int(at))
            right = list(reference("v3", prompt, 4).tokens)
            assert tokens_of(stream) == right[: len(tokens_of(stream))], request_id
    setup.check_idle()


def interrupted(setup: Setup, name: str, interrupter: Interrupter) -> list[pd.TokenEvent]:
    """`serve`, until it is hit."""
    events: list[pd.TokenEvent] = []
    try:
        with interrupter.active():
            serve(setup, name, events)
    except BaseException as error:
        if not interrupter.where or interrupter.error not in chain(error):
            raise
    return events


def chain(error: BaseException | None) -> list[type[BaseException]]:
    """Its kind and those it came from."""
    kinds = []
    while error is not None:
        kinds.append(type(error))
        error = error.__cause__ or error.__context__
    return kinds
