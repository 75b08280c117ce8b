"""Pages and their bytes as channels and transports see them, on any device, whoever owns them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import attrs

from pdinfer.kv.layout import KVLayout, Spans


@attrs.frozen(eq=False)
class Landing:
    """Where bytes arrive before they are in a memory. `views` are writable host buffers, one per span: the memory
    itself when it is on the host. `commit`, called once they are filled, makes any later step find them in the memory;
    it waits for no device."""

    views: list[memoryview]
    commit: Callable[[], None] = lambda: None


class Memory(Protocol):
    """A pool's bytes, on any device. Offsets are bytes from the start of the pool. Host buffers are contiguous
    memoryviews of unsigned bytes, one per span."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def block_bytes(self) -> int:
        """The bytes that are best read or landed at once: a block of a device's host copies, or all there are."""

    def read(self, spans: Spans) -> list[memoryview]:
        """Return the contents of `spans` as host buffers, without a copy when the memory is on the host. On a device
        this waits for what writes them, if the `ready` of a push was called before, and for the copy."""

    def landing(self, spans: Spans) -> Landing:
        """Return where to write what arrives for `spans`. One that is not committed changes nothing on a device."""

    def copy_from(self, spans: Spans, source: Memory, source_spans: Spans) -> None:
        """Copy from another memory of this process, so that any later step finds the bytes here, and none changes them
        there before. Both span lists have the same total length."""


class Pages(Protocol):
    """What a channel asks of its pages. A `PagePool` has all of it, and so may the pages of another engine:
    accounts of who uses which page are not the channel's business.

    `layout` says what the bytes mean, and `memory` holds them: for each (component, layer), component first, one region
    of `memory_pages` pages. Ids below `num_pages` may be named in grants and pushes; pages after them are scratch, and
    the two numbers are equal where there is none. A pool of a model whose weights were read also has their `tensors`
    (`identity.TensorDigests`): the channel names those that differ from a peer's."""

    @property
    def layout(self) -> KVLayout: ...

    @property
    def memory(self) -> Memory: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def memory_pages(self) -> int: ...

    def generations(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Return how often each page has changed hands. A grant carries these numbers, and what arrives for it is
        refused when one of them has changed: whoever takes a page for another use has to renew its number. Called from
        the transport's thread too."""


def take(spans: deque[tuple[int, int]], num_bytes: int) -> Spans:
    """Remove spans of `num_bytes` in all from the front, and cut the last one. Return them."""
    taken = []
    while num_bytes:
        offset, length = spans.popleft()
        if length > num_bytes:
            spans.appendleft((offset + num_bytes, length - num_bytes))
            length = num_bytes
        taken.append((offset, length))
        num_bytes -= length
    return taken


def in_blocks(spans: Spans, memory: Memory) -> Iterator[Spans]:
    """Cut spans into parts of at most `memory.block_bytes`, at least one part."""
    if memory.block_bytes == memory.num_bytes:  # on the host, where a write may have thousands of spans
        yield spans
        return
    rest, missing = deque(spans), sum(length for _, length in spans)
    while missing > memory.block_bytes:
        yield take(rest, memory.block_bytes)
        missing -= memory.block_bytes
    yield list(rest)
