"""The decode batch that stays on the device: whatever joins, leaves, grows or is broken off, a step reads its rows."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Sequence

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pdinfer.model.batch import Batch, Row
from pdinfer.model.decode_rows import MAX_NEWEST, DecodeRows, Drafting, _Block
from tests.e2e.interrupts import Interrupter

PAGE_SIZE, SCRATCH = 4, 1999
CPU = torch.device("cpu")
SETTINGS = {"scale": torch.float64, "seed": torch.int64, "count": torch.int32}


@attrs.frozen(eq=False)
class Owner:
    """What belongs to one sequence from its first step to its last."""

    values: tuple[float, int, int]


@attrs.define(eq=False)
class Running:
    """A running sequence: `pages` changes in place as an engine changes it."""

    tokens: list[int]
    pages: list[int]
    owner: Owner
    num_drafts: int
    num_newest: int

    @property
    def drafting(self) -> Drafting:
        newest = self.tokens[len(self.tokens) - self.num_newest :] if self.num_newest else []
        return Drafting(newest, self.num_drafts)

    @property
    def row(self) -> Row:
        return Row(self.tokens[-1:], len(self.tokens) - 1, self.pages)


def sequence(chance: random.Random, num_tokens: int) -> Running:
    pages = [chance.randrange(1000) for _ in range(-(-num_tokens // PAGE_SIZE))]
    owner = Owner((chance.random(), chance.randrange(-(2**63), 2**63), chance.randrange(100)))
    num_drafts, num_newest = chance.choice([(0, 0), (0, 1), (2, 1), (3, 1)])
    return Running([chance.randrange(50) for _ in range(num_tokens)], pages, owner, num_drafts, num_newest)


def rows_of(device: torch.device = CPU) -> DecodeRows:
    return DecodeRows(SETTINGS, lambda owner: owner.values, page_size=PAGE_SIZE, device=device, scratch_page=SCRATCH)


def check(rows: DecodeRows, running: Sequence[Running], slots: Sequence[int]) -> Batch:
    """Compare what the device reads with what the sequences are."""
    batch = rows.batch(len(running))
    assert sorted(slots) == list(range(len(running)))
    for slot, one in zip(slots, running, strict=True):
        page, offset = divmod(len(one.tokens) - 1, PAGE_SIZE)
        assert int(batch.tokens_T[slot]) == one.tokens[-1]
        assert int(batch.positions_T[slot]) == len(one.tokens) - 1
        assert int(batch.context_lens_B[slot]) == len(one.tokens)
        assert batch.page_table_BM[slot, : page + 1].tolist() == one.pages[: page + 1]
        assert int(batch.slots_A[slot]) == one.pages[page] * PAGE_SIZE + offset
        assert tuple(rows.column(name, len(running))[slot].item() for name in SETTINGS) == one.owner.values
    return batch


def check_drafting(rows: DecodeRows, running: Sequence[Running], slots: Sequence[int]) -> None:
    """Compare what the device drafts from with the newest tokens of the sequences, and a batch of their drafts."""
    count = len(running)
    position_B, num_drafts_B = rows.column("position", count), rows.column("num_drafts", count)
    tokens_BQ = torch.arange(count * 3, device=position_B.device).view(count, 3)
    batch = rows.batch(count, tokens_BQ, num_live_B=num_drafts_B + 1)
    assert batch.tokens_T.tolist() == [*range(count * 3)]
    assert batch.context_lens_B.tolist() == (position_B + 3).tolist()
    assert batch.live_T is not None
    for slot, one in zip(slots, running, strict=True):
        assert set(batch.page_table_BM[slot, len(one.pages) :].tolist()) <= {SCRATCH}
        newest = list(one.drafting.newest)
        assert int(num_drafts_B[slot]) == one.num_drafts
        assert int(rows.column("num_newest", count)[slot]) == len(newest)
        assert rows.column("newest", count)[slot, : len(newest)].tolist() == newest
        for at in range(3):
            token, position = slot * 3 + at, len(one.tokens) - 1 + at
            assert int(batch.positions_T[token]) == position
            assert int(batch.sequence_T[token]) == slot
            live = at <= one.num_drafts
            assert bool(batch.live_T[token]) is live
            if live and position < len(one.pages) * PAGE_SIZE:
                page = one.pages[position // PAGE_SIZE]
                assert int(batch.slots_A[token]) == page * PAGE_SIZE + position % PAGE_SIZE
            if not live:
                assert int(batch.slots_A[token]) == SCRATCH * PAGE_SIZE


def test_an_interrupt_in_any_line_while_room_is_made_leaves_it_to_the_next_step() -> None:
    running = [sequence(random.Random(number), 9) for number in range(5)]
    making = {DecodeRows.reserve.__code__, _Block.lay_out.__code__}
    for at in itertools.count():
        rows = rows_of()
        hit = Interrupter(at, counts=lambda code: code in making)
        for count in (1, 5):  # the first room, and a larger one
            stepping = running[:count]
            given = [one.row for one in stepping], [one.owner for one in stepping], [one.drafting for one in stepping]
            with contextlib.suppress(KeyboardInterrupt), hit.active():
                rows.place(*given)
            check(rows, stepping, rows.place(*given))
        if not hit.where:
            return


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("device", [CPU], ids=str)
@given(seed=st.integers(0, 10**6))
def test_a_step_reads_its_rows_whatever_became_of_the_others(device: torch.device, drafts: bool, seed: int) -> None:
    chance = random.Random(seed)
    rows, running = rows_of(device), list[Running]()
    for _ in range(chance.randrange(1, 30)):
        running = [one for one in running if chance.random() > 0.15]
        running += [sequence(chance, chance.randrange(1, 40)) for _ in range(chance.choice([0, 0, 1, 3]))]
        chance.shuffle(running)
        stepping = [one for one in running if chance.random() > 0.1]  # the others found no page in this step
        for one in stepping:
            last = (len(one.tokens) - 1) // PAGE_SIZE
            if chance.random() < 0.3:  # pages for drafts came, or went and others came
                one.pages[last + 1 :] = [chance.randrange(1000) for _ in range(chance.randrange(3))]
            if chance.random() < 0.05:  # an answer goes on with the parameters of another request
                one.owner = sequence(chance, 1).owner
            if chance.random() < 0.1:  # a known page took the place of one of ours
                one.pages = [*one.pages[:last], *one.pages[last:]]
                one.pages[0] = chance.randrange(1000)
            if one.num_drafts > 0:  # fewer near its end
                one.num_drafts = chance.choice([0, 2, 3])
        drafting = [one.drafting for one in stepping] if drafts else None
        slots = rows.place([one.row for one in stepping], [one.owner for one in stepping], drafting)
        check(rows, stepping, slots)
        if drafts:
            check_drafting(rows, stepping, slots)
        if chance.random() < 0.2:
            continue  # the step failed: nothing is drawn, or it was drawn elsewhere
        tokens = [[chance.randrange(50) for _ in range(chance.randint(1, MAX_NEWEST))] for _ in stepping]
        if not drafts or chance.random() < 0.3:  # a step that drafts nothing
            tokens = [new[:1] for new in tokens]
            rows.advance_by(torch.tensor(tokens, device=device).view(-1, 1), torch.ones(len(tokens), dtype=torch.int64))
        else:
            filled = [new + [0] * (MAX_NEWEST - len(new)) for new in tokens]
            counts_B = torch.tensor([len(new) for new in tokens], dtype=torch.int64, device=device)
            rows.advance_by(torch.tensor(filled, device=device).view(-1, MAX_NEWEST), counts_B)
        if chance.random() < 0.1:
            continue  # interrupted behind the device's work: the sequences have no new token
        rows.advanced(tokens)
        for slot, one in zip(slots, stepping, strict=True):
            one.tokens += tokens[slot]
            one.num_newest = len(tokens[slot]) if one.num_newest else 0
            while len(one.tokens) > PAGE_SIZE * len(one.pages):
                one.pages.append(chance.randrange(1000))


def test_padding_rows_are_not_live_and_write_to_the_scratch_page() -> None:
    rows = DecodeRows({}, lambda _: (), page_size=PAGE_SIZE, device=CPU, scratch_page=SCRATCH)
    rows.reserve(4, 8)
    one = sequence(random.Random(1), 6)
    rows.place([one.row], [one.owner])
    batch = rows.batch(4, padded=True)
    assert batch.live_T is not None
    assert batch.live_T.tolist() == [True, False, False, False]
    assert batch.slots_A.tolist() == [one.pages[1] * PAGE_SIZE + 1, *[SCRATCH * PAGE_SIZE] * 3]
    assert batch.context_lens_B.tolist() == [6, 1, 1, 1]


def test_nothing_is_read_of_pages_that_a_sequence_has_no_longer() -> None:
    """They may be another one's by then, and a peer may be writing them."""
    rows = rows_of()
    rows.reserve(2, 8)
    long, short = (sequence(random.Random(seed), length) for seed, length in ((1, 23), (2, 6)))
    long.pages.append(7)
    rows.place([long.row], [long.owner])
    assert rows.batch(2).page_table_BM.tolist() == [[*long.pages, SCRATCH], [SCRATCH] * 8]
    long.pages.pop()  # its draft was not right
    rows.place([long.row], [long.owner], [Drafting()])
    assert rows.batch(2).page_table_BM[0].tolist() == long.pages + [SCRATCH] * 2
    rows.place([short.row], [short.owner])
    assert rows.batch(2).page_table_BM[0].tolist() == short.pages + [SCRATCH] * 6
    rows.place([], [])
    assert rows.batch(2).page_table_BM.tolist() == [[SCRATCH] * 8] * 2


def test_what_is_reserved_keeps_its_addresses() -> None:
    rows = rows_of()
    rows.reserve(16, 32)
    before = rows.column("seed", 16).data_ptr()
    many = [sequence(random.Random(seed), 100) for seed in range(16)]
    rows.place([one.row for one in many], [one.owner for one in many])
    assert rows.column("seed", 16).data_ptr() == before


def test_two_rows_with_one_list_of_pages_are_refused() -> None:
    rows, one = rows_of(), sequence(random.Random(2), 3)
    with pytest.raises(ValueError, match="the same list of pages"):
        rows.place([one.row, one.row], [one.owner, one.owner])
