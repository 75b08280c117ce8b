"""The threads of simulated ranks depend on virtual time alone."""

from __future__ import annotations

import threading
import time

import attrs
import pytest

from tests.sim.ranks import Fiber


@attrs.define
class Slow:
    """A lock whose release lets the other thread go on for a while before it returns."""

    lock: threading.Lock
    fiber: Fiber

    def acquire(self, timeout: float) -> bool:
        return self.lock.acquire(timeout=timeout)

    def release(self) -> None:
        self.lock.release()
        while not self.fiber._killed:
            time.sleep(0.001)


def test_a_rank_may_be_stopped_before_its_thread_has_noticed_that_its_work_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fiber = Fiber()
    monkeypatch.setattr(fiber, "_back", Slow(fiber._back, fiber))
    done: list[int] = []
    fiber.start(lambda: 1, done.append)
    fiber.kill()
    assert done == [1]
    assert not fiber._thread.is_alive()
