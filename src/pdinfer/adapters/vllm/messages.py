"""Messages from the scheduler's half of the connector to the worker's in every step, and back. vLLM carries them
between its processes as they are, so they hold plain values only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import xxhash


def proof_of(tokens: Sequence[int]) -> str:
    """Return what proves that two ends mean the same tokens. A grant has it in the place of a request's id."""
    return xxhash.xxh3_128_hexdigest(np.asarray(tokens, dtype="<i8").tobytes())


MAX_WORKERS = 256
"""A decode has no more of them: what is more than one byte away from a request's room is another request's."""


def room_of(room: str, rank: int) -> str:
    """Return the room of a worker of a decode, in hexadecimal: the request's for rank 0, and for others one that is no
    other request's. Called with a worker's room and rank it returns the request's."""
    return f"{int(room, 16) ^ rank:0{len(room)}x}"


@attrs.frozen
class Terms:
    """The value that a grant of a decode's worker has in the place of a request's id: the `proof` of its tokens, and
    which of how many workers it is. Each of them has a cache of its own, so each grants its own pages."""

    proof: str
    rank: int = 0
    num_workers: int = 1

    def __str__(self) -> str:
        return self.proof if self.num_workers == 1 else f"{self.proof} {self.rank}/{self.num_workers}"

    @classmethod
    def of(cls, text: str) -> Terms:
        """Read what a peer says. What is not of this form is the proof of no tokens."""
        proof, space, worker = text.partition(" ")
        rank, _, count = worker.partition("/")
        if not space or not (rank.isdecimal() and count.isdecimal() and len(worker) < 8):
            return cls(text)
        terms = cls(proof, int(rank), int(count))
        return terms if terms.rank < terms.num_workers <= MAX_WORKERS else cls(text)


@attrs.frozen
class VLLMLoad:
    """Blocks that wait for a peer: `tokens` of a request belong into `blocks`, the first of which holds the first
    token. `proof` is that of all tokens up to the last of them. `problem` is why it cannot be."""

    req_id: str
    room: str
    prefill: str
    proof: str
    tokens: tuple[int, int]
    blocks: tuple[int, ...]
    problem: str = ""


@attrs.frozen
class Save:
    """A request of which this step computes tokens up to `stop`. `blocks` hold them from token 0. `whole` is set when
    they are all that its prompt has. `proofs` are of its prompt, and of its prompt without the last token: what decodes
    ask for. With `first_token` its hand-off waits for the token that vLLM draws."""

    req_id: str
    room: str
    proofs: tuple[str, ...]
    stop: int
    blocks: tuple[int, ...]
    whole: bool
    first_token: bool = False


@attrs.define(kw_only=True)
class Orders:
    """The orders of a step for the worker, as they come together. `ended` are requests that have finished in vLLM and
    whose blocks are held until nothing reads them; `cancelled` are loads that are not wanted any more; `unwanted` are
    rooms of requests that ended before their prompt was whole. `drawn` has the first tokens of ended requests that
    asked for it. `waits` is set when the step computes nothing and a request waits for its grant, and `lacks_blocks`
    when one that somebody waits for got no blocks."""

    loads: list[VLLMLoad] = attrs.field(factory=list)
    saves: list[Save] = attrs.field(factory=list)
    ended: list[str] = attrs.field(factory=list)
    cancelled: list[str] = attrs.field(factory=list)
    unwanted: list[str] = attrs.field(factory=list)
    drawn: list[tuple[str, int]] = attrs.field(factory=list)
    preempted: list[str] = attrs.field(factory=list)
    is_idle: bool = False
    waits: bool = False
    lacks_blocks: bool = False


@attrs.frozen
class Arrivals:
    """The rooms whose grants have come to the worker since the last step."""

    rooms: frozenset[str]

    def aggregate(self, other: Arrivals) -> Arrivals:
        """Return the rooms that both workers have; vLLM asks for it where it has several."""
        return Arrivals(self.rooms & other.rooms)


ABORTED = "aborted_"


@attrs.define(eq=False)
class TransferCounts:
    """Counts since they were last taken: "landed", "aborted_<reason>", "bytes_received", "bytes_sent", "receive_s". It
    has the methods that vLLM asks of a KVConnectorStats."""

    data: dict[str, Any] = attrs.field(factory=dict)

    def add(self, name: str, amount: float = 1) -> None:
        """Count something."""
        if amount:
            self.data[name] = self.data.get(name, 0) + amount

    def take(self) -> TransferCounts | None:
        """Return what was counted since the last call, None when it is nothing."""
        if not self.data:
            return None
        taken, self.data = TransferCounts(self.data), {}
        return taken

    def to_dict(self) -> dict[str, Any]:
        return self.data

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: TransferCounts) -> TransferCounts:
        for name, amount in other.data.items():
            self.add(name, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds, received = self.data.get("receive_s", 0.0), self.data.get("bytes_received", 0)
        speed = {"mb_per_s": round(received / 1e6 / seconds, 1)} if seconds else {}
        return {**{name: round(self.data[name], 3) for name in sorted(self.data)}, **speed}

    def is_empty(self) -> bool:
        return not self.data
