"""A mirror of pages follows increments, whatever happens in which order."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer.remote.line import MirroredPages
from pdinfer.remote.messages import KEY_BYTES, PageChanges
from pdinfer.remote.served_client import PageNews
from tests.unit.kv.test_events import keep, pool_of

WHAT = st.sampled_from(["keep", "rebuild", "tell", "begin anew"])


@example([("keep", 0, 1), ("tell", 0, 1), ("rebuild", 0, 1)])
@given(st.lists(st.tuples(WHAT, st.integers(0, 5), st.integers(1, 5)), max_size=30))
def test_the_mirror_has_the_pages_of_the_pool(happens: list[tuple[str, int, int]]) -> None:
    pool = pool_of(8)
    news, mirror = PageNews(pool), MirroredPages()
    for what, family, num_pages in happens:
        if what == "keep":
            keep(pool, tuple(range(100 * family, 100 * family + 4 * num_pages)))
        elif what == "rebuild":
            pool.rebuild()
        elif what == "tell":
            mirror.take(news.take(), num_pages=8)
        else:  # a new session: what was not told is part of it
            mirror = MirroredPages()
            mirror.take(news.all(), num_pages=8)
    mirror.take(news.take(), num_pages=8)
    assert news.take() is None
    assert len(mirror) == len(pool.keys)
    assert all(key in mirror for key in pool.keys)
    chain = pool.key_scheme.chain(b"")
    chain.extend(tuple(range(24)))
    assert mirror.count_known(chain.keys) == pool.count_known(chain.keys) == len(pool.find(chain.keys))


def test_an_engine_cannot_tell_of_more_pages_than_it_has() -> None:
    mirror = MirroredPages()
    mirror.take(PageChanges(added=bytes(range(32))), num_pages=2)
    with pytest.raises(pd.TransferError, match="it tells of 3 pages and has 2"):
        mirror.take(PageChanges(added=b"x" * KEY_BYTES), num_pages=2)


def test_half_a_key_is_no_message() -> None:
    for broken in ({"added": b"x" * 15}, {"dropped": b"x" * 17}):
        with pytest.raises(msgspec.ValidationError, match="keys of pages have 16 bytes"):
            msgspec.convert(broken, PageChanges)
