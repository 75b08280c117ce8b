"""Children of tests: copies of a pytest worker, which end whatever happens, since they would go on with its tests, and
processes that are there at once, forked off a server that has imported the library and no test."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

HANGS_S = 120
"""After so many seconds a child prints where it is, and ends."""
FAR_S = 180.0
"""Longer than anything takes on a busy machine; a test that reaches it fails. `--far` sets another limit."""
PRELOADED = ["torch", "torch.distributed", "pdinfer", "pdinfer.testing"]


def context() -> Any:
    """Return what makes processes off the server, which is started once for all tests of a pytest worker and has no
    thread."""
    made = get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    return made


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `function` returns in such a process."""
    ours, theirs = context().Pipe()
    process = context().Process(target=_say, args=(theirs, function, arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(FAR_S), f"{function} did not end in {FAR_S} s"
        return ours.recv()
    finally:
        process.kill()
        process.join()


def _say(connection: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    import torch

    torch.set_num_threads(1)
    connection.send(function(*arguments))


def fork(work: Callable[[], object]) -> int:
    """Run `work` in a forked child, and return its process. Its exit code is 0 when it went well."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        gc.freeze()  # what the parent has made is no garbage of its child, and looking through it would copy all of it
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
