"""Ctrl-C waits for the end of a step, and no lock stays closed after any other interrupt.

A handler of a signal may raise between any two lines, also where a `with` already has its lock but not yet, or no
longer, the duty to give it back. So the outermost call that was interrupted opens the locks that its thread still
holds.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps: its enums would take 20 us of each step
import functools
import threading
import weakref
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pdinfer.errors import PDInferError

Args = ParamSpec("Args")
Result = TypeVar("Result")


class LetsGo(Protocol):
    """An object that has locks."""

    def let_go(self) -> None:
        """Open those that the calling thread holds."""


Owner = TypeVar("Owner", bound=LetsGo)
Method = Callable[Concatenate[Owner, Args], Result]

SIGINT: int = _signal.SIGINT
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
    """Make a method leave no lock closed, wherever Ctrl-C hits it. The next step finds what it leaves half done."""

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


class HeldBack:
    """Hold Ctrl-C back until the context ends, and raise KeyboardInterrupt there. A second one is raised at once, for
    the user whose step takes too long.

    This is so in the main thread where SIGINT has Python's own handler, which would raise between any two lines. Any
    other handler is the host's, and stays."""

    __slots__ = ("_came", "_holds")

    def __enter__(self) -> None:
        self._came = False
        self._holds = (
            threading.current_thread() is threading.main_thread()
            and _signal.getsignal(SIGINT) is _signal.default_int_handler
        )
        if self._holds:
            _signal.signal(SIGINT, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._holds:
            return
        if _signal.getsignal(SIGINT) == self._note:  # or the host has set its own meanwhile
            _signal.signal(SIGINT, _signal.default_int_handler)
        if self._came and not isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            _signal.signal(SIGINT, _signal.default_int_handler)
            raise KeyboardInterrupt
        self._came = True
