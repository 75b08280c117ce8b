"""Connects to an engine that a directory names, finds out what it is, and makes it a port."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection

from pdinfer.config import RemoteConfig
from pdinfer.remote import messages
from pdinfer.remote.client import DecodeClient, EngineClient, PrefillClient
from pdinfer.remote.directory.handshake import connected
from pdinfer.remote.messages import AnyLoad, Ready
from pdinfer.remote.session import MessageStream
from pdinfer.stats import DecodeLoad, PrefillLoad


class _Found(EngineClient[AnyLoad]):
    """A port to an engine that was started by others: closing it leaves the engine to its next client."""

    def close(self) -> None:
        """End the connection. An engine that drains ends then; any other waits for a client, as `serve` says."""
        self._line.close()


class FoundPrefill(_Found[PrefillLoad], PrefillClient):
    """A prefill engine that a directory led to."""


class FoundDecode(_Found[DecodeLoad], DecodeClient):
    """A decode engine that a directory led to."""


class Heard:
    """A connection over which messages have come that are still to be read."""

    def __init__(self, connection: Connection, heard: deque[bytes]) -> None:
        self._connection, self._heard = connection, heard
        self.send_bytes, self.close, self.fileno = connection.send_bytes, connection.close, connection.fileno

    def recv_bytes(self) -> bytes:
        return self._heard.popleft() if self._heard else self._connection.recv_bytes()

    def poll(self, timeout: float, /) -> bool:
        return bool(self._heard) or self._connection.poll(timeout)


def found(endpoint: str, key: bytes, config: RemoteConfig | None) -> FoundPrefill | FoundDecode:
    """Return a port to the engine at an endpoint, whichever role it has. Raises TransferError when there is none within
    DIAL_S, or it does not know the key."""
    with connected(endpoint, key) as connection:
        heard, ready = _hear(connection)
    first = [Heard(connection, heard)]

    def dial() -> MessageStream:
        if first:
            return first.pop()
        with connected(endpoint, key) as another:
            return another

    made: Callable[..., FoundPrefill | FoundDecode] = FoundDecode if ready.load.prefill is None else FoundPrefill
    return made(dial, config=config)


def _hear(connection: Connection) -> tuple[deque[bytes], Ready]:
    """Return the first messages of an engine, until it has said what it is, and that one by itself."""
    heard: deque[bytes] = deque()
    joiner = messages.Joiner()
    while True:
        heard.append(connection.recv_bytes())
        whole = joiner.add(heard[-1])
        report = None if whole is None else messages.decode_report(whole)
        if isinstance(report, Ready):
            return heard, report
