"""A process with one Mooncake end, for tests that kill and freeze it. It answers "sum" with the xxh3_64 of its memory.
A write's frame is the offset where it goes."""

from __future__ import annotations

from multiprocessing.connection import Connection

import xxhash

from pdinfer.errors import TransferError
from pdinfer.kv.layout import Spans
from pdinfer.kv.transports.base import Link
from pdinfer.kv.transports.mooncake import MooncakeTransport
from tests.conformance.transport_ends import BytesMemory


class Peer:
    """A receiver that places writes where their frames say, and answers."""

    authenticates = False

    def __init__(self, num_bytes: int, slot_bytes: int) -> None:
        self.memory = BytesMemory(num_bytes)
        self.transport = MooncakeTransport(slot_bytes=slot_bytes)
        self.endpoints = self.transport.register(self.memory, self)

    def opened(self, link: Link) -> None:
        link.trusted = True

    def received(self, link: Link, frame: bytes) -> None:
        self.transport.send(link, frame + b" %016x" % xxhash.xxh3_64_intdigest(self.memory.data))

    def place(self, link: Link, frame: bytes, num_bytes: int) -> Spans:
        return [(int(frame), num_bytes)]

    def placed(self, link: Link, frame: bytes, error: TransferError | None) -> None:
        self.transport.send(link, frame + (b" damaged" if error else b" placed"))

    def tick(self) -> None:
        pass

    def closed(self, link: Link, error: TransferError | None) -> None:
        pass


def serve(connection: Connection, num_bytes: int, slot_bytes: int) -> None:
    """Tell the endpoint of a peer, which then serves until it is killed."""
    peer = Peer(num_bytes, slot_bytes)
    connection.send(peer.endpoints[0])
    connection.recv()
