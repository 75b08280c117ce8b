"""Counts what happens on the simulated device, by the line that caused it."""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs

LOCK = threading.RLock()
"""Held by each op and by each change of what is known of it: the device does one thing at a time."""

Place = Sequence[tuple[str, int]]
"""Files and lines of theirs, the innermost first."""

KINDS = ("launches", "allocations", "syncs", "pageable", "pinned", "destroyed", "elsewhere")

WATCHES: list[Watch] = []
_OURS = str(Path(__file__).parent)
_ROOT = str(Path(__file__).parents[2])


@attrs.define(eq=False)
class Watch:
    """Counts what happens on the device while it is entered: in this thread, or in all threads with `everywhere`. Each
    counter is by op and line.

    launches      ops that would be a kernel
    allocations   new device memory
    syncs         the host waits for the device: .item(), .tolist(), .cpu(), nonzero, boolean masks, events, …
    pageable      copies to the device from memory that is not page-locked
    pinned        asynchronous copies from or to page-locked memory
    destroyed     captured graphs that ended
    elsewhere     ops on another device than the current one of their thread
    """

    everywhere: bool = attrs.field(default=False, kw_only=True)
    counts: dict[str, Counter[str]] = attrs.field(factory=lambda: {kind: Counter() for kind in KINDS}, init=False)
    _thread: int = attrs.field(factory=threading.get_ident, init=False)

    def totals(self) -> dict[str, int]:
        """Return how often each kind of thing happened."""
        return {kind: counter.total() for kind, counter in self.counts.items()}

    def sees(self) -> bool:
        """Return whether it counts what happens in this thread."""
        return self.everywhere or threading.get_ident() == self._thread

    def ran(self, call: Any, result: Any) -> None:
        """Told of each op behind it, in a thread that it sees."""

    def __enter__(self) -> Watch:
        with LOCK:
            WATCHES.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with LOCK:
            WATCHES.remove(self)


def note(kind: str, what: str) -> None:
    """Count something of a kind for every watch that sees this thread."""
    for watch in WATCHES:
        if watch.sees():
            watch.counts[kind][f"{what} @ {where()}"] += 1


def tell(call: Any, result: Any) -> None:
    """Tell the watches that see this thread of an op."""
    for watch in WATCHES:
        if watch.sees():
            watch.ran(call, result)


def where() -> str:
    """Return the innermost two lines of this repository that led here, without those of the simulation."""
    return told(place())


def told(lines: Place) -> str:
    return " < ".join(f"{_short(file)}:{line}" for file, line in lines)


def place() -> Place:
    """Return the files and numbers of these lines. Each op asks for them, and few are ever told."""
    frame, lines = sys._getframe(1), list[tuple[str, int]]()
    while frame is not None and len(lines) < 2:
        file = frame.f_code.co_filename
        if _short(file):
            lines.append((file, frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return lines


@functools.cache
def _short(file: str) -> str:
    """Return the path of a file of this repository below its sources; "" for files of others and of the simulation."""
    if file.startswith(_OURS) or not file.startswith(_ROOT):
        return ""
    return file.removeprefix(_ROOT).removeprefix("/src/pdinfer").lstrip("/")
