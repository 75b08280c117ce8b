"""What several ops take, as values: cached rows of sequences in pages, and the rule of a router."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from torch import Tensor

from pdinfer.kernels.formats.cache_rows import PACKED
from pdinfer.values import Value


@attrs.frozen(eq=False)
class PagedCache(Value):
    """Rows of sequences in the pages of a pool: latents and rotated keys, W = C + R, or index keys.

    Where an `OpSpec` has rows in parts, `pages_PGW` is a pair of tensors, see `page_parts`.

    `table_BM`, int32 or int64, has the pages of each sequence in their order. It may be wider than any sequence:
    entries beyond the end of one are any valid page.

    `of_step` has what providers made of everything but the pages, by keys of their own. The caches of all layers of a
    step share it, and no other step does."""

    pages_PGW: Tensor
    table_BM: Tensor
    of_step: dict[object, Any] = attrs.field(factory=dict, kw_only=True)

    @property
    def page_size(self) -> int:
        """The tokens of a page."""
        return self.pages_PGW.shape[1]

    @property
    def packed(self) -> bool:
        """Whether rows are packed FP8 (`formats.cache_rows`)."""
        return self.pages_PGW.dtype == PACKED


@attrs.frozen(eq=False)
class PrefillCache(PagedCache):
    """With lengths that the host knows: sequence b has `context_lens[b]` rows, and the last `query_lens[b]` of them are
    those of its queries, which are stored already."""

    query_lens: Sequence[int]
    context_lens: Sequence[int]

    def sequences(self) -> Iterator[tuple[slice, Tensor, int]]:
        """Yield for each sequence which tokens are its queries, its pages [ceil(context / G)], and its context."""
        first = 0
        for pages_M, num_queries, context in zip(self.table_BM, self.query_lens, self.context_lens, strict=True):
            yield slice(first, first + num_queries), pages_M[: -(-context // self.page_size)], context
            first += num_queries


@attrs.frozen(eq=False)
class DecodeCache(PagedCache):
    """With lengths on the device, int64 [B], which no host waits for. The last Q rows of a sequence are those of its
    queries.

    `live_T` (bool, T = B * Q) says which queries mean something, those of a sequence first; None if all do. The row of
    a query that is not live may never have been written."""

    lens_B: Tensor
    live_T: Tensor | None = attrs.field(default=None, kw_only=True)


@attrs.frozen(eq=False)
class TokenCache(PagedCache):
    """With the sequence of each token, its row of the table, on the device: for tokens that read chosen positions."""

    sequence_T: Tensor


@attrs.frozen(kw_only=True)
class RouterRule(Value):
    """How a router chooses `top_k` experts by scores that are the `sigmoid` or softmax of logits.

    With more than one group only the best `top_k_groups` compete. `normalize` divides the weights of a token by their
    sum; `scaling_factor` multiplies them."""

    sigmoid: bool
    top_k: int
    num_groups: int = 1
    top_k_groups: int = 1
    normalize: bool
    scaling_factor: float = 1.0
