"""The decode batch that stays on the device: fixed slots for running sequences, of which a step sends what changed.

A sequence keeps its slot while it runs. Its newest token, where that lies, its page table and whatever else a step
reads of it lie in one block of device memory, which the host mirrors. Behind the model `advance` puts the drawn tokens
into their slots and moves the positions on, so the next step needs nothing from the host: a sequence that joined, left
or came to another page travels as a few words in one copy. On a CPU the block is the mirror.

    place(rows) ──words that changed──► device block ──views──► Batch ──► model ──► draw ──► advance ──► (next step)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from pdinfer.model.batch import Batch, Row
from pdinfer.parallel.groups import ALONE
from pdinfer.process.memory import pinned_empty
from pdinfer.process.streams import record_event

_WORDS = {torch.int32: 1, torch.int64: 2, torch.float64: 2}
_NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.float64: np.float64}
_MOVING = ("position", "context_len", "cache_slot")
"""What is one more for the next token. These columns lie side by side, so that one op moves all of them on. Slots of
the cache follow each other up to the end of a page; the host sends the first one of the next page."""
_OWN = dict.fromkeys(("token", *_MOVING, "num_newest", "num_drafts"), torch.int64)
_NEWEST, _TABLE, _NUM_ROWS, _INDEX, _ALL_MOVING = "newest", "table", "num_rows", "index", "moving"

MAX_NEWEST = 4
"""The maximum number of tokens that one step gives a sequence: the next one, and drafts."""


@attrs.frozen
class Drafting:
    """What a step drafts for one sequence. `newest` are its tokens, the last one included, whose entries in the cache
    of the layer that drafts are due; without any, nothing is drafted. `num_drafts` is how many tokens are drafted."""

    newest: Sequence[int] = ()
    num_drafts: int = 0


_NOTHING = Drafting()


@attrs.define(eq=False)
class _Seat:
    """What the device knows of one sequence. `pages` is the list itself, by which the sequence is recognised."""

    pages: Sequence[int]
    owner: object = None
    token: int = -1
    position: int = -1
    cache_slot: int = -1
    newest: Sequence[int] = ()
    num_drafts: int | None = None
    first: int = 0
    """The pages before this one are known and stay."""
    tail: Sequence[int] = ()
    """The pages from there on, as they were sent."""


class _Block:
    """Columns in one block of device memory, and the host's mirror of it. `set` and `fill` change the mirror, and
    `flush` sends the words that changed. On a CPU both are the same memory."""

    def __init__(self, device: torch.device) -> None:
        self.columns: dict[str, Tensor] = {}
        self.values: dict[str, np.ndarray[tuple[int], np.dtype[np.generic]]] = {}
        self._device = device
        self._starts: dict[str, int] = {}
        self._changed: list[tuple[int, int]] = []
        self._staging = torch.empty(0, dtype=torch.int32, device="cpu")
        self._sent: torch.Event | None = None

    def lay_out(self, sizes: Mapping[str, tuple[torch.dtype, int]]) -> None:
        """Make columns of so many zeros each, one after the other, in the place of those before."""
        num_words = sum(_WORDS[dtype] * count for dtype, count in sizes.values())
        mirror = pinned_empty(4 * num_words, self._device).view(torch.int32).zero_()
        self._mirror = mirror.numpy()
        self._words = mirror if self._device.type == "cpu" else torch.zeros_like(mirror, device=self._device)
        self.columns, self.values, start = {}, {}, 0
        for name, (dtype, count) in sizes.items():
            stop = start + _WORDS[dtype] * count
            self._starts[name] = start
            self.values[name] = self._mirror[start:stop].view(_NUMPY[dtype])
            self.columns[name] = self._words[start:stop].view(dtype)
            start = stop
        self._changed.clear()

    @property
    def address(self) -> int:
        return self._words.data_ptr()

    def side_by_side(self, names: Sequence[str], count: int) -> Tensor:
        """Return int64 columns of `count` values that follow each other as one tensor [len(names), count]."""
        start = self._starts[names[0]]
        return self._words[start : start + len(names) * 2 * count].view(torch.int64).view(len(names), count)

    def set(self, name: str, at: int, value: float) -> None:
        """Change one value of a column."""
        self.values[name][at] = value
        words = _WORDS[self.columns[name].dtype]
        self._mark(self._starts[name] + words * at, words)

    def fill(self, name: str, at: int, count: int, values: int | Sequence[int]) -> None:
        """Change `count` values of an int32 column, which become `values`."""
        self.values[name][at : at + count] = values
        self._mark(self._starts[name] + at, count)

    def _mark(self, start: int, count: int) -> None:
        if self._words.device.type != "cpu":
            self._changed.append((start, start + count))

    def flush(self) -> None:
        """Send the words that changed: their places and values in one copy."""
        if not self._changed:
            return
        places = np.concatenate([np.arange(start, stop, dtype=np.int32) for start, stop in self._changed])
        self._changed.clear()
        count = len(places)
        if self._sent is not None and not self._sent.query():  # only behind a step that nobody read
            self._sent.synchronize()
        if len(self._staging) < 2 * count:
            self._staging = pinned_empty(4 * max(4 * count, 1024), self._device).view(torch.int32)
        words = self._staging.numpy()
        words[:count], words[count : 2 * count] = places, self._mirror[places]
        sent = self._staging[: 2 * count].to(self._device, non_blocking=True)
        self._sent = record_event(self._device)
        self._words.index_copy_(0, sent[:count].long(), sent[count:])


class DecodeRows:
    """Slots for the sequences of one pool. `settings` names further columns and their dtypes (int32, int64 or float64);
    `values_of` makes the values of a sequence for them from its owner, which is the same object while it runs.
    Rows without a sequence read and write `scratch_page`: what was theirs may be written by a peer. Slots and table
    widths grow as they are needed; `reserve` fixes the addresses of what fits."""

    def __init__(
        self,
        settings: Mapping[str, torch.dtype],
        values_of: Callable[[Any], Sequence[float]],
        *,
        page_size: int,
        device: torch.device,
        scratch_page: int,
    ) -> None:
        self._settings = settings
        self._values_of = values_of
        self._page_size = page_size
        self._device = device
        self._scratch_page, self._scratch_slot = scratch_page, scratch_page * page_size
        self._capacity = self._width = 0
        self._seats: dict[int, tuple[int, _Seat]] = {}
        self._aranges: dict[int, Tensor] = {}
        self._is_running = False
        self._block = _Block(device)

    def reserve(self, num_rows: int, width: int) -> None:
        """Make room for so many rows, and so many pages in each. Whatever was there is sent again when it runs next."""
        if num_rows <= self._capacity and width <= self._width:
            return
        capacity, width = max(num_rows, self._capacity), max(width, self._width)
        self._capacity = self._width = 0  # there is no room until all of it is made, should an interrupt come between
        columns = {**self._settings, **_OWN}
        wide_first = sorted(columns, key=lambda name: -_WORDS[columns[name]])
        sizes = {name: (columns[name], capacity) for name in wide_first}
        sizes = {_NEWEST: (torch.int64, capacity * MAX_NEWEST), **sizes}
        sizes[_NUM_ROWS] = torch.int32, 1
        sizes[_TABLE] = torch.int32, capacity * width
        self._block.lay_out(sizes)
        self._columns, self._values = self._block.columns, self._block.values
        self._values[_TABLE].fill(self._scratch_page)
        self._columns[_TABLE].fill_(self._scratch_page)
        self._columns[_ALL_MOVING] = self._block.side_by_side(_MOVING, capacity)
        self._views: dict[int, dict[str, Tensor]] = {}
        self._seats.clear()
        self._capacity, self._width = capacity, width

    @property
    def address(self) -> int:
        """Where the slots lie. It changes when room is made for more."""
        return self._block.address

    # -- the host's side --------------------------------------------------------------------------------------------

    def seat(self, rows: Sequence[Row]) -> list[int]:
        """Give every row of one token a slot below their number, and return the slots. Sends nothing."""
        return [slot for slot, _ in self._seated(rows)]

    def _seated(self, rows: Sequence[Row]) -> list[tuple[int, _Seat]]:
        """Seat the rows, and return what is known of each."""
        tables = [row.pages for row in rows]
        last = max((row.start for row in rows), default=0) + MAX_NEWEST - 1  # drafts that are not live have positions
        num_pages = max(last // self._page_size + 1, *map(len, tables), 1)
        self.reserve(_grown(len(rows), self._capacity), _grown(num_pages, self._width))
        keys = [*map(id, tables)]
        if len(self._seats) != len(rows) or not all(map(self._seats.__contains__, keys)):
            self._seat(keys, rows)
        return [self._seats[key] for key in keys]

    @property
    def is_broken_off(self) -> bool:
        """Whether the last step did not end, so that nobody knows which tokens are the newest on the device."""
        return self._is_running

    def place(
        self, rows: Sequence[Row], owners: Sequence[object], drafting: Sequence[Drafting] | None = None
    ) -> list[int]:
        """Seat the rows, and send what the device does not know yet. Return the slots. A step that begins here ends
        with `advanced`; what one changed that was broken off is sent anew."""
        seated = self._seated(rows)
        if self._is_running:
            self._forget()
        if self._values[_NUM_ROWS][0] != len(rows):
            self._block.set(_NUM_ROWS, 0, len(rows))
        if drafting is None:
            self._send_news(seated, rows, owners)
        else:
            for (slot, seat), row, owner, draft in zip(seated, rows, owners, drafting, strict=True):
                self._send(slot, seat, row, owner, draft)
        self._block.flush()
        self._is_running = True
        return [slot for slot, _ in seated]

    def advanced(self, tokens: Sequence[Sequence[int]]) -> None:
        """Note that `advance` made these the newest tokens of the slots."""
        for slot, seat in self._seats.values():
            new = tokens[slot]
            seat.token = new[-1]
            seat.position += len(new)
            seat.cache_slot += len(new)
            if seat.newest:
                seat.newest = new
        self._is_running = False

    def _forget(self) -> None:
        """Forget which tokens are the newest of every slot."""
        for _, seat in self._seats.values():
            seat.position = -1

    def _seat(self, keys: Sequence[int], rows: Sequence[Row]) -> None:
        """Give slots to the sequences that joined, and to those whose slot is not below the number of rows any more."""
        wanted = set(keys)
        if len(wanted) < len(keys):
            raise ValueError("two rows of a step have the same list of pages")
        kept = {key: held for key, held in self._seats.items() if key in wanted and held[0] < len(rows)}
        free = iter(sorted(set(range(len(rows))) - {slot for slot, _ in kept.values()}))
        for key, row in zip(keys, rows, strict=True):
            if key not in kept:
                kept[key] = next(free), _Seat(row.pages)
        taken = {slot: len(seat.pages) for slot, seat in kept.values()}
        for key, (slot, seat) in self._seats.items():
            if key not in kept or kept[key][1] is not seat:
                self._let_go(slot, taken.get(slot, 0), seat.first + len(seat.tail))
        self._seats = kept

    def _let_go(self, slot: int, first: int, stop: int) -> None:
        """Put the scratch page into the places of pages that the sequence of a slot has no longer."""
        if first < stop:
            self._block.fill(_TABLE, slot * self._width + first, stop - first, self._scratch_page)

    def _send_news(self, seated: Sequence[tuple[int, _Seat]], rows: Sequence[Row], owners: Sequence[object]) -> None:
        """Send what the device does not know of rows that draft nothing: of most of them nothing. Between two tokens of
        one page, no page changes that the second one reads."""
        page_size = self._page_size
        for (slot, seat), row, owner in zip(seated, rows, owners, strict=True):
            start = row.start
            is_known = seat.position == start and seat.token == row.tokens[0] and seat.owner is owner
            if not is_known or start % page_size == 0:
                self._send(slot, seat, row, owner, _NOTHING)

    def _send(self, slot: int, seat: _Seat, row: Row, owner: object, drafting: Drafting) -> None:
        (token,) = row.tokens
        moved = seat.token != token or seat.position != row.start
        if moved:
            self._block.set("token", slot, token)
            self._block.set("position", slot, row.start)
            self._block.set("context_len", slot, row.start + 1)
            seat.token, seat.position = token, row.start
        if drafting is not _NOTHING:
            self._send_drafting(slot, seat, drafting, moved)
        if seat.owner is not owner:
            for name, value in zip(self._settings, self._values_of(owner), strict=True):
                self._block.set(name, slot, value)
            seat.owner = owner
        # pages behind the newest token may have been given back and others taken; those before it stay
        now, offset = divmod(row.start, self._page_size)
        cache_slot = row.pages[now] * self._page_size + offset
        if moved or seat.cache_slot != cache_slot:
            self._block.set("cache_slot", slot, cache_slot)
            seat.cache_slot = cache_slot
        first = seat.first if now >= seat.first else 0
        tail = list(row.pages[first:])
        if first != seat.first or tail != seat.tail:
            self._block.fill(_TABLE, slot * self._width + first, len(tail), tail)
            self._let_go(slot, first + len(tail), seat.first + len(seat.tail))
        seat.first, seat.tail = now, tail[now - first :]

    def _send_drafting(self, slot: int, seat: _Seat, drafting: Drafting, moved: bool) -> None:
        if moved or seat.newest != drafting.newest:
            for at, newest in enumerate(drafting.newest):
                self._block.set(_NEWEST, slot * MAX_NEWEST + at, newest)
            self._block.set("num_newest", slot, len(drafting.newest))
            seat.newest = drafting.newest
        if seat.num_drafts != drafting.num_drafts:
            self._block.set("num_drafts", slot, drafting.num_drafts)
            seat.num_drafts = drafting.num_drafts

    # -- the device's side: nothing here looks at a value -------------------------------------------------------------

    def column(self, name: str, num_rows: int) -> Tensor:
        """Return a column of the first `num_rows` slots: a setting; "token", "position", "context_len" or "cache_slot"
        (of the newest token); or "newest" [B, MAX_NEWEST], "num_newest" or "num_drafts" of `Drafting`."""
        return self._first(num_rows)[name]

    def batch(
        self,
        num_rows: int,
        tokens_BQ: Tensor | None = None,
        *,
        first_B: Tensor | None = None,
        num_live_B: Tensor | None = None,
        padded: bool = False,
    ) -> Batch:
        """Return a batch of the first `num_rows` slots, by default their newest tokens. Otherwise sequence b has the Q
        `tokens_BQ` from the position of its newest token or from `first_B[b]`, of which the first `num_live_B[b]` are
        live. When `padded`, some slots at the end may be without a sequence: their rows are not live."""
        first = self._first(num_rows)
        sequence_T, table_BM, num_queries = first[_INDEX], first[_TABLE], 1
        tokens_T, slots_T, context_lens_B = first["token"], first["cache_slot"], first["context_len"]
        first_B = first["position"] if first_B is None else first_B
        live_T = None if num_live_B is None else num_live_B > 0
        if padded:
            live_B = sequence_T < self._columns[_NUM_ROWS]
            live_T = live_B if live_T is None else live_T & live_B
            first_B, context_lens_B = first_B * live_B, context_lens_B.where(live_B, 1)
        positions_T = first_B
        if tokens_BQ is not None:
            tokens_T, num_queries = tokens_BQ.reshape(-1), tokens_BQ.shape[1]
            context_lens_B = first_B + num_queries
            if num_queries > 1:
                steps_Q = self._arange(num_queries)
                positions_T = (first_B[:, None] + steps_Q).view(-1)
                sequence_T = self._arange(num_rows * num_queries) // num_queries
                if num_live_B is not None and live_T is not None:
                    live_T = ((steps_Q < num_live_B[:, None]) & live_T[:, None]).view(-1)
            slots_T = self._cache_slots(positions_T.view(num_rows, num_queries), table_BM)
        return Batch(
            tokens_T=tokens_T,
            positions_T=positions_T,
            sequence_T=sequence_T,
            slots_A=slots_T if live_T is None else slots_T.where(live_T, self._scratch_slot),
            page_table_BM=table_BM,
            context_lens_B=context_lens_B,
            query_lens=(),
            context_lens=(),  # the host does not look: rows of a captured step are others by the time it runs
            decode=True,
            next_tokens=(),
            cp=ALONE,
            cp_counts=(),
            row_ends=(),
            live_T=live_T,
        )

    def _cache_slots(self, positions_BQ: Tensor, table_BM: Tensor) -> Tensor:
        """Return the slots of the cache at these positions, one after the other."""
        page_of_BQ = positions_BQ // self._page_size
        # page * page_size + offset, in two ops: a step of drafts on a CPU is made of what launching them takes
        pages_BQ = table_BM.gather(1, page_of_BQ) - page_of_BQ
        return torch.add(positions_BQ, pages_BQ, alpha=self._page_size).view(-1)

    def advance(self, tokens_B: Tensor) -> None:
        """Make these the newest tokens of the first slots, each one position further on."""
        first = self._first(tokens_B.shape[0])
        first["token"].copy_(tokens_B)
        first[_ALL_MOVING].add_(1)

    def advance_by(self, tokens_BQ: Tensor, counts_B: Tensor) -> None:
        """Make the first `counts_B` of these the newest tokens of the first slots, as many positions further on."""
        num_rows, num_queries = tokens_BQ.shape
        first = self._first(num_rows)
        first["token"].copy_(tokens_BQ.gather(1, counts_B[:, None] - 1)[:, 0])
        first[_ALL_MOVING].add_(counts_B)
        first[_NEWEST][:, :num_queries].copy_(tokens_BQ)
        first["num_newest"].copy_(counts_B * (first["num_newest"] > 0))

    def _arange(self, count: int) -> Tensor:
        """Return 0, 1, 2, …, made once for each number of them."""
        made = self._aranges.get(count)
        if made is None:
            made = self._aranges[count] = torch.arange(count, device=self._device, dtype=torch.int64)
        return made

    def _first(self, num_rows: int) -> dict[str, Tensor]:
        """Return views of the first slots, made once for each number of them."""
        views = self._views.get(num_rows)
        if views is None:
            views = {
                name: column[:num_rows]
                for name, column in self._columns.items()
                if name in self._settings or name in _OWN
            }
            views[_ALL_MOVING] = self._columns[_ALL_MOVING][:, :num_rows]
            views[_TABLE] = self._columns[_TABLE].view(self._capacity, self._width)[:num_rows]
            views[_NEWEST] = self._columns[_NEWEST].view(self._capacity, MAX_NEWEST)[:num_rows]
            views[_INDEX] = self._arange(num_rows)
            self._views[num_rows] = views
        return views


def _grown(needed: int, there: int) -> int:
    """Return what to reserve, so that it does not grow with every step."""
    return there if needed <= there else max(needed, 2 * there)
