"""Records what a Broker is in the middle of, so that after an interrupted step it knows what was done and what was
not."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

import attrs

from pdinfer.pairing.ports import Port
from pdinfer.pairing.tracked_request import TrackedRequest
from pdinfer.stats import LostPort
from pdinfer.types import Event, PeerAddress, TokenEvent

RELEASE_S = 1.0
"""How long a request's id is withheld from its decode after an interrupt ended the request: the decode's answer may
have been lost."""


@attrs.define
class Progress:
    """The work in progress. `came` holds events of a port that are not handled yet. `telling` is the request whose
    event is being passed to the host: the request, its number of tokens before, and the event once it is made. `losing`
    is a port that is being given up, and why."""

    came: deque[tuple[PeerAddress, Event]] = attrs.field(factory=deque)
    telling: tuple[TrackedRequest, int, TokenEvent | None] | None = None
    losing: tuple[Port, LostPort, Exception] | None = None

    def settle(self, told: Sequence[TokenEvent]) -> TrackedRequest | None:
        """Correct the token count of the request whose event was interrupted. `told` are the last events that the host
        will get. Return the request if its final event is among them, else None."""
        telling, self.telling = self.telling, None
        if telling is None:
            return None
        tracked, num_tokens, event = telling
        if event is None or not any(each is event for each in told):
            tracked.num_tokens = num_tokens
            return None
        tracked.num_tokens = event.index + (event.token is not None)
        return tracked if event.finish_reason is not None else None


class AwaitingRelease:
    """Requests that were taken away from a decode, by ending them or by removing the port. Each id stays reserved until
    that decode has released it, as long as the decode is a port."""

    def __init__(self) -> None:
        self._forget_at: dict[tuple[str, PeerAddress], float] = {}

    def __len__(self) -> int:
        return len(self._forget_at)

    def add(self, request_id: str, decode: PeerAddress, *, forget_at: float = float("inf")) -> None:
        """Reserve an id until the decode releases it, or until `forget_at` by the broker's clock."""
        self._forget_at[request_id, decode] = forget_at

    def discard(self, request_id: str, decode: PeerAddress) -> None:
        """Free an id that the decode has released."""
        self._forget_at.pop((request_id, decode), None)

    def waits(self, request_id: str, decodes: Iterable[PeerAddress]) -> bool:
        """Return whether any of these decodes has not released the id."""
        return any((request_id, decode) in self._forget_at for decode in decodes)

    def keep(self, decodes: Collection[PeerAddress]) -> None:
        """Forget the ids of all other decodes."""
        self._forget_at = {each: at for each, at in self._forget_at.items() if each[1] in decodes}

    def drop(self, decode: PeerAddress) -> None:
        """Forget the ids of a decode that is lost."""
        self._forget_at = {each: at for each, at in self._forget_at.items() if each[1] != decode}

    def expire(self, now: float) -> None:
        """Forget the ids whose time is over."""
        self._forget_at = {each: at for each, at in self._forget_at.items() if now < at}

    def ends_at(self) -> Iterator[float]:
        """Return when ids will be forgotten, where that is known."""
        return (at for at in list(self._forget_at.values()) if at < float("inf"))
