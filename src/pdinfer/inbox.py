"""What every stepped object shares: a box that any thread may fill, and a sleep that ends when there is work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from pdinfer.checks import MAX_WAIT_S
from pdinfer.log import log
from pdinfer.process.forked import OfOneProcess
from pdinfer.process.locks import EXHAUSTED, HeldBack, new_lock

T = TypeVar("T")


def tell(listeners: Iterable[Callable[[], None]]) -> None:
    """Call each, and log what one raises: it is the host's, and neither who submits nor a link is to blame."""
    for listener in listeners:
        try:
            listener()
        except EXHAUSTED:
            raise
        except Exception:  # noqa: BLE001 - whatever a host's raises
            log.exception("a listener failed")


class Inbox(OfOneProcess, Generic[T]):
    """Items that any thread puts in and that the stepping thread takes out. `listen` lets an owner of several boxes
    sleep once for all of them."""

    _ends = frozenset({"put", "wake"})  # garbage collection calls them: see `leader`

    def __init__(self) -> None:
        self._changed = threading.Condition(new_lock())
        self._items: list[T] = []
        self._awake = False
        self._listeners: list[Callable[[], None]] = []

    def put(self, item: T) -> None:
        with HeldBack():
            with self._changed:
                self._items.append(item)
            self.wake()

    def take(self) -> list[T]:
        """Return everything put in since the last call, in order."""
        items: list[T] = []
        try:
            with self._changed:
                self._awake = False
                items, self._items = self._items, []
            return items
        except BaseException:  # an interrupted caller has not got them
            with self._changed:
                self._items = items + self._items
            raise

    def peek(self) -> list[T]:
        """Return the same without taking it."""
        with self._changed:
            return list(self._items)

    def wake(self) -> None:
        """End a sleep now or, when nobody sleeps, the next one."""
        with self._changed:
            self._awake = True
            self._changed.notify_all()
            listeners = list(self._listeners)
        tell(listeners)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener`, from any thread, on every wake."""
        with self._changed:
            self._listeners.append(listener)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until `wake` or the end of `timeout_s`. Return whether it was woken."""
        with self._changed:  # whose clock is not one that a host's tests have stopped
            wait_s = min(timeout_s, MAX_WAIT_S)
            return self._awake or (wait_s > 0 and self._changed.wait_for(lambda: self._awake, wait_s))
