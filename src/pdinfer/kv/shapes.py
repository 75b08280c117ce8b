"""How the heads of a component lie in its pages: which of them, in which order of the axes, and packed or not.

The axes have vLLM's letters: L layers, B pages, H heads, N tokens of a page, C the values of one token and head, with
keys and values together. An order names them from the outermost to the innermost, so it gives the stride of each:

    address(layer, page, head, token) = layer * stride.L + page * stride.B + head * stride.H + token * stride.N
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from pdinfer.bounds import MAX_INDEX
from pdinfer.values import Value

Ints = npt.NDArray[np.int64]


class AxisOrder(enum.Enum):
    """The order of a component's axes in memory, outermost first: the six of vLLM's `KVCacheLayout`."""

    LBHNC = "LBHNC"
    LBNHC = "LBNHC"
    LHBNC = "LHBNC"
    BLHNC = "BLHNC"
    BLNHC = "BLNHC"
    BHLNC = "BHLNC"

    @property
    def keeps_pages_whole(self) -> bool:
        """Whether the bytes of a page of one layer are adjacent."""
        return set(self.value[:2]) == {"L", "B"}

    @property
    def by_token(self) -> bool:
        """Whether a token's heads are adjacent, and not a head's tokens."""
        return self.value.index("N") < self.value.index("H")


class Strides(NamedTuple):
    """The bytes from one index of an axis to the next."""

    layer: int
    page: int
    head: int
    token: int


@attrs.frozen(kw_only=True)
class PageShape(Value):
    """The shape of a component that has heads. `heads` are the global ids of those that this rank holds, of
    `num_heads` in all.

    A `packed` page is in a form of its kernel's own, where no token and no head has bytes of its own: such pages move
    whole, between ends with pages of one size that hold the same heads. Raises ValueError for heads that are not among
    `num_heads`, and for a packed page whose bytes are not adjacent."""

    heads: range
    num_heads: Annotated[int, Meta(ge=1, le=MAX_INDEX)]
    order: AxisOrder = AxisOrder.LBHNC
    packed: bool = False

    def __attrs_post_init__(self) -> None:
        if not self.heads or self.heads.step != 1 or self.heads.start < 0 or self.heads.stop > self.num_heads:
            raise ValueError(f"heads {self.heads} are not some of {self.num_heads} that follow each other")
        if self.packed and not self.order.keeps_pages_whole:
            raise ValueError(f"a packed page is one piece, and {self.order.value} has one for each head")


ONE_HEAD = PageShape(heads=range(1), num_heads=1)
"""The axes of a component without heads."""


def joined(rows: Ints, row_bytes: int) -> list[tuple[int, int]]:
    """Return (offset, length) of the runs of rows that are adjacent in memory. `rows` are the offsets of rows of
    `row_bytes`, in the order of a payload."""
    if not rows.size:
        return []
    first = np.concatenate([[0], np.flatnonzero(np.diff(rows) != row_bytes) + 1, [rows.size]])
    return list(zip(rows[first[:-1]].tolist(), (np.diff(first) * row_bytes).tolist(), strict=True))


def slots_of(tokens: range, pages: Sequence[int], first_token: int, page_size: int) -> tuple[Ints, Ints]:
    """Return the page of each token and its place in it. `pages[i]` holds the tokens from `first_token + i * page_size`
    on."""
    at, within = np.divmod(np.arange(tokens.start, tokens.stop) - first_token, page_size)
    return np.asarray(pages, np.int64)[at], within
