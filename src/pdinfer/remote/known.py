"""What a client knows of its engine: who it is, what it reported last, and what it was sent since."""

from __future__ import annotations

import time

from pdinfer.errors import TransferError
from pdinfer.remote import messages
from pdinfer.remote.messages import Load, Ready, Stepped


class KnownEngine:
    """An engine as its reports tell of it, checked against what it was asked. `is_live` from a Ready until the port is
    lost; `num_renewals` is the number of the last Renew of this session. Its client calls it under one lock."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.ready: Ready | None = None
        self.is_live = False
        self.load = Load()
        self.num_renewals = 0
        self._num_submitted = self._num_seen = 0
        self._unseen: list[tuple[int, int]] = []
        self._step_age_s, self._told_at = 0.0, time.monotonic()

    @property
    def num_unseen_requests(self) -> int:
        """Requests submitted that are not part of `load` yet."""
        return len(self._unseen)

    @property
    def num_unseen_tokens(self) -> int:
        """The tokens of those requests."""
        return sum(tokens for _, tokens in self._unseen)

    @property
    def step_age_s(self) -> float:
        """How long ago its last step ended, as its last beat told and aged since."""
        return self._step_age_s + time.monotonic() - self._told_at

    def beat(self, step_age_s: float) -> None:
        """Take the age of its last step from a beat."""
        self._step_age_s, self._told_at = step_age_s, time.monotonic()

    def submit(self, num_tokens: int) -> bool:
        """Number a request that is to be sent now; return False when the port is lost and nothing is to be sent."""
        if not self.is_live:
            return False
        self._num_submitted += 1
        self._unseen.append((self._num_submitted, num_tokens))
        return True

    def lose(self) -> None:
        """What was submitted is given up."""
        self.is_live = False
        self._unseen.clear()

    def take(self, report: Ready | Stepped) -> bool:
        """Keep what the engine reports; return False for what was said before the session was renewed. Raises
        TransferError for what this engine cannot say now."""
        if self._is_old(report):
            return False
        self._check(report)
        self.load = report.load
        self._unseen = [(number, tokens) for number, tokens in self._unseen if number > self._num_seen]
        return True

    def _is_old(self, report: Ready | Stepped) -> bool:
        if self.is_live or self.ready is None:
            return False
        return isinstance(report, Stepped) or report.session < self.num_renewals

    def _check(self, report: Ready | Stepped) -> None:
        """Whoever says what cannot be is given up: its load is what policies go by."""
        if isinstance(report, Ready):
            self._meet(report)
        ready, load = self.ready, report.load.of_role(self.role)
        if ready is None or (load is not None and load.address != ready.address):
            raise TransferError("it tells the load of another engine than it said it is")
        if isinstance(report, Ready):
            return
        if load is None:
            raise TransferError(f"it tells of no load of a {self.role} engine")
        if not self._num_seen <= report.num_seen <= self._num_submitted:
            raise TransferError(
                f"it has seen {report.num_seen} of {self._num_submitted} submits, {self._num_seen} before"
            )
        self._num_seen = report.num_seen
        for event in report.tokens:
            ids = [0 if event.token is None else event.token, *(token for token, _ in event.top_logprobs)]
            if max(ids) >= ready.limits.vocab_size:
                raise TransferError(f"token {max(ids)} is not one of a vocabulary of {ready.limits.vocab_size}")

    def _meet(self, ready: Ready) -> None:
        if self.is_live or ready.address not in (ready.addresses or (ready.address,))[:1]:
            raise TransferError("it says who it is twice, or in two ways")
        if ready.version != messages.VERSION:
            raise TransferError(f"it speaks version {ready.version}, this end speaks {messages.VERSION}")
        if self.ready is not None and (ready.address, ready.limits) != (self.ready.address, self.ready.limits):
            raise TransferError("it is another engine than before")
        self.ready, self.is_live = ready, True
        self._num_submitted = self._num_seen = 0
