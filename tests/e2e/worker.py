"""A process that hosts one engine after another: starting Python and torch anew for each would take too long."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import secrets
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

import attrs
import torch

import pdinfer as pd
from pdinfer.execution.sampling import LogitsProcessor
from tests.e2e.setups import model_of
from tests.forks import FAR_S, context

KEY = b"the host's"
"""For connections that clients make themselves."""

TRANSPORTS: dict[str, Callable[[Path], pd.kv.Transport]] = {
    "tcp": lambda folder: pd.kv.SocketTransport(),
    "unix": lambda folder: pd.kv.SocketTransport(path=folder / secrets.token_hex(4)),
    "shm": lambda folder: pd.kv.ShmTransport(folder / secrets.token_hex(4)),
    "mooncake": lambda folder: pd.kv.MooncakeTransport(),
}
"""Every transport that crosses a process, made from a folder that it may use."""
MEMORY = {"shm": "shared"}


def one_in_five(argument: str) -> LogitsProcessor:
    """A logits processor that leaves a fifth of the vocabulary, another one after each token."""
    shift = int(argument)

    def processor(prompt: tuple[int, ...], output: tuple[int, ...], logits_V: torch.Tensor) -> torch.Tensor:
        masked_V = torch.full_like(logits_V, -torch.inf)
        left = list(left_of_five(shift, output, len(logits_V)))
        masked_V[left] = logits_V[left]
        return masked_V

    return processor


def left_of_five(shift: int, output: Sequence[int], vocab_size: int = 97) -> range:
    """What it leaves."""
    return range((shift + sum(output)) % 5, vocab_size, 5)


@attrs.frozen(kw_only=True)
class Order:
    """An engine to make and serve, with `one_in_five` if it `has_processor`. While `slow_while` exists, its steps take
    long enough to be met in the middle; while `hung_while` does, they do not end, and the interpreter is held if it
    `holds_gil`. With a path to `listen` at, its client dials, again if need be. If it `is_cuttable`, SIGUSR1 breaks its
    links, and the connection that the client made."""

    role: str
    family: str = "v3"
    seed: int = 0
    page_size: int = 4
    num_pages: int = 256
    config: pd.EngineConfig = attrs.field(factory=pd.EngineConfig)
    transport: str = "tcp"
    folder: Path
    slow_while: Path | None = None
    hung_while: Path | None = None
    holds_gil: bool = False
    remote: pd.remote.RemoteConfig | None = None
    has_processor: bool = False
    is_cuttable: bool = False
    listen: Path | None = None


FIRST_S, LAYER_S, TOKEN_S = 0.5, 0.05, 0.05
"""What a slow engine sleeps: before its first prompt, in every layer of a chunk, before a token."""


def slow_down(engine: pd.PrefillEngine | pd.DecodeEngine, path: Path) -> None:
    """Sleeps in the engine's steps while there is a file at `path`."""
    runner: Any = engine.ranks.runner
    prefill, decode = runner.prefill, runner.decode
    first = [FIRST_S]

    def sleep(seconds: float) -> None:
        if path.exists():
            time.sleep(seconds)

    def slow_prefill(rows: Sequence[Any]) -> Iterator[Any]:
        sleep(first.pop() if first else 0.0)
        for layer in prefill(rows):
            sleep(LAYER_S)
            yield layer

    def slow_decode(*arguments: Any) -> Any:
        sleep(TOKEN_S)
        return decode(*arguments)

    runner.prefill, runner.decode = slow_prefill, slow_decode


def hang_up(engine: pd.PrefillEngine | pd.DecodeEngine, path: Path, *, holds_gil: bool) -> None:
    """Has steps wait while there is a file at `path`, as for a kernel that hangs."""
    step = engine.step
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)

    def hung() -> list[pd.types.Event]:
        while path.exists():
            if holds_gil:  # locked twice by one thread: no signal wakes it
                libc.pthread_mutex_lock(mutex)
            else:
                time.sleep(0.05)
        return step()

    engine.step = hung  # type: ignore[method-assign]


def cut_links(*_: object) -> None:
    """Ends every connection of this process that has a name, which the pipe to its client has not, at whatever byte it
    is: as a network does."""
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.stat(f"/proc/self/fd/{descriptor}").st_mode):
                with socket.socket(fileno=os.dup(int(descriptor))) as sock:
                    if sock.getpeername() or sock.getsockname():
                        sock.shutdown(socket.SHUT_RDWR)


def work(control: Connection) -> None:
    """Runs in the process: each message is what to build and the connection to serve it on, None is the end."""
    torch.set_num_threads(1)
    control.send("ready")
    while (order := control.recv()) is not None:
        wanted, connection = order
        if wanted.listen is not None:
            connection = Listener(str(wanted.listen), authkey=KEY)
            control.send("listening")
        model = model_of(wanted.family, wanted.seed)
        memory = MEMORY.get(wanted.transport, "auto")
        cache = pd.CacheConfig(page_size=wanted.page_size, num_pages=wanted.num_pages, memory=memory)
        pool = pd.PagePool(model, cache)
        channel = pd.KVChannel(pool, TRANSPORTS[wanted.transport](wanted.folder))
        kind = {"prefill": pd.PrefillEngine, "decode": pd.DecodeEngine}[wanted.role]
        processors = {"one_in_five": one_in_five} if wanted.has_processor else {}
        engine = kind(model, channel, wanted.config, logits_processors=processors)
        if wanted.slow_while is not None:
            slow_down(engine, wanted.slow_while)
        if wanted.hung_while is not None:
            hang_up(engine, wanted.hung_while, holds_gil=wanted.holds_gil)
        if wanted.is_cuttable:
            signal.signal(signal.SIGUSR1, cut_links)
        pd.remote.serve(engine, connection, config=wanted.remote)
        control.send((engine.num_unfinished, pool.num_pages - pool.num_available))


class Worker:
    """One such process, seen from the test. Its sockets are in `folder`. `connection` is our end of the pipe to the
    engine that it serves."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.control, theirs = context().Pipe()
        self.process = context().Process(target=work, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.ready = False
        self.serving = False
        self.connection: Connection

    def serve(
        self, role: str, *, client_config: pd.remote.RemoteConfig | None = None, listen: Path | None = None, **more: Any
    ) -> pd.remote.PrefillClient | pd.remote.DecodeClient:
        """Starts an engine in the process and returns its client; `listen` and `more` go into the `Order`."""
        if not self.ready:
            assert self.hear() == "ready"
            self.ready = True
        self.connection, theirs = context().Pipe()
        self.control.send((Order(role=role, folder=self.folder, listen=listen, **more), theirs))
        dial: Any = self.connection
        if listen is not None:
            assert self.hear() == "listening"
            dial = functools.partial(Client, str(listen), authkey=KEY)
        client = {"prefill": pd.remote.PrefillClient, "decode": pd.remote.DecodeClient}[role]
        made = client(dial, timeout_s=FAR_S, config=client_config)
        theirs.close()
        self.serving = True
        return made

    def hear(self) -> Any:
        """What the process says next; fails when it says nothing."""
        assert self.control.poll(FAR_S), f"the worker process said nothing in {FAR_S} s"
        return self.control.recv()

    def stopped(self) -> tuple[int, int]:
        """Waits until the engine was closed: (requests it still had, pages it still held)."""
        left: tuple[int, int] = self.hear()
        self.serving = False
        return left

    def freeze(self) -> None:
        """The process stands still, as one does that swaps or hangs in a driver."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on as if nothing had happened."""
        os.kill(self.process.pid, signal.SIGCONT)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        self.freeze()
        try:
            yield
        finally:
            if self.process.is_alive():
                self.thaw()

    def kill(self) -> None:
        """As the machine would: no last words."""
        self.process.kill()
        self.process.join(FAR_S)
        assert not self.process.is_alive()

    def end(self) -> int | None:
        """Ends an idle process and returns its exit code."""
        self.control.send(None)
        self.process.join(FAR_S)
        return self.process.exitcode


class Workers:
    """Processes kept for the tests of a module."""

    def __init__(self, count: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pd")
        self.folder = Path(self._folder.name)
        self._workers = [Worker(self.folder) for _ in range(count)]

    def take(self, count: int) -> list[Worker]:
        """Idle ones, new where they do not suffice."""
        idle = [worker for worker in self._workers if worker.process.is_alive() and not worker.serving]
        fresh = [Worker(self.folder) for _ in range(count - len(idle))]
        self._workers += fresh
        return [*idle, *fresh][:count]

    def close(self) -> None:
        """Ends them all; kills those that a failed test left serving."""
        for worker in self._workers:
            if worker.serving and worker.process.is_alive():
                worker.kill()
        idle = [worker for worker in self._workers if worker.process.is_alive()]
        codes = [worker.end() for worker in idle if worker.ready or worker.hear()]
        self._folder.cleanup()
        assert set(codes) <= {0}, codes
