"""What a Broker is in the middle of: after a step that did not end it has to know what was done and what was not."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence

import attrs

from pdinfer.pairing.ports import Port
from pdinfer.pairing.tracked_request import TrackedRequest
from pdinfer.stats import LostPort
from pdinfer.types import Event, PeerAddress, TokenEvent

RELEASE_S = 1.0
"""How long the id of a request that an interrupt ended is kept from its decode, whose answer may have been lost."""


@attrs.define
class Progress:
    """`came` are events of a port that are not dealt with yet; `telling` is the request of which the host is being told
    something, the number of tokens that it had before and the event, once that is made; `losing` is a port that is
    being given up, and why."""

    came: deque[tuple[PeerAddress, Event]] = attrs.field(factory=deque)
    telling: tuple[TrackedRequest, int, TokenEvent | None] | None = None
    losing: tuple[Port, LostPort, Exception] | None = None

    def settle(self, told: Sequence[TokenEvent]) -> TrackedRequest | None:
        """Has the request of an interrupted event count what was `told`, the last events that the host will get;
        returns it if that was its end."""
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
    """Requests that a decode has and we took away, by ending them or by removing that port: each id waits for that
    decode to let go of it while the decode is a port."""

    def __init__(self) -> None:
        self._forget_at: dict[tuple[str, PeerAddress], float] = {}

    def __len__(self) -> int:
        return len(self._forget_at)

    def add(self, request_id: str, decode: PeerAddress, *, forget_at: float = float("inf")) -> None:
        """`forget_at` is when it is given up to wait, by the broker's clock."""
        self._forget_at[request_id, decode] = forget_at

    def discard(self, request_id: str, decode: PeerAddress) -> None:
        """The decode has let go of it."""
        self._forget_at.pop((request_id, decode), None)

    def waits(self, request_id: str, decodes: Iterable[PeerAddress]) -> bool:
        """Whether one of these decodes has not let go of that id."""
        return any((request_id, decode) in self._forget_at for decode in decodes)

    def keep(self, decodes: Collection[PeerAddress]) -> None:
        """Forgets those of other decodes."""
        self._forget_at = {each: at for each, at in self._forget_at.items() if each[1] in decodes}

    def drop(self, decode: PeerAddress) -> None:
        """Forgets those of a decode that is lost."""
        self._forget_at = {each: at for each, at in self._forget_at.items() if each[1] != decode}

    def expire(self, now: float) -> None:
        """Forgets those that are given up."""
        self._forget_at = {each: at for each, at in self._forget_at.items() if now < at}

    def ends_at(self) -> Iterator[float]:
        """When waits will be given up."""
        return (at for at in list(self._forget_at.values()) if at < float("inf"))
