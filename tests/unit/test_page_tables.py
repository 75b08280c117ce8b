"""Pages for drafts: only those that nobody else needs, and back after the step."""

from __future__ import annotations

import pytest
import torch

from pdinfer.config import CacheConfig, EngineConfig
from pdinfer.kv.pool import PagePool
from pdinfer.page_tables import PageTables
from pdinfer.sequence import Sequence, SequenceState
from pdinfer.speculation import Draft
from pdinfer.testing import random_model
from pdinfer.types import Request, SamplingParams

PAGE_SIZE = 2


def tables_of(num_pages: int) -> tuple[PagePool, PageTables]:
    pool = PagePool(random_model(), CacheConfig(page_size=PAGE_SIZE, num_pages=num_pages))
    return pool, PageTables(pool, EngineConfig(num_draft_tokens=3))


def running(pool: PagePool, num_tokens: int, *, max_tokens: int = 64, protected: bool = False) -> Sequence:
    """A sequence with pages for its next token, and if it is protected with all it can need."""
    held = list(pool.own(pool.layout.num_pages(num_tokens)))
    spare = list(pool.own(pool.layout.num_pages(max_tokens) - len(held))) if protected else []
    return Sequence(
        request_id="a",
        request=Request(
            prompt=(1,) * (num_tokens - 1), sampling=SamplingParams(max_new_tokens=max_tokens - num_tokens + 1)
        ),
        writers=(),
        arrival=0,
        submitted_at=0.0,
        deadline_at=None,
        output=[7],
        chain=pool.chain(b""),
        state=SequenceState.RUNNING,
        pages=held,
        spare=spare,
        protected=protected,
        draft=Draft(state=torch.zeros(1, 4)),
    )


@pytest.mark.parametrize(("free", "drafts"), [(0, 1), (1, 3), (5, 3)])
def test_drafts_get_the_slots_that_are_free(free: int, drafts: int) -> None:
    pool, tables = tables_of(2 + free)
    sequence = running(pool, 3)  # its second page has room for one more
    assert tables.extend_for_drafts(sequence) == drafts
    assert pool.num_free == max(0, free - 1)
    tables.trim(sequence)
    assert len(sequence.pages) == 2
    assert pool.num_free == free
    pool.check()


def test_pages_that_accepted_drafts_fill_stay() -> None:
    pool, tables = tables_of(8)
    sequence = running(pool, 3)
    tables.extend_for_drafts(sequence)
    sequence.output += [7, 7]
    tables.trim(sequence)
    assert len(sequence.pages) == 3
    assert tables.extend(sequence)
    assert len(sequence.pages) == 3


@pytest.mark.parametrize(("left", "drafts"), [(1, 0), (2, 1), (3, 2), (4, 3), (9, 3)])
def test_no_more_is_drafted_than_can_be_used(left: int, drafts: int) -> None:
    pool, tables = tables_of(16)
    assert tables.extend_for_drafts(running(pool, 5, max_tokens=5 + left)) == drafts


def test_a_protected_sequence_drafts_within_its_own_pages() -> None:
    pool, tables = tables_of(5)
    sequence = running(pool, 4, max_tokens=10, protected=True)
    assert pool.num_free == 0
    assert tables.extend_for_drafts(sequence) == 3
    assert (len(sequence.pages), len(sequence.spare)) == (4, 1)
    pages = [*sequence.pages, *sequence.spare]
    tables.trim(sequence)
    assert (len(sequence.pages), len(sequence.spare)) == (2, 3)
    assert sorted(pages) == sorted([*sequence.pages, *sequence.spare])


def test_without_a_state_nothing_is_drafted() -> None:
    pool, tables = tables_of(8)
    sequence = running(pool, 3)
    sequence.draft = Draft()
    assert tables.extend_for_drafts(sequence) == 0


def test_with_drafts_a_page_is_full_one_token_later() -> None:
    pool, tables = tables_of(8)
    sequence = running(pool, 4)
    tables.keep(sequence)
    assert [pool.is_kept(page) for page in sequence.pages] == [True, False]
    sequence.output.append(7)
    tables.extend(sequence)
    tables.keep(sequence)
    assert [pool.is_kept(page) for page in sequence.pages] == [True, True, False]


def test_what_is_kept_to_draft_from_goes_with_the_pages() -> None:
    pool, tables = tables_of(8)
    sequence = running(pool, 4)
    tables.release(sequence)
    assert sequence.draft.state is None
    assert pool.num_free == 8
