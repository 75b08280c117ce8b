"""Copies between a pool on a device and the host, or another pool of that device, while that computes.

    read        pool ── gather ──► one block ── one copy ──► page-locked host memory
    landing     page-locked host memory ── one copy ──► one block ── scatter ──► pool
    copy_from   pool ── gather ──► one block ── scatter ──► pool

They run on a stream of the pool's own, in the order in which they were asked for, and only `read` waits for them.
Events order them with the steps of a model:

- what a push reads is read after the event that its step recorded after the layer (`computed`), and after all steps
  before;
- a step begins after all that was committed or copied before, whatever stream its host uses (`step`);
- what arrives is written after the last step, of which some may still be queued.

Page-locked memory is torch's, which keeps what is freed and gives it out again, but not before copies from it are done.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Protocol

import attrs
import numpy as np
import torch
from torch import Tensor

from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import Landing
from pdinfer.kv.shapes import Ints
from pdinfer.process.locks import new_lock
from pdinfer.process.memory import pinned_empty
from pdinfer.process.streams import current_stream, new_stream, on_stream, record_event

BLOCK_BYTES = 8 << 20
"""Room for the joined layers of a push: 4 MiB, and a part of the last layer more."""

WORD_BYTES = 8
"""The most bytes that a thread of the device copies at once."""


class PageOps(Protocol):
    """The ops of `pdinfer.kernels` that copies are made of."""

    @property
    def gather_pages(self) -> Callable[[Tensor, Tensor, Tensor], None]: ...

    @property
    def scatter_pages(self) -> Callable[[Tensor, Tensor, Tensor], None]: ...


class DeviceCopies:
    """The copies of one pool, uint8 [num_bytes]. `borders` are the offsets at which components begin, ascending. Safe
    from any thread."""

    def __init__(self, pool_N: Tensor, borders: Sequence[int], ops: PageOps) -> None:
        self._pool_N, self._borders, self._ops = pool_N, borders, ops
        self._device = pool_N.device
        self._stream = new_stream(self._device)
        _wait(self._stream, record_event(self._device))  # the zeros of the pool
        self._lock = new_lock()
        self._arrived: torch.Event | None = None
        self._stepped: torch.Event | None = None

    def computed(self) -> Callable[[], None]:
        """Return what lets the pool be read after what this thread has queued so far, without a wait."""
        event = record_event(self._device)
        return lambda: _wait(self._stream, event)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Order the work that this thread queues inside the context with the copies and with other steps."""
        _wait(current_stream(self._device), self._stepped, self._arrived)
        try:
            yield
        finally:
            self._stepped = record_event(self._device)

    def read(self, spans: Spans) -> list[memoryview]:
        starts, lengths = _numbers(spans)
        host_N = pinned_empty(int(lengths.sum()), self._device)
        with self._waited_for():
            block_N = self._block(len(host_N))
            self._gather(starts, lengths, block_N)
            host_N.copy_(block_N, non_blocking=True)
        return _views(host_N, lengths)

    def landing(self, spans: Spans) -> Landing:
        starts, lengths = _numbers(spans)
        host_N = pinned_empty(int(lengths.sum()), self._device)

        def commit() -> None:
            with on_stream(self._stream):
                self._scatter(starts, lengths, host_N.to(self._device, non_blocking=True))

        return Landing(_views(host_N, lengths), commit)

    def lasting_block(self, num_bytes: int) -> Tensor:
        """Return memory of the device, uint8 [num_bytes], that a NIC may write: whoever had it before is done."""
        with self._waited_for():
            return self._block(num_bytes)

    def store(self, data: bytes, block_N: Tensor) -> None:
        """Copy bytes to a block of the device. Return when they are there."""
        host_N = pinned_empty(len(data), self._device)
        host_N.numpy()[:] = np.frombuffer(data, np.uint8)
        with self._waited_for():
            block_N.copy_(host_N, non_blocking=True)

    def fetch(self, block_N: Tensor) -> bytes:
        """Return the bytes of a block of the device."""
        with self._waited_for():
            host_N = block_N.to("cpu", non_blocking=True)
        return host_N.numpy().tobytes()

    @contextlib.contextmanager
    def _waited_for(self) -> Iterator[None]:
        """Queue on our stream, and wait until that is done."""
        with on_stream(self._stream):
            yield
            done = record_event(self._device)
        if done is not None:
            done.synchronize()

    def _block(self, num_bytes: int) -> Tensor:
        """Return uninitialised memory of the device. Called on our stream, whose later blocks may take its place."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def gather(self, spans: Spans, block_N: Tensor) -> None:
        """Copy `spans` to the front of a block of the device. Return when they are there."""
        with self._waited_for():
            self._gather(*_numbers(spans), block_N)

    def scatter(self, spans: Spans, block_N: Tensor) -> None:
        """Copy the front of a block of the device to `spans`, as `landing` does. Return when it is read. The block
        begins at a multiple of WORD_BYTES."""
        with self._waited_for():
            self._scatter(*_numbers(spans), block_N)

    def _gather(self, starts: Ints, lengths: Ints, block_N: Tensor) -> None:
        _wait(self._stream, self._stepped)
        for rows, (from_S,) in self._rows(starts[None], lengths):
            self._ops.gather_pages(rows.of_pool(self._pool_N), from_S, rows.of_block(block_N))

    def _scatter(self, starts: Ints, lengths: Ints, block_N: Tensor) -> None:
        _wait(self._stream, self._stepped)
        for rows, (to_S,) in self._rows(starts[None], lengths):
            self._ops.scatter_pages(rows.of_pool(self._pool_N), to_S, rows.of_block(block_N))
        self._note_arrival()

    def copy_from(self, pieces: Sequence[tuple[int, int, int]], source: DeviceCopies) -> None:
        """Copy pieces (offset here, offset there, length) from a pool of the same device. Does not wait."""
        if not pieces:
            return
        *starts, lengths = np.array(pieces, np.int64).T
        with on_stream(source._stream):
            written = record_event(self._device)
        with on_stream(self._stream):
            _wait(self._stream, written, source._stepped, self._stepped)
            block_N = self._block(int(lengths.sum()))
            for rows, (to_S, from_S) in self._rows(np.stack(starts), lengths):
                self._ops.gather_pages(rows.of_pool(source._pool_N, 1), from_S, rows.of_block(block_N))
                self._ops.scatter_pages(rows.of_pool(self._pool_N), to_S, rows.of_block(block_N))
            self._note_arrival()
            copied = record_event(self._device)
        with on_stream(source._stream):
            _wait(source._stream, copied)
            source._note_arrival()  # a step there must not write what is still read

    def _rows(self, starts: Ints, lengths: Ints) -> Iterator[tuple[CopyRows, Tensor]]:
        """Yield the rows that pieces are made of, with their numbers on the device, which get there in one copy."""
        cut = list(rows_of(starts, lengths, self._borders))
        if not cut:
            return
        sizes = [rows.numbers.size for rows in cut]
        host = pinned_empty(8 * sum(sizes), self._device).view(torch.int64)
        np.concatenate([rows.numbers.ravel() for rows in cut], out=host.numpy())
        there = host.to(self._device, non_blocking=True)
        for rows, numbers in zip(cut, torch.split(there, sizes), strict=True):
            yield rows, numbers.view(rows.numbers.shape)

    def _note_arrival(self) -> None:
        with self._lock:  # the later of two events must be the one that is kept
            self._arrived = record_event(self._device)


@attrs.frozen(eq=False)
class CopyRows:
    """Pieces of one component as rows of one size, in one pool or in two: row r of pool p is the `width` bytes from
    `bases[p] + r * width` on. `numbers` [pools, rows] are theirs in each pool. They lie in a block from `start` on."""

    start: int
    width: int
    bases: tuple[int, ...]
    numbers: Ints

    def of_pool(self, pool_N: Tensor, index: int = 0) -> Tensor:
        """Return a pool as rows [N, W]."""
        base = self.bases[index]
        return self._words(pool_N[base : base + (len(pool_N) - base) // self.width * self.width])

    def of_block(self, block_N: Tensor) -> Tensor:
        """Return their part of a block, [S, W]."""
        return self._words(block_N[self.start : self.start + self.numbers.shape[1] * self.width])

    def _words(self, bytes_N: Tensor) -> Tensor:
        """Return rows of the largest integers that are aligned wherever the rows lie."""
        aligned = math.gcd(self.width, self.start, *self.bases)
        word = next(word for word in (torch.int64, torch.int32, torch.uint8) if aligned % word.itemsize == 0)
        return bytes_N.view(word).view(-1, self.width // word.itemsize)


def rows_of(starts: Ints, lengths: Ints, borders: Sequence[int]) -> Iterator[CopyRows]:
    """Cut pieces, with `starts` [pools, pieces], into rows as large as they allow. Pieces of different components are
    cut apart, since whole tokens, or pages, of one are multiples of its own size."""
    component = np.searchsorted(borders, starts[0], side="right")
    changes = (np.flatnonzero(np.diff(component)) + 1).tolist()
    offsets = [0, *accumulate(lengths.tolist())]
    for first, last in pairwise([0, *changes, len(lengths)]):
        there, sizes = starts[:, first:last], lengths[first:last]
        if not sizes.any():
            continue
        width = int(np.gcd.reduce(np.concatenate([sizes, (there - there[:, :1]).ravel()])))
        bases = there[:, 0] % width
        counts = sizes // width
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = np.repeat((there - bases[:, None]) // width, counts, axis=1) + within
        yield CopyRows(offsets[first], width, tuple(bases.tolist()), numbers)


def _wait(stream: torch.Stream | None, *events: torch.Event | None) -> None:
    """Let what is queued on `stream` from now on begin after `events`."""
    for event in events:
        if stream is not None and event is not None:
            stream.wait_event(event)


def _numbers(spans: Spans) -> tuple[Ints, Ints]:
    offsets, lengths = np.array(spans, np.int64).reshape(-1, 2).T
    return offsets, lengths


def _views(host_N: Tensor, lengths: Ints) -> list[memoryview]:
    """Return host memory as one buffer per length. They keep it alive."""
    whole: memoryview = host_N.numpy().data
    return [whole[start:stop] for start, stop in pairwise([0, *accumulate(lengths.tolist())])]
