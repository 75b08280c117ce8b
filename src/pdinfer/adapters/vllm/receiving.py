"""Decode's side of the worker: blocks that wait for a peer.

    load ──► dialling ──► granted ──► landed: finished
               │            └──► given up (lease, cancelled) ──► its writers have stopped: failed
               └──► no answer, lease, cancelled: failed

vLLM waits without a limit, so the lease here is the only one. A block is reported only when no peer can write it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import attrs

from pdinfer.adapters.vllm.memory import EnginePages
from pdinfer.adapters.vllm.messages import ABORTED, Terms, TransferCounts, VLLMLoad, room_of
from pdinfer.errors import Overloaded, PDInferError, TransferError
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.channel.rooms import by_room, first_error
from pdinfer.process.threads import start
from pdinfer.types import HandoffStatus, PageGrant, PeerAddress

DIAL_S = 3.0
"""Seconds that a prefill may take to answer."""
AGAIN_S = 0.5
"""Seconds for which an address that did not answer is not dialled again, so that a burst of requests is one attempt."""
MAX_DOORS = 256
"""The number of addresses that are remembered. They come with requests; the one met first, of those that are not being
dialled, is forgotten."""
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
    """The addresses that `channel` has dialled, each in a thread of its own: no step of the engine waits for a peer
    that is slow, frozen or gone. `wake` is called, from any thread, when there is an answer."""

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
        if endpoint not in self._doors and len(self._doors) >= MAX_DOORS:
            del self._doors[next(at for at, door in self._doors.items() if not door.is_dialling)]
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
        door.peer, door.error, door.tried_at = peer, error, self._clock()
        door.is_dialling = False
        self._turns.release()


_log = logging.getLogger("vllm.pdinfer")


@attrs.define(eq=False)
class Incoming:
    """A load. `reason` is set when it was given up and its writers have yet to stop."""

    load: VLLMLoad
    since: float
    grant: PageGrant | None = None
    reason: str = ""


@attrs.define(eq=False, repr=False, slots=False)
class Receiving:
    """The loads of the worker of `rank`, one of `num_workers` with a cache each. Everything is called from vLLM's
    thread, and nothing waits."""

    _channel: KVChannel
    _pages: EnginePages
    _doors: Doors
    _counts: TransferCounts
    _lease_s: float
    _rank: int = 0
    _num_workers: int = 1
    _clock: Callable[[], float] = time.monotonic
    _waiting: dict[str, Incoming] = attrs.field(factory=dict)
    _finished: set[str] = attrs.field(factory=set)
    _bad_blocks: set[int] = attrs.field(factory=set)

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, load: VLLMLoad) -> None:
        """Ask the prefill for these blocks."""
        self._pages.renew(load.blocks)
        entry = self._waiting[load.req_id] = Incoming(load, self._clock())
        if load.problem:
            self._fail(entry, "refused", load.problem)
        elif any(other.load.room == load.room for other in self._waiting.values() if other is not entry):
            self._fail(entry, "refused", f"room {load.room} is of another request too; give each one its own")

    def cancel(self, req_id: str) -> None:
        """Give up a load that is not wanted any more. Its blocks are reported once its writers have stopped."""
        if (entry := self._waiting.get(req_id)) is not None:
            self._give_up(entry, "cancelled", "the request was cancelled")

    def step(self) -> None:
        """Grant what can be granted, note what has landed, and give up what takes too long."""
        for entry in list(self._waiting.values()):
            if self._clock() - entry.since > self._lease_s and not entry.reason:
                self._give_up(entry, "lease", f"nothing landed within lease_s={self._lease_s:g}")
            elif entry.grant is None:
                self._find_prefill(entry)
        rooms = {room_of(entry.load.room, self._rank): entry for entry in self._waiting.values()}
        for room, handoffs in by_room(self._channel.poll()).items():
            entry = rooms[room.hex()]
            if all(handoff.status is HandoffStatus.LANDED for handoff in handoffs):
                self._counts.add("landed")
                self._finish(entry)
            else:
                self._fail(entry, entry.reason or "writer", str(first_error(handoffs)))

    def take_finished(self) -> set[str]:
        """Return the requests whose loads have ended since the last call, well or not."""
        taken, self._finished = self._finished, set()
        return taken

    def take_bad_blocks(self) -> set[int]:
        """Return the blocks that did not land since the last call."""
        taken, self._bad_blocks = self._bad_blocks, set()
        return taken

    # -- inside -----------------------------------------------------------------------------------------------------

    def _find_prefill(self, entry: Incoming) -> None:
        there = self._doors.at(entry.load.prefill)
        if isinstance(there, PDInferError):
            self._fail(entry, "unreachable", f"no prefill at {entry.load.prefill}: {there}")
        elif there is not None:
            self._grant(entry, there)

    def _grant(self, entry: Incoming, prefill: PeerAddress) -> None:
        load, layout = entry.load, self._pages.layout
        entry.grant = PageGrant(
            room=bytes.fromhex(room_of(load.room, self._rank)),
            request_id=str(Terms(load.proof, self._rank, self._num_workers)),
            writers=(prefill,),
            destinations=(self._channel.address,),
            tokens=range(load.tokens[0], layout.border(load.tokens[1], up=True)),
            pages=load.blocks,
            generations=self._pages.generations(load.blocks),
            layout_id=layout.layout_id,
        )
        # before the offer, since the writer may answer at once
        self._channel.expect(entry.grant)
        try:
            self._channel.receiver.offer(entry.grant)
        except PDInferError as error:
            self._give_up(entry, "refused", str(error))

    def _give_up(self, entry: Incoming, reason: str, why: str) -> None:
        """Ask the writers to stop. A load that was never granted has none."""
        if entry.grant is None:
            self._fail(entry, reason, why)
        elif not entry.reason:
            entry.reason = reason
            self._channel.abort(entry.grant, TransferError(why))

    def _fail(self, entry: Incoming, reason: str, why: str) -> None:
        self._counts.add(ABORTED + reason)
        if reason != "cancelled":
            _log.warning("the KV of request %s was not loaded (%s): %s", entry.load.req_id, reason, why)
        self._bad_blocks |= set(entry.load.blocks)
        self._finish(entry)

    def _finish(self, entry: Incoming) -> None:
        del self._waiting[entry.load.req_id]
        self._finished.add(entry.load.req_id)
