"""The line to an engine in another process: a session that is renewed when the engine was lost and is heard again, over
another connection where the first one broke. And what the client knows of that engine: its identity, its last report,
and the requests sent since."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, cast

import attrs

from pdinfer.checks import clip
from pdinfer.config import RemoteConfig
from pdinfer.errors import ConfigError, Overloaded, TransferError
from pdinfer.kv.prefix import count_known
from pdinfer.log import log
from pdinfer.process.forked import OfOneProcess
from pdinfer.process.locks import new_lock
from pdinfer.process.threads import start
from pdinfer.remote import messages
from pdinfer.remote.messages import (
    KEY_BYTES,
    AnyLoad,
    BeatMessage,
    Command,
    Computing,
    Connected,
    PageChanges,
    Ready,
    Report,
    Stepped,
)
from pdinfer.remote.session import MessageStream, Session
from pdinfer.stats import ChannelStats, DecodeLoad, PeerStats, PrefillLoad, changed, with_queued, with_waiting
from pdinfer.types import PeerAddress, TokenEvent


class MirroredPages:
    """The pages of an engine in another process, as its last report tells."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and key[:KEY_BYTES] in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def count_known(self, keys: Sequence[bytes]) -> int:
        return count_known(keys, self)

    def take(self, changes: PageChanges | None, *, num_pages: int) -> None:
        """Follow the engine, which has `num_pages`. Raises TransferError when it tells of more."""
        if changes is None:
            return
        if changes.forgotten:
            self._keys = set()
        self._keys.update(_split(changes.added))
        self._keys.difference_update(_split(changes.dropped))
        if len(self._keys) > num_pages:
            raise TransferError(f"it tells of {len(self._keys)} pages and has {num_pages}")


def _split(packed: bytes) -> list[bytes]:
    return [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)]


class KnownEngine(Generic[AnyLoad]):
    """An engine as its reports describe it. It `is_live` from a Ready until it is lost, for which `num_losses` are
    counted. `pages` are those that it can find, and `computing` are the requests of which it last reported to compute
    rows. One that `follows` begins with the Ready of its role: reports of another engine, which come before, are
    ignored. `num_renewals` is the number of the last Renew that was sent. The line calls it under its lock."""

    def __init__(self, role: str, *, follows: bool = False) -> None:
        self.role = role
        self._follows = follows
        self.ready: Ready | None = None
        self.is_live = False
        self.num_losses = 0
        self.pages = MirroredPages()
        self.computing: frozenset[str] = frozenset()
        self.num_renewals = 0
        self._load: AnyLoad | None = None
        self._brief: AnyLoad | None = None
        self._num_submitted = self._num_seen = 0
        self._unseen: list[tuple[int, int]] = []
        self._step_age_s, self._told_at = 0.0, time.monotonic()

    def load_now(self) -> AnyLoad:
        """Return the load that the engine reported, with the requests submitted since."""
        load, new = self._load, [tokens for _, tokens in self._unseen]
        if isinstance(load, PrefillLoad):
            return with_queued(load, sum(new), new)
        assert isinstance(load, DecodeLoad)
        return with_waiting(load, new)

    def brief_load(self) -> AnyLoad:
        """Return the part of it that policies need, which is made again only when something has changed, and how old it
        is."""
        if self._brief is None:
            self._brief = attrs.evolve(self.load_now(), transport="", providers=(), kv=ChannelStats())
        return changed(self._brief, step_age_s=self.step_age_s)

    @property
    def peers(self) -> tuple[PeerStats, ...]:
        return () if self._load is None else self._load.kv.peers

    @property
    def step_age_s(self) -> float:
        """How long ago its last step ended: 0 at its last report, the age in a later beat, and the time since."""
        return self._step_age_s + time.monotonic() - self._told_at

    def beat(self, step_age_s: float) -> None:
        self._step_age_s, self._told_at = step_age_s, time.monotonic()

    def submit(self, num_tokens: int) -> bool:
        """Number a request that is about to be sent. Return False when the port is lost and it must not be sent."""
        if not self.is_live:
            return False
        self._num_submitted += 1
        self._brief = None
        self._unseen.append((self._num_submitted, num_tokens))
        return True

    def lose(self) -> None:
        """Note that the port is lost, and give up what was submitted."""
        self.is_live = False
        self.num_losses += 1
        self._brief = None
        self._unseen.clear()

    def take(self, report: Ready | Computing | Stepped) -> bool:
        """Take a report, and return whether it brings a host news. Those from before a renewal are ignored. Raises
        TransferError for what the engine cannot report now: policies rely on its load."""
        is_renewing = self.ready is not None and not self.is_live
        if is_renewing and (not isinstance(report, Ready) or report.session < self.num_renewals):
            return False
        is_ours = isinstance(report, Ready) and report.load.of_role(self.role) is not None
        if self._follows and self.ready is None and not is_ours:
            return False
        if isinstance(report, Computing):
            self.computing = frozenset(report.request_ids)
            return False
        load = cast(AnyLoad | None, report.load.of_role(self.role))
        ready = report if isinstance(report, Ready) else self.ready
        if ready is None or (load is not None and load.address != ready.address):
            raise TransferError("it tells the load of another engine than the one it said it is")
        if isinstance(report, Ready):
            self._check_ready(report)
        elif load is None:
            raise TransferError(f"it tells of no load of a {self.role} engine")
        elif not self._num_seen <= report.num_seen <= self._num_submitted:
            raise TransferError(
                f"it has seen {report.num_seen} of {self._num_submitted} submits, {self._num_seen} before"
            )
        else:
            _check_tokens(report.tokens, ready.limits.vocab_size)
        if load is not None:
            self.pages.take(report.pages, num_pages=load.num_total_pages)
        if isinstance(report, Ready):
            self.ready, self.is_live, self.computing = report, True, frozenset()
            self._num_submitted = self._num_seen = 0
        else:
            self._num_seen = report.num_seen
        self._load, self._brief = load, None
        self.beat(0.0)
        self._unseen = [(number, tokens) for number, tokens in self._unseen if number > self._num_seen]
        return True

    def check_role(self, role: str) -> tuple[PeerAddress, ...]:
        """Return the addresses of all leaders of the engine's ranks. Raise ConfigError when it has not said that it can
        take this role."""
        ready = self.ready
        assert ready is not None
        if role == self.role:
            raise ConfigError(f"{ready.address} is a {role} engine already: name the other role")
        if ready.minor < messages.BECOMING_MINOR:
            raise ConfigError(
                f"the process of {ready.address} speaks version {ready.version}.{ready.minor}, without a change of "
                f"role, which came with {messages.VERSION}.{messages.BECOMING_MINOR}: update pdinfer there"
            )
        if role not in ready.roles:
            raise ConfigError(
                f"{ready.address} cannot become {clip(role)}; it can become {', '.join(ready.roles) or 'nothing'}: "
                "the model must be able to run the steps of the other one"
            )
        return ready.leaders or (ready.address,)

    def _check_ready(self, ready: Ready) -> None:
        own = (ready.address,)
        is_itself = (ready.addresses or own)[0] == ready.address and ready.address in (ready.leaders or own)
        if self.is_live or not is_itself:
            raise TransferError("it has said who it is twice, or in two ways")
        if ready.version != messages.VERSION:
            raise TransferError(f"it speaks version {ready.version}, this end speaks {messages.VERSION}")
        if unknown := set(ready.required) - messages.FEATURES:
            raise TransferError(f"it requires features this end does not have: {', '.join(sorted(unknown))}")
        if self.ready is not None and (ready.address, ready.limits) != (self.ready.address, self.ready.limits):
            raise TransferError("it is another engine than before")


def _check_tokens(events: Sequence[TokenEvent], vocab_size: int) -> None:
    for event in events:
        ids = [0 if event.token is None else event.token, *(token for token, _ in event.top_logprobs)]
        if max(ids) >= vocab_size:
            raise TransferError(f"token {max(ids)} is not one of a vocabulary of {vocab_size}")


REDIAL_S = (0.1, 5.0)
"""Seconds before the first and, doubling, before every later attempt to make another connection."""


class Line(OfOneProcess, Generic[AnyLoad]):
    """Carries messages to an `engine` and notes what it reports, under `lock`.

    `tell` gets what the engine says, but for reports that bring no news. `wake` is called when it is lost, and when it
    `is_gone`: then nothing will come any more. Both are called in the session's threads. `dial` makes another
    connection. A line that `follows` another takes over its session, and knows an engine of its own role only."""

    def __init__(
        self,
        role: str,
        config: RemoteConfig,
        dial: Callable[[], MessageStream] | None,
        tell: Callable[[Report], None],
        wake: Callable[[], None],
        *,
        follows: bool = False,
    ) -> None:
        self.config = config
        self.dial = dial
        self.engine: KnownEngine[AnyLoad] = KnownEngine(role, follows=follows)
        self.lock = new_lock()
        self.is_gone = False
        self._tell, self._wake = tell, wake
        self._reason = ""
        self._hung_s: float | None = None  # of an engine that changes its role, which says it again when it has
        self._closing = threading.Event()
        self._session: Session[Report]

    def meet(self, connection: MessageStream) -> None:
        """Hold the session over this connection."""
        with self.lock:  # its threads may deliver a message at once
            self._session = Session(
                connection,
                messages.decode_report,
                self._deliver,
                silent_s=self.config.silent_s,
                return_s=self.config.return_s,
                on_silence=self._silent,
            )

    def follow(self, before: Line[Any]) -> None:
        """Take over the session of a line whose engine will be ours, and to which the engine is lost then. Raise
        TransferError where it is lost already, of which the other line is told: nobody would tell this one."""
        with before.lock:
            if not before.engine.is_live:
                raise before.loss()
            self._session, self._hung_s = before._session, before.hung_s
            if not self._session.report_to(self._deliver, self._silent):
                raise TransferError(f"the process at the other end of a port {self._session.loss}")
            before.engine.lose()  # what its threads are about to notice is not for them any more
            before.is_gone, before._reason = True, "changes its role: use the port that it becomes"

    def post(self, message: Command) -> None:
        self._session.post(message)

    def submit(self, message: Command, num_tokens: int) -> None:
        """Send a request, unless the engine is lost."""
        with self.lock:  # so that numbers are in the order of sending
            if self.engine.submit(num_tokens):
                self.post(message)

    def close(self, *last_messages: Command) -> None:
        self._closing.set()
        self._session.close(*last_messages)

    @property
    def hung_s(self) -> float | None:
        """How long a step of the engine may take before the port is given up: our own limit, or else the engine's."""
        if self.config.hung_s is not None:
            return self.config.hung_s
        return self._hung_s if self.engine.ready is None else self.engine.ready.hung_s

    def loss(self) -> TransferError:
        return TransferError(f"the process at the other end of a port {self._reason}")

    # -- what is heard, in the threads that read and keep time ---------------------------------------------------------

    def _deliver(self, report: Report | None) -> None:
        if report is None:
            self._disconnected()
            return
        if isinstance(report, BeatMessage):
            age_s = report.step_age_s or 0.0
            with self.lock:
                self.engine.beat(age_s)
            self._check_step(age_s)
        elif not isinstance(report, Connected):
            with self.lock:
                if not self.engine.take(report):
                    return
        self._tell(report)

    def _lose(self, reason: str) -> None:
        """Give the engine up. Reports before the next Ready are about requests that were given up too."""
        with self.lock:
            if not self.engine.is_live:
                return
            self.engine.lose()
            self._reason = reason
            self._session.forget()
        self._wake()

    def _end(self) -> None:
        self.is_gone = True
        self._wake()

    def _renew(self) -> None:
        with self.lock:
            self.engine.num_renewals += 1
            self.post(messages.Renew(self.engine.num_renewals))

    def _silent(self, is_silent: bool) -> None:
        if is_silent:
            self._lose(f"was silent for {self.config.silent_s:g} s")
        else:
            with self.lock:  # an answer to an earlier renewal may be about to make it live
                if not self.engine.is_live and self.engine.ready is not None:
                    self._renew()

    def _check_step(self, age_s: float) -> None:
        """Give up an engine whose step takes too long, for good if it takes `return_s` more. It is back when the step
        ends."""
        limit_s = self.hung_s
        if limit_s is None or age_s <= limit_s:
            return
        reason = f"hangs: its step has not ended for {age_s:.1f} s, and {limit_s:g} s are its limit"
        if self.engine.is_live:
            self._lose(reason)
            self._renew()
        elif age_s > limit_s + self.config.return_s and not self.is_gone:
            self._reason = self._reason or reason
            self._end()

    def _disconnected(self) -> None:
        with self.lock:
            session = self._session
        reason = str(session.loss)
        self._lose(reason)
        if self.dial is not None and session.broke and self.engine.ready is not None and not self._closing.is_set():
            with contextlib.suppress(Overloaded):
                start(threading.Thread(target=self._redial, args=(self.dial,), name="pdinfer-redial", daemon=True))
                return
        self._reason = self._reason or reason
        self._end()

    def _redial(self, dial: Callable[[], MessageStream]) -> None:
        pause_s, left_s = REDIAL_S[0], self.config.return_s
        while left_s > 0 and not self._closing.wait(min(pause_s, left_s)):
            left_s, pause_s = left_s - pause_s, min(2 * pause_s, REDIAL_S[1])
            try:
                connection = dial()
                self._session.close()
                self.engine.num_renewals = 0
                self.meet(connection)
            except Exception as error:  # noqa: BLE001 - whatever a host's own way to connect raises
                log.info("the process at the other end of a port cannot be reached: %s", error)
                continue
            if self._closing.is_set():
                self._session.close(messages.Close())
            return
        self._end()
