"""How a served engine announces itself in a directory.

The medium may be a file system that hangs, so a thread writes, and nothing that steps waits for it. It writes only what
the thread that serves has confirmed by a turn of its loop: a fresh announcement means an engine that steps.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from pdinfer.bounds import cause
from pdinfer.engine.decode import DecodeEngine
from pdinfer.engine.prefill import PrefillEngine
from pdinfer.errors import ConfigError
from pdinfer.kv.transports.stream.endpoints import endpoint_of
from pdinfer.log import log
from pdinfer.process.threads import start
from pdinfer.remote.directory.announcement import Announcement
from pdinfer.remote.directory.directory import Directory
from pdinfer.remote.directory.media import host_and_port

LOOK_S = 0.2
"""How soon others are told that an engine takes no more clients, or does again."""
REFRESHES = 3
"""How often an announcement is refreshed within its `ttl_s`."""
WITHDRAW_S = 1.0
"""How long an engine that ends waits for its announcement to be withdrawn. What stays lapses."""
WILDCARDS = ("", "0.0.0.0", "::")  # noqa: S104 - they are refused


class Served(Protocol):
    """What is known of a served engine: in which role it is, when its loop has last gone round, whether it is to be
    drained, and whether it has as many clients as it may have."""

    stepped_at: float
    drain: threading.Event

    @property
    def engine(self) -> PrefillEngine | DecodeEngine: ...

    @property
    def is_taken(self) -> bool: ...


def announced_at(connection: object, advertise: str | None) -> str:
    """Return the endpoint that others are told. Raises ConfigError where there is none."""
    if not hasattr(connection, "accept"):
        raise ConfigError(
            "an engine in a directory has clients that come by themselves: give `serve` a listener, such as "
            "pdinfer.remote.directory.Door(host, port, key=key); ranks without a client are not announced"
        )
    if advertise is not None:
        host_and_port(advertise, ConfigError)
        return advertise
    match getattr(connection, "address", None):
        case (str(host), int(port), *_) if host not in WILDCARDS:
            return endpoint_of(host, port)
        case address:
            raise ConfigError(f"{address} is not where others reach this engine: give advertise='host:port'")


class Announcer:
    """Announces one engine from `start` to `close`. The constructor raises ConfigError for what can never be announced.
    A medium that cannot be written to now is tried again, since it may come back."""

    def __init__(self, directory: Directory, engine: PrefillEngine | DecodeEngine, endpoint: str) -> None:
        self._directory, self._engine, self._endpoint = directory, engine, endpoint
        self._announced = self._describe(0, is_taken=False)
        directory.check(self._announced)
        self._due_at, self._seen_at = 0.0, float("-inf")
        self._is_failing = self._is_withdrawn = False
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, served: Served) -> None:
        self._thread = start(threading.Thread(target=self._run, args=(served,), name="pdinfer-announce", daemon=True))

    def close(self) -> None:
        """Withdraw the announcement, unless that takes longer than WITHDRAW_S."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(WITHDRAW_S)

    def look(self, served: Served, now: float) -> None:
        """Announce the engine if its loop has gone round and the time has come, or when it was taken or set free. What
        could not be written is tried again at the next look. One that drains is withdrawn."""
        if served.drain.is_set():
            self.withdraw()
            return
        is_news = served.is_taken != self._announced.is_taken
        if served.stepped_at == self._seen_at or not (is_news or now >= self._due_at):
            return
        self._seen_at, self._due_at = served.stepped_at, now
        self._engine = served.engine
        try:
            self._announced = self._describe(self._announced.beat + 1, is_taken=served.is_taken)
            self._directory.announce(self._announced)
        except Exception as error:  # noqa: BLE001 - whatever a medium raises
            if not self._is_failing:
                log.warning("an engine cannot announce itself in %s now: %s", self._directory, cause(error))
            self._is_failing = True
        else:
            self._is_failing, self._due_at = False, now + self._directory.ttl_s / REFRESHES

    def withdraw(self) -> None:
        """Take the announcement back, once."""
        if self._is_withdrawn:
            return
        self._is_withdrawn = True
        try:
            self._directory.withdraw(self._announced)
        except Exception as error:  # noqa: BLE001 - as above
            log.warning("an engine cannot withdraw from %s, where it will lapse: %s", self._directory, cause(error))

    def _describe(self, beat: int, *, is_taken: bool) -> Announcement:
        return Announcement.of(self._engine, self._endpoint, ttl_s=self._directory.ttl_s, beat=beat, is_taken=is_taken)

    def _run(self, served: Served) -> None:
        while not self._ended.wait(LOOK_S):
            self.look(served, time.monotonic())
        self.withdraw()
