"""Copies and digests in one pass over memory, in C (fused.c) where a compiler is at hand: a byte that is copied is
digested while the core's cache holds it. The digest is xxh3_64, that of the package xxhash, which is used where nothing
is compiled.

Calls keep the interpreter lock: given back to a busy host, it would be gone for 5 ms each time. So each should move a
few MiB at most."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

from pdinfer.log import log
from pdinfer.process.compiled import NativeLibrary, cpu_flags, find_or_build

MIN_BYTES = 1 << 15
"""Below that the calls cost more than a second pass. A digest of at most 240 bytes would also be made differently."""

_P, _N = ctypes.c_void_p, ctypes.c_int64
SOURCES = NativeLibrary(
    name="fused",
    folder=Path(__file__).parent,
    sources=("fused.c",),
    signatures={
        "digest_size": (),
        "digest_begin": (_P,),
        "digest_bytes": (_P, ctypes.c_char_p, _N),
        "digest_spans": (_P, _P, ctypes.c_char_p, _N),
        "digest_end": (_P,),
        "copy_spans": (_P, _P, ctypes.c_char_p, _N, _P, ctypes.c_char_p, _N, _P),
    },
    results={"digest_size": _N, "digest_end": ctypes.c_uint64, "copy_spans": _N},
    keeps_lock=True,
)
SPAN_BYTES = 16
"""The size of a span in an array of them: offset and length, 8 bytes each, little-endian."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled loops, None where this machine cannot have them. The first call in a process may compile."""
    if sys.byteorder != "little":
        found: ctypes.CDLL | str = "is for little-endian machines"
    else:
        found = find_or_build([SOURCES], cpu_flags())[SOURCES.name]
    if isinstance(found, str):
        log.info("payloads are copied and digested in two passes: C for one pass %s", found)
        return None
    return found


def loops_for(num_bytes: int) -> ctypes.CDLL | None:
    """Return the loops if a payload of this size should be moved by them."""
    return library() if num_bytes >= MIN_BYTES else None


class FusedDigest:
    """The xxh3_64 of bytes that lie at addresses: `start`, and what is read or copied after it, more than 240 bytes in
    all. `loops` is what `loops_for` returned. One thread at a time may use it."""

    def __init__(self, loops: ctypes.CDLL, start: bytes) -> None:
        self._loops = loops
        self.state = ctypes.create_string_buffer(loops.digest_size())
        loops.digest_begin(self.state)
        loops.digest_bytes(self.state, start, len(start))

    def read(self, address: int, spans: bytes) -> None:
        """Digest `spans` of the memory at an address."""
        self._loops.digest_spans(self.state, address, spans, len(spans) // SPAN_BYTES)

    def intdigest(self) -> int:
        """Return the digest. Nothing may be added after that."""
        return int(self._loops.digest_end(self.state))


class FusedCopy:
    """Copies that fill `spans` of the memory at `address` one after the other, digested on the way if there is a
    `digest`."""

    def __init__(self, loops: ctypes.CDLL, address: int, spans: bytes, digest: FusedDigest | None) -> None:
        self._loops = loops
        self._address = address
        self._spans = spans
        self._state = None if digest is None else digest.state
        self._place = (ctypes.c_int64 * 2)()

    def take(self, address: int, spans: bytes) -> int:
        """Copy `spans` of the memory at an address to where there is room. Return how many bytes had room."""
        num, num_targets = len(spans) // SPAN_BYTES, len(self._spans) // SPAN_BYTES
        return int(
            self._loops.copy_spans(
                self._state, address, spans, num, self._address, self._spans, num_targets, self._place
            )
        )
