"""The sending end of a landing ring: one thread per link, which gathers, writes, and repairs what went wrong.

    queue ─► frame ─────────────────────────────────────────────► control
          └► write ─► gather into a block ─► engine ─► landed? ──► control: BEGIN, LANDED
                      (the next, while one write is under way)

A write that is not known to have landed holds two places: the block that it reads and the slot that it hits. Repeated
from the same block into the same slot it is harmless whenever it lands, since the bytes are the same. Afterwards
neither place is used for other bytes while the link lives."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import attrs

from pdinfer.errors import TransferError
from pdinfer.kv.memory import Memory, take
from pdinfer.kv.transports.base import Budget, Link, Message, Transfer, WriteMessage
from pdinfer.kv.transports.one_sided.block import MakeBlock, NamedEngine, RingBlock
from pdinfer.kv.transports.one_sided.ring import PROBE_BYTES, Landed, RingOffer, Signal
from pdinfer.log import log
from pdinfer.process.locks import new_lock

NUM_PROBES = 3
"""Probes in a row that must land before a failed write is repeated."""
PAUSE_S = (0.1, 1.0)
"""The silence before the first probe, and the longest between two. It doubles with each probe that fails."""
MEND_S = 5.0
"""How long probing may take before the link is given up."""
LOOK_S = (20e-6, 5e-3)
"""The shortest and the longest sleep between two looks at a write. Between these limits it is a sixteenth of the time
that the write has taken."""


@attrs.define(eq=False)
class _Part:
    """One slot's worth of a write. The first part of a write has its frame. An empty write is one part without a
    block."""

    frame: bytes | None
    total: int
    num_bytes: int
    digest: int | None = None
    block: RingBlock | None = None
    slot: int = 0
    number: int = 0
    repeated: bool = False


@attrs.define(eq=False, kw_only=True)
class RingWriter:
    """The sending direction of a link: frames and writes leave in the order in which they were queued.

    `send` and `say` queue on the stream next to the engine and never block; `fail` closes the link. Any thread may call
    the public methods, which do not block. A transfer is done when its bytes are gathered."""

    _link: Link
    _segment: NamedEngine
    _memory: Memory
    _make_block: MakeBlock
    _slot_bytes: int
    _tail_bytes: int
    _digest: bool
    _timeout_s: float
    _waiting: Budget[RingWriter]
    _send: Callable[[bytes], None]
    _say: Callable[[Signal, bytes], object]
    _fail: Callable[[TransferError], None]
    _changed: threading.Condition = attrs.field(init=False, factory=lambda: threading.Condition(new_lock()))
    _queue: deque[Message] = attrs.field(init=False, factory=deque)
    _closed: bool = attrs.field(init=False, default=False)
    _ring: RingOffer | None = attrs.field(init=False, default=None)
    _free: deque[int] = attrs.field(init=False, factory=deque)
    _lent: set[int] = attrs.field(init=False, factory=set)
    _lost: set[int] = attrs.field(init=False, factory=set)
    _reading: Transfer | None = attrs.field(init=False, default=None)
    _flying: _Part | None = attrs.field(init=False, default=None)
    _met: bool = attrs.field(init=False, default=False)
    _blocks: list[RingBlock] = attrs.field(init=False, factory=list)
    _unclean: list[RingBlock] = attrs.field(init=False, factory=list)
    is_busy: bool = attrs.field(init=False, default=False)
    thread: threading.Thread = attrs.field(init=False)

    @thread.default
    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="pdinfer-mooncake", daemon=True)

    def queue(self, message: Message) -> bool:
        """Queue a message. Return False when the link is closed. A frame leaves at once when nothing is in front of it.
        When too many wait, some link is closed: this one or another."""
        with self._changed:
            if self._closed:
                return False
            is_write, slowest = isinstance(message, WriteMessage), None
            if not is_write and not self.is_busy:
                self._send(message.frame)
                return True
            self._queue.append(message)
            if is_write:
                self.is_busy = True
                self._changed.notify()
            else:
                slowest = self._waiting.take(self, message.cost_bytes)
        if slowest is not None:
            slowest.give_up()
        return True

    def give_up(self) -> None:
        """Close the link: too much waits for a write that the peer does not take."""
        self._fail(TransferError(f"{self._link.endpoint} does not take what is written: too many bytes wait"))

    def offered(self, ring: RingOffer) -> None:
        """Take the peer's answer to ASK. Raise TransferError for a second one."""
        with self._changed:
            if self._ring is not None:
                raise TransferError(f"{self._link.endpoint} offered a second ring")
            self._ring = ring
            self._slot_bytes = min(self._slot_bytes, ring.slot_bytes)
            self._free.extend(range(ring.num_slots))
            self._changed.notify()

    def credited(self, slot: int) -> None:
        """Take back a slot that the peer has emptied. Raise TransferError for a slot that the peer did not have."""
        with self._changed:
            if slot not in self._lent:
                raise TransferError(f"{self._link.endpoint} gave back slot {slot}, which it does not have")
            self._lent.discard(slot)
            if slot not in self._lost:
                self._free.append(slot)
                self._changed.notify()

    def shut(self, error: TransferError) -> None:
        """Fail what is queued, and let the thread end as soon as it comes back from the engine."""
        with self._changed:
            self._closed = True
            dropped = [message.transfer for message in self._queue if isinstance(message, WriteMessage)]
            self._queue.clear()
            self._changed.notify()
        self._waiting.drop(self)
        for transfer in dropped:
            transfer.complete(error)

    # Everything below runs in the thread.

    def _run(self) -> None:
        error = self._gone()
        try:
            while (message := self._next()) is not None:
                if isinstance(message, WriteMessage):
                    self._write(message)
                else:
                    self._settle()
                    self._send(message.frame)
        except TransferError as raised:
            error = raised
        except BaseException as raised:  # noqa: BLE001 - a SystemExit out of `ready`, too, must not leave the link half alive
            name = self._link.endpoint
            log.exception("writing to %s failed; the link is closed", name)
            error = TransferError(f"writing to {name} failed, so the link was closed: {raised!r}")
        self._fail(error)
        if self._reading is not None and not self._reading.done:
            self._reading.complete(error)
        for block in self._blocks:
            block.release(clean=True)
        for block in self._unclean:
            block.release(clean=False)

    def _next(self) -> Message | None:
        """Return what to do next, or None when the link is closed. Settle the write under way before sleeping."""
        while True:
            with self._changed:
                if self._flying is None and not self._queue:
                    self.is_busy = False
                    self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return None
                if self._queue:
                    message = self._queue.popleft()
                    if not isinstance(message, WriteMessage):
                        self._waiting.give(self, message.cost_bytes)
                    return message
            self._settle()

    def _write(self, message: WriteMessage) -> None:
        self._reading = transfer = message.transfer
        with self._changed:
            self._changed.wait_for(lambda: self._ring is not None or self._closed)
        self._check_open()
        if not self._met:
            self._meet()
        if message.ready is not None:
            message.ready()
        rest, missing = deque(message.source), transfer.num_bytes
        frame: bytes | None = message.frame
        while not transfer.done:
            self._check_open()
            part = self._gathered(frame, transfer.num_bytes, min(self._slot_bytes - self._tail_bytes, missing), rest)
            frame, missing = None, missing - part.num_bytes
            if not missing:
                transfer.complete()
            self._settle()
            self._start(part)

    def _meet(self) -> None:
        """Make the first contact with a peer, for which Mooncake takes a lock that its writes to all peers need. Do it
        when the peer has just spoken, not after `ready` has waited for a device. Whether it lands shows soon enough."""
        self._met = True
        block = self._borrow_block()
        if self._landed(self._probe(block), self._timeout_s):
            self._return_block(block)

    def _gathered(self, frame: bytes | None, total: int, num_bytes: int, rest: deque[tuple[int, int]]) -> _Part:
        part = _Part(frame, total, num_bytes)
        if num_bytes:
            part.block = self._borrow_block()
            part.digest = part.block.gather(self._memory, take(rest, num_bytes), digest=self._digest)
        return part

    def _start(self, part: _Part) -> None:
        """Write a part into the next free slot. The part before it has landed, so two blocks are enough."""
        if part.block is not None:
            part.slot = self._borrow()
            part.number = self._submit(part.block, self._slot_address(part.slot), part.num_bytes + self._tail_bytes)
        self._flying = part

    def _settle(self) -> None:
        """Wait for the write under way, repair it if need be, and tell the peer of it."""
        part, self._flying = self._flying, None
        if part is None:
            return
        if part.block is not None:
            if not self._landed(part.number, self._timeout_s):
                self._mend(part, part.block)
            if not part.repeated:
                self._return_block(part.block)
        self._check_open()
        if part.frame is not None:
            self._say(Signal.BEGIN, part.frame)
        landed = Landed(part.total, part.num_bytes, part.slot, part.digest)
        self._say(Signal.LANDED, landed.packed())

    def _mend(self, part: _Part, block: RingBlock) -> None:
        """Repair a write whose fate is unknown: keep silent, probe until probes land, and write once more."""
        name = self._link.endpoint
        log.warning("a write of %d bytes to %s failed, and may land late; probing", part.num_bytes, name)
        part.repeated = True
        with self._changed:
            self._lost.add(part.slot)
        deadline = time.monotonic() + MEND_S
        pause, landed = PAUSE_S[0], 0
        self._sleep(pause)
        while landed < NUM_PROBES:
            if time.monotonic() > deadline:
                raise TransferError(f"a write to {name} failed, and nothing reached it for {MEND_S} s after that")
            if self._landed(self._probe(block), deadline - time.monotonic()):
                landed += 1
            else:
                landed = 0
                self._sleep(pause)
                pause = min(2 * pause, PAUSE_S[1])
        part.number = self._submit(block, self._slot_address(part.slot), part.num_bytes + self._tail_bytes)
        if not self._landed(part.number, self._timeout_s):
            raise TransferError(f"a write of {part.num_bytes} bytes to {name} failed twice")

    def _probe(self, block: RingBlock) -> int:
        return self._submit(block, self._slot_address(self._num_slots), min(PROBE_BYTES, self._slot_bytes))

    def _borrow_block(self) -> RingBlock:
        block = self._blocks.pop() if self._blocks else self._make_block(self._slot_bytes)
        self._unclean.append(block)
        return block

    def _return_block(self, block: RingBlock) -> None:
        """Take back a block that nothing reads any more."""
        self._unclean.remove(block)
        self._blocks.append(block)

    def _submit(self, block: RingBlock, address: int, num_bytes: int) -> int:
        engine, ring = self._segment.engine, self._ring
        assert ring is not None
        return 0 if engine is None else engine.transfer_submit_write(ring.segment, block.address, address, num_bytes)

    def _landed(self, number: int, timeout_s: float) -> bool:
        """Whether a write is known to have landed. Sleep between looks: spinning would take the core that moves the
        bytes, and a thread that waits inside the engine cannot be called back when the link closes."""
        engine = self._segment.engine
        if not number or engine is None:
            return False
        start = time.monotonic()
        while not (status := engine.transfer_check_status(number)):
            self._check_open()
            elapsed = time.monotonic() - start
            if elapsed > timeout_s:
                return False
            time.sleep(min(max(elapsed / 16, LOOK_S[0]), LOOK_S[1]))
        return status == 1

    def _borrow(self) -> int:
        with self._changed:
            if len(self._lost) == self._num_slots:
                raise TransferError(f"every slot of the ring of {self._link.endpoint} waits for a write that got lost")
            self._changed.wait_for(lambda: self._free or self._closed)
            if self._closed:
                raise self._gone()
            slot = self._free.popleft()
            self._lent.add(slot)
            return slot

    def _sleep(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, seconds)
        self._check_open()

    @property
    def _num_slots(self) -> int:
        assert self._ring is not None
        return self._ring.num_slots

    def _slot_address(self, slot: int) -> int:
        assert self._ring is not None
        return self._ring.address + slot * self._ring.slot_bytes

    def _check_open(self) -> None:
        if self._closed:
            raise self._gone()

    def _gone(self) -> TransferError:
        return TransferError(f"the link to {self._link.endpoint} is closed")
