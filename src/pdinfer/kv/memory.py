"""A pool's bytes as channels and transports see them, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pdinfer.kv.layout import Spans


class Memory(Protocol):
    """A pool's bytes, on any device. Offsets are bytes from the start of the pool. Host buffers are contiguous
    memoryviews of unsigned bytes, one per span."""

    @property
    def num_bytes(self) -> int: ...

    def read(self, spans: Spans) -> list[memoryview]:
        """Return the contents of `spans` as host buffers, without a copy when the memory is on the host."""

    def landing(self, spans: Spans) -> list[memoryview]:
        """Return writable host buffers for `spans`: the memory itself when it is on the host."""

    def commit(self, spans: Spans, landed: Sequence[memoryview]) -> None:
        """Make what was written to `landing(spans)` visible in the memory. Does nothing on the host."""

    def copy_from(self, spans: Spans, source: Memory, source_spans: Spans) -> None:
        """Copy from another memory of this process. Both span lists have the same total length."""
