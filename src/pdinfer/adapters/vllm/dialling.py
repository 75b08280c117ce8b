"""Links to prefills by their addresses. Each is made in a thread of its own, so that no step of the engine waits for a
peer that is slow, frozen or gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import attrs

from pdinfer.errors import Overloaded, PDInferError, TransferError
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.process.threads import start
from pdinfer.types import PeerAddress

DIAL_S = 3.0
"""Seconds that a prefill may take to answer."""
AGAIN_S = 0.5
"""Seconds for which an address that did not answer is not dialled again, so that a burst of requests is one attempt."""
MAX_DOORS = 256
"""The number of addresses that are remembered. They come with requests."""
MAX_DIALS = 16
"""The number of addresses that are dialled at a time, each by a thread. Others wait for their turn."""


@attrs.define(eq=False)
class VLLMDoor:
    """An address, and what came of dialling it last."""

    is_dialling: bool = False
    peer: PeerAddress | None = None
    error: PDInferError | None = None
    tried_at: float = 0.0


class Doors:
    """The addresses that `channel` has dialled. `wake` is called, from any thread, when there is an answer."""

    def __init__(
        self, channel: KVChannel, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._channel = channel
        self._wake = wake
        self._clock = clock
        self._doors: dict[str, VLLMDoor] = {}
        self._turns = threading.BoundedSemaphore(MAX_DIALS)

    def at(self, endpoint: str) -> PeerAddress | PDInferError | None:
        """Return the peer that is linked at an address, why none is, or None while it is being dialled or waits for
        that. Never waits itself."""
        door = self._doors.get(endpoint, VLLMDoor())
        if door.is_dialling:
            return None
        if door.peer is not None and self._channel.connected(door.peer):
            return door.peer
        if door.error is not None and self._clock() - door.tried_at < AGAIN_S:
            return door.error
        if not self._turns.acquire(blocking=False):
            return None
        if endpoint not in self._doors:
            self._forget_one()
        self._doors[endpoint] = door
        door.is_dialling = True
        try:
            start(threading.Thread(target=self._dial, args=(endpoint, door), name="pdinfer-dial", daemon=True))
        except Overloaded as error:
            self._dialled(door, None, error)
            return error
        return None

    def _dial(self, endpoint: str, door: VLLMDoor) -> None:
        try:
            self._dialled(door, self._channel.links.dial(endpoint, timeout_s=DIAL_S), None)
        except PDInferError as error:
            self._dialled(door, None, error)
        except Exception as error:  # noqa: BLE001 - a thread that died would leave its requests waiting
            self._dialled(door, None, TransferError(f"dialling {endpoint} failed: {error!r}"))
        self._wake()

    def _dialled(self, door: VLLMDoor, peer: PeerAddress | None, error: PDInferError | None) -> None:
        """Note what came of dialling an address."""
        door.peer, door.error, door.tried_at = peer, error, self._clock()
        door.is_dialling = False
        self._turns.release()

    def _forget_one(self) -> None:
        """Forget the address that was met first and is not being dialled, when there are too many."""
        if len(self._doors) >= MAX_DOORS:
            del self._doors[next(at for at, door in self._doors.items() if not door.is_dialling)]
