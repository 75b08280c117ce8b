"""Engines as children of a process that has imported vLLM, which takes 13 s of a core; making an engine takes 3."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import attrs

from tests.vllm.engines import ENVIRONMENT

PRELOADED = (
    "vllm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.deepseek_v2",
    "pdinfer.adapters.vllm",
)
"""None of them starts a thread, so a fork behind their import is as good as one before."""
FORKS = multiprocessing.get_context("forkserver")


@attrs.frozen(eq=False)
class Forked:
    """The part of a Popen that an Engine needs."""

    process: Any
    stdin: IO[str]
    stdout: IO[str]

    def send_signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout_s: float) -> int | None:
        self.process.join(timeout_s)
        return self.poll()


def launch(log: Path, settings: dict[str, Any]) -> Forked:
    """Start an engine. Its standard streams are as in a process of its own."""
    os.environ.update(ENVIRONMENT)
    FORKS.set_forkserver_preload(list(PRELOADED))
    (stdin, to), (of, stdout) = FORKS.Pipe(duplex=False), FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_run, args=(stdin, stdout, str(log), json.dumps(settings)), daemon=True)
    process.start()
    streams = os.fdopen(os.dup(to.fileno()), "w", buffering=1), os.fdopen(os.dup(of.fileno()))
    for end in (stdin, stdout, to, of):
        end.close()
    return Forked(process, *streams)


def _run(stdin: Connection, stdout: Connection, log: str, settings: str) -> None:
    with open(log, "a") as stderr:
        for number, source in enumerate((stdin, stdout, stderr)):
            os.dup2(source.fileno(), number)
    stdin.close()
    stdout.close()
    sys.stdin = os.fdopen(0)
    sys.argv = ["child", settings]
    importlib.import_module("tests.vllm.child").main()
