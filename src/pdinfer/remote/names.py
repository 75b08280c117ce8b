"""What the requests of several clients are called in one engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Generic, TypeVar

import attrs

from pdinfer.bounds import escaped
from pdinfer.log import log
from pdinfer.types import Event, Granted

C = TypeVar("C")


class Names(Generic[C]):
    """The names of the requests that an engine has, and whose they are. A client's own id is the name, unless a request
    of another client has it."""

    def __init__(self) -> None:
        self._owners: dict[str, tuple[C, str]] = {}
        self._names: dict[tuple[C, str], str] = {}
        self._numbers = itertools.count(1)

    def give(self, client: C, request_id: str) -> str:
        """Return the name of a request, which is a new one if the engine has none of this client's by that id."""
        ours = client, request_id
        name = self._names.get(ours, request_id)
        while self._owners.get(name, ours) != ours:
            name = str(next(self._numbers))
        if name != request_id and name not in self._owners:
            log.info("two clients have a request %s: that of one is called %s here", escaped(request_id), name)
        self._owners[name], self._names[ours] = ours, name
        return name

    def of(self, client: C, request_id: str) -> str | None:
        """Return the name of a request, or None when the engine does not have it."""
        return self._names.get((client, request_id))

    def owner(self, name: str) -> tuple[C, str] | None:
        """Return whose request it is, and the client's own id for it, or None when it is nobody's."""
        return self._owners.get(name)

    def of_client(self, client: C) -> list[str]:
        """Return the names of the requests of a client."""
        return [name for name, (owner, _) in self._owners.items() if owner is client]

    def keep(self, names: Iterable[str]) -> None:
        """Forget all names but these."""
        for name in self._owners.keys() - set(names):
            del self._names[self._owners.pop(name)]


def renamed(event: Event, request_id: str) -> Event:
    """Return an event as one of the request `request_id`."""
    if not isinstance(event, Granted):
        return event if event.request_id == request_id else attrs.evolve(event, request_id=request_id)
    if event.grant.request_id == request_id:
        return event
    grant = attrs.evolve(event.grant, request_id=request_id)
    return attrs.evolve(event, grant=grant, request=attrs.evolve(event.request, request_id=request_id))
