"""Which sequences may have pages. Drafts get only those that nobody else needs, and return them after the step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdinfer.config import CacheConfig, EngineConfig
from pdinfer.engine.page_tables import PageTables
from pdinfer.engine.sequence import Sequence
from pdinfer.execution.drafting import Draft
from pdinfer.kv.pool import PagePool
from pdinfer.scheduling.decode import DecodeScheduler, SequenceState
from pdinfer.scheduling.rules import withheld_pages
from pdinfer.testing import random_model, tiny_config
from pdinfer.types import Request, SamplingParams

DRAFTING = random_model(tiny_config("v3"), mtp=True)
PAGE_SIZE = 2


def tables_of(num_pages: int, **more: int) -> tuple[PagePool, PageTables, DecodeScheduler[Sequence]]:
    pool = PagePool(DRAFTING, CacheConfig(page_size=PAGE_SIZE, num_pages=num_pages))
    config = EngineConfig(num_draft_tokens=3, **more)
    withheld = withheld_pages(num_pages, page_size=PAGE_SIZE, max_total_tokens=config.max_total_tokens)
    channel: Any = SimpleNamespace(shares_pool=lambda _: True)
    tables = PageTables(pool, channel, num_withheld=withheld)
    scheduler = DecodeScheduler(tables, config, lambda: 0.0, num_pages=num_pages, page_size=PAGE_SIZE)
    return pool, tables, scheduler


def may_grant(scheduler: DecodeScheduler[Sequence], sequence: Sequence, *, holding: list[Sequence]) -> bool:
    scheduler.running = dict.fromkeys(holding)
    return scheduler.may_grant(sequence)


def granted(scheduler: DecodeScheduler[Sequence], sequence: Sequence) -> Sequence:
    """Begin an attempt."""
    scheduler.wait(sequence)
    scheduler.grant(sequence)
    return sequence


def waiting(pool: PagePool, num_tokens: int, *, max_tokens: int = 64, attempts: int = 0) -> Sequence:
    """Return a sequence that holds nothing."""
    sequence = running(pool, num_tokens, max_tokens=max_tokens)
    pool.release(sequence.pages)
    sequence.state, sequence.pages, sequence.attempts = SequenceState.WAITING, [], attempts
    return sequence


@pytest.mark.parametrize(("attempts", "granted"), [(0, True), (1, False)])
def test_who_comes_back_needs_room_to_run_for_a_while(attempts: int, granted: bool) -> None:
    pool, _, scheduler = tables_of(32)
    other = running(pool, 4)
    assert may_grant(scheduler, waiting(pool, 20, attempts=attempts), holding=[other]) == granted
    assert may_grant(scheduler, waiting(pool, 20, max_tokens=56, attempts=attempts), holding=[other]), "28 of 30 pages"
    assert may_grant(scheduler, waiting(pool, 20, max_tokens=60, attempts=attempts), holding=[]), (
        "alone it may have all"
    )


def test_after_a_retraction_pages_are_kept_for_growth() -> None:
    """A tenth of the 60 tokens that the other may still generate is 3 pages of 30."""
    pool, _, scheduler = tables_of(32)
    others = [running(pool, 4)]
    assert may_grant(scheduler, waiting(pool, 58), holding=others)
    scheduler.learn(num_retracted=1)
    assert not may_grant(scheduler, waiting(pool, 56), holding=others)
    assert may_grant(scheduler, waiting(pool, 54), holding=others)
    others[0].protected = True
    assert may_grant(scheduler, waiting(pool, 58), holding=others), "it has what it needs"
    others[0].protected = False
    for _ in range(128):
        scheduler.learn(num_retracted=0)
    assert may_grant(scheduler, waiting(pool, 58), holding=others)


def test_pages_in_use_have_room_for_no_more_tokens_than_allowed() -> None:
    pool, tables, scheduler = tables_of(32, max_total_tokens=9)
    sequence = running(pool, 4)
    assert not may_grant(scheduler, waiting(pool, 4), holding=[sequence])
    assert may_grant(scheduler, waiting(pool, 2), holding=[sequence])
    sequence.output += [7] * 4
    assert tables.extend(sequence)
    sequence.pages += pool.own(1)
    sequence.output += [7] * 2
    assert not tables.extend(sequence)
    assert pool.num_owned == 4


def test_the_line_goes_by_priority_return_deadline_and_age() -> None:
    pool, _, _ = tables_of(32)

    def order(attempts: int = 0, *, priority: int = 0, arrival: int = 0, deadline_at: float | None = None) -> object:
        sequence = waiting(pool, 4, attempts=attempts)
        sequence.priority, sequence.arrival, sequence.submitted_at = priority, arrival, float(arrival)
        sequence.deadline_at = deadline_at
        return sequence.order

    line = [
        order(priority=1, arrival=9),
        order(1, arrival=5),
        order(arrival=7, deadline_at=8.0),
        order(arrival=6, deadline_at=9.0),
        order(arrival=2),
        order(arrival=3, deadline_at=500.0),
    ]
    assert sorted(line, key=lambda one: one) == line


def running(pool: PagePool, num_tokens: int, *, max_tokens: int = 64, protected: bool = False) -> Sequence:
    """Return a sequence with pages for its next token, or with all it can ever need if it is protected."""
    held = list(pool.own(pool.layout.num_pages(num_tokens)))
    spare = list(pool.own(pool.layout.num_pages(max_tokens) - len(held))) if protected else []
    sampling = SamplingParams(max_new_tokens=max_tokens - num_tokens + 1)
    request = Request(request_id="a", prompt=(1,) * (num_tokens - 1), sampling=sampling)
    sequence = Sequence.of(request, (), 0, 0.0, pool.key_scheme.chain(b""), eos_token_ids=(), processor=None)
    sequence.state, sequence.output, sequence.protected = SequenceState.RUNNING, [7], protected
    sequence.pages, sequence.spare, sequence.draft = held, spare, Draft.of(torch.zeros(1, 4))
    return sequence


@pytest.mark.parametrize(("free", "drafts"), [(0, 1), (1, 3), (5, 3)])
def test_drafts_get_the_slots_that_are_free(free: int, drafts: int) -> None:
    pool, tables, scheduler = tables_of(2 + free)
    sequence = running(pool, 3)  # its second page has room for one more
    assert scheduler.num_drafts(sequence) == drafts
    assert pool.num_free == max(0, free - 1)
    tables.trim(sequence)
    assert len(sequence.pages) == 2
    assert pool.num_free == free
    pool.check()


def test_pages_that_accepted_drafts_fill_stay() -> None:
    pool, tables, scheduler = tables_of(8)
    sequence = running(pool, 3)
    scheduler.num_drafts(sequence)
    sequence.output += [7, 7]
    tables.trim(sequence)
    assert len(sequence.pages) == 3
    assert tables.extend(sequence)
    assert len(sequence.pages) == 3


@pytest.mark.parametrize(("left", "drafts"), [(1, 0), (2, 1), (3, 2), (4, 3), (9, 3)])
def test_no_more_is_drafted_than_can_be_used(left: int, drafts: int) -> None:
    pool, _, scheduler = tables_of(16)
    assert scheduler.num_drafts(running(pool, 5, max_tokens=5 + left)) == drafts


def test_a_protected_sequence_drafts_within_its_own_pages() -> None:
    pool, tables, scheduler = tables_of(5)
    sequence = running(pool, 4, max_tokens=10, protected=True)
    assert pool.num_free == 0
    assert scheduler.num_drafts(sequence) == 3
    assert (len(sequence.pages), len(sequence.spare)) == (4, 1)
    pages = [*sequence.pages, *sequence.spare]
    tables.trim(sequence)
    assert (len(sequence.pages), len(sequence.spare)) == (2, 3)
    assert sorted(pages) == sorted([*sequence.pages, *sequence.spare])


def test_with_an_mtp_layer_a_page_is_full_one_token_later() -> None:
    pool, tables, _ = tables_of(8)
    sequence = running(pool, 4)
    tables.keep(sequence)
    assert [pool.is_kept(page) for page in sequence.pages] == [True, False]
    sequence.output.append(7)
    tables.extend(sequence)
    tables.keep(sequence)
    assert [pool.is_kept(page) for page in sequence.pages] == [True, True, False]


def test_known_pages_that_take_the_place_of_ours_make_a_new_table() -> None:
    """A runner knows a sequence by its list of pages: one that changed behind the newest token is sent anew."""
    pool, tables, _ = tables_of(12)
    first, second = running(pool, 5), running(pool, 5)
    tables.keep(first)
    table = first.pages
    tables.keep(first)
    assert first.pages is table
    table, before = second.pages, list(second.pages)
    tables.keep(second)
    assert second.pages[:2] == first.pages[:2]
    assert second.pages is not table
    assert table == before


def test_what_is_kept_to_draft_from_goes_with_the_pages() -> None:
    pool, tables, _ = tables_of(8)
    sequence = running(pool, 4)
    tables.release(sequence)
    assert sequence.draft.state is None
    assert pool.num_free == 8


def test_pages_of_a_room_that_was_given_up_wait_for_its_writers() -> None:
    """A sequence that comes meanwhile leaves the watermark free, as if the room were in use."""
    pool, tables, scheduler = tables_of(32)
    sequence = waiting(pool, 4)
    grant = tables.reserve(granted(scheduler, sequence), b"r" * 16, ())
    all_there_is = waiting(pool, 60)
    scheduler.leave(sequence)
    assert tables.orphan(sequence) == grant
    assert (tables.num_orphans, pool.num_granted, sequence.pages, sequence.grant) == (1, 2, [], None)
    assert not may_grant(scheduler, all_there_is, holding=[])
    assert not tables.settle(b"o" * 16)
    assert tables.settle(grant.room)
    assert (tables.num_orphans, pool.num_granted, pool.num_free) == (0, 0, 32)
    assert not tables.settle(grant.room)
    assert may_grant(scheduler, all_there_is, holding=[])


def test_pages_that_others_use_anyway_are_had_for_nothing() -> None:
    pool, tables, scheduler = tables_of(12)
    first, second = running(pool, 7), waiting(pool, 7)
    tables.keep(first)
    second.extend_chain()
    taken = pool.own(pool.num_free - 1)
    assert may_grant(scheduler, second, holding=[])
    grant = tables.reserve(granted(scheduler, second), b"r" * 16, ())
    assert second.pages == [*first.pages[:3], *grant.pages]
    assert grant.tokens == range(6, 7)
    pool.release(taken)


def test_at_the_last_attempt_a_sequence_has_all_it_can_need() -> None:
    pool, tables, scheduler = tables_of(32, max_attempts=2)
    sequence = waiting(pool, 4, max_tokens=20)
    tables.reserve(granted(scheduler, sequence), b"r" * 16, ())
    assert (sequence.protected, len(sequence.pages), len(sequence.spare)) == (False, 2, 0)
    again = waiting(pool, 4, max_tokens=20, attempts=1)
    tables.reserve(granted(scheduler, again), b"o" * 16, ())
    assert (again.protected, len(again.pages), len(again.spare)) == (True, 2, 8)


def test_pages_are_kept_for_the_growth_that_is_expected_and_not_for_a_mere_limit() -> None:
    for expected, may in ((64, False), (7, True)):
        pool, _, scheduler = tables_of(32)
        sequence = running(pool, 4)
        sequence.expected_tokens = expected
        for _ in range(8):
            scheduler.learn(num_retracted=1)
        assert may_grant(scheduler, waiting(pool, 40), holding=[sequence]) == may
