"""What a handler of a signal raises waits for the end of a step, and no lock stays closed after any other interrupt.

Python calls handlers between any two lines of the main thread, and half a step cannot be told from a whole one.
What a process is out of, and what another thread sets, come at any line, too, also where a `with` already has its lock
but not yet, or no longer, the duty to give it back. So the outermost call that was interrupted opens the locks that its
thread still holds."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps: its enums would take 20 us of each step
import _thread
import contextlib
import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pdinfer.errors import ConfigError, PDInferError

Args = ParamSpec("Args")
Result = TypeVar("Result")


class LetsGo(Protocol):
    """An object that has locks."""

    def let_go(self) -> None:
        """Open those that the calling thread holds."""


Owner = TypeVar("Owner", bound=LetsGo)
Handler = Callable[[int, FrameType | None], object]
Method = Callable[Concatenate[Owner, Args], Result]

EXHAUSTED = (MemoryError, RecursionError)
"""What this process has no more of, or the host left no more of: the line that asked last is not to blame."""
HELD_S = 10.0
"""How long an error waits for the end of a step: a callback of the host may hang in it."""

_NAMES = ("HUP", "INT", "QUIT", "USR1", "USR2", "ALRM", "TERM", "CHLD", "XCPU", "VTALRM", "PROF")
_NUMBERS: tuple[int, ...] = tuple(getattr(_signal, f"SIG{name}") for name in _NAMES)
"""The signals that hosts handle. Others tell of faults."""

_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()


def new_lock() -> threading.RLock:
    """Return a lock that `let_go` knows."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def let_go() -> None:
    """Open every lock of `new_lock` that the calling thread holds. For the outermost call that takes such locks."""
    for lock in list(_locks):
        open_lock(lock)


def open_lock(lock: threading.RLock) -> None:
    """Open the lock if the calling thread holds it, however often it took it."""
    try:
        while True:
            lock.release()
    except RuntimeError:  # it is not ours, or not any more
        pass


def interruptible(method: Method[Owner, Args, Result]) -> Method[Owner, Args, Result]:
    """Make a method leave no lock closed, wherever an interrupt hits it. The next step finds what is half done."""

    @functools.wraps(method)
    def call(owner: Owner, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        try:
            return method(owner, *args, **kwargs)
        except PDInferError:
            raise
        except BaseException:
            owner.let_go()
            raise

    return call


def undivided(method: Method[Owner, Args, Result]) -> Method[Owner, Args, Result]:
    """Do the same for a method that does not wait, and hold back until its end what handlers of signals raise."""

    @functools.wraps(method)
    def whole(owner: Owner, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        with HeldBack():
            return method(owner, *args, **kwargs)

    return interruptible(whole)


def check_not_inside(owner: object, name: str) -> None:
    """Raise ConfigError where the method that calls this runs for the same owner further down this thread's stack: a
    callback of the host, or a handler of a signal, has called us from inside a step."""
    method = sys._getframe(1)  # noqa: SLF001 - there is no public name for it
    frame = method.f_back
    while frame is not None:
        if frame.f_code is method.f_code and frame.f_locals.get("self") is owner:
            raise ConfigError(
                f"a callback or a signal's handler has called a {name} from inside its own step: step it, drain it and "
                "generate when that step has returned; submit and cancel may be called anywhere"
            )
        frame = frame.f_back


class HeldBack:
    """Call the host's handlers of signals as ever, but hold back what one raises until the context ends, and raise it
    there. A second error is raised at once, and so is one that has waited for HELD_S.

    Handlers run in the main thread, so elsewhere this does nothing, nor does it inside another such context. A handler
    that is set meanwhile stays."""

    __slots__ = ("_error", "_handlers", "_holds", "_reminder")
    _reminder: _Reminder | None

    def __enter__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._error: BaseException | None = None
        self._reminder = None
        self._holds = threading.current_thread() is threading.main_thread()
        if self._holds:
            try:
                for number in _NUMBERS:
                    handler = _signal.getsignal(number)
                    if callable(handler) and not _is_held_back(handler):
                        self._handlers[number] = handler
                        _signal.signal(number, self._call)
            except BaseException:
                self._put_back()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._holds = False
            if self._reminder is not None:
                self._reminder.end()
        finally:
            self._put_back()
        held, self._error = self._error, None
        try:
            if held is not None and held is not error:
                raise held
        finally:
            del held  # or its traceback would keep itself, and what the step had

    def _put_back(self) -> None:
        self._holds = False
        try:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) == self._call:
                    _signal.signal(number, handler)
        except BaseException:  # one that is back has raised already
            self._put_back()
            raise

    def _call(self, number: int, frame: FrameType | None) -> None:
        """Stand in for the host's handler."""
        if self._error is not None and self._reminder is not None and self._reminder.comes(number):
            raise self._error
        try:
            self._handlers[number](number, frame)
        except BaseException as error:
            if not self._holds:  # the host has kept this as its handler
                raise
            is_first, self._error = self._error is None, error
            if not is_first:
                raise
            with contextlib.suppress(RuntimeError):  # there is no thread: a second error still ends the step
                self._reminder = _Reminder(number)
                self._reminder.start()  # when it is known here: what it sends may come at once


def _is_held_back(handler: Handler) -> bool:
    owner = getattr(handler, "__self__", None)
    return isinstance(owner, HeldBack) and owner._holds  # noqa: SLF001 - another one of this class


class _Reminder:
    """Sends the main thread a signal again in HELD_S, unless it is ended before."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._was_sent = self._has_come = False
        self._may_send, self._ended = _thread.allocate_lock(), _thread.allocate_lock()
        self._ended.acquire()

    def start(self) -> None:
        _thread.start_new_thread(self._run, ())  # `threading` has locks, which the main thread may hold just now

    def _run(self) -> None:
        if not self._ended.acquire(timeout=HELD_S) and self._may_send.acquire(blocking=False):
            self._was_sent = True
            _signal.pthread_kill(threading.main_thread().ident, self._number)

    def comes(self, number: int) -> bool:
        """Return whether a signal is what this has sent."""
        is_this = self._was_sent and not self._has_come and number == self._number
        self._has_come |= is_this
        return is_this

    def end(self) -> None:
        """Keep it from sending, or wait for what it has sent, which is not for the host."""
        if self._may_send.acquire(blocking=False):
            self._ended.release()
        else:
            while not self._has_come:
                time.sleep(0.001)
