"""The tokens of a grant that each rank sends when several compute it, and the proof that each token is sent exactly
once.

Plain ranges, no tensors, no peers. Page sizes do not appear: a payload is named by its tokens, and each end finds them
in its own pages (`KVLayout.spans`). So a plan holds for any two page sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import attrs

from pdinfer.checks import within
from pdinfer.errors import ConfigError

Slices = tuple[tuple[range, ...], ...]
"""The token ranges that each rank computes, in rising order."""


@attrs.frozen
class Push:
    """The part that one writer sends: `tokens` of every layer in `layers`. `writer` is an index in
    `PageGrant.writers`."""

    writer: int
    layers: range
    tokens: range


@attrs.frozen
class Plan:
    """Every push of a grant.

    Raises ConfigError, naming the first gap or overlap, unless the pushes cover each token of each layer once and
    nothing else.
    """

    layers: range
    tokens: range
    pushes: tuple[Push, ...]

    def __attrs_post_init__(self) -> None:
        for push in self.pushes:
            if not within(push.layers, self.layers) or not within(push.tokens, self.tokens):
                raise ConfigError(f"{_text(push)} leaves the grant's layers {self.layers} and tokens {self.tokens}")
        for layer in self.layers:
            self._check(layer)

    def of(self, writer: int) -> tuple[Push, ...]:
        """Return what one writer sends. A writer with nothing to send still ends the grant with its last word."""
        return tuple(push for push in self.pushes if push.writer == writer)

    def _check(self, layer: int) -> None:
        reached = self.tokens.start
        last = ""
        pushes = (push for push in self.pushes if layer in push.layers and push.tokens)
        for push in sorted(pushes, key=lambda push: push.tokens.start):
            if push.tokens.start > reached:
                raise ConfigError(f"layer {layer}: no writer sends tokens [{reached}, {push.tokens.start})")
            if push.tokens.start < reached:
                raise ConfigError(f"layer {layer}: {_text(push)} overlap {last}")
            reached, last = push.tokens.stop, _text(push)
        if reached < self.tokens.stop:
            raise ConfigError(f"layer {layer}: no writer sends tokens [{reached}, {self.tokens.stop})")


def context_parallel_slices(tokens: range, cp_size: int) -> Slices:
    """Split a sequence between `cp_size` ranks so that causal attention costs each about the same.

    The sequence is cut into 2 * cp_size chunks. Rank r takes chunk r and chunk 2 * cp_size - 1 - r: a cheap one near
    the start and an expensive one near the end, as in the training of Llama 3 (arXiv:2407.21783, section 3.3.2). Chunks
    differ by one token at most. A rank may get nothing when there are few tokens. Raises ConfigError for a size below
    1.
    """
    if cp_size < 1:
        raise ConfigError(f"cp_size must be at least 1, got {cp_size}")
    num_chunks = 2 * cp_size
    borders = [tokens.start + len(tokens) * index // num_chunks for index in range(num_chunks + 1)]
    chunks = [range(start, stop) for start, stop in itertools.pairwise(borders)]
    return tuple(tuple(_joined((chunks[rank], chunks[-1 - rank]))) for rank in range(cp_size))


def even_slices(tokens: range, size: int) -> Slices:
    """Return an equal share of adjacent tokens for each of `size` ranks that all have all tokens; some may be empty.

    Raises ConfigError for a size below 1.
    """
    if size < 1:
        raise ConfigError(f"the number of writers must be at least 1, got {size}")
    borders = [tokens.start + len(tokens) * rank // size for rank in range(size + 1)]
    return tuple(tuple(_joined([range(start, stop)])) for start, stop in itertools.pairwise(borders))


def plan_writers(layers: range, tokens: range, slices: Slices) -> Plan:
    """Plan what each rank sends once it computed its slice: the part of it that decode lacks, in all `layers`.

    Decode lacks `tokens`. Raises ConfigError when the slices leave a gap in `tokens`, or overlap.
    """
    pushes = (
        Push(writer, layers, missing)
        for writer, ranges in enumerate(slices)
        for span in ranges
        if (missing := range(max(span.start, tokens.start), min(span.stop, tokens.stop)))
    )
    return Plan(layers, tokens, tuple(pushes))


def _joined(ranges: Sequence[range]) -> Iterator[range]:
    """Drop empty ranges and join neighbours."""
    last: range | None = None
    for span in filter(None, ranges):
        if last is None or last.stop != span.start:
            if last is not None:
                yield last
            last = span
        else:
            last = range(last.start, span.stop)
    if last is not None:
        yield last


def _text(push: Push) -> str:
    return f"writer {push.writer}'s tokens [{push.tokens.start}, {push.tokens.stop})"
