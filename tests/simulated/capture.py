"""What a CUDA graph does, without one: the ops of a step are recorded with the memory they used, and run again on it.

A value that the host knew while recording is in the recording for good, and so is the place of each input: a replay
that should have depended on another value, or on an input that has moved, shows by its result.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import attrs

from tests.simulated import order
from tests.simulated.device import ALLOCATIONS, Call, SimTensor, copied, tensors_in
from tests.simulated.order import Access
from tests.simulated.watch import LOCK, WATCHES, Watch, note


@attrs.define(eq=False)
class Capture(Watch):
    """Records what this thread runs while it is entered: all of it, or that on `stream`."""

    stream: order.Stream | None = None
    _recorded: list[tuple[Call, list[SimTensor]]] = attrs.field(factory=list, init=False)

    def records(self) -> bool:
        """Return whether the current stream is its own."""
        return self.stream is None or order.current_stream() is self.stream

    def ran(self, call: Call, result: Any) -> None:
        if self.records() and not call.op.is_view and call.name not in ALLOCATIONS:
            self._recorded.append((call, [x for x in tensors_in(result) if isinstance(x, SimTensor)]))

    @property
    def illegal(self) -> list[str]:
        """What a CUDA graph cannot hold: waits of the host, copies from memory that is not page-locked, and the end of
        another graph."""
        return sorted(self.counts["syncs"] + self.counts["pageable"] + self.counts["destroyed"])

    def replay(self) -> None:
        """Run it all again on the current stream. Every result is written to where it was the first time."""
        with LOCK:
            note("launches", "graph")
            for call, results in self._recorded:
                with order.on_device(call.device):
                    _again(call, results)


def _again(call: Call, results: list[SimTensor]) -> None:
    if call.crosses:
        copied(call)
        return
    made = [x for x in results if not any(x is argument for argument in call.tensors)]
    order.ran(call.name, [*call.accesses(), *(Access(x.inner, x.memory, writes=True) for x in made)])
    for before, now in zip(results, tensors_in(call.inside()), strict=True):
        if before.inner is not now:
            before.inner.copy_(now)


class Graph:
    """A captured step, as `torch.cuda.CUDAGraph`."""

    captured: Capture

    def replay(self) -> None:
        self.captured.replay()

    def pool(self) -> object:
        return self

    def __del__(self) -> None:
        note("destroyed", "graph")


def is_current_stream_capturing() -> bool:
    """Return whether what this thread runs on its current device is recorded."""
    return any(isinstance(each, Capture) and each.sees() and each.records() for each in WATCHES)


@functools.cache
def _default_stream() -> order.Stream:
    """Return the one that torch makes once in a process, on the device that is current then."""
    return order.Stream()


@contextlib.contextmanager
def graph(
    made: Graph, pool: object = None, stream: order.Stream | None = None, *, capture_error_mode: str = "global"
) -> Iterator[None]:
    """Capture what this thread runs on `stream` until the context ends, as `torch.cuda.graph`: what runs on another
    stream is not in the graph. Raises RuntimeError for what a CUDA graph cannot hold, also in another thread if the
    mode is "global"."""
    order.synchronize()
    stream = stream or _default_stream()
    if order.is_default(stream):
        raise RuntimeError("CUDA graphs must be captured on a non-default stream")
    with order.using(stream), Capture(stream, everywhere=capture_error_mode == "global") as captured:
        yield
    order.host_waits(stream.clock)  # nothing has run yet that anybody had to wait for
    if captured.illegal:
        raise RuntimeError(f"operation not permitted when stream is capturing: {captured.illegal}")
    made.captured = captured
