"""Links a port that joins a Pairing to the ports at work, without delaying the thread that steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import ClassVar
from weakref import WeakKeyDictionary, ref

from pdinfer.errors import ConfigError, LayoutMismatch, TransferError
from pdinfer.log import log
from pdinfer.pairing.intake import Intake
from pdinfer.pairing.port import Port
from pdinfer.pairing.ports import Ports
from pdinfer.process.threads import start
from pdinfer.types import PeerAddress

FIRST_TRY_S = 1.0
"""How long each pair may take in the first round. If any port answers, one that does not costs no more than this."""


def link(port: Port, others: Iterable[Port], *, timeout_s: float) -> dict[PeerAddress, TransferError]:
    """Connect a port to the ports of the other side, and return which of them cannot be reached now, and why.

    One link is enough to begin with. The others are down, and the Broker has them dialled until they are there. When
    no port could be reached, all are tried once more, within `timeout_s` in total. Raises LayoutMismatch."""
    known = {other.address: other for other in others}
    end = time.monotonic() + timeout_s
    unlinked = _try(port, known, min(FIRST_TRY_S, timeout_s))
    left_s = end - time.monotonic()
    if unlinked and len(unlinked) == len(known) and left_s > 0:
        unlinked = _try(port, known, left_s / len(known))
    if len(unlinked) < len(known):
        for address, error in unlinked.items():
            log.warning("a link is missing and dialled again: %s, %s: %s", port.address, address, error)
    return unlinked


def _try(port: Port, others: dict[PeerAddress, Port], timeout_s: float) -> dict[PeerAddress, TransferError]:
    unlinked = {}
    for address, other in others.items():
        try:
            _connect(port, other, timeout_s)
        except LayoutMismatch:
            raise
        except TransferError as error:
            unlinked[address] = error
    return unlinked


def _connect(one: Port, other: Port, timeout_s: float) -> None:
    """Make the prefill dial every rank of the decode."""
    prefill, decode = (one, other) if one.role == "prefill" else (other, one)
    for rank in decode.addresses:
        prefill.connect(rank, timeout_s=timeout_s)


class _Attempt:
    """One attempt of a port to join."""

    is_given_up = False


class Joining:
    """The ports that are being linked, each in the thread that adds it or in one of its own. `find_lost` steps ports
    that did not answer. A port has one owner: another pairing over it would take events that are the first one's."""

    _owners: ClassVar[WeakKeyDictionary[Port, ref[Joining]]] = WeakKeyDictionary()

    def __init__(
        self, ports: Ports, intake: Intake, find_lost: Callable[[Iterable[Port]], None], timeout_s: float
    ) -> None:
        self._ports = ports
        self._intake = intake
        self._find_lost = find_lost
        self._timeout_s = timeout_s
        self._attempts: dict[PeerAddress, _Attempt] = {}

    def beside(self, port: Port) -> Iterator[float]:
        """Add a port in a thread of its own, see `Pairing.joining`."""
        attempt, end = _Attempt(), time.monotonic() + self._timeout_s
        joined = _beside(partial(self.add, port, attempt), then=self._intake.inbox.wake)
        try:
            while not joined.done():
                yield max(0.0, end - time.monotonic())
        finally:
            self._drop(port, attempt)
        joined.result()

    def _drop(self, port: Port, attempt: _Attempt) -> None:
        """End an attempt whose iterator is closed. Garbage collection closes it in any thread, whatever locks that
        holds, so this waits for none: where it would, the thread that joins finds out."""
        attempt.is_given_up = True
        if self._intake.lock.acquire(blocking=False):
            try:
                self._end(port, attempt)
            finally:
                self._intake.lock.release()

    def _end(self, port: Port, attempt: _Attempt) -> None:
        """End an attempt. A port that has not joined by now does not join, and any pairing may have it."""
        with self._intake.lock:
            if self._attempts.get(port.address) is attempt:
                del self._attempts[port.address]
                if port not in self._ports.all:
                    self.release(port)

    def _claim(self, port: Port) -> None:
        owner = self._owners.get(port, lambda: None)()
        if owner is not None and owner is not self:
            raise ConfigError(f"{port} is a port of another pairing; remove it there, or close that pairing, first")
        self._owners[port] = ref(self)

    def release(self, port: Port) -> None:
        """Let any pairing have it."""
        self._owners.pop(port, None)

    def give_up(self, address: PeerAddress) -> None:
        """Let a port that is being linked not join."""
        with self._intake.lock:
            self._attempts.pop(address, None)

    def add(self, port: Port, attempt: _Attempt | None = None) -> None:
        """Connect a port and use it, unless the attempt is given up meanwhile."""
        attempt = attempt or _Attempt()
        try:
            with self._intake.lock:
                if port.address in self._attempts or port.address in (known.address for known in self._ports.all):
                    raise ConfigError(f"{port.address} is a port of this pairing already; every engine is added once")
                self._claim(port)
                self._attempts[port.address] = attempt
            self._join(port, attempt)
        finally:
            self._end(port, attempt)
            if self._intake.num_unfinished or self._ports.links_down:  # requests may go there, and links are dialled
                self._intake.inbox.wake()

    def _join(self, port: Port, attempt: _Attempt) -> None:
        """Link the port to the ports here, then to those that have joined meanwhile, until there are none."""
        met: set[PeerAddress] = set()
        unlinked: dict[PeerAddress, TransferError] = {}
        while True:
            with self._intake.lock:
                others = self._ports.opposite(port)
                newcomers = [other for other in others if other.address not in met]
                is_ours = self._attempts.get(port.address) is attempt and not attempt.is_given_up
                if self._intake.closed or not is_ours:
                    what = "pairing was closed" if self._intake.closed else "port was removed"
                    raise TransferError(
                        f"the {what} while the port was connected; it stays open, and is yours to close"
                    )
                if not newcomers:
                    if others and all(other.address in unlinked for other in others):
                        raise unlinked[others[0].address]
                    port.notify(self._intake.inbox.wake)
                    self._ports.add(port, unlinked)
                    return
            met.update(other.address for other in newcomers)
            unlinked |= link(port, newcomers, timeout_s=self._timeout_s)
            self._find_lost([other for other in newcomers if other.address in unlinked])


def _beside(work: Callable[[], None], *, then: Callable[[], None]) -> Future[None]:
    """Do `work` in a thread of its own, and return what becomes of it. Call `then` there when it has ended. Raises
    Overloaded when there is no thread."""
    result: Future[None] = Future()
    result.add_done_callback(lambda _: then())

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            result.set_exception(error)
        else:
            result.set_result(None)

    start(threading.Thread(target=run, name="pdinfer-join", daemon=True))
    return result
