"""Keeps the ports of a Pairing those that a directory names.

    directory ──► entries ──► a thread for each dial ──► a port that joins
    a port that is lost, or that drains ──► the step lets go of it

A directory only ever adds ports. An entry that is gone says nothing about the engine: the directory may be lost, late
or split. Whether an engine is there is known from its connection, so a port leaves when that ends, or when the engine
itself asks for it."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import attrs

from pdinfer.bounds import cause
from pdinfer.errors import LayoutMismatch, Overloaded
from pdinfer.log import log
from pdinfer.pairing.port import DecodePort, Port, PrefillPort
from pdinfer.process.threads import start
from pdinfer.types import PeerAddress

POLL_S = 1.0
"""How often a directory is read."""
MAX_DIALS = 16
"""How many entries are dialled at a time. One that does not answer takes a while."""
DIAL_AGAIN_S = (1.0, 60.0)
"""Seconds from a dial that failed to the next one: after the first failure, and at most. They double in between."""


class Entry(Protocol):
    """An engine that a directory names. Entries of one `identity` have the same model and weights; None is unknown.
    One that `is_taken` has another client, and is not dialled."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> bytes | None: ...

    @property
    def is_taken(self) -> bool: ...


class PortDirectory(Protocol):
    """What `Pairing.follow` takes, such as a `pdinfer.remote.directory.Directory`. Both methods may wait, and raise
    whatever they like."""

    def watch(self) -> Sequence[Entry]: ...

    def dial(self, entry: Any, /) -> PrefillPort | DecodePort: ...


@runtime_checkable
class DrainingPort(Protocol):
    """A port whose engine may ask to be let go of."""

    @property
    def is_draining(self) -> bool: ...


@attrs.frozen
class Followed:
    """What a Following does to its Pairing. `add` and `removal` are the Pairing's. `has` says whether a port is in use,
    or lost and may come back, and `wake` has the host step."""

    add: Callable[[Any], None]
    removal: Callable[..., Iterator[float]]
    has: Callable[[Port], bool]
    wake: Callable[[], None]


@attrs.define
class _Tries:
    """When an entry may be dialled again, and how long it then waits for the next time."""

    due_at: float
    pause_s: float = DIAL_AGAIN_S[0]


@attrs.define(eq=False, repr=False)
class Following:
    """One directory that a Pairing follows. `look` and `let_go` are called again and again by threads of `start`, or by
    a test, and `act` by the thread that steps. `beside` runs what it is given in a thread of its own."""

    _directory: PortDirectory
    _followed: Followed
    _drain_s: float
    _clock: Callable[[], float]
    _beside: Callable[[Callable[[], None]], object]
    _ports: dict[str, tuple[Entry, Port]] = attrs.field(factory=dict)
    _dialling: dict[str, Entry] = attrs.field(factory=dict)
    _tries: dict[str, _Tries] = attrs.field(factory=dict)
    _asked: set[PeerAddress] = attrs.field(factory=set)
    _leaving: deque[tuple[Port, Iterator[float]]] = attrs.field(factory=deque)
    _changing: threading.Lock = attrs.field(factory=threading.Lock)
    _is_lost: bool = False
    _ended: threading.Event = attrs.field(factory=threading.Event)

    def start(self) -> None:
        try:  # two, since an engine drains whether or not the directory can be read
            for work in (self.look, self.let_go):
                start(threading.Thread(target=self._repeat, args=(work,), name="pdinfer-follow", daemon=True))
        except Overloaded:
            self.close()
            raise

    def close(self) -> None:
        """Look no more. A dial that is under way ends by itself, and its port does not join."""
        self._ended.set()

    def look(self) -> None:
        """Read the directory once, and have entries dialled that are due, first those that have waited longest."""
        now, entries = self._clock(), self._read()
        listed = {entry.name for entry in entries}
        with self._changing:
            self._forget_lost()
            self._tries = {
                name: tries
                for name, tries in self._tries.items()
                if name in listed or now < tries.due_at + DIAL_AGAIN_S[1]
            }
            for entry in sorted(entries, key=self._due_at):
                if self._is_due(entry, now) and len(self._dialling) < MAX_DIALS:
                    self._dialling[entry.name] = entry
                    try:
                        self._beside(partial(self._dial, entry))
                    except Overloaded as error:
                        self._failed(entry, error)

    def act(self) -> None:
        """Go on with letting ports go, between two steps."""
        for _ in range(len(self._leaving)):
            if not self._leaving:  # the end of a removal is a step, which has come here itself
                return
            port, removal = self._leaving.popleft()
            try:
                has_left = next(removal, None) is None
            except BaseException:  # the port is still here
                self._asked.discard(port.address)
                raise
            if has_left:
                port.close()
            else:
                self._leaving.append((port, removal))

    def replace(self, port: Port, changed: Port) -> None:
        """Have a port that has changed its role in the place of the one that it was."""
        with self._changing:
            self._ports = {
                name: (entry, changed if known is port else known) for name, (entry, known) in self._ports.items()
            }

    def let_go(self) -> None:
        """Begin to let go of the ports whose engines have asked for it."""
        with self._changing:
            self._forget_lost()
            ports = [port for _, port in self._ports.values()]
        self._asked &= {port.address for port in ports}
        for port in ports:
            if isinstance(port, DrainingPort) and port.is_draining and port.address not in self._asked:
                log.info("a port is let go of, since its engine drains: %s", port.address)
                self._asked.add(port.address)
                self._leaving.append((port, self._followed.removal(port, drain_s=self._drain_s)))
        if self._leaving:
            self._followed.wake()

    def _repeat(self, work: Callable[[], None]) -> None:
        while not self._ended.is_set():
            try:
                work()
            except Exception:  # noqa: BLE001 - what an entry or a port raises must not be the last that is read
                log.exception("a directory could not be followed now")
            self._ended.wait(POLL_S)

    def _forget_lost(self) -> None:
        self._ports = {name: known for name, known in self._ports.items() if self._followed.has(known[1])}

    def _read(self) -> Sequence[Entry]:
        """Return what the directory names, nothing while it cannot be read."""
        try:
            entries = tuple(self._directory.watch())
        except Exception as error:  # noqa: BLE001 - whatever a directory raises
            if not self._is_lost:
                log.warning("a directory is lost; the ports that it led to stay: %s", cause(error))
            self._is_lost = True
            return ()
        if self._is_lost:
            log.warning("a directory that was lost is back")
        self._is_lost = False
        return entries

    def _due_at(self, entry: Entry) -> float:
        tries = self._tries.get(entry.name)
        return -math.inf if tries is None else tries.due_at

    def _is_due(self, entry: Entry, now: float) -> bool:
        """Return whether to dial an entry now: nobody has it, its last failure is long enough ago, and no port of
        other weights is here or on its way, since no pair of them could serve."""
        name = entry.name
        if entry.is_taken or name in self._ports or name in self._dialling:
            return False
        others = [*self._dialling.values(), *(known for known, _ in self._ports.values())]
        if any(None is not other.identity != entry.identity is not None for other in others):
            return False
        return now >= self._due_at(entry)

    def _dial(self, entry: Entry) -> None:
        """Make an entry a port, or note that this has failed."""
        try:
            port = self._directory.dial(entry)
            try:
                self._followed.add(port)
            except BaseException:
                port.close()
                raise
        except Exception as error:  # noqa: BLE001 - whatever a port or a directory raises
            with self._changing:
                self._failed(entry, error)
        else:
            log.info("a directory has led to a port: %s", port.address)
            with self._changing:
                del self._dialling[entry.name]
                self._tries.pop(entry.name, None)
                self._ports[entry.name] = entry, port

    def _failed(self, entry: Entry, error: Exception) -> None:
        """Have the entry dialled ever more rarely. One whose pages mean something else stays so, and is dialled as
        rarely as any at once."""
        del self._dialling[entry.name]
        tries = self._tries.get(entry.name) or _Tries(0.0)
        pause_s = DIAL_AGAIN_S[1] if isinstance(error, LayoutMismatch) else tries.pause_s
        log.info("an entry of a directory is dialled again in %g s: %s: %s", pause_s, entry, cause(error))
        self._tries[entry.name] = _Tries(self._clock() + pause_s, min(2 * pause_s, DIAL_AGAIN_S[1]))


def in_a_thread(work: Callable[[], None]) -> None:
    """Do `work` in a thread of its own."""
    start(threading.Thread(target=work, name="pdinfer-dial", daemon=True))
