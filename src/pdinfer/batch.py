"""The index tensors of one step: which tokens run, where they stand, and which pages their context lies in."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import attrs
import numpy as np
import torch
from torch import Tensor

from pdinfer.trace import Trace


@attrs.frozen
class Row:
    """One sequence's part of a step: `tokens` at positions from `start`, its context in `pages` from position 0."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    next_token: int | None = None
    """The token behind them, where it is known: a prompt's chunk before its last one."""


@attrs.frozen(kw_only=True)
class Batch:
    """What one step runs. T tokens of B sequences, those of a sequence adjacent and in order; int64 tensors.

    `sequence_T` is each token's row of the page table; `slots_T` is where each token's latent is written (page *
    page_size + offset); `page_table_BM` is padded with pages of the same row; `context_lens` counts the tokens a
    sequence has after this step. Lengths are also on the host, so that no kernel has to sync. `absorbed` picks the
    attention form (see `mla`); there every token is a sequence of its own, T = B, which shares its pages with those
    before it. `trace` is told which part of the model runs.
    """

    tokens_T: Tensor
    positions_T: Tensor
    sequence_T: Tensor
    slots_T: Tensor
    page_table_BM: Tensor
    context_lens_B: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    absorbed: bool
    trace: Trace | None = None

    @classmethod
    def build(
        cls,
        rows: Sequence[Row],
        *,
        page_size: int,
        device: torch.device,
        absorbed: bool,
        trace: Trace | None = None,
    ) -> Batch:
        """A batch of `rows`; none is an empty batch, which every layer accepts."""
        if absorbed:
            rows = [Row((token,), at, row.pages) for row in rows for at, token in enumerate(row.tokens, row.start)]
        tokens: list[int] = []
        positions: list[int] = []
        sequences: list[int] = []
        slots: list[int] = []
        for index, row in enumerate(rows):
            tokens.extend(row.tokens)
            span = range(row.start, row.start + len(row.tokens))
            positions.extend(span)
            sequences.extend([index] * len(span))
            slots.extend(row.pages[at // page_size] * page_size + at % page_size for at in span)
        context_lens = tuple(row.start + len(row.tokens) for row in rows)
        width = max((-(-context // page_size) for context in context_lens), default=0)
        table = [page for row in rows for page in _padded(row.pages, width)]
        columns = (tokens, positions, sequences, slots, table, context_lens)
        # one tensor, and so one copy to the device, of which the others are views
        flat = torch.from_numpy(np.array([*chain.from_iterable(columns)], np.int64)).to(device, non_blocking=True)
        tokens_T, positions_T, sequence_T, slots_T, flat_table, context_lens_B = flat.split_with_sizes(
            [*map(len, columns)]
        )
        return cls(
            tokens_T=tokens_T,
            positions_T=positions_T,
            sequence_T=sequence_T,
            slots_T=slots_T,
            page_table_BM=flat_table.view(len(rows), width),
            context_lens_B=context_lens_B,
            query_lens=tuple(len(row.tokens) for row in rows),
            context_lens=context_lens,
            absorbed=absorbed,
            trace=trace,
        )

    def shifted(self, next_tokens: Sequence[int]) -> Batch:
        """The same positions, each with the token behind it, which for the last of a sequence is that of
        `next_tokens`."""
        tokens_T = self.tokens_T.roll(-1)
        tokens_T[self.last_rows] = torch.tensor(next_tokens, dtype=torch.int64).to(tokens_T.device)
        return attrs.evolve(self, tokens_T=tokens_T)

    @property
    def last_rows(self) -> list[int]:
        """For each sequence, the row of its last token."""
        rows, total = [], 0
        for length in self.query_lens:
            total += length
            rows.append(total - 1)
        return rows


def _padded(pages: Sequence[int], width: int) -> list[int]:
    used = list(pages[:width])
    return used + used[:1] * (width - len(used))
