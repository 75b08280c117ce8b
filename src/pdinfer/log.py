"""The log of this library. Its handlers and filters are the host's."""

from __future__ import annotations

import logging
import traceback
from typing import Any


class Log(logging.LoggerAdapter[logging.Logger]):
    """Logs as `logging` does. What a handler or a filter raises is printed as `logging` prints it, and costs only that
    line: most lines are about what has gone wrong and has still to be put right."""

    def log(self, level: int, msg: object, *args: object, **more: Any) -> None:
        try:
            super().log(level, msg, *args, stacklevel=2, **more)
        except Exception:  # noqa: BLE001 - whatever a host's raises
            if logging.raiseExceptions:
                traceback.print_exc()


log = Log(logging.getLogger("pdinfer"))
