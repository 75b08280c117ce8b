"""Ends over shared memory for tests, and the descriptors and maps of this process."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from pdinfer.errors import TransferError
from pdinfer.kv.transports.base import Link
from pdinfer.kv.transports.shm.transport import ShmTransport
from tests.conformance.transport_ends import PATIENT, BytesMemory, End, MemfdMemory, Recorder, anywhere, closing
from tests.waiting import TIMEOUT_S, wait_until

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


def receive(connection: Connection, num_bytes: int) -> None:
    """Receive in a process of its own, place all at the start of a memory, and tell what happens."""
    memory, receiver = MemfdMemory(num_bytes), Recorder()

    def placed(_: Link, __: bytes, error: TransferError | None) -> None:
        if error or {*memory.data[::4096]} != {1}:
            connection.send(f"placed {error} { ({*memory.data[::4096]}) }")

    def received(link: Link, frame: bytes) -> None:
        connection.send(f"{frame.decode()} after {len(receiver.of('placed', link))} writes")

    receiver.hooks |= {"place": anywhere, "placed": placed, "received": received}
    receiver.hooks["closed"] = lambda *_: connection.send("closed")
    connection.send(ShmTransport(digest=False).register(memory, receiver)[0])
    connection.recv()  # until it is killed


def send_without_end(endpoint: str) -> NoReturn:
    """Write to an end until this process is killed."""
    transport = ShmTransport()
    transport.register(MemfdMemory(MIB), Recorder())
    link = transport.connect([endpoint], timeout_s=TIMEOUT_S)
    link.trusted = True
    while True:
        transport.write(link, b"w", [(0, MIB)])
        time.sleep(0.001)
