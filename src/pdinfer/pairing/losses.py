"""The ports that one request has lost, and whether it may go on.

A port that is lost while a request waits there, holds granted pages or is on its way says nothing about the request.
One that is lost while it computes rows of the request may have been broken by them, and so may any other request in
that step. So after MAX_COMPUTING of those a request runs alone in its step, and the next one is its last:

    lost while it waited …        never counts
    lost while it was computed    1, 2, 3 ─► alone ─► 4: FAILED
    a link broke under it         1, 2 ─► 3: FAILED; a port that turns out to be lost behind it is counted above
"""

from __future__ import annotations

import attrs

from pdinfer.types import PeerAddress

MAX_COMPUTING = 3
"""After so many ports that were lost while they computed a request, it runs alone in its step."""
MAX_LINKS = 3
"""With so many links that broke under an attempt, between ports that live, it has failed."""
NAMED = 4
"""How many ports an error names of each kind."""


@attrs.define
class Losses:
    """What one request has lost: the ports that were `computing` it, the last ones of `num_waiting` that were not, and
    the prefills whose link broke under an attempt (`links`)."""

    computing: list[PeerAddress] = attrs.field(factory=list)
    waiting: list[PeerAddress] = attrs.field(factory=list)
    num_waiting: int = 0
    links: list[PeerAddress] = attrs.field(factory=list)

    def add(self, port: PeerAddress, *, was_computing: bool) -> None:
        """Note that a port was lost under the request. A link to it that broke before was no loss of its own."""
        self.links = [other for other in self.links if other != port]
        if was_computing:
            self.computing.append(port)
        else:
            self.waiting = [*self.waiting, port][-NAMED:]
            self.num_waiting += 1

    @property
    def is_suspect(self) -> bool:
        """Whether the request has to run alone in its step."""
        return len(self.computing) >= MAX_COMPUTING

    @property
    def are_too_many(self) -> bool:
        """Whether the request must not be tried again."""
        return len(self.computing) > MAX_COMPUTING or len(self.links) >= MAX_LINKS

    def __str__(self) -> str:
        """Return the end of a sentence: how many of each kind it has lost, and which."""
        alone = ", the last one alone," if len(self.computing) > MAX_COMPUTING else ""
        told = [
            (len(self.computing), f"lost while they computed it{alone} and may have been broken by it", self.computing),
            (self.num_waiting, "lost while it only waited there", self.waiting),
            (len(self.links), "whose link broke under it", self.links),
        ]
        return "".join(
            f"; ports {what}: {num} ({', '.join(map(str, ports[-NAMED:]))})" for num, what, ports in told if num
        )
