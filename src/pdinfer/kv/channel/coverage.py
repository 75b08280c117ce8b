"""Which of a room's tokens have been announced, and whether all of them have arrived."""

from __future__ import annotations

import math
from bisect import bisect

import attrs

from pdinfer.checks import within
from pdinfer.errors import TransferError


@attrs.define
class Coverage:
    """The tokens of each layer that a room's writers have announced, and how many have not yet arrived and verified.

    The announced tokens of a layer are sorted, disjoint ranges, at most `max_pieces` of them. Neighbours are joined.
    """

    layers: range
    tokens: range
    max_pieces: float = math.inf
    _announced: dict[int, list[range]] = attrs.field(factory=dict)
    _num_missing: int = 0

    def __attrs_post_init__(self) -> None:
        self._num_missing = len(self.layers) * len(self.tokens)

    @property
    def num_pieces(self) -> int:
        """The number of announced ranges, over all layers."""
        return sum(len(self.pieces(layer)) for layer in self.layers)

    def pieces(self, layer: int) -> tuple[range, ...]:
        """Return the announced ranges of a layer, in order."""
        return tuple(self._announced.get(layer, ()))

    @property
    def complete(self) -> bool:
        """Whether every token of every layer has arrived."""
        return self._num_missing == 0

    def announce(self, layers: range, tokens: range) -> None:
        """Note that a rectangle is about to arrive. Raises TransferError when it leaves the grant or overlaps an
        earlier one."""
        inside = within(layers, self.layers) and within(tokens, self.tokens)
        if not inside or not layers or not tokens:
            raise TransferError(
                f"layers {_text(layers)} x tokens {_text(tokens)} is outside the grant's layers {_text(self.layers)} "
                f"x tokens {_text(self.tokens)}"
            )
        places = []
        for layer in layers:
            ranges = self._announced.setdefault(layer, [])
            at = bisect(ranges, tokens.start, key=lambda span: span.start)
            if (at and ranges[at - 1].stop > tokens.start) or (at < len(ranges) and ranges[at].start < tokens.stop):
                raise TransferError(f"tokens {_text(tokens)} of layer {layer} were announced twice")
            if len(ranges) >= self.max_pieces:
                raise TransferError(
                    f"layer {layer} was announced in more than {self.max_pieces} pieces with gaps between them; "
                    f"tokens are sent in order"
                )
            places.append((ranges, at))
        for ranges, at in places:
            _insert(ranges, at, tokens)

    def arrive(self, layers: range, tokens: range) -> None:
        """Note that an announced rectangle has arrived and verified."""
        self._num_missing -= len(layers) * len(tokens)


def _insert(ranges: list[range], at: int, tokens: range) -> None:
    """Insert `tokens` between its neighbours, and join it to those that it touches."""
    first, last, start, stop = at, at, tokens.start, tokens.stop
    if at and ranges[at - 1].stop == start:
        first, start = at - 1, ranges[at - 1].start
    if at < len(ranges) and ranges[at].start == stop:
        last, stop = at + 1, ranges[at].stop
    ranges[first:last] = [range(start, stop)]


def _text(span: range) -> str:
    return f"[{span.start}, {span.stop})"
