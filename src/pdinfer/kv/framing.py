"""How messages lie on a byte stream: a fixed header, the frame, and for a write its payload and a digest.

    magic  version  kind  reserved  frame_bytes  payload_bytes │ frame │ payload │ digest
      4       1      1       2           4             8                              8       little-endian

The digest is xxh3_64 of the header, frame and payload of a write. It finds bytes that the way or a bug has changed; it
proves nothing about who sent them.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable

import attrs
import xxhash

from pdinfer.errors import TransferError

MAGIC = b"pdkv"
VERSION = 1
HEADER = struct.Struct("<4sBBHIQ")
DIGEST_BYTES = 8
IOV_MAX = 1024
BATCH_BYTES = 1 << 18
"""Bytes per system call: what a core's cache still holds when the digest reads it again."""


class Kind(enum.IntEnum):
    """What follows a header: a frame alone, or a frame, a payload and its digest."""

    FRAME = 1
    WRITE = 2


@attrs.frozen
class Header:
    """The fixed start of every message, checked."""

    kind: Kind
    frame_bytes: int
    payload_bytes: int

    def packed(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, self.kind, 0, self.frame_bytes, self.payload_bytes)

    @classmethod
    def parse(cls, data: bytes) -> Header:
        """Raises TransferError naming what is wrong; sizes are the caller's to check before it allocates."""
        magic, version, kind, reserved, frame_bytes, payload_bytes = HEADER.unpack(data)
        if magic != MAGIC:
            raise TransferError(f"not a pdinfer peer: a message starts with {MAGIC!r}, this one with {data!r}")
        if version != VERSION:
            raise TransferError(f"the peer speaks version {version} of the stream format, this end {VERSION}")
        if kind not in (Kind.FRAME, Kind.WRITE) or reserved:
            raise TransferError(f"message of unknown kind {kind}, reserved bits {reserved:#06x}")
        if kind == Kind.FRAME and payload_bytes:
            raise TransferError(f"a control frame announced a payload of {payload_bytes} bytes; only writes have one")
        return cls(Kind(kind), frame_bytes, payload_bytes)


def digest_bytes(digest: xxhash.xxh3_64) -> bytes:
    """The digest as it stands on the wire."""
    return digest.intdigest().to_bytes(DIGEST_BYTES, "little")


class Buffers:
    """Host buffers that a socket empties or fills from the front, however the kernel cuts them.

    `digest`, when given, is fed every byte just after the kernel has read or written it. False when nothing is left.
    """

    def __init__(self, views: Iterable[memoryview] = (), digest: xxhash.xxh3_64 | None = None) -> None:
        # The kernel would report a batch of empty buffers as the end of the stream.
        self._views = [view for view in views if len(view)]
        self._next = 0
        self._digest = digest

    def __bool__(self) -> bool:
        return self._next < len(self._views)

    def batch(self) -> list[memoryview]:
        """The buffers of the next system call: at most IOV_MAX, and BATCH_BYTES in all."""
        batch = []
        room = BATCH_BYTES
        for view in self._views[self._next : self._next + IOV_MAX]:
            if len(view) >= room:
                batch.append(view[:room])
                break
            batch.append(view)
            room -= len(view)
        return batch

    def advance(self, count: int) -> None:
        """Removes `count` bytes from the front."""
        while count:
            view = self._views[self._next]
            if count < len(view):
                self._views[self._next] = view[count:]
                view = view[:count]
            else:
                self._next += 1
            if self._digest is not None:
                self._digest.update(view)
            count -= len(view)
