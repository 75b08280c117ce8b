"""Waiting in tests: for what comes true, and for threads, which end by themselves or the test fails, or cannot be
started."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.forks import FAR_S

TIMEOUT_S = FAR_S
"""No test waits longer than this for anything."""


def wait_until(condition: Callable[[], object]) -> None:
    """Poll; fail when it does not come true."""
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end, f"it did not happen in {TIMEOUT_S} s"
        time.sleep(0.001)


def started(function: Callable[..., object], *arguments: Any, **named: Any) -> threading.Thread:
    """Return a thread that calls the function, and that ends with the process at the latest."""
    thread = threading.Thread(target=function, args=arguments, kwargs=named, daemon=True)
    thread.start()
    return thread


def check_ends(*threads: threading.Thread) -> None:
    """Fail unless they end by themselves."""
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), f"a thread did not end in {TIMEOUT_S} s"


def check_returns(call: Callable[[], object]) -> None:
    """Fail unless the call ends: it waits for nothing that does not happen here."""
    check_ends(started(call))


@contextmanager
def without_threads(*names: str) -> Iterator[list[str]]:
    """No thread of these names can be started. Gives the names of those that were to be."""
    refused: list[str] = []
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in names:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        yield refused
