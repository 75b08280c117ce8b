"""The index tensors of one step: which tokens run, at which positions, and which pages hold their context.

With context parallelism the new tokens of every prompt are cut into pieces (`parallel.slices.context_parallel_slices`),
and each rank runs its own. A piece is a sequence like any other. Its context ends where the piece ends and lies in the
pages of its prompt, which every rank fills with the latents of all pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from pdinfer.kv.view import KVView
from pdinfer.parallel.groups import ALONE, Group
from pdinfer.parallel.slices import context_parallel_slices
from pdinfer.trace import Trace


@attrs.define
class Row:
    """One sequence's part of a step: `tokens` at positions from `start`, with its context in `pages` from position 0.
    Nobody changes it; one is made for each token, and to make a frozen one takes more than twice as long."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    next_token: int | None = None
    """The token after `tokens`, where it is known: in every chunk of a prompt but the last."""

    @property
    def stop(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    def slots(self, page_size: int) -> list[int]:
        """Return the cache slot of each token: page * page_size + offset."""
        span = range(self.start, self.start + len(self.tokens))
        return [self.pages[at // page_size] * page_size + at % page_size for at in span]

    def piece(self, positions: range) -> Row:
        """Return the row of some of its tokens."""
        tokens = self.tokens[positions.start - self.start : positions.stop - self.start]
        after = self.next_token if positions.stop == self.stop else self.tokens[positions.stop - self.start]
        return Row(tokens, positions.start, self.pages, after)


@attrs.frozen(kw_only=True)
class Batch:
    """What one step runs: T tokens of B sequences. The tokens of a sequence are adjacent and in order. Tensors are
    int64, but for the page table, which is int32.

    `sequence_T` is each token's row of the page table. `slots_A` are the slots (page * page_size + offset) that this
    step's latents are written to: those of the T tokens, and with `cp` those of the other ranks' tokens, in rank order.
    `page_table_BM` is padded with pages of the same row. `context_lens` counts the tokens that a sequence has after
    this step. Lengths are on the host too in a prefill, so that no kernel has to sync. `next_tokens` are the tokens
    after each sequence of a prefill.

    In a step of `decode` every sequence has the same number of tokens, Q: one, and drafts. Where it has fewer, those
    after its last one are dead; they count in its context, and a captured step may have sequences of dead ones alone.
    What is computed of them means nothing, and their latents go to a page that nobody reads. `live_T` (bool) says which
    tokens are not; it is None where all are live.

    `cp` are the ranks that run pieces of the same prompts, and `cp_counts` the tokens of each rank. The last piece of
    every prompt is on rank 0, where `row_ends` tells which sequences end a prompt. A single rank has no counts."""

    tokens_T: Tensor
    positions_T: Tensor
    sequence_T: Tensor
    slots_A: Tensor
    page_table_BM: Tensor
    context_lens_B: Tensor
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    decode: bool
    next_tokens: tuple[int | None, ...]
    cp: Group
    cp_counts: tuple[int, ...]
    row_ends: Sequence[int]
    live_T: Tensor | None = None

    @classmethod
    def build(
        cls, rows: Sequence[Row], *, page_size: int, device: torch.device, decode: bool, cp: Group = ALONE
    ) -> Batch:
        """Build a batch of `rows`, which a prefill cuts over `cp`, and of which decode takes one token each. Without
        rows it is an empty batch, which every layer accepts."""
        cp = ALONE if decode else cp
        row_ends: Sequence[int] = range(len(rows))
        of_ranks: Sequence[Sequence[Row]] = ()
        if len(cp.ranks) > 1:
            of_ranks = _pieces(rows, cp.size)
            row_ends = [*_ends(of_ranks[0], rows)]
            rows = of_ranks[cp.rank]
        tokens = [token for row in rows for token in row.tokens]
        positions = [at for row in rows for at in range(row.start, row.stop)]
        sequences = [index for index, row in enumerate(rows) for _ in row.tokens]
        slots = [slot for of_rank in of_ranks or (rows,) for row in of_rank for slot in row.slots(page_size)]
        query_lens = tuple(len(row.tokens) for row in rows)
        context_lens = tuple(row.stop for row in rows)
        width = max((-(-context // page_size) for context in context_lens), default=0)
        table = [page for row in rows for page in _padded(row.pages, width)]
        longs, flat_table = _moved((tokens, positions, sequences, slots, context_lens), table, device)
        tokens_T, positions_T, sequence_T, slots_A, context_lens_B = longs
        return cls(
            tokens_T=tokens_T,
            positions_T=positions_T,
            sequence_T=sequence_T,
            slots_A=slots_A,
            page_table_BM=flat_table.view(len(rows), width),
            context_lens_B=context_lens_B,
            query_lens=query_lens,
            context_lens=context_lens,
            decode=decode,
            next_tokens=() if decode else tuple(row.next_token for row in rows),
            cp=cp,
            cp_counts=tuple(sum(len(row.tokens) for row in of_rank) for of_rank in of_ranks),
            row_ends=row_ends,
        )

    def shifted(self) -> Batch:
        """Return the same positions of a prefill, each with the token after it, or 0 where that is not known yet."""
        tokens_T = self.tokens_T.roll(-1)
        tokens_T[self.last_rows] = torch.tensor(
            [token or 0 for token in self.next_tokens], dtype=torch.int64, device=tokens_T.device
        )
        return attrs.evolve(self, tokens_T=tokens_T)

    def halves(self) -> tuple[Batch, Batch]:
        """Cut the tokens in two. The borders of decode are those of sequences. A prefill may be cut within one: its
        second part reads what the first wrote. Halves are for the layers alone; the head takes the whole batch."""
        num_sequences = len(self.context_lens_B)
        if self.decode:
            first, cut = -(-num_sequences // 2), 0
            middle = first * (len(self.tokens_T) // max(1, num_sequences))
        else:
            middle = -(-len(self.tokens_T) // 2)
            ends = [*accumulate(self.query_lens)]
            first = sum(end <= middle for end in ends)
            cut = middle - (ends[first - 1] if first else 0)
        before, behind = self._part(0, first + (cut > 0), 0, middle), self._part(first, None, middle, None)
        if not cut:
            return before, behind
        left = self.query_lens[first] - cut
        return (
            attrs.evolve(
                before,
                query_lens=(*before.query_lens[:-1], cut),
                context_lens=(*before.context_lens[:-1], before.context_lens[-1] - left),
                context_lens_B=torch.cat((before.context_lens_B[:-1], before.context_lens_B[-1:] - left)),
            ),
            attrs.evolve(behind, query_lens=(left, *behind.query_lens[1:])),
        )

    def _part(self, first: int, last: int | None, start: int, stop: int | None) -> Batch:
        """Return the sequences from `first` to `last`, of which the tokens are those from `start` to `stop`."""
        sequences, tokens = slice(first, last), slice(start, stop)
        return attrs.evolve(
            self,
            tokens_T=self.tokens_T[tokens],
            positions_T=self.positions_T[tokens],
            sequence_T=self.sequence_T[tokens] - first,
            slots_A=self.slots_A[tokens],
            page_table_BM=self.page_table_BM[sequences],
            context_lens_B=self.context_lens_B[sequences],
            query_lens=self.query_lens[sequences],
            context_lens=self.context_lens[sequences],
            next_tokens=(),
            row_ends=(),
            live_T=None if self.live_T is None else self.live_T[tokens],
        )

    def by_sequence(self, x_T: Tensor) -> Tensor:
        """Return a tensor of the tokens [T, ...] of a decode step as [B, Q, ...]."""
        num_sequences = self.context_lens_B.shape[0]
        return x_T.view(num_sequences, x_T.shape[0] // max(1, num_sequences), *x_T.shape[1:])

    def gather(self, *parts: Tensor) -> tuple[Tensor, ...]:
        """Return tensors of this rank's tokens [T, ...] for the tokens of all ranks [A, ...], in the order of
        `slots_A`. The tensors have one dtype and two axes. One collective."""
        if not self.cp_counts:
            return parts
        gathered = self.cp.all_gather_rows(torch.cat(parts, 1), self.cp_counts)
        return torch.split(gathered, [part.shape[1] for part in parts], 1)

    def in_order(self, x_TD: Tensor) -> Tensor:
        """Return the rows of the tokens of all ranks of `cp`, in the order of their slots."""
        (x_AD,) = self.gather(x_TD)
        return x_AD[self.slots_A.argsort()] if self.cp_counts else x_AD

    def last_of(self, x_TD: Tensor) -> Tensor:
        """Return the row of every prompt's last token, on all ranks of `cp`."""
        if not self.cp_counts:
            return x_TD[self.last_rows]
        last_BD = x_TD.new_empty(len(self.row_ends), x_TD.shape[1])
        if self.cp.rank == 0:
            ends = self.last_rows
            last_BD = x_TD[[ends[index] for index in self.row_ends]]
        return self.cp.broadcast(last_BD)

    @property
    def last_rows(self) -> list[int]:
        """The row of each sequence's last token."""
        return [end - 1 for end in accumulate(self.query_lens)]


def _moved(columns: Sequence[Sequence[int]], table: Sequence[int], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Return the columns on the device in int64, and the page table in int32: views of one tensor, so that there is one
    copy."""
    sizes = [*map(len, columns)]
    num_longs, table_words = sum(sizes), len(table) // 2 + 1
    words = np.empty(num_longs + table_words, np.int64)
    words[:num_longs] = [*chain.from_iterable(columns)]
    words[num_longs:].view(np.int32)[: len(table)] = table
    moved = torch.from_numpy(words).to(device, non_blocking=True)
    *longs, rest = moved.split_with_sizes([*sizes, table_words])
    return longs, rest.view(torch.int32)[: len(table)]


def _pieces(rows: Sequence[Row], cp_size: int) -> list[list[Row]]:
    """Return what each context-parallel rank runs. Pieces of one row are in rising order."""
    pieces: list[list[Row]] = [[] for _ in range(cp_size)]
    for row in rows:
        slices = context_parallel_slices(range(row.start, row.stop), cp_size)
        for mine, spans in zip(pieces, slices, strict=True):
            mine.extend(row.piece(span) for span in spans)
    return pieces


def _ends(pieces: Sequence[Row], rows: Sequence[Row]) -> Iterator[int]:
    """Yield the indices of rank 0's pieces that end a row."""
    left = iter(rows)
    row = next(left, None)
    for index, piece in enumerate(pieces):
        if row is not None and piece.stop == row.stop:
            yield index
            row = next(left, None)


def _padded(pages: Sequence[int], width: int) -> list[int]:
    used = list(pages[:width])
    return used + used[:1] * (width - len(used))


@attrs.define
class Step:
    """One pass through the layers. The model makes one at the start of a step, and the MTP layer makes its own.

    `angles` are (cos_TF, sin_TF) of the batch's positions. `trace` is told which part of the model runs."""

    batch: Batch
    view: KVView
    angles: tuple[Tensor, Tensor]
    trace: Trace | None = None
    live_T: Tensor | None = None
    """Which tokens are more than padding: bool, None where all are. The others go to no routed expert, and what is
    computed of them means nothing."""
    selected_TS: Tensor | None = None
    """The positions that the last indexer of this step chose, in the form that `Ops.index_topk` returns. They
    hold for its own layer and for the layers that share its choice. None before the first indexer, and where every
    position is read."""
    of_lengths: dict[object, Any] = attrs.field(factory=dict)
    """What ops made of the batch's lengths for the first layer, and use in the others."""
