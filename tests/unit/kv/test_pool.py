"""Every page of a pool is in exactly one state, whatever is asked of the pool and in any order."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdinfer.config import CacheConfig
from pdinfer.errors import Overloaded, PDInferError
from pdinfer.kv.layout import KVComponent, KVLayout
from pdinfer.kv.memory import Memory
from pdinfer.kv.pool import Held, PagePool, PageState
from pdinfer.testing import random_model
from tests.slices import examples

NUM_PAGES = 7


class OneByteTokens:
    """What a pool needs of a model. It remembers what the pool asked for."""

    asked: str = ""

    def kv_layout(self, cache: CacheConfig) -> KVLayout:
        part = KVComponent(name="latent", format="f", dtype="uint8", width=1, token_bytes=1, layers=(0,))
        return KVLayout(model_id=b"m", weights_id=b"w", page_size=cache.page_size, components=(part,))

    def auto_num_pages(self, layout: KVLayout, mem_fraction_static: float | None) -> int:
        return 11

    def allocate_pages(self, layout: KVLayout, num_pages: int, memory: str = "auto") -> Memory:
        self.asked = f"{num_pages} pages of {layout.page_size} tokens in {memory} memory"
        return None  # type: ignore[return-value]  # the accounting never looks at the bytes


def pool_of(num_pages: int = NUM_PAGES) -> PagePool:
    return PagePool(OneByteTokens(), CacheConfig(num_pages=num_pages))


class PoolMachine(RuleBasedStateMachine):
    """A pool beside the plainest model of it: a state and a generation per page."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of()
        self.states = [PageState.FREE] * NUM_PAGES
        self.generations = [0] * NUM_PAGES

    def having(self, state: PageState) -> list[int]:
        return [page for page in range(NUM_PAGES) if self.states[page] is state]

    def some(self, data: st.DataObject, state: PageState) -> list[int]:
        return data.draw(st.lists(st.sampled_from(self.having(state)), min_size=1, unique=True))

    def taken(self, pages: tuple[int, ...], count: int, state: PageState) -> None:
        assert len(pages) == len(set(pages)) == count
        assert all(self.states[page] is PageState.FREE for page in pages)
        for page in pages:
            self.states[page] = state

    def returned(self, pages: list[int]) -> None:
        for page in pages:
            self.states[page] = PageState.FREE
            self.generations[page] += 1

    @rule(data=st.data())
    def own(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.having(PageState.FREE))))
        self.taken(self.pool.own(count), count, PageState.OWNED)

    @rule(data=st.data())
    def grant(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, len(self.having(PageState.FREE))))
        self.taken(self.pool.grant(count), count, PageState.GRANTED)

    @rule(data=st.data())
    @precondition(lambda self: self.having(PageState.GRANTED))
    def adopt(self, data: st.DataObject) -> None:
        pages = self.some(data, PageState.GRANTED)
        self.pool.adopt(pages)
        for page in pages:
            self.states[page] = PageState.OWNED

    @rule(data=st.data())
    @precondition(lambda self: self.having(PageState.OWNED))
    def release_owned(self, data: st.DataObject) -> None:
        pages = self.some(data, PageState.OWNED)
        self.pool.release(pages)
        self.returned(pages)

    @rule(data=st.data())
    @precondition(lambda self: self.having(PageState.GRANTED))
    def release_granted(self, data: st.DataObject) -> None:
        pages = self.some(data, PageState.GRANTED)
        self.pool.release(pages)
        self.returned(pages)

    @rule(more=st.integers(1, 3))
    def take_too_many(self, more: int) -> None:
        for take in (self.pool.own, self.pool.grant):
            with pytest.raises(Overloaded, match=f"of {NUM_PAGES} are free"):
                take(len(self.having(PageState.FREE)) + more)

    @rule(data=st.data())
    @precondition(lambda self: len(self.having(PageState.GRANTED)) < NUM_PAGES)
    def adopt_one_that_is_not_granted(self, data: st.DataObject) -> None:
        wrong = [page for page in range(NUM_PAGES) if self.states[page] is not PageState.GRANTED]
        pages = [*self.having(PageState.GRANTED), data.draw(st.sampled_from(wrong))]
        with pytest.raises(PDInferError, match="expected granted"):
            self.pool.adopt(data.draw(st.permutations(pages)))

    @rule(data=st.data())
    @precondition(lambda self: len(set(self.states)) > 1)
    def release_pages_of_two_states(self, data: st.DataObject) -> None:
        pages = data.draw(st.permutations(range(NUM_PAGES)))
        with pytest.raises(PDInferError, match=r"released twice|expected"):
            self.pool.release(pages)

    @rule(data=st.data())
    @precondition(lambda self: self.having(PageState.FREE))
    def release_free(self, data: st.DataObject) -> None:
        with pytest.raises(PDInferError, match="is free, expected"):
            self.pool.release(self.some(data, PageState.FREE))

    @rule(data=st.data())
    @precondition(lambda self: len(self.having(PageState.FREE)) < NUM_PAGES)
    def name_a_page_twice(self, data: st.DataObject) -> None:
        taken = [page for page in range(NUM_PAGES) if self.states[page] is not PageState.FREE]
        page = data.draw(st.sampled_from(taken))
        for transition in (self.pool.release, self.pool.adopt):
            with pytest.raises(PDInferError):
                transition([page, page])

    @rule(data=st.data(), outside=st.sampled_from([-1, -NUM_PAGES, NUM_PAGES, 2**31]))
    def name_a_page_of_no_pool(self, data: st.DataObject, outside: int) -> None:
        mine = data.draw(st.lists(st.sampled_from(range(NUM_PAGES)), unique=True, max_size=2))
        for transition in (self.pool.release, self.pool.adopt):
            with pytest.raises(PDInferError, match=f"is not in a pool of {NUM_PAGES}"):
                transition(data.draw(st.permutations([*mine, outside])))

    @rule(count=st.integers(-3, -1))
    def take_less_than_nothing(self, count: int) -> None:
        for take in (self.pool.own, self.pool.grant):
            with pytest.raises(PDInferError, match=f"{count} pages were asked for"):
                take(count)

    @rule()
    def nothing_at_all(self) -> None:
        self.pool.adopt([])
        self.pool.release([])

    @invariant()
    def every_page_is_counted_once(self) -> None:
        pool = self.pool
        pool.check()
        counts = [len(self.having(state)) for state in (PageState.FREE, PageState.OWNED, PageState.GRANTED)]
        assert [pool.num_free, pool.num_owned, pool.num_granted] == counts
        assert pool.num_free + pool.num_owned + pool.num_granted == pool.num_pages

    @invariant()
    def generations_count_returns(self) -> None:
        assert self.pool.generations(range(NUM_PAGES)) == tuple(self.generations)


TestPool = PoolMachine.TestCase
TestPool.settings = examples(80, stateful_step_count=40)


def test_check_notices_a_page_that_is_counted_twice() -> None:
    pool = pool_of()
    pool._free.append(pool._free[0])
    with pytest.raises(PDInferError, match="page accounting is broken"):
        pool.check()


def test_check_notices_a_page_in_the_wrong_state() -> None:
    pool = pool_of()
    (page,) = pool.own(1)
    pool._granted.add(page)
    with pytest.raises(PDInferError, match="page accounting is broken"):
        pool.check()


def test_the_model_says_how_many_pages_when_the_config_does_not() -> None:
    model = OneByteTokens()
    assert PagePool(model, CacheConfig(page_size=32, memory="shared")).num_free == 11
    assert model.asked == "12 pages of 32 tokens in shared memory"


def test_the_config_says_how_many_pages_when_it_can() -> None:
    model = OneByteTokens()
    assert PagePool(model, CacheConfig(page_size=32, num_pages=3)).num_free == 3
    assert model.asked == "4 pages of 32 tokens in auto memory"


def test_a_pool_of_a_real_model_holds_its_pages() -> None:
    pool = PagePool(random_model(), CacheConfig(page_size=16, num_pages=5))
    assert pool.memory.num_bytes == (5 + 1) * pool.layout.page_bytes


@attrs.frozen
class Engine:
    holds: Held

    def held(self) -> Held:
        return self.holds


def test_an_engine_that_has_left_holds_nothing_though_it_lives() -> None:
    pool = pool_of()
    gone, there = Engine((list(pool.own(2)), [])), Engine((list(pool.own(3)), []))
    for engine in (gone, there):
        pool.holders.add(engine.held)
    pool.holders.remove(gone.held)
    pool.rebuild()
    assert pool.num_owned == 3


def test_accounts_are_made_anew_from_what_engines_hold() -> None:
    pool = pool_of()
    shared, granted, lost = pool.own(2), pool.grant(2), pool.own(2)
    engine = Engine(([*shared, shared[0]], list(granted)))
    pool.holders.add(engine.held)
    before = pool.generations((*shared, *granted, *lost))
    pool._free.clear()  # as if an interrupt had hit
    pool.rebuild()
    pool.check()
    assert (pool.num_owned, pool.num_granted, pool.num_free) == (2, 2, 3)
    assert pool.states((shared[1], granted[0], lost[0])) == (PageState.OWNED, PageState.GRANTED, PageState.FREE)
    assert [pool.num_users(page) for page in (*shared, granted[0])] == [2, 1, 0]
    after = pool.generations((*shared, *granted, *lost))
    assert [new - old for new, old in zip(after, before, strict=True)] == [0, 0, 0, 0, 1, 1]
    pool.release(shared)
    assert pool.num_owned == 1, "another request uses it too"
    pool.release(shared[:1])
    pool.adopt(granted)
    pool.release(granted)
    pool.check()
    assert pool.num_free == 7
