"""The division of tokens between ranks: of those that they compute, and of those that they send.

Plain ranges, no tensors, no peers. Page sizes do not appear: a payload is named by its tokens, and each end finds them
in its own pages (`KVLayout.spans`). So slices hold for any two page sizes."""

from __future__ import annotations

import itertools

from pdinfer.errors import ConfigError

Slices = tuple[tuple[range, ...], ...]
"""The token ranges of each rank, in rising order."""


def context_parallel_slices(tokens: range, cp_size: int) -> Slices:
    """Split a sequence between `cp_size` ranks so that causal attention costs each about the same.

    The sequence is cut into 2 * cp_size chunks. Rank r takes chunk r and chunk 2 * cp_size - 1 - r: a cheap one near
    the start and an expensive one near the end, as in the training of Llama 3 (arXiv:2407.21783, section 3.3.2). Chunks
    differ by one token at most. A rank may get nothing when there are few tokens. Raises ConfigError for a size below
    1."""
    chunks = _chunks(tokens, 2 * cp_size)
    return tuple(_joined(chunks[rank], chunks[-1 - rank]) for rank in range(cp_size))


def even_slices(tokens: range, size: int) -> Slices:
    """Return an equal share of adjacent tokens for each of `size` ranks that all have all tokens; some may be empty.

    Raises ConfigError for a size below 1."""
    return tuple((share,) if share else () for share in _chunks(tokens, size))


def _chunks(tokens: range, count: int) -> list[range]:
    if count < 1:
        raise ConfigError(f"the number of ranks must be at least 1, got {count}")
    borders = [tokens.start + len(tokens) * index // count for index in range(count + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(borders)]


def _joined(first: range, second: range) -> tuple[range, ...]:
    """Return both without those that are empty, as one range where nothing is between them."""
    if first.stop == second.start:
        first, second = range(first.start, second.stop), range(0)
    return tuple(filter(None, (first, second)))
