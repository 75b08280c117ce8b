"""vLLM engines in processes of their own, as tests drive them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

ROOT = Path(__file__).parents[2]
START_S = 300.0
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling takes minutes, and these models run for seconds
}


Launch = Callable[[Path, dict[str, Any]], Any]


def launch_alone(log: Path, settings: dict[str, Any]) -> subprocess.Popen[str]:
    """Start an engine in a process that imports vLLM itself."""
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    with log.open("a") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.child", json.dumps(settings)],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            bufsize=1,
        )


@attrs.define(eq=False)
class Engine:
    """A child (a Popen, or what serves as one) and what it has said: `done` by request and when that was heard
    (`ended`), `moved` by room, `last` its stats."""

    child: Any
    log: Path
    heard: queue.Queue[dict[str, Any] | None] = attrs.field(factory=queue.Queue)
    done: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    ended: dict[str, float] = attrs.field(factory=dict)
    moved: dict[str, dict[str, Any]] = attrs.field(factory=dict)
    last: dict[str, Any] | None = None
    address: str | None = None
    is_ready: bool = False
    block_size: int = 0
    reader: threading.Thread = attrs.field(init=False)

    @classmethod
    def start(cls, folder: Path, name: str, launch: Launch | None = None, **settings: Any) -> Engine:
        log = folder / f"{name}.log"
        child = (launch or launch_alone)(log, settings)
        engine = cls(child, log)
        engine.reader = threading.Thread(target=engine._read, daemon=True)
        engine.reader.start()
        return engine

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.heard.put(json.loads(line))
        self.heard.put(None)

    def say(self, **what: Any) -> None:
        assert self.child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed
            self.child.stdin.write(json.dumps(what) + "\n")

    def hear(self, timeout_s: float = 0.0) -> bool:
        """Take one thing that was said. Return whether there was any."""
        try:
            what = self.heard.get(timeout=timeout_s) if timeout_s else self.heard.get_nowait()
        except queue.Empty:
            return False
        if what is None:
            return False
        if "ready" in what:
            self.is_ready, self.address, self.block_size = True, what["ready"], what["block_size"]
        elif "done" in what:
            self.end(what["done"], what)
        elif "moved" in what:
            self.moved[what["moved"]] = what
        else:
            self.last = what
        return True

    def end(self, name: str, what: dict[str, Any]) -> None:
        """Note that a request has ended, and when it did so first."""
        self.done[name] = what
        self.ended.setdefault(name, time.monotonic())

    def stats(self) -> dict[str, Any]:
        self.last = None
        self.say(stats=True)
        until(lambda: self.last is not None, [self], 60)
        assert self.last is not None
        return self.last

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.child.send_signal(number)

    def close(self) -> None:
        self.child.kill()
        self.child.wait(30)
        self.reader.join(10)
        for pipe in (self.child.stdin, self.child.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def until(condition: Callable[[], object], engines: list[Engine], timeout_s: float) -> None:
    """Hear engines until something is so."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            tails = "\n".join(f"--- {one.log.name}\n{one.log.read_text()[-3000:]}" for one in engines)
            raise AssertionError(f"waited for {timeout_s} s in vain\n{tails}")
        heard = [engine.hear() for engine in engines]
        if not any(heard):
            time.sleep(0.0005)


def ready(*engines: Engine) -> None:
    """Wait until engines have loaded their model."""
    for engine in engines:
        until(lambda one=engine: one.is_ready or one.child.poll() is not None, [engine], START_S)  # type: ignore[misc]
        assert engine.is_ready, engine.log.read_text()[-4000:]


def role(name: str, **extra: Any) -> dict[str, Any]:
    """Return the settings of vLLM's KVTransferConfig."""
    return {
        "kv_connector": "PDInferConnector",
        "kv_connector_module_path": "pdinfer.adapters.vllm",
        "kv_role": name,
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": extra.pop("policy", "recompute"),
    }
