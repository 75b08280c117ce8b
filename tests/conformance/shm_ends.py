"""Ends over shared memory for tests, and the descriptors and maps of this process."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from pdinfer.kv.transports.shm.transport import ShmTransport
from tests.conformance.transport_ends import PATIENT, BytesMemory, End, MemfdMemory, Recorder, anywhere, closing
from tests.waiting import wait_until

KIB, MIB = 1 << 10, 1 << 20


@contextlib.contextmanager
def opened_ends() -> Iterator[Callable[..., End]]:
    """Make registered ends, and close them at the end of the test."""
    with closing() as ends:

        def make(
            transport: ShmTransport | None = None,
            *,
            memory: BytesMemory | None = None,
            num_bytes: int = 64 * KIB,
            trusts: bool = True,
            digest: bool = True,
        ) -> End:
            transport = transport or ShmTransport(digest=digest, strangers=PATIENT)
            ends.append(End(transport, memory or MemfdMemory(num_bytes), Recorder(trusts=trusts)))
            ends[-1].receiver.hooks["place"] = anywhere
            return ends[-1]

        yield make


def num_descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def check_no_more_than(descriptors: int, maps: int) -> None:
    """Wait until this process has no more than before. Of those, tests before may give some back meanwhile."""
    wait_until(lambda: num_descriptors() <= descriptors and num_maps() <= maps)


def num_maps() -> int:
    gc.collect()
    return sum("memfd:pdinfer" in line for line in Path("/proc/self/maps").read_text().splitlines())
