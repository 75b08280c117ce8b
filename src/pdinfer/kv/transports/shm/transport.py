"""A transport between processes of one host: the receiver copies out of the sender's memory, at the speed of memory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from pdinfer.checks import typed
from pdinfer.errors import ConfigError
from pdinfer.kv.fused import library
from pdinfer.kv.memfd import CAN_SHARE, Memfd
from pdinfer.kv.memory import Memory
from pdinfer.kv.transports.base import Link, Receiver, Transport
from pdinfer.kv.transports.shm.receiver import MappedPayloads
from pdinfer.kv.transports.socket import SocketTransport
from pdinfer.kv.transports.stream.endpoints import Listener, listen_unix
from pdinfer.kv.transports.stream.framing import Payloads
from pdinfer.kv.transports.stream.transport import Strangers, StreamTransport
from pdinfer.process.scratch import ScratchFolder

SCHEME = "shm://"


@runtime_checkable
class Shareable(Protocol):
    """What a Memory also has when its bytes may be those of a memfd."""

    @property
    def memfd(self) -> Memfd | None:
        """The memfd whose first `num_bytes` are this memory, or None when the bytes lie elsewhere."""


class ShmTransport(StreamTransport):
    """Frames over a Unix socket, payloads through shared memory. Linux only.

    Listens on a socket made at `path`, or in a private temporary directory that is removed at `close`. A peer gets a
    descriptor of the pool's memory to read from, so the ends may be in different containers as long as they share the
    socket file. Any process that can open that file and that the channel trusts can read the whole pool. A memory that
    is not in a memfd (a GPU's) is staged through a ring of a few MiB per link.

    With `digest=False` payloads are not verified; an end with digests refuses the writes of one without. Either way a
    copy that the end of its sender may have disturbed is never used. `strangers` limits links that are not trusted yet.
    Raises ConfigError on systems without memfds."""

    @typed
    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        digest: bool = True,
        strangers: Strangers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not CAN_SHARE:
            raise ConfigError("ShmTransport needs Linux; use SocketTransport")

        library()  # compiled now, where that takes a second, and not while a link is served

        def payloads(link: Link, memory: Memory, receiver: Receiver) -> Payloads:
            pool = memory.memfd if isinstance(memory, Shareable) else None
            return MappedPayloads(link, memory, receiver, digest=digest, pool=pool)

        super().__init__(
            "shm",
            listen=lambda: listen_shm(None if path is None else os.fspath(path)),
            schemes=(SCHEME,),
            payloads=payloads,
            clock=clock,
            strangers=strangers or Strangers(),
        )


@typed
def same_host_transport(*, digest: bool = True) -> Transport:
    """Return the fastest transport between processes of this host: shared memory, or sockets where there is none."""
    return ShmTransport(digest=digest) if CAN_SHARE else SocketTransport(digest=digest)


def listen_shm(path: str | None) -> Listener:
    """Listen at `path`, or in a private folder that is removed with the listener."""
    if path is not None:
        return listen_unix(path, scheme=SCHEME)
    try:
        folder = ScratchFolder()
    except OSError as error:
        raise ConfigError(
            f"cannot make a folder for a socket: {error}; give a path, or set TMPDIR to a short one that you may write"
        ) from error
    try:
        return listen_unix(str(folder.path / "kv.sock"), scheme=SCHEME, folder=folder)
    except ConfigError:
        folder.close()
        raise
