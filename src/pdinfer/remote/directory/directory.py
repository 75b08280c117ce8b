"""Announcements that may be believed, and ports to the engines that made them."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

from pdinfer.bounds import cause, escaped
from pdinfer.checks import clip, typed
from pdinfer.config import RemoteConfig
from pdinfer.errors import ConfigError, TransferError
from pdinfer.kv.channel.wire import check_key
from pdinfer.log import log
from pdinfer.remote.client import DecodeClient, PrefillClient
from pdinfer.remote.directory.announcement import TTL_S, Announcement
from pdinfer.remote.directory.dialling import found
from pdinfer.remote.directory.media import Medium, WritableMedium
from pdinfer.values import Value


@attrs.frozen
class Entry(Value):
    """An engine to dial. `announced` is what it has said of itself, None where the medium carries nothing: it says so
    when it is met."""

    name: str
    endpoint: str
    announced: Announcement | None = None

    @property
    def identity(self) -> bytes | None:
        """What engines of one model and equal weights have in common, None where it is not known."""
        return None if self.announced is None else self.announced.model_id + self.announced.weights_id

    @property
    def is_taken(self) -> bool:
        """Whether another client is known to have it."""
        return self.announced is not None and self.announced.is_taken


@attrs.frozen
class _Beat:
    """The greatest beat of an engine that was read, and when it was, on our clock."""

    beat: int
    at: float


class Directory:
    """What front ends and engines of one group share: a medium, and a key of at least 16 random bytes, which is also
    that of the engines' `Door`.

        directory = pd.remote.directory.Directory(pd.remote.directory.Folder("/shared/engines"), key=key)
        pd.remote.serve(engine, door, directory=directory)             # where the engine is
        pairing.follow(directory)                                      # where the front end is

    `ttl_s` is how long its announcements are believed without a refresh; they are refreshed three times as often.
    `config` is for the ports. Raises ConfigError for what is no medium, no key and no `ttl_s`.
    """

    @typed
    def __init__(
        self,
        medium: Medium,
        *,
        key: bytes,
        ttl_s: float = 15.0,
        config: RemoteConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_key(key)
        if not 0 < ttl_s <= TTL_S:
            raise ConfigError(f"ttl_s must be greater than 0 and at most {TTL_S:g}, got {clip(ttl_s)}")
        self.ttl_s = ttl_s
        self._medium = medium
        self._key = key
        self._config = config
        self._clock = clock
        self._beats: dict[str, _Beat] = {}
        self._refused: set[str] = set()

    def __repr__(self) -> str:
        return f"Directory({type(self._medium).__name__})"

    def watch(self) -> tuple[Entry, ...]:
        """Return the engines that are announced now, by name. Those are left out whose announcement has lapsed, was not
        made with the key, is malformed, or tells of a version that this end does not speak; the log says why, once.
        Waits for the medium. Raises TransferError when that cannot be read, which says nothing about any engine."""
        try:
            read = self._medium.read()
        except Exception as error:
            raise TransferError(f"{self} cannot be read: {cause(error)}") from error
        now, entries, refused = self._clock(), [], set()
        for name, data in sorted(read.items()):
            if data is None:
                entries.append(Entry(name, name))
                continue
            try:
                announced = Announcement.opened(name, data, self._key)
            except TransferError as error:
                refused.add(name)
                if name not in self._refused:
                    log.warning("an entry of %s is ignored: %s: %s", self, escaped(name)[:100], error)
                continue
            if self._is_fresh(name, announced, now):
                entries.append(Entry(name, announced.endpoint, announced))
        self._refused = refused
        self._beats = {name: beat for name, beat in self._beats.items() if name in read or now - beat.at <= TTL_S}
        return tuple(entries)

    def dial(self, entry: Entry) -> PrefillClient | DecodeClient:
        """Return a port to the engine of an entry. Both ends prove that they know the key, and the engine says its role
        itself. Closing the port leaves the engine to its next client. Raises TransferError, also where another engine
        answers than the one that announced itself: it may have other weights."""
        port = found(entry.endpoint, self._key, self._config)
        if entry.announced is not None and port.address != entry.announced.engine:
            port.close()
            raise TransferError(f"{entry.announced.engine} was announced at {entry.endpoint}, where {port} answers")
        return port

    def check(self, announcement: Announcement) -> None:
        """Raise ConfigError for what can never be announced here, without a look at the medium."""
        self._writable()
        announcement.sealed(self._key)

    def announce(self, announcement: Announcement) -> None:
        """Write an announcement, or refresh it. Waits for the medium, and raises what that raises; ConfigError when
        the announcement is too long, or the medium cannot be written to."""
        self._writable().write(announcement.name, announcement.sealed(self._key), ttl_s=announcement.ttl_s)

    def withdraw(self, announcement: Announcement) -> None:
        """Remove it. Waits for the medium, and raises what that raises."""
        self._writable().remove(announcement.name)

    def _writable(self) -> WritableMedium:
        if not isinstance(self._medium, WritableMedium):
            raise ConfigError(
                f"engines cannot announce themselves in {self}, which is only read: start them without a directory, "
                "and let what keeps the medium name them"
            )
        return self._medium

    def _is_fresh(self, name: str, announced: Announcement, now: float) -> bool:
        """Return whether its beat has grown within its `ttl_s`. Only growth counts: where views of a medium differ, or
        somebody puts back what was, an old announcement comes again."""
        known = self._beats.get(name)
        if known is None or announced.beat > known.beat:
            known = self._beats[name] = _Beat(announced.beat, now)
        return now - known.at <= announced.ttl_s
