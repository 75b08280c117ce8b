"""Ranks for tests: processes that are started once and run one job after another, each in a world of its own.

A test asks for the fixture `ranks` and names a function, which runs on every rank of a fresh world:

    results = ranks.run("tests.e2e.rank_jobs:logits", 4, str(folder), tokens, topology={"tp_size": 4})

The function gets these arguments, which travel as msgpack, and returns a value that msgpack can carry. RANK and
WORLD_SIZE are set as torchrun sets them; torch.distributed is started with gloo before the function and ended after it.
`outcomes`, used in place of `run`, reports errors.
"""

from __future__ import annotations

import faulthandler
import importlib
import itertools
import os
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import attrs
import msgspec

from tests.forks import FAR_S, context

DEADLINE_S = 300.0
"""Seconds, longer than any job on a busy machine; a test that reaches them fails, and says where each rank is. Shorter
than what ends a test that hangs (`tests.conftest.LONGEST_S`), which cannot say that."""
COLLECTIVE_S = 180.0
"""The time that a rank waits for the others."""
END_S = 60.0
"""The time that a process has to end when it is to run no more jobs."""


class Outcome(msgspec.Struct, omit_defaults=True):
    """The outcome of a job on one rank: its `value`, or the class and message of the error that it raised.

    "Died" is the error of a rank whose process ended. A rank that stayed `alone`, since its world was not made, ends
    too: torch counts the worlds that a process was to be in.
    """

    value: Any = None
    error: str = ""
    message: str = ""
    trace: str = ""
    alone: bool = False


class Job(msgspec.Struct):
    """A job for a rank, with its place in its world."""

    function: str
    arguments: list[Any]
    named: dict[str, Any]
    rank: int
    world_size: int
    store: str


@attrs.frozen(eq=False)
class _Worker:
    process: BaseProcess
    connection: Connection
    stacks: Path

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.stacks.unlink(missing_ok=True)


class Ranks:
    """As many processes as the largest world so far needed; a world of n ranks is made from the first n."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pd-ranks-")
        self._numbers = itertools.count()
        self.workers: list[_Worker] = []

    def run(self, function: str, world_size: int, *arguments: Any, **named: Any) -> list[Any]:
        """Return the result of `function` ("module:name") on each rank; fail with the first error of a rank."""
        outcomes = self.outcomes(function, world_size, *arguments, **named)
        failed = [(rank, outcome) for rank, outcome in enumerate(outcomes) if outcome.error]
        # the error that made one rank fail, before the errors that its absence caused on others
        for rank, outcome in sorted(failed, key=lambda each: each[1].error == "RankLost"):
            raise AssertionError(f"rank {rank} of {world_size}: {outcome.error}: {outcome.message}\n{outcome.trace}")
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: str,
        world_size: int,
        *arguments: Any,
        deadline_s: float = DEADLINE_S,
        **named: Any,
    ) -> list[Outcome]:
        """Do the same, but return what each rank raised instead of failing. Fails when a rank does not end in
        `deadline_s`."""
        self._start(world_size)
        workers = self.workers[:world_size]
        store = Path(self._folder.name) / f"store-{next(self._numbers)}"
        for rank, worker in enumerate(workers):
            job = Job(function, list(arguments), named, rank, world_size, str(store))
            worker.connection.send_bytes(msgspec.msgpack.encode(job))
        try:
            return self._collect(workers, function, deadline_s)
        finally:
            store.unlink(missing_ok=True)

    def close(self) -> None:
        for worker in self.workers:
            worker.end()
        self.workers = []
        self._folder.cleanup()

    def _start(self, count: int) -> None:
        alive = []
        for worker in self.workers:
            if worker.process.is_alive():
                alive.append(worker)
            else:
                worker.end()
        self.workers = alive
        while len(self.workers) < count:
            ours, theirs = context().Pipe()
            stacks = Path(self._folder.name) / f"stacks-{next(self._numbers)}"
            process = context().Process(target=serve, args=(theirs, str(stacks)), daemon=True)
            process.start()
            theirs.close()
            self.workers.append(_Worker(process, ours, stacks))

    def _collect(self, workers: list[_Worker], function: str, deadline_s: float) -> list[Outcome]:
        end = time.monotonic() + deadline_s
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(workers):
            missing = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in outcomes}
            ready = wait(list(missing), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                stacks = "\n".join(f"rank {rank}:\n{_stack(workers[rank])}" for rank in missing.values())
                for worker in workers:
                    worker.end()
                names = ", ".join(map(str, missing.values()))
                failed = [
                    f"\nrank {rank} of {len(workers)} ended: {outcome.error}: {outcome.message}\n{outcome.trace}"
                    for rank, outcome in outcomes.items()
                    if outcome.error
                ]
                raise AssertionError(
                    f"{function} did not end in {deadline_s} s on ranks {names}\n{stacks}{''.join(failed)}"
                )
            for rank in [rank for connection, rank in missing.items() if connection in ready]:
                try:
                    outcomes[rank] = msgspec.msgpack.decode(workers[rank].connection.recv_bytes(), type=Outcome)
                    if outcomes[rank].alone:
                        _await_end(workers[rank])
                except (EOFError, ConnectionResetError):
                    _await_end(workers[rank])
                    outcomes[rank] = Outcome(error="Died", message=f"exit code {workers[rank].process.exitcode}")
        return [outcomes[rank] for rank in range(len(workers))]


def _await_end(worker: _Worker) -> None:
    """Wait for a process that said its last word. Fails when it does not end in `END_S`."""
    worker.process.join(END_S)
    if worker.process.is_alive():
        stack = _stack(worker)
        worker.end()
        raise AssertionError(f"a rank did not end in {END_S} s behind its last job\n{stack}")


def _stack(worker: _Worker) -> str:
    """Return where a process that hangs is."""
    if worker.process.pid is not None and worker.process.is_alive():
        os.kill(worker.process.pid, signal.SIGUSR1)
        end = time.monotonic() + END_S
        while not _written(worker) and worker.process.is_alive() and time.monotonic() < end:
            time.sleep(0.05)
        time.sleep(0.5)  # until all of it is there
    return _written(worker)


def _written(worker: _Worker) -> str:
    return worker.stacks.read_text() if worker.stacks.exists() else ""


# ---- in the processes ----------------------------------------------------------------------------------------------


def serve(connection: Connection, stacks: str) -> None:
    """Run jobs until the test session ends."""
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    with open(stacks, "w", encoding="utf-8") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        while True:
            try:
                data = connection.recv_bytes()
            except (EOFError, ConnectionResetError):
                return
            outcome = _outcome(msgspec.msgpack.decode(data, type=Job))
            sys.stdout.flush()
            connection.send_bytes(msgspec.msgpack.encode(outcome))
            if outcome.alone:
                return


def _outcome(job: Job) -> Outcome:
    import torch.distributed as dist

    from pdinfer.engine.ranks import wakeup

    # one that a busy machine does not run for seconds is not lost: `tests.e2e.rank_worlds.miss_soon` undoes it
    wakeup.RANKS = attrs.evolve(wakeup.RANKS, silent_s=FAR_S)

    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(job.rank), str(job.world_size)
    alone = job.world_size > 1
    try:
        module, _, name = job.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        if alone:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{job.store}",
                rank=job.rank,
                world_size=job.world_size,
                timeout=timedelta(seconds=COLLECTIVE_S),
            )
            # a process that leaves at once would close the connections that another one is still making
            dist.barrier()
            alone = False
        return Outcome(value=function(*job.arguments, **job.named))
    except Exception as error:  # noqa: BLE001 whatever it was is the test's to judge
        return Outcome(error=type(error).__name__, message=str(error), trace=traceback.format_exc(), alone=alone)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
