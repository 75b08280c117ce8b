"""Streams and events of the simulated devices, and the order that they give to work.

Ops run at once, so what a card would do later is judged by *who may know of it*. Each op has a number. A stream knows
the work of another up to an event that it waited for, or for which the host waited before it queued more. This
knowledge is a clock (L. Lamport, "Time, clocks, and the ordering of events in a distributed system", 1978; here with a
number for each stream). Memory remembers who wrote and who read it last: bytes (uint8 with one axis: pools and blocks,
parts of which belong to different streams) remember it byte by byte, all else as a whole. Using what this stream does
not know to be written, or writing what it does not know to be read, raises StreamOrder with both lines. Where several
streams read the same bytes, only the last is remembered.

What the host sees cannot be watched, so it is made to show: an asynchronous copy to page-locked memory fills it with
POISON until the host has waited for it, and page-locked memory that was copied to the device must be the same when the
host has waited as when the copy was queued.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from tests.simulated.watch import LOCK, Place, note, place, told, where

POISON = 0x5A
"""What integers on the host hold before they have arrived; floats hold NaN."""

DEVICES = [torch.device("privateuseone", number) for number in range(2)]

_MAX_STREAMS = 1 << 12

Device = torch.device | int | None

Clock = dict[int, int]
"""By stream: the number of its last op that is known to be done before what comes next."""


class StreamOrder(RuntimeError):
    """Two streams, or a stream and the host, used the same memory and no event says who came first."""


# ---- devices --------------------------------------------------------------------------------------------------------


class _Here(threading.local):
    """What this thread has made current: a device, and streams by the number of their device."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}


_here = _Here()


def number_of(device: Device) -> int:
    """Return the number of a device; that of the current one for None, or for a device without a number."""
    number = device.index if isinstance(device, torch.device) else device
    if number is None:
        return _here.device
    if not 0 <= number < len(DEVICES):
        raise RuntimeError(f"invalid device ordinal {number}: there are {len(DEVICES)}")
    return number


def set_device(device: Device) -> None:
    """Do as `torch.cuda.set_device`, which takes no device without a number."""
    if isinstance(device, torch.device) and device.index is None:
        raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
    _here.device = number_of(device)


@contextlib.contextmanager
def on_device(device: Device) -> Iterator[None]:
    """Make a device the current one of this thread until the context ends."""
    before = _here.device
    _here.device = number_of(device)
    try:
        yield
    finally:
        _here.device = before


def _merge(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        clock[stream] = max(clock.get(stream, 0), number)


# ---- streams and events ---------------------------------------------------------------------------------------------


class Stream:
    """A queue of work, as `torch.cuda.Stream`: of the current device, if no other is named."""

    def __init__(self, device: Device = None) -> None:
        self.device = DEVICES[number_of(device)]
        with LOCK:
            self.id = len(_STREAMS)
            _STREAMS.append(self)
        assert self.id < _MAX_STREAMS
        self.clock: Clock = {}

    def wait_event(self, event: Event) -> None:
        with LOCK:
            _merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        with LOCK:
            event.clock, event.asked = dict(self.clock), False
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        with LOCK:
            note("syncs", "stream")
            host_waits(self.clock)


class Event:
    """A point in the work of a stream, as `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.blocking = blocking
        self.clock: Clock = {}
        self.asked = False

    def record(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Return False when asked for the first time, unless the host knows already: a device takes its time."""
        with LOCK:
            done = self.asked or all(_HOST.get(stream, 0) >= number for stream, number in self.clock.items())
            self.asked = True
            if done:
                host_waits(self.clock)
            return done

    def synchronize(self) -> None:
        with LOCK:
            note("syncs", "event")
            host_waits(self.clock)


_STREAMS: list[Stream] = []
_DEFAULTS = [Stream(number) for number in range(len(DEVICES))]
_HOST: Clock = {}
"""What the host knows to be done. One clock for all its threads, which tell each other by means not seen here."""


def current_stream(device: Device = None) -> Stream:
    """Return the stream on which ops of this thread run on a device. All threads begin with the same one."""
    number = number_of(device)
    return _here.streams.get(number, _DEFAULTS[number])


def is_default(stream: Stream) -> bool:
    """Return whether a stream is that of a device on which threads begin."""
    return stream in _DEFAULTS


@contextlib.contextmanager
def using(stream: Stream) -> Iterator[None]:
    """Let ops of this thread run on `stream`, and make its device the current one, until the context ends."""
    with on_device(stream.device):
        before, _here.streams[_here.device] = current_stream(), stream
        try:
            yield
        finally:
            _here.streams[number_of(stream.device)] = before


def synchronize(device: Device = None) -> None:
    with LOCK:
        note("syncs", "device")
        for stream in _STREAMS:
            if stream.device.index == number_of(device):
                host_waits(stream.clock)


# ---- work on memory -------------------------------------------------------------------------------------------------

_LINES: list[tuple[str, Place]] = [("", ())]
"""By number: what an op was, and where."""


class Memory:
    """Who used one piece of a device's memory last. A stamp is the number of an op and its stream."""

    def __init__(self, stamp: int) -> None:
        self.device = DEVICES[_here.device]
        self._written, self._read = stamp, 0

    @staticmethod
    def of(tensor: Tensor) -> Memory:
        """Return the memory of a tensor that the last op has made."""
        stamp = (len(_LINES) - 1) * _MAX_STREAMS + current_stream().id
        return SharedMemory(stamp, len(tensor)) if tensor.dtype == torch.uint8 and tensor.dim() == 1 else Memory(stamp)

    def last(self, access: Access) -> set[int]:
        """Return the stamps that whoever makes this access has to know."""
        return {self._written, self._read} if access.writes else {self._written}

    def mark(self, access: Access, stamp: int) -> None:
        """Remember an access."""
        if access.writes:
            self._written = stamp
        else:
            self._read = stamp


class SharedMemory(Memory):
    """The same byte by byte."""

    def __init__(self, stamp: int, num_bytes: int) -> None:
        super().__init__(stamp)
        self._written_N = torch.full((num_bytes,), stamp)
        self._read_N = torch.zeros(num_bytes, dtype=torch.int64)

    def last(self, access: Access) -> set[int]:
        both = (self._written_N, self._read_N) if access.writes else (self._written_N,)
        # neighbours have mostly the same one, and sorting them all, as `unique` does, would take most of the time
        return {
            stamp
            for stamps_N in both
            for stamp in access.within(stamps_N)[access.key].flatten().unique_consecutive().tolist()
        }

    def mark(self, access: Access, stamp: int) -> None:
        access.within(self._written_N if access.writes else self._read_N)[access.key] = stamp


@attrs.frozen
class Access:
    """What an op does with a tensor on the device: with all of it, or with the part that `key` indexes."""

    tensor: Tensor
    memory: Memory
    writes: bool = False
    key: Any = ...

    def within(self, stamps_N: Tensor) -> Tensor:
        """Return the stamps of the tensor's elements, with an axis for their bytes, of those of all bytes."""
        size = self.tensor.element_size()
        return stamps_N.as_strided(
            (*self.tensor.shape, size),
            (*(stride * size for stride in self.tensor.stride()), 1),
            self.tensor.storage_offset() * size,
        )


def ran(name: str, accesses: Iterable[Access]) -> None:
    """Let an op come next on the current stream of the current device."""
    stream, accesses = current_stream(), list(accesses)
    if len(_STREAMS) > len(DEVICES):
        for access in accesses:
            _check(name, access, stream)
    number = len(_LINES)
    _LINES.append((name, place()))
    for access in accesses:
        if access.writes or len(_STREAMS) > len(DEVICES):
            access.memory.mark(access, number * _MAX_STREAMS + stream.id)
    stream.clock[stream.id] = number


def _check(name: str, access: Access, stream: Stream) -> None:
    for stamp in access.memory.last(access):
        number, other = divmod(stamp, _MAX_STREAMS)
        # what the host knows to be done is done before whatever it queues
        if other != stream.id and number > stream.clock.get(other, 0) and number > _HOST.get(other, 0):
            before, there = _LINES[number]
            _fail(
                f"{name} @ {where()} on stream {stream.id} follows no event behind {before} @ {told(there)} "
                f"on stream {other}"
            )


# ---- what the host sees ---------------------------------------------------------------------------------------------

_PAGE_LOCKED: dict[int, int] = {}
"""The address and the size of page-locked memory."""
_UNDER_WAY: list[tuple[Clock, Callable[[], object]]] = []
"""Asynchronous copies: what the host has to know, and what to do then."""
_FAULTS: list[str] = []


def page_locked(num_bytes: int) -> Tensor:
    """Return host memory that the simulated device copies by itself; stands in for `process.memory._page_locked`."""
    memory_N = np.empty(num_bytes, dtype=np.uint8)
    with LOCK:
        _PAGE_LOCKED[memory_N.ctypes.data] = num_bytes
    weakref.finalize(memory_N, _PAGE_LOCKED.pop, memory_N.ctypes.data)
    return torch.from_numpy(memory_N)


def is_page_locked(tensor: Tensor) -> bool:
    """Return whether a host tensor lies in page-locked memory."""
    there = _PAGE_LOCKED.copy()  # other threads add to it, and so may the collector of garbage, where objects are made
    return any(start <= tensor.data_ptr() < start + size for start, size in there.items())


def leaves(to: Tensor, values: Tensor, clock: Clock) -> None:
    """Begin to copy `values` to page-locked memory: the host sees them once it knows `clock`."""
    to.fill_(float("nan") if to.is_floating_point() else POISON)
    _UNDER_WAY.append((clock, functools.partial(to.copy_, values)))


def enters(source: Tensor, clock: Clock) -> None:
    """Begin to copy page-locked memory to the device: the host may not change it before it knows `clock`."""
    before, line = _bytes(source), where()

    def check() -> None:
        if _bytes(source) != before:
            _fail(f"page-locked memory was changed before its copy to the device was done: {line}")

    _UNDER_WAY.append((clock, check))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def host_waits(clock: Clock | None = None) -> None:
    """Let the host know `clock`, or all that is queued on the current stream."""
    _merge(_HOST, current_stream().clock if clock is None else clock)
    done = [copy for copy in _UNDER_WAY if all(_HOST.get(stream, 0) >= number for stream, number in copy[0].items())]
    for copy in done:
        _UNDER_WAY.remove(copy)
    for _, end in done:
        end()


def _fail(sentence: str) -> None:
    _FAULTS.append(sentence)
    raise StreamOrder(sentence)


def faults() -> Sequence[str]:
    """Make the first device the current one of this thread again, and wait for all that is under way.
    Return what was out of order since this was last asked, in whatever thread."""
    set_device(0)
    with LOCK:
        for stream in _STREAMS:
            with contextlib.suppress(StreamOrder):
                host_waits(stream.clock)
        found = list(_FAULTS)
        _FAULTS.clear()
        _UNDER_WAY.clear()
        return found
