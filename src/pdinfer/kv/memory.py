"""A pool's bytes as channels and transports see them, on whatever device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdinfer.errors import ConfigError
from pdinfer.kv.layout import Spans


class Memory(Protocol):
    """A pool's bytes, on whatever device. Offsets are bytes from the start of the pool; host buffers are contiguous
    memoryviews of unsigned bytes, one per span."""

    @property
    def num_bytes(self) -> int: ...

    def read(self, spans: Spans) -> list[memoryview]:
        """The contents of `spans` as host buffers; no copy when the memory is on the host."""

    def landing(self, spans: Spans) -> list[memoryview]:
        """Writable host buffers for `spans`; the memory itself when it is on the host."""

    def commit(self, spans: Spans, landed: Sequence[memoryview]) -> None:
        """Makes what was written to `landing(spans)` visible in the memory; nothing to do on the host."""

    def copy_from(self, spans: Spans, source: Memory, source_spans: Spans) -> None:
        """Copies from another memory of this process; both span lists have the same total length."""


def total_bytes(spans: Spans, memory: Memory) -> int:
    """The payload that `spans` hold; raises ConfigError when one leaves the memory."""
    if not spans:
        return 0
    end = memory.num_bytes
    offsets, lengths = zip(*spans, strict=True)
    if min(lengths) >= 0 and min(offsets) >= 0 and max(offsets) <= end - max(lengths):
        return sum(lengths)  # all of them, without a look at each: a write has thousands
    total = 0
    for offset, length in spans:
        if not (0 <= length <= end and 0 <= offset <= end - length):
            raise ConfigError(f"span (offset {offset}, length {length}) leaves a memory of {end} bytes")
        total += length
    return total
