"""Locks that an interrupt cannot keep closed for ever.

Python may raise KeyboardInterrupt between any two lines, also where a `with` has its lock and not yet, or no more, the
duty to give it back. Who ends a call that was interrupted lets go of what its thread still holds.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pdinfer.errors import PDInferError

Args = ParamSpec("Args")
Result = TypeVar("Result")


class LetsGo(Protocol):
    """What has locks."""

    def let_go(self) -> None:
        """Opens those that the calling thread holds."""


Owner = TypeVar("Owner", bound=LetsGo)
Method = Callable[Concatenate[Owner, Args], Result]

_locks: weakref.WeakSet[threading.RLock] = weakref.WeakSet()


def new_lock() -> threading.RLock:
    """A lock that `let_go` knows."""
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def let_go() -> None:
    """Opens every lock of `new_lock` that the calling thread holds. For the outermost call that takes such locks."""
    for lock in list(_locks):
        open_lock(lock)


def open_lock(lock: threading.RLock) -> None:
    """Opens the lock if the calling thread holds it, however often it took it."""
    try:
        while True:
            lock.release()
    except RuntimeError:  # it is not ours, or not any more
        pass


def interruptible(method: Method[Owner, Args, Result]) -> Method[Owner, Args, Result]:
    """A method that leaves no lock closed, wherever Ctrl-C hits it. What it leaves half done, the next step finds."""

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
