"""How far long work is: reported to a function of the host, or in a line on stderr. Everything that takes `progress=`
reports through this."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from pdinfer.checks import clip
from pdinfer.errors import ConfigError

Tell = Callable[[int, int], None]
"""Is called with how much is done, of how much in all."""
Progress = bool | Tell | None
"""What `progress=` takes: True for a line on stderr, a function of (done, total), or None or False for neither."""

REDRAW_S = 0.1
"""How often a line is drawn again at most."""
LINE_S = 5.0
"""How often a log gets a line at most, besides the last one."""
TENTH = 10
BAR = 30


@contextlib.contextmanager
def telling(
    progress: Progress, what: str, unit: str, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int, int], None]]:
    """Yield what is to be called with (done, total) while the work goes on; a function of the host is that itself.

    The line says `what` is done and how much of it: a bar that is drawn again on a terminal and in a notebook, at most
    ten times a second by `clock`. Elsewhere, as in a log, a line follows every further tenth of work that takes longer,
    and one the end, which may be that of an error. `unit` names what is counted; "bytes" are shown as MB. A stderr that
    cannot be written to stops no work. Raises ConfigError for a `progress` of another kind."""
    if callable(progress):
        yield progress
    elif progress is not None and not isinstance(progress, bool):
        raise ConfigError(f"progress must be True, a function of (done, total) or None, got {clip(progress)}")
    elif not progress or sys.stderr is None:
        yield nobody
    else:
        line = _Line(sys.stderr, what, unit, clock)
        try:
            yield line
        finally:
            line.end()


def nobody(_done: int, _total: int) -> None:
    """Tell nobody."""


class _Line:
    """A line on a stream, as `telling` describes it."""

    def __init__(self, stream: TextIO, what: str, unit: str, clock: Callable[[], float]) -> None:
        self._stream, self._what, self._unit, self._clock = stream, what, unit, clock
        self._redraws = _redraws(stream)
        self._pause_s, self._step = (REDRAW_S, 1) if self._redraws else (LINE_S, TENTH)
        self._due_s = clock() + (0.0 if self._redraws else LINE_S)
        self._percent = self._written = -1
        self._total = 0

    def __call__(self, done: int, total: int) -> None:
        self._percent, self._total = 100 if done >= total else 100 * done // total, total
        is_due = self._percent // self._step != self._written // self._step and self._clock() >= self._due_s
        if is_due or self._percent == 100:
            self._write()

    def end(self) -> None:
        """Leave the line as far as the work came."""
        self._write()
        if self._redraws and 0 <= self._written < 100:
            self._put("\n")

    def _write(self) -> None:
        if self._percent == self._written:
            return
        self._written, self._due_s = self._percent, self._clock() + self._pause_s
        amount = f"{self._total / 1e6:,.1f} MB" if self._unit == "bytes" else f"{self._total:,} {self._unit}"
        if self._redraws:
            bar = "#" * (self._percent * BAR // 100)
            end = "\n" if self._percent == 100 else ""
            self._put(f"\r{self._what} [{bar:<{BAR}}] {self._percent:3d} % of {amount}{end}")
        else:
            self._put(f"{self._what}: {self._percent} % of {amount}\n")

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it was closed
            self._stream.write(text)
            self._stream.flush()


def _redraws(stream: TextIO) -> bool:
    """Whether what follows a carriage return is shown in the place of the line: a notebook does that, and is no
    terminal."""
    with contextlib.suppress(ValueError):
        return type(stream).__module__.startswith("ipykernel.") or stream.isatty()
    return False
