"""Warnings that a stranger can cause, limited in number for that reason."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import attrs

MAX_WARNINGS = 20
"""How many are logged in each WINDOW_S. The rest are counted."""
WINDOW_S = 10.0

_log = logging.getLogger("pdinfer")


@attrs.define
class Complaints:
    """A logger of warnings that stops after MAX_WARNINGS in one window. The next window begins with the number of those
    that were left out."""

    clock: Callable[[], float] = time.monotonic
    _since: float = -WINDOW_S
    _num: int = 0

    def warn(self, text: str, *values: object, exc_info: bool = False) -> None:
        """Log as `Logger.warning` does. May be called from any thread; a race miscounts by one."""
        now = self.clock()
        if now - self._since >= WINDOW_S:
            unsaid = self._num - MAX_WARNINGS
            self._since, self._num = now, 0
            if unsaid > 0:
                _log.warning("%d more warnings about peers were not logged", unsaid)
        self._num += 1
        if self._num <= MAX_WARNINGS:
            _log.warning(text, *values, exc_info=exc_info)
