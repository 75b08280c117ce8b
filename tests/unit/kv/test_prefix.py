"""Prefixes in a pool: who shares what, what is evicted when, and that every page is counted."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdinfer.config import CacheConfig
from pdinfer.errors import PDInferError
from pdinfer.kv.pool import PagePool
from pdinfer.kv.prefix import KeyScheme, PrefixIndex, digest, domain_of
from pdinfer.types import PeerAddress
from tests.slices import examples
from tests.unit.kv.test_pool import OneByteTokens

SIZE = 2
"""Tokens of a page."""


def pool_of(num_pages: int = 8, **more: bool) -> PagePool:
    return PagePool(OneByteTokens(), CacheConfig(page_size=SIZE, num_pages=num_pages, **more))


def keys_of(pool: PagePool, tokens: tuple[int, ...], salt: bytes = b"") -> list[bytes]:
    chain = pool.key_scheme.chain(salt)
    chain.extend(tokens)
    return chain.keys


def run(pool: PagePool, tokens: tuple[int, ...], salt: bytes = b"") -> tuple[int, ...]:
    """Return the table of a request that has taken its pages, computed `tokens` and let others find them."""
    keys = keys_of(pool, tokens, salt)
    known = pool.find(keys[: (len(tokens) - 1) // SIZE])
    pool.share(known)
    pages = known + pool.own(pool.layout.num_pages(len(tokens)) - len(known))
    return pool.keep(keys, pages[: len(keys)]) + pages[len(keys) :]


def leave(pool: PagePool, tokens: tuple[int, ...], salt: bytes = b"") -> tuple[int, ...]:
    """Do the same, and end the request."""
    pages = run(pool, tokens, salt)
    pool.release(pages)
    pool.check()
    return pages


# -- keys ---------------------------------------------------------------------------------------------------------


def test_a_field_ends_where_it_ends() -> None:
    assert digest(b"org_1", b"2345") != digest(b"org_12345", b"")
    assert digest(b"org_1", b"2345") != digest(b"org_12345")
    assert digest() != digest(b"")


def scheme(layout_id: bytes, lookahead: int = 0) -> KeyScheme:
    return KeyScheme(layout_id=layout_id, page_size=SIZE, lookahead=lookahead)


@attrs.frozen
class Beginning:
    """Everything that a page's latents depend on."""

    layout_id: bytes
    salt: bytes
    tokens: tuple[int, ...]

    def keys(self, lookahead: int = 0) -> list[bytes]:
        chain = scheme(self.layout_id, lookahead).chain(self.salt)
        chain.extend(self.tokens)
        return chain.keys


beginnings = st.builds(
    Beginning,
    st.binary(max_size=2),
    st.binary(max_size=2),
    st.lists(st.integers(0, 2), min_size=SIZE, max_size=4 * SIZE).map(tuple),
)


@given(beginnings, beginnings, st.integers(0, 2))
def test_pages_have_one_key_where_everything_up_to_them_is_the_same(
    ours: Beginning, theirs: Beginning, lookahead: int
) -> None:
    assert len(ours.keys(lookahead)) == (len(ours.tokens) - lookahead) // SIZE
    for at, (a, b) in enumerate(zip(ours.keys(lookahead), theirs.keys(lookahead), strict=False), start=1):
        end = at * SIZE + lookahead
        same = (ours.layout_id, ours.salt, ours.tokens[:end]) == (theirs.layout_id, theirs.salt, theirs.tokens[:end])
        assert (a == b) == same
    assert not set(ours.keys()[1:]) & set(theirs.keys()[:1]), "a page's key says where it stands"


@given(st.lists(st.integers(0, 2**31 - 1), max_size=9).map(tuple), st.integers(0, 9))
def test_a_chain_grows_with_its_sequence(tokens: tuple[int, ...], first: int) -> None:
    whole = scheme(b"layout").chain(b"salt")
    whole.extend(tokens)
    grown = scheme(b"layout").chain(b"salt")
    grown.extend(tokens[:first])
    assert len(grown.keys) == len(tokens[:first]) // SIZE, "a page that is not full has no key"
    grown.extend(tokens)
    assert grown.keys == whole.keys


# -- sharing ------------------------------------------------------------------------------------------------------


def test_a_request_finds_what_another_left() -> None:
    pool = pool_of()
    pages = leave(pool, (1, 2, 3, 4, 5))
    assert (pool.num_cached, pool.num_owned, pool.num_available) == (2, 0, 8)
    assert pool.find(keys_of(pool, (1, 2, 3, 4, 6, 7))) == pages[:2]
    assert pool.find(keys_of(pool, (1, 2, 9, 9))) == pages[:1]
    assert pool.find(keys_of(pool, (9, 2, 3, 4))) == ()


def test_salts_share_nothing() -> None:
    pool = pool_of()
    pages = leave(pool, (1, 2, 3, 4), b"a")
    assert pool.find(keys_of(pool, (1, 2, 3, 4), b"a")) == pages
    assert pool.find(keys_of(pool, (1, 2, 3, 4), b"b")) == ()
    assert pool.find(keys_of(pool, (1, 2, 3, 4))) == ()
    assert not set(leave(pool, (1, 2, 3, 4), b"b")) & set(pages)


def test_who_wrote_pages_is_another_with_each_start_and_each_rank() -> None:
    writer = PeerAddress(engine_id=b"a", epoch=1, rank=0)
    others = [attrs.evolve(writer, **other) for other in ({"engine_id": b"b"}, {"epoch": 2}, {"rank": 1})]
    assert len({domain_of([each]) for each in (writer, *others)}) == 4
    assert domain_of([writer, others[2]]) == domain_of([others[2], writer, writer])
    assert domain_of([attrs.evolve(writer, endpoints=("tcp://elsewhere:1",))]) == domain_of([writer])


def test_writers_are_told_apart_where_that_is_asked_for() -> None:
    writer = PeerAddress(b"writer", 1, 0)
    alike, apart = (KeyScheme(layout_id=bytes(32), page_size=SIZE, by_writer=each) for each in (False, True))
    assert alike.chain(b"", (writer,)).root == alike.chain(b"").root
    assert apart.chain(b"", (writer,)).root != apart.chain(b"").root == alike.chain(b"").root


def test_a_page_has_one_key() -> None:
    index = PrefixIndex()
    index.add(b"key", 3, None)
    for key, page, parent in ((b"key", 4, None), (b"other", 3, None), (b"other", 4, 9)):
        with pytest.raises(PDInferError, match=f"page {page} cannot be indexed"):
            index.add(key, page, parent)


def test_a_page_of_several_requests_is_owned_once_and_until_the_last_lets_go() -> None:
    pool = pool_of()
    first = run(pool, (1, 2, 3, 4, 5))
    second = run(pool, (1, 2, 3, 4, 6))
    assert first[:2] == second[:2]
    assert pool.num_owned == 4
    pool.release(first)
    pool.check()
    assert (pool.num_owned, pool.num_cached) == (3, 0)
    pool.release(second)
    pool.check()
    assert (pool.num_owned, pool.num_cached) == (0, 2)


def test_who_computed_the_same_at_the_same_time_is_given_the_known_page() -> None:
    pool = pool_of()
    keys = keys_of(pool, (1, 2, 3, 4))
    ours, theirs = pool.own(2), pool.own(2)
    assert pool.keep(keys, ours) == ours
    assert pool.keep(keys, theirs) == ours
    assert pool.num_owned == 2
    assert pool.generations(theirs) == (1, 1)
    for _ in range(2):
        pool.release(ours)
        pool.check()
    assert pool.num_cached == 2


def test_without_the_switch_nothing_is_kept() -> None:
    pool = pool_of(prefix_cache=False)
    leave(pool, (1, 2, 3, 4))
    assert (pool.num_free, pool.num_cached) == (8, 0)
    assert pool.find(keys_of(pool, (1, 2, 3, 4))) == ()


def test_only_known_pages_are_shared_and_only_owned_ones_kept() -> None:
    pool = pool_of()
    with pytest.raises(PDInferError, match="is not in the prefix index"):
        pool.share(pool.own(1))
    with pytest.raises(PDInferError, match="is granted, expected owned"):
        pool.keep(keys_of(pool, (1, 2)), pool.grant(1))
    pool.check()


# -- eviction -----------------------------------------------------------------------------------------------------


def test_free_pages_are_taken_before_cached_ones() -> None:
    pool = pool_of(6)
    leave(pool, (1, 2, 3, 4))
    assert pool.generations(pool.own(4)) == (0,) * 4
    assert pool.num_cached == 2


def test_what_rested_longest_is_evicted_first_and_ends_before_beginnings() -> None:
    pool = pool_of(6)
    old, new = leave(pool, (1, 2, 3, 4)), leave(pool, (5, 6, 7, 8))
    pool.own(2)
    for gone in (old[1], old[0], new[1], new[0]):
        generation = pool.generations([gone])[0]
        assert pool.own(1) == (gone,)
        assert pool.generations([gone]) == (generation + 1,), "a grant of before is recognised"
        pool.check()


def test_a_use_makes_pages_young_again() -> None:
    pool = pool_of(6)
    old, new = leave(pool, (1, 2, 3, 4)), leave(pool, (5, 6, 7, 8))
    leave(pool, (1, 2, 3, 4, 9))
    pool.own(2)
    assert [pool.own(1)[0] for _ in range(4)] == [new[1], new[0], old[1], old[0]]


def test_a_page_in_use_is_not_evicted_nor_any_before_it() -> None:
    pool = pool_of(4)
    pages = leave(pool, (1, 2, 3, 4, 5, 6))
    pool.share(pages[:2])
    assert set(pool.own(2)) == {3, pages[2]}
    assert (pool.num_available, pool.find(keys_of(pool, (1, 2, 3, 4, 5, 6)))) == (0, pages[:2])
    with pytest.raises(PDInferError, match="0 of 4 are free or cached"):
        pool.own(1)


def test_ends_go_before_beginnings_in_whatever_order_they_came_to_rest() -> None:
    index = PrefixIndex()
    for page in range(3):
        index.add(b"%d" % page, page, page - 1 if page else None)
    for page in range(3):
        index.rest(page)
    assert [index.evict() for _ in range(3)] == [2, 1, 0]
    with pytest.raises(PDInferError, match="no page can be evicted"):
        index.evict()


# -- doubt --------------------------------------------------------------------------------------------------------


def test_what_is_forgotten_is_not_found_nor_what_continues_it() -> None:
    pool = pool_of()
    stem = leave(pool, (1, 2, 3, 4))
    leave(pool, (1, 2, 5, 6))
    other = leave(pool, (7, 8))
    pool.forget(stem[:1])
    pool.check()
    assert pool.find(keys_of(pool, (1, 2, 3, 4))) == ()
    assert pool.find(keys_of(pool, (7, 8))) == other
    assert (pool.num_free, pool.num_cached) == (7, 1)


def test_pages_forgotten_while_in_use_go_with_their_users() -> None:
    pool = pool_of()
    first, second = run(pool, (1, 2, 3, 4)), run(pool, (1, 2, 3, 4, 5))
    pool.forget(first)
    pool.release(first)
    pool.check()
    assert pool.num_owned == 3
    pool.release(second)
    pool.check()
    assert (pool.num_free, pool.num_cached) == (8, 0)


def test_a_user_of_forgotten_pages_makes_them_known_once_it_is_alone() -> None:
    pool = pool_of()
    keys = keys_of(pool, (1, 2, 3, 4))
    failed, healthy = run(pool, (1, 2, 3, 4)), run(pool, (1, 2, 3, 4, 5))
    pool.forget(failed)
    assert pool.keep(keys, healthy[:2]) == healthy[:2]
    assert pool.find(keys) == ()
    pool.release(failed)
    assert pool.keep(keys, healthy[:2]) == healthy[:2]
    assert pool.find(keys) == healthy[:2]
    pool.check()


# -- a random life ------------------------------------------------------------------------------------------------

NUM_PAGES = 7
Path = tuple[bytes, tuple[int, ...]]
"""Salt and tokens up to the end of a page: what a key stands for."""


def continues(path: Path, beginning: Path) -> bool:
    return path[0] == beginning[0] and path[1][: len(beginning[1])] == beginning[1]


@attrs.define
class Held:
    """A request that holds pages."""

    salt: bytes
    tokens: tuple[int, ...]
    table: list[int]

    @property
    def paths(self) -> list[Path]:
        return [(self.salt, self.tokens[:stop]) for stop in range(SIZE, len(self.tokens) + 1, SIZE)]


class PrefixMachine(RuleBasedStateMachine):
    """A pool with requests that share, and the plainest account of it: lists that are searched."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pool_of(NUM_PAGES)
        self.held: list[Held] = []
        self.granted: list[tuple[int, ...]] = []
        self.known: dict[Path, int] = {}
        self.resting: list[Path] = []

    def users(self, page: int) -> int:
        return sum(page in held.table for held in self.held)

    def num_free(self) -> int:
        used = {page for held in self.held for page in held.table} | {page for grant in self.granted for page in grant}
        return NUM_PAGES - len(used) - len(self.resting)

    def find(self, paths: list[Path]) -> list[int]:
        found: list[int] = []
        for path in paths:
            if path not in self.known:
                break
            found.append(self.known[path])
        return found

    def make_room(self, count: int) -> None:
        while self.num_free() < count:
            first = next(path for path in self.resting if not any(continues(o, path) for o in self.known if o != path))
            self.resting.remove(first)
            del self.known[first]

    def let_go(self, table: list[int]) -> None:
        """Drop a table that nobody holds any more: its known pages come to rest, the last page first."""
        paths = {page: path for path, page in self.known.items()}
        self.resting += [paths[page] for page in reversed(table) if page in paths and not self.users(page)]

    @rule(
        salt=st.sampled_from([b"", b"a"]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        grants=st.booleans(),
    )
    def start(self, salt: bytes, tokens: list[int], grants: bool) -> None:
        """Start a request, directly or through a grant, or not at all when there are too few pages."""
        held = Held(salt, tuple(tokens), [])
        keys = keys_of(self.pool, held.tokens, salt)[: (len(tokens) - 1) // SIZE]
        known = self.find(held.paths[: len(keys)])
        assert list(self.pool.find(keys)) == known
        count = self.pool.layout.num_pages(len(tokens)) - len(known)
        unused = [page for page in known if not self.users(page)]
        assert self.pool.num_unused(known) == len(unused)
        if count > self.num_free() + len(self.resting) - len(unused):
            return
        self.pool.share(known)
        held.table += known
        self.held.append(held)
        self.resting = [path for path in self.resting if self.known[path] not in known]
        new = self.pool.grant(count) if grants else self.pool.own(count)
        if grants:
            self.pool.adopt(new)
        self.make_room(count)
        assert not set(new) & {*self.known.values(), *(page for held in self.held for page in held.table)}
        held.table += new

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def keep(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        full = len(held.paths)
        kept = self.pool.keep(keys_of(self.pool, held.tokens, held.salt), held.table[:full])
        for at, path in enumerate(held.paths):
            if path in self.known:
                held.table[at] = self.known[path]
                self.resting = [resting for resting in self.resting if resting != path]
            elif self.users(held.table[at]) == 1:
                self.known[path] = held.table[at]
            else:
                break
        assert list(kept) == held.table[:full]

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def end(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.pool.release(held.table)
        self.held.remove(held)
        self.let_go(held.table)

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def fail(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        self.pool.forget(held.table)
        self.pool.release(held.table)
        self.held.remove(held)
        doubtful = [path for path, page in self.known.items() if page in held.table]
        gone = [path for path in self.known if any(continues(path, beginning) for beginning in doubtful)]
        self.known = {path: page for path, page in self.known.items() if path not in gone}
        self.resting = [path for path in self.resting if path not in gone]
        self.let_go(held.table)

    @rule(count=st.integers(0, 3))
    def grant(self, count: int) -> None:
        if count <= self.num_free() + len(self.resting):
            self.make_room(count)
            self.granted.append(self.pool.grant(count))
            assert not set(self.granted[-1]) & set(self.known.values())

    @rule()
    @precondition(lambda self: self.granted)
    def return_grant(self) -> None:
        self.pool.release(self.granted.pop())

    @invariant()
    def every_page_is_counted_once(self) -> None:
        pool = self.pool
        pool.check()
        owned = len({page for held in self.held for page in held.table})
        granted = sum(map(len, self.granted))
        counts = (pool.num_free, pool.num_owned, pool.num_granted, pool.num_cached)
        assert counts == (self.num_free(), owned, granted, len(self.resting))
        assert sum(counts) == pool.num_pages
        assert pool.num_available == self.num_free() + len(self.resting)

    @invariant()
    def the_first_in_line_can_go(self) -> None:
        """Eviction looks at one page, not at all of them: the pages that continue a page have rested longer."""
        index = self.pool._index
        assert not any(index._nodes[page].children for page in list(index._resting)[:1])

    @invariant()
    def what_is_known_is_found_and_nothing_else(self) -> None:
        assert sum(map(self.pool.is_kept, range(NUM_PAGES))) == len(self.known)
        for (salt, tokens), page in self.known.items():
            assert self.pool.find(keys_of(self.pool, tokens, salt))[-1:] == (page,)


TestPrefixes = PrefixMachine.TestCase
TestPrefixes.settings = examples(150, stateful_step_count=40)


# -- the check itself can fail ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._users.__setitem__(0, 1),
        lambda pool: pool._index.drop(1),
        lambda pool: pool._index.use(2),
        lambda pool: pool._index.rest(5),
        lambda pool: pool._index._nodes.pop(2),
        lambda pool: pool._index._nodes[0].children.clear(),
        lambda pool: pool._index._nodes[0].children.update({5: None}),
        lambda pool: pool._index.pages.popitem(),
        lambda pool: pool.share((2,)),
    ],
)
def test_check_notices(damage: Callable[[PagePool], object]) -> None:
    pool = pool_of()
    assert leave(pool, (1, 2, 3, 4)) == (0, 1)
    assert leave(pool, (1, 2, 5, 6))[1] == 2
    damage(pool)
    with pytest.raises(PDInferError):
        pool.check()


def test_pages_behind_pages_of_our_own_are_found_for_their_writers_alone() -> None:
    scheme = KeyScheme(layout_id=b"l", page_size=SIZE, by_writer=True)
    one, other = (PeerAddress(engine_id=bytes([number] * 16), epoch=1, rank=0, endpoints=()) for number in (1, 2))
    own, tokens = scheme.chain(b""), tuple(range(4 * SIZE))
    own.extend(tokens)
    of_one, of_other, again = (
        own.continued(2, scheme.chain(b"", writers=(writer,)).root) for writer in (one, other, one)
    )
    all_of_one = scheme.chain(b"", writers=(one,))
    for chain in (of_one, of_other, again, all_of_one):
        chain.extend(tokens)
    assert of_one.keys[:2] == of_other.keys[:2] == own.keys[:2]
    assert of_one.keys == again.keys
    assert len({*of_one.keys[2:], *of_other.keys[2:], *own.keys[2:], *all_of_one.keys}) == 10
    deeper = own.continued(3, scheme.chain(b"", writers=(one,)).root)
    deeper.extend(tokens)
    assert deeper.keys[3] != of_one.keys[3]
