"""Starts an engine in a process of its own and returns the port to it.

The process is a new Python that imports pdinfer and nothing of its parent: a script needs no `__main__` guard, and a
notebook or a prompt has no file that could be imported. It ends when its port is closed, and when its parent does."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.spawn import get_executable
from typing import Any, Self

import attrs
import msgspec

from pdinfer.checks import MAX_WAIT_S, clip
from pdinfer.config import CacheConfig, EngineConfig, RemoteConfig
from pdinfer.errors import ConfigError, TransferError
from pdinfer.execution.sampling import LogitsProcessorFactory
from pdinfer.execution.warm_up import WarmUp
from pdinfer.files import AnyPath
from pdinfer.kv.transports.base import Transport
from pdinfer.kv.transports.shm.transport import same_host_transport
from pdinfer.log import log
from pdinfer.model.load import Device, DType
from pdinfer.process.scratch import remove_abandoned, temporary_folder
from pdinfer.progress import Progress, Tell, telling
from pdinfer.remote.client import READY_S, DecodeClient, EngineClient, PrefillClient
from pdinfer.remote.messages import AnyLoad
from pdinfer.remote.orders import Failed, Loaded, Loading, Named, Order, Said, Warming, decode_said
from pdinfer.stats import DecodeLoad, PrefillLoad

CODE = "import sys; sys.path[:] = sys.argv[4:]; from pdinfer.remote.child import main; main(*map(int, sys.argv[1:3]))"
"""The code of the process. Its arguments are two descriptors, a name for whoever lists processes, and `sys.path`."""
GRACE_S = 5.0
"""How much longer than `RemoteConfig.exit_s` a process may take to end before it is killed."""
LAST_BYTES = 4096
"""How much of a child's last words an error holds."""
STDERR = 2
MOST_WARM_UPS = 16


class _Spawned(EngineClient[AnyLoad]):
    """A port to an engine that was spawned. `process` has `pid`, `poll`, `wait`, `terminate` and `kill`. `warm_ups` are
    those that the engine ran before it was ready; the first has what first uses take. One that changes its role has
    none."""

    warm_ups: tuple[WarmUp, ...] = ()

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        connection: Connection,
        config: RemoteConfig,
        warm_ups: tuple[WarmUp, ...] = (),
    ) -> None:
        self.process = process
        self.warm_ups = warm_ups
        super().__init__(connection, config=config)

    def _follow(self, before: EngineClient[Any]) -> None:
        assert isinstance(before, _Spawned)
        self.process = before.process
        super()._follow(before)

    def close(self) -> None:
        """Make the process close the engine and end, without waiting for that. One that does not is killed."""
        super().close()
        if self._successor is None:  # which ends it
            _end(self.process, self._line.config.exit_s + GRACE_S)

    @classmethod
    def _spawn(
        cls,
        checkpoint: AnyPath,
        *,
        cache: CacheConfig | None = None,
        engine: EngineConfig | None = None,
        other_engine: EngineConfig | None = None,
        transport: Callable[[], Transport] = same_host_transport,
        device: Device = "cpu",
        dtype: DType | None = None,
        logits_processors: Mapping[str, LogitsProcessorFactory] | None = None,
        trusted_roots: Sequence[AnyPath] = (),
        key: bytes | None = None,
        warm_up: int = 0,
        progress: Progress = True,
        timeout_s: float = READY_S,
        config: RemoteConfig | None = None,
    ) -> Self:
        """Start a process with an engine of one rank, wait until it is ready, and return the port. Any thread may.

        The process loads `checkpoint` with `device`, `dtype` and `trusted_roots`, and makes a pool of `cache`, a
        channel with `key`, and an engine of `engine`; `other_engine` is for the other role (`Pairing.switch`), and by
        default the same. `transport` is called there to make the channel's: it is a class or function of a module, or a
        `functools.partial` of one with plain arguments, and so is each of `logits_processors`. The engine is warmed up
        `warm_up` times first, once for True; `planning.calibrate` takes all but the first of the port's `warm_ups`.
        `progress(done_bytes, total_bytes)` is called here while the model is loaded; True draws lines on stderr, of
        warm-ups, too. `timeout_s` is how long it may say nothing before it is ready. `config` is for both ends.

        The process is a new Python with this one's `sys.path`, environment and working directory. It is told all this
        over a pipe, gets no Ctrl-C, closes its engine on SIGTERM, and ends with the port or with this process.

        Raises ConfigError for what cannot be handed over; what loading and making the engine raise there;
        TransferError, with the last that it wrote, when it cannot start, ends or falls silent before it is ready."""
        config = config or RemoteConfig()
        order = Order(
            role=cls.role,
            checkpoint=_path("checkpoint", checkpoint),
            device=str(device),
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            cache=_fields("cache", cache, CacheConfig),
            engine=_fields("engine", engine, EngineConfig),
            other_engine=_fields("other_engine", other_engine or engine, EngineConfig),
            remote=_fields("config", config, RemoteConfig),
            transport=Named.of("transport", transport),
            logits_processors=_named(logits_processors or {}),
            trusted_roots=[_path("each of trusted_roots", root) for root in trusted_roots],
            key=key,
            warm_up=_times(warm_up),
            log_level=log.getEffectiveLevel(),
        )
        warming_up = telling(progress is True, f"warming up {cls.role}", "steps")
        with telling(progress, f"loading {cls.role}", "bytes") as loads, warming_up as warms:
            child = _started(cls.role)
            try:
                loaded = child.obey(order, {Loading: loads, Warming: warms}, timeout_s)
                return cls(child.process, child.connection, config, loaded.warm_ups)
            except BaseException:
                child.kill()
                raise


class SpawnedPrefill(_Spawned[PrefillLoad], PrefillClient):
    """A prefill engine that `spawn_prefill` started."""

    def _other(self) -> type[SpawnedDecode]:
        return SpawnedDecode


class SpawnedDecode(_Spawned[DecodeLoad], DecodeClient):
    """A decode engine that `spawn_decode` started."""

    def _other(self) -> type[SpawnedPrefill]:
        return SpawnedPrefill


spawn_prefill = SpawnedPrefill._spawn  # noqa: SLF001 - one function, under a name for each role
spawn_decode = SpawnedDecode._spawn  # noqa: SLF001


def _path(what: str, folder: AnyPath) -> str:
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"{what} must be the path of a folder, got {clip(folder)}")
    return os.fspath(folder)


def _times(warm_up: int) -> int:
    if not isinstance(warm_up, int) or not 0 <= warm_up <= MOST_WARM_UPS:
        raise ConfigError(f"warm_up must be how often, from 0 to {MOST_WARM_UPS}, or a bool, got {clip(warm_up)}")
    return int(warm_up)


def _named(processors: Mapping[str, LogitsProcessorFactory]) -> dict[str, Named]:
    return {name: Named.of(f"logits processor {name!r}", made_by) for name, made_by in processors.items()}


def _fields(what: str, config: attrs.AttrsInstance | None, kind: type[attrs.AttrsInstance]) -> dict[str, Any]:
    if not isinstance(config, kind | None):
        raise ConfigError(f"{what} must be a {kind.__name__}, got {clip(config)}")
    return {} if config is None else attrs.asdict(config)


def _started(role: str) -> _Child:
    try:
        return _Child(role)
    except OSError as error:
        raise TransferError(f"a process for the {role} engine cannot be started: {error}") from error


class _Child:
    """A process until it serves: what it says over its connection, and what it writes to stderr."""

    def __init__(self, role: str) -> None:
        self._role = role
        self._wrote = b""
        self.connection, theirs = multiprocessing.Pipe()
        try:
            stderr = os.dup(STDERR)
        except OSError:  # this process has none
            stderr = os.open(os.devnull, os.O_WRONLY)
        try:
            self.process = subprocess.Popen(  # noqa: S603 - this Python, with arguments that are our own
                [get_executable(), "-c", CODE, str(theirs.fileno()), str(stderr), f"pdinfer-{role}", *sys.path],
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(theirs.fileno(), stderr),
                start_new_session=True,  # a Ctrl-C, or a notebook's interrupt, is for the host
            )
        finally:
            os.close(stderr)
            theirs.close()
        assert self.process.stderr is not None
        self._stderr = self.process.stderr

    def obey(self, order: Order, tells: Mapping[type[Said], Tell], timeout_s: float) -> Loaded:
        """Give the order, and return what the process says when it serves. `tells` take its progress. Raises
        TransferError, or its error."""
        with contextlib.suppress(OSError):  # it has ended already, which is noticed below
            self.connection.send_bytes(msgspec.msgpack.encode(order, enc_hook=os.fspath))
        while not isinstance(said := self._hear(timeout_s), Loaded):
            if isinstance(said, Failed):
                raise said.error()
            tells[type(said)](*msgspec.structs.astuple(said))
        self._read_stderr()
        if self._wrote and sys.stderr is not None:
            sys.stderr.write(self._wrote.decode("utf-8", "replace"))
        self._stderr.close()  # the process has the stderr of this one now
        return said

    def kill(self) -> None:
        """Leave nothing of it."""
        self.process.kill()
        self.process.wait()
        self._stderr.close()
        self.connection.close()
        remove_abandoned(temporary_folder())

    def _hear(self, timeout_s: float) -> Said:
        """Return the next message, and keep the last of what the process writes meanwhile."""
        stderr = self._stderr.fileno()
        sources: list[Connection | int] = [self.connection, stderr]
        while ready := wait(sources, min(timeout_s, MAX_WAIT_S)):
            if stderr in ready and not self._read_stderr():
                sources.remove(stderr)
            if self.connection in ready:
                try:
                    return decode_said(self.connection.recv_bytes())
                except (EOFError, OSError):
                    raise self._loss(self._how_it_ended()) from None
        raise self._loss(f"has said nothing for {timeout_s:g} s")

    def _read_stderr(self) -> bool:
        """Read what is there, and return False when nothing more will come."""
        while wait([self._stderr.fileno()], 0.0):
            data = os.read(self._stderr.fileno(), 1 << 16)
            if not data:
                return False
            self._wrote = (self._wrote + data)[-LAST_BYTES:]
        return True

    def _how_it_ended(self) -> str:
        try:
            status = self.process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        self._read_stderr()
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"

    def _loss(self, what: str) -> TransferError:
        wrote = self._wrote.decode("utf-8", "replace").strip()
        last = f"; the last that it wrote is:\n{wrote}" if wrote else ", and wrote nothing"
        return TransferError(f"the process of a {self._role} engine {what} before it was ready{last}")


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Wait in a thread until a process has ended whose port is closed. Python waits for that thread before it exits."""

    def reap() -> None:
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            log.error("process %d did not end within %g s of closing its port; it is killed", process.pid, grace_s)
            process.kill()
            process.wait()
        remove_abandoned(temporary_folder())  # the folder of one that was killed

    with contextlib.suppress(RuntimeError):  # Python exits already, and the process will notice
        threading.Thread(target=reap, name="pdinfer-reap").start()
