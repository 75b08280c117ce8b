"""Links a port that joins a Pairing to the ports at work, without delaying the thread that steps."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from weakref import WeakKeyDictionary, ref

from pdinfer.errors import ConfigError, LayoutMismatch, TransferError
from pdinfer.pairing.port import Port
from pdinfer.types import PeerAddress

FIRST_TRY_S = 1.0
"""How long each pair may take in the first round. If any port answers, one that does not costs no more than this."""

_log = logging.getLogger("pdinfer")


def link(port: Port, others: Iterable[Port], *, timeout_s: float) -> dict[PeerAddress, TransferError]:
    """Connect a port to the ports of the other side, and return which of them cannot be reached now, and why.

    One link is enough to begin with. The others are left to the channels, which keep dialling. When no port could be
    reached, all are tried once more, within `timeout_s` in total. Raises LayoutMismatch.
    """
    known = {other.address: other for other in others}
    end = time.monotonic() + timeout_s
    unlinked = _try(port, known, min(FIRST_TRY_S, timeout_s))
    left_s = end - time.monotonic()
    if unlinked and len(unlinked) == len(known) and left_s > 0:
        unlinked = _try(port, known, left_s / len(known))
    if len(unlinked) < len(known):
        for address, error in unlinked.items():
            _log.warning("a link is missing and dialled again: %s, %s: %s", port.address, address, error)
            with contextlib.suppress(TransferError):
                _connect(port, known[address], 0.0)
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


def beside(work: Callable[[], None], *, then: Callable[[], None]) -> Future[None]:
    """Do `work` in a thread of its own, and return what becomes of it. Call `then` there when it has ended."""
    result: Future[None] = Future()
    result.add_done_callback(lambda _: then())

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is taken
            result.set_exception(error)
        else:
            result.set_result(None)

    threading.Thread(target=run, name="pdinfer-join", daemon=True).start()
    return result


class _Owners:
    """The pairings by their ports: a second pairing over an engine would take events that are the first one's."""

    def __init__(self) -> None:
        self.by_port: WeakKeyDictionary[Port, ref[object]] = WeakKeyDictionary()


_OWNERS = _Owners()


def claim(port: Port, pairing: object) -> None:
    """Make it a port of this pairing. Raise ConfigError while it is one of another."""
    owner = _OWNERS.by_port.get(port, lambda: None)()
    if owner is not None and owner is not pairing:
        raise ConfigError(f"{port} is a port of another pairing; remove it there, or close that pairing, first")
    _OWNERS.by_port[port] = ref(pairing)


def release(port: Port) -> None:
    """Let any pairing have it."""
    _OWNERS.by_port.pop(port, None)
