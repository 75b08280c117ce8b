"""Threads of ours. At any moment the process may have as many as it may have, so whoever needs one does without it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from pdinfer.errors import Overloaded


def start(thread: threading.Thread) -> threading.Thread:
    """Start a thread, and return it. Raises Overloaded as `starting` does."""
    with starting(thread.name):
        thread.start()
    return thread


@contextlib.contextmanager
def starting(name: str) -> Iterator[None]:
    """Raise Overloaded when the thread that the block starts is one too many."""
    try:
        yield
    except RuntimeError as error:
        raise Overloaded(
            f"the thread {name} cannot be started: {error}; end others, or raise the limits of this user (ulimit -u) "
            "and of its control group (pids.max)"
        ) from error
