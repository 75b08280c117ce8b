"""A process that hosts one engine after another: starting Python and torch anew for each would take too long."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch

import pdinfer as pd
from pdinfer.testing import random_model

START_S = 120.0
"""Longer than any start on a busy machine; a test that reaches it fails."""


def work(control: Connection) -> None:
    """Runs in the process: each message is what to build and the connection to serve it on, None is the end."""
    torch.set_num_threads(1)
    control.send("ready")
    while (order := control.recv()) is not None:
        role, seed, page_size, num_pages, config, connection = order
        model = random_model(seed=seed)
        pool = pd.PagePool(model, pd.CacheConfig(page_size=page_size, num_pages=num_pages))
        channel = pd.KVChannel(pool, pd.kv.SocketTransport())
        engine = {"prefill": pd.PrefillEngine, "decode": pd.DecodeEngine}[role](model, channel, config)
        pd.remote.serve(engine, connection)
        control.send((engine.num_unfinished, pool.num_pages - pool.num_free))


class Worker:
    """One such process, seen from the test."""

    def __init__(self) -> None:
        context = get_context("spawn")
        self.control, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.ready = False
        self.serving = False

    def serve(
        self,
        role: str,
        *,
        seed: int = 0,
        page_size: int = 4,
        num_pages: int = 256,
        config: pd.EngineConfig | None = None,
    ) -> pd.remote.PrefillClient | pd.remote.DecodeClient:
        """Starts an engine in the process and returns its client."""
        if not self.ready:
            assert self.hear(START_S) == "ready"
            self.ready = True
        ours, theirs = get_context("spawn").Pipe()
        self.control.send((role, seed, page_size, num_pages, config or pd.EngineConfig(), theirs))
        client = {"prefill": pd.remote.PrefillClient, "decode": pd.remote.DecodeClient}[role]
        made = client(ours, timeout_s=START_S)
        theirs.close()
        self.serving = True
        return made

    def hear(self, timeout_s: float) -> Any:
        """What the process says next; fails when it says nothing."""
        assert self.control.poll(timeout_s), "the worker process does not answer"
        return self.control.recv()

    def stopped(self, timeout_s: float = 15.0) -> tuple[int, int]:
        """Waits until the engine was closed: (requests it still had, pages it still held)."""
        left = self.hear(timeout_s)
        self.serving = False
        return left

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The process stands still, as one does that swaps or hangs in a driver."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            if self.process.is_alive():
                os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """As the machine would: no last words."""
        self.process.kill()
        self.process.join(15.0)
        assert not self.process.is_alive()

    def end(self) -> int | None:
        """Ends an idle process and returns its exit code."""
        self.control.send(None)
        self.process.join(15.0)
        return self.process.exitcode


class Workers:
    """Processes kept for the tests of a module."""

    def __init__(self, count: int) -> None:
        self._workers = [Worker() for _ in range(count)]

    def take(self, count: int) -> list[Worker]:
        """Idle ones, new where they do not suffice."""
        idle = [worker for worker in self._workers if worker.process.is_alive() and not worker.serving]
        fresh = [Worker() for _ in range(count - len(idle))]
        self._workers += fresh
        return [*idle, *fresh][:count]

    def close(self) -> None:
        """Ends them all; kills those that a failed test left serving."""
        for worker in self._workers:
            if worker.serving and worker.process.is_alive():
                worker.kill()
        idle = [worker for worker in self._workers if worker.process.is_alive()]
        codes = [worker.end() for worker in idle if worker.ready or worker.hear(START_S)]
        assert set(codes) <= {0}, codes
