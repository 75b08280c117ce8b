"""Runs of pages keep the accounts of a pool, and evict what a pool would."""

from __future__ import annotations

import random

import pytest

from pdinfer.errors import PDInferError
from pdinfer.planning.simulation.pages import Held, Keys, SimPages


def keys(*blocks: tuple[str, int]) -> Keys:
    return Keys(tuple(name for name, _ in blocks), tuple(end for _, end in blocks))


def hold(pages: SimPages, wanted: Keys, num_pages: int) -> Held:
    """Take what a sequence of `num_pages` pages needs beyond what is known, as an engine does."""
    found = pages.find(wanted, num_pages - 1)
    needed = num_pages - found.num_known
    assert needed + pages.num_unused(found) <= pages.num_available
    pages.share(found)
    found.num_own = needed
    pages.take(needed)
    return found


def test_a_prompt_finds_the_blocks_that_it_shares() -> None:
    pages = SimPages(100)
    first = hold(pages, keys(("a", 4), ("b", 8), ("c", 12)), 13)
    pages.keep(first, keys(("a", 4), ("b", 8), ("c", 12)))
    assert (pages.num_used, pages.num_cached, pages.num_free) == (13, 0, 87)
    second = hold(pages, keys(("a", 4), ("b", 8), ("d", 12)), 13)
    assert second.num_known == 8
    assert pages.num_used == 13 + 5
    pages.release(first)
    assert (pages.num_used, pages.num_cached) == (8 + 5, 4)  # "c" rests, "a" and "b" are in use
    pages.release(second)
    assert (pages.num_used, pages.num_cached) == (0, 12)


def test_the_page_of_the_last_token_is_never_found() -> None:
    pages = SimPages(100)
    whole = keys(("a", 4), ("b", 8))
    first = hold(pages, whole, 8)
    pages.keep(first, whole)
    pages.release(first)
    second = hold(pages, whole, 8)
    assert second.num_known == 7
    pages.keep(second, whole)  # its own eighth page is known already
    assert (pages.num_used, pages.num_free) == (8, 92)
    pages.release(second)
    assert (pages.num_cached, pages.num_free) == (8, 92)


def test_what_two_sequences_computed_is_kept_once() -> None:
    pages, whole = SimPages(100), keys(("a", 4), ("b", 8))
    first, second = hold(pages, whole, 9), hold(pages, whole, 9)
    pages.keep(first, whole)
    pages.keep(second, whole)
    assert pages.num_used == 8 + 2
    pages.release(first)
    pages.release(second)
    assert (pages.num_used, pages.num_cached) == (0, 8)


def test_the_longest_at_rest_goes_first_and_its_end_before_its_beginning() -> None:
    pages = SimPages(20)
    for name in "ab":
        held = hold(pages, keys((name, 8)), 8)
        pages.keep(held, keys((name, 8)))
        pages.release(held)
    pages.take(4 + 5)
    assert pages.find(keys(("a", 8)), 100).num_known == 3
    assert pages.find(keys(("b", 8)), 100).num_known == 8
    refreshed = hold(pages, keys(("a", 8)), 4)
    pages.release(refreshed)
    pages.take(2)
    assert pages.find(keys(("a", 8)), 100).num_known == 3
    assert pages.find(keys(("b", 8)), 100).num_known == 6


def test_domains_share_memory_and_no_pages() -> None:
    pages, whole = SimPages(20), keys(("a", 8))
    held = hold(pages, whole, 8)
    pages.keep(held, whole, "one")
    assert pages.find(whole, 100, "other").num_known == 0
    assert pages.find(whole, 100, "one").num_known == 8


def test_a_pool_gives_no_page_that_is_in_use() -> None:
    pages = SimPages(10)
    hold(pages, keys(("a", 8)), 8)
    with pytest.raises(PDInferError, match="3 pages asked for, 2 of 10"):
        pages.take(3)


def test_without_a_cache_nothing_is_kept() -> None:
    pages, whole = SimPages(10, prefix_cache=False), keys(("a", 8))
    held = hold(pages, whole, 8)
    pages.keep(held, whole)
    pages.release(held)
    assert (pages.num_free, pages.find(whole, 100).num_known) == (10, 0)


@pytest.mark.parametrize("seed", range(20))
def test_every_page_is_counted_once_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    pages, holding = SimPages(60), []
    for _ in range(400):
        if holding and rng.random() < 0.5:
            held, wanted = holding.pop(rng.randrange(len(holding)))
            if rng.random() < 0.8:
                pages.keep(held, wanted)
            pages.release(held)
        else:
            depth = rng.randint(1, 5)
            names = tuple(f"{at}/{rng.choice('xy') if at == depth - 1 else 'x'}" for at in range(depth))
            wanted = Keys(names, tuple(range(3, 3 * depth + 1, 3)))
            found = pages.find(wanted, 3 * depth)
            needed = 3 * depth + 1 - found.num_known
            if needed + pages.num_unused(found) <= pages.num_available:
                pages.share(found)
                found.num_own = needed
                pages.take(needed)
                holding.append((found, wanted))
        runs, walk = [], list(pages._roots.values())
        while walk:
            run = walk.pop()
            walk += run.children.values()
            runs.append(run)
        used = sum(run.num_pages for run in runs if run.num_users)
        assert pages.num_cached == sum(run.num_pages for run in runs if not run.num_users and run.parent)
        assert pages.num_used == used + sum(held.num_own for held, _ in holding)
        assert pages.num_free >= 0
    for held, _ in holding:
        pages.release(held)
    assert pages.num_used == 0
