"""Forked children that end, whatever happens in them: a copy of a pytest worker would go on with its tests."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

HANGS_S = 60
"""After so many seconds a child prints where it is, and ends."""


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a forked child, and return its process. Its exit code is 0 when it went well."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        # by a signal, since `dump_traceback_later` would wait for the thread of its parent, which a fork does not copy
        faulthandler.register(signal.SIGALRM, file=2, chain=True)
        signal.alarm(HANGS_S)
        work()
        gc.collect()
        code = 0
    except BaseException:  # noqa: BLE001 - the exit code tells
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def check_ended(child: int, *, code: int = 0) -> None:
    """Wait until the child has ended, and check its exit code: less than 0 is the signal that ended it."""
    end = time.monotonic() + 2 * HANGS_S
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        assert time.monotonic() < end, "a forked child does not end"
        time.sleep(0.005)
    assert os.waitstatus_to_exitcode(ended[1]) == code
