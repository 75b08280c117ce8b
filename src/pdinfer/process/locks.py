"""No lock stays closed after an interrupt.

A handler of a signal may raise between any two lines, also where a `with` already has its lock but not yet, or no
longer, the duty to give it back. So the outermost call that was interrupted opens the locks that its thread still
holds.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from pdinfer.errors import PDInferError
from pdinfer.process.signals import HeldBack

Args = ParamSpec("Args")
Result = TypeVar("Result")


class LetsGo(Protocol):
    """An object that has locks."""

    def let_go(self) -> None:
        """Open those that the calling thread holds."""


Owner = TypeVar("Owner", bound=LetsGo)
Method = Callable[Concatenate[Owner, Args], Result]

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
