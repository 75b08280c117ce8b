"""Ends over shared memory for tests, and the descriptors and maps of this process."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from pdinfer.kv.transports.shm.transport import ShmTransport
from tests.conformance.transport_ends import BytesMemory, End, MemfdMemory, Recorder

KIB, MIB = 1 << 10, 1 << 20


@contextlib.contextmanager
def opened_ends() -> Iterator[Callable[..., End]]:
    """Make registered ends, and close them at the end of the test."""
    ends: list[End] = []

    def make(
        transport: ShmTransport | None = None,
        *,
        memory: BytesMemory | None = None,
        num_bytes: int = 64 * KIB,
        trusts: bool = True,
        digest: bool = True,
    ) -> End:
        transport = transport or ShmTransport(digest=digest)
        end = End(transport, memory or MemfdMemory(num_bytes), Recorder(trusts=trusts))
        end.receiver.hooks["place"] = lambda _, __, size: [(0, size)]
        end.endpoints = end.transport.register(end.memory, end.receiver)
        ends.append(end)
        return end

    yield make
    for end in ends:
        end.transport.close()
        assert not end.receiver.broken


def num_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def num_maps() -> int:
    gc.collect()
    return sum("memfd:pdinfer" in line for line in Path("/proc/self/maps").read_text().splitlines())
