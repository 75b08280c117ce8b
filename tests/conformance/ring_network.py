"""Engines made for the tests of landing rings, whose writes fail, hang and land late when told to."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable

import attrs

from pdinfer.kv.transports.one_sided.block import NamedEngine
from pdinfer.kv.transports.one_sided.ring import PROBE_BYTES
from tests.waiting import TIMEOUT_S

GREETING = 1 << 32


def writers() -> list[threading.Thread]:
    """Return the threads of this process that write to rings."""
    return [thread for thread in threading.enumerate() if thread.name == "pdinfer-mooncake"]


@attrs.define(eq=False)
class Write:
    """A write that the engine was given, and what became of it. `status` is what the engine reports."""

    segment: str
    source: int
    target: int
    num_bytes: int
    status: int = 0

    def land(self) -> None:
        """Read the source and write the target as they are now, whatever was reported before."""
        ctypes.memmove(self.target, self.source, self.num_bytes)


class Network:
    """Engines that reach each other. `fates` says what becomes of the next writes: "land" (also of those without a
    fate), "fail", "hang", "refuse" to start, or "block" inside the call until `unblock` is set. The first probe of each
    ring lands whatever the fates are. It is among the `greetings`, not among the `writes`."""

    def __init__(self) -> None:
        self.engines: dict[str, FakeEngine] = {}
        self.segments: list[NamedEngine] = []
        self.fates: deque[str] = deque()
        self.writes: list[Write] = []
        self.greetings: list[Write] = []
        self.unblock = threading.Event()
        self.landed: Callable[[Write], None] = lambda _: None
        self.misuses: list[str] = []

    def segment(self) -> NamedEngine:
        engine = FakeEngine(self, f"host:{len(self.engines)}")
        self.engines[engine.name] = engine
        self.segments.append(NamedEngine(engine, engine.name))
        return self.segments[-1]

    def is_registered(self, write: Write) -> bool:
        memory = self.engines[write.segment].memory.items()
        return any(start <= write.target and write.target + write.num_bytes <= start + size for start, size in memory)

    def payloads(self) -> list[Write]:
        """Return the writes that were not probes."""
        return [write for write in self.writes if write.num_bytes > PROBE_BYTES]


class FakeEngine:
    """The part of Mooncake that a NamedEngine uses, within this process. What the real one answers with an error, or
    does not survive, is among the network's `misuses`."""

    def __init__(self, network: Network, name: str) -> None:
        self.network, self.name = network, name
        self.memory: dict[int, int] = {}
        self.past: set[int] = set()
        self.void: set[int] = set()

    def _expect(self, kept: bool, rule: str) -> None:
        if not kept:
            self.network.misuses.append(rule)

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        for address, length in zip(addresses, lengths, strict=True):
            self._expect(type(address) is type(length) is int and length > 0, "memory is so many bytes at an address")
            others = self.memory.items()
            apart = all(address + length <= start or start + size <= address for start, size in others)
            self._expect(apart, "memory is registered once")
            self.memory[address] = length
        return 0

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        for address in addresses:
            self._expect(self.memory.pop(address, None) is not None, "only what is registered is withdrawn")
            self.past.add(address)
        return 0

    def transfer_submit_write(self, segment: str, source: int, target: int, num_bytes: int) -> int:
        self._expect(segment in self.network.engines, "a segment is the name of an engine")
        self._expect(all(type(value) is int for value in (source, target, num_bytes)), "addresses and sizes are ints")
        self._expect(num_bytes > 0, "a write has bytes")
        write = Write(segment, source, target, num_bytes)
        if num_bytes == PROBE_BYTES and all(greeting.target != target for greeting in self.network.greetings):
            self.network.greetings.append(write)
            write.land()
            return GREETING
        fate = self.network.fates.popleft() if self.network.fates else "land"
        if fate == "block":
            self.network.unblock.wait(2 * TIMEOUT_S)
        held = any(start <= source and source + num_bytes <= start + size for start, size in self.memory.items())
        self._expect(held, "the source of a write is registered")
        self.network.writes.append(write)
        if fate == "land" and self.network.is_registered(write):
            write.land()
            self.network.landed(write)
            write.status = 1
        elif fate != "hang":
            write.status = -1
        return 0 if fate == "refuse" else len(self.network.writes)

    def transfer_check_status(self, number: int) -> int:
        if number == GREETING:
            return 1
        self._expect(number not in self.void, "a number is void once its write has landed or failed")
        status = self.network.writes[number - 1].status
        if status:
            self.void.add(number)
        return status
