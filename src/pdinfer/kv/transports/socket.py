"""A transport over TCP or Unix sockets: the receiver places the bytes, so nothing can land after a fence."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from pdinfer.checks import typed
from pdinfer.errors import ConfigError
from pdinfer.kv.memory import Memory
from pdinfer.kv.transports.base import Link, Receiver
from pdinfer.kv.transports.stream.endpoints import (
    TCP,
    UNIX,
    check_advertised,
    check_local,
    check_port,
    listen_tcp,
    listen_unix,
)
from pdinfer.kv.transports.stream.framing import InlinePayloads, Payloads
from pdinfer.kv.transports.stream.transport import Strangers, StreamTransport


class SocketTransport(StreamTransport):
    """Frames and writes over stream sockets, each write verified by a digest.

    Listens on `host`:`port` (0 is any free port), or on a Unix socket made at `path`, and connects to both kinds. With
    `digest=False` payloads are not verified: neither those sent nor, when the peer sends no digest, those received. An
    end with digests refuses the writes of one without. `strangers` limits links that are not trusted yet.

    `advertise` is the name or address that peers are told instead of `host`. Behind a wildcard such as "0.0.0.0" they
    are otherwise told this machine's name, which not every network resolves. The port stays the one listened on.

    Nothing is encrypted. A host that other machines can reach needs a channel with a key, or `allow_remote=True` on a
    trusted network. Without either, making the channel raises ConfigError, as it does for an address that cannot be
    used."""

    @typed
    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        path: str | os.PathLike[str] | None = None,
        advertise: str | None = None,
        allow_remote: bool = False,
        digest: bool = True,
        strangers: Strangers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_port(port)
        if path is not None and (host, port) != ("127.0.0.1", 0):
            raise ConfigError(f"listen on a path ({path!r}) or on a host and port ({host}:{port}), not on both")
        if advertise is not None:
            check_advertised(advertise, path)

        def payloads(link: Link, memory: Memory, receiver: Receiver) -> Payloads:
            return InlinePayloads(link, memory, receiver, digest=digest)

        super().__init__(
            "tcp" if path is None else "unix",
            listen=lambda: listen_tcp(host, port, advertise) if path is None else listen_unix(os.fspath(path)),
            schemes=(TCP, UNIX),
            payloads=payloads,
            clock=clock,
            strangers=strangers or Strangers(),
        )
        self._host = host if path is None else None
        self._allow_remote = allow_remote

    def register(self, memory: Memory, receiver: Receiver) -> tuple[str, ...]:
        if self._host is not None and not self._allow_remote:
            check_local(self._host, receiver)
        return super().register(memory, receiver)
