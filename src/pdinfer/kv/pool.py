"""Who owns which page: the accounting of one pool. There are no tensors here; the bytes belong to `memory`.

A page is FREE, OWNED (used by one or more of this engine's own requests), GRANTED (a peer may be writing it) or CACHED
(no request uses it, but its tokens are known, so a later request may). A page gets a new generation when it becomes
free, so a grant that outlived its pages is recognised.

    FREE ──own──► OWNED ──release──► FREE                      FREE ──grant──► GRANTED ──adopt──► OWNED
                    │ keep: indexed; from then on                                └────release───► FREE
                    └──release by the last──► CACHED ──share──► OWNED     CACHED ──evicted or forgotten──► FREE
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Protocol
from weakref import WeakMethod

from pdinfer.checks import clip, typed
from pdinfer.config import CacheConfig
from pdinfer.errors import Overloaded, PDInferError
from pdinfer.identity import NO_TENSORS, TensorDigests
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.memory import Memory
from pdinfer.kv.prefix import KeyScheme, PrefixIndex, count_known
from pdinfer.process.forked import OfOneProcess
from pdinfer.process.modes import own_modes


class PageState(enum.Enum):
    """The state of a page."""

    FREE = "free"
    OWNED = "owned"
    GRANTED = "granted"
    CACHED = "cached"


class CacheShape(Protocol):
    """What a pool asks of a model: the meaning of a page, and memory for pages. One whose weights were read also has
    their `tensors`."""

    def kv_layout(self, cache: CacheConfig) -> KVLayout: ...

    def auto_num_pages(self, layout: KVLayout, mem_fraction_static: float | None) -> int: ...

    def allocate_pages(self, layout: KVLayout, num_pages: int, memory: str = "auto") -> Memory: ...


class PageWatcher(Protocol):
    """What is told of the pages that requests can find. Keys are those of `prefix.PrefixChain`."""

    def stored(self, keys: Sequence[bytes], parent: bytes | None, tokens: Sequence[int], page_size: int) -> None:
        """Note pages that follow each other and, the first of them, the page with the key `parent`."""

    def removed(self, key: bytes) -> None:
        """Note that a page cannot be found any more."""

    def cleared(self) -> None:
        """Note that no page can be found any more."""


Held = tuple[list[int], list[int]]
"""Pages that an engine's requests use, with a page named once per request that uses it, and pages that peers may
write."""


class Holders:
    """Methods that return the pages that their objects hold, for as long as those live."""

    def __init__(self) -> None:
        self._methods: list[WeakMethod[Callable[[], Held]]] = []

    def add(self, holder: Callable[[], Held]) -> None:
        self._methods = [*filter(lambda known: known() is not None, self._methods), WeakMethod(holder)]

    def remove(self, holder: Callable[[], Held]) -> None:
        """Forget a `holder` that holds nothing any more: a closed engine that its host keeps is not asked."""
        self._methods = [known for known in self._methods if known() not in (None, holder)]

    def held(self) -> list[Held]:
        """Return what each of them holds."""
        return [holder() for known in self._methods if (holder := known())]


class Watchers:
    """All that watch one pool, as one PageWatcher."""

    def __init__(self) -> None:
        self.all: list[PageWatcher] = []

    def stored(self, keys: Sequence[bytes], parent: bytes | None, tokens: Sequence[int], page_size: int) -> None:
        for watcher in self.all:
            watcher.stored(keys, parent, tokens, page_size)

    def removed(self, key: bytes) -> None:
        for watcher in self.all:
            watcher.removed(key)

    def cleared(self) -> None:
        for watcher in self.all:
            watcher.cleared()


class PagePool(OfOneProcess):
    """The pages of one engine on one rank. Used from the thread that steps the engine.

    `free + owned + granted + cached == num_pages` always holds; a page that several requests share counts as owned
    once. A transition that does not fit raises and changes nothing. Requests get free pages first, and cached pages
    when those run out. Raises ConfigError when the pool does not fit the device's memory. On several ranks all of them
    make their pools together, unless `num_pages` sets the size."""

    @typed
    @own_modes()
    def __init__(self, model: CacheShape, config: CacheConfig | None = None) -> None:
        config = config or CacheConfig()
        self.layout = model.kv_layout(config)
        self.tensors: TensorDigests = getattr(model, "tensors", NO_TENSORS)
        self.num_pages = config.num_pages or model.auto_num_pages(self.layout, config.mem_fraction_static)
        self.memory = model.allocate_pages(self.layout, self.memory_pages, config.memory)
        self.prefix_cache = config.prefix_cache
        self.key_scheme = KeyScheme(
            layout_id=self.layout.layout_id,
            page_size=self.layout.page_size,
            lookahead=self.layout.lookahead,
            by_writer=config.trust_domain != "all",
        )
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._granted: set[int] = set()
        self._generations = [0] * self.num_pages
        self._users = [0] * self.num_pages
        self.watchers = Watchers()
        self._index = PrefixIndex(self.watchers.removed)
        self.holders = Holders()

    def __repr__(self) -> str:
        return (
            f"PagePool({self.num_pages} pages of {self.layout.page_size} tokens: {self.num_free} free, "
            f"{self.num_owned} owned, {self.num_granted} granted, {self.num_cached} cached)"
        )

    @property
    def memory_pages(self) -> int:
        """The pages of `memory`: those of the pool, and after them the scratch page, which no request ever gets. What
        steps compute only to have an even shape is written there."""
        return self.num_pages + 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_granted(self) -> int:
        return len(self._granted)

    @property
    def num_cached(self) -> int:
        return self._index.num_resting

    @property
    def num_owned(self) -> int:
        return self.num_pages - self.num_available - self.num_granted

    @property
    def num_available(self) -> int:
        """Pages that can be taken: free ones, and cached ones, which are evicted when they are taken."""
        return len(self._free) + self._index.num_resting

    @typed
    def own(self, count: int) -> tuple[int, ...]:
        """Take pages for a request of this engine. Raise Overloaded when there are too few."""
        pages = self._take(count)
        for page in pages:
            self._users[page] = 1
        return pages

    @typed
    def grant(self, count: int) -> tuple[int, ...]:
        """Take pages for a peer to write. They come back through `adopt`, or through `release` once the writer has
        stopped."""
        pages = self._take(count)
        self._granted.update(pages)
        return pages

    @typed
    def adopt(self, pages: Sequence[int]) -> None:
        """Turn granted pages whose hand-off has landed into owned ones."""
        self._expect(pages, PageState.GRANTED)
        for page in pages:
            self._users[page] = 1
        self._granted.difference_update(pages)

    @typed
    def release(self, pages: Sequence[int]) -> None:
        """Let go of a request's pages, given in the order of their tokens. Owned pages become cached or free, unless
        another request uses them. Granted pages become free; their writer must be proven to have stopped."""
        granted = bool(pages) and pages[0] in self._granted
        self._expect(pages, PageState.GRANTED if granted else PageState.OWNED)
        self._granted.difference_update(pages)
        for page in reversed(pages):  # what continues a page is evicted before it
            self._users[page] -= not granted
            if self._users[page]:
                continue
            if page in self._index:
                self._index.rest(page)
            else:
                self._to_free(page)

    @typed
    def generations(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Return how often each page has become free."""
        return tuple(self._generations[page] for page in pages)

    def states(self, pages: Sequence[int]) -> tuple[PageState, ...]:
        return tuple(map(self._state, pages))

    def num_users(self, page: int) -> int:
        """Return how many requests use a page. More than one share it, and it is not written again."""
        return self._users[page]

    # -- prefixes ---------------------------------------------------------------------------------------------------

    def count_known(self, keys: Sequence[bytes]) -> int:
        """Return how many of `keys`, from the first, belong to pages in the prefix index."""
        return count_known(keys, self._index.pages)

    def find(self, keys: Sequence[bytes]) -> tuple[int, ...]:
        """Return the pages that hold the longest known beginning of a sequence with these `keys`. They belong to nobody
        until `share`, which must be called before any other page is taken."""
        return self._index.find(keys)

    def num_unused(self, pages: Sequence[int]) -> int:
        """Return how many of these found pages no request uses. `share` takes that many from the available pages."""
        return sum(not self._users[page] for page in pages)

    @typed
    def share(self, pages: Sequence[int]) -> None:
        """Add a request that reads these found pages. Each user releases them."""
        if any(page not in self._index for page in pages):
            raise PDInferError(f"a page of {clip(list(pages))} is not in the prefix index")
        for page in pages:
            self._users[page] += 1
            self._index.use(page)

    def is_kept(self, page: int) -> bool:
        return page in self._index

    @property
    def keys(self) -> Collection[bytes]:
        return self._index.pages.keys()

    def watch(self, watcher: PageWatcher) -> None:
        """Tell `watcher` from now on which pages can be found. It is told in the thread that steps the engine."""
        self.watchers.all.append(watcher)

    def keep(
        self, keys: Sequence[bytes], pages: Sequence[int], tokens: Callable[[], Sequence[int]] = tuple
    ) -> tuple[int, ...]:
        """Let later requests find these owned pages: the first pages of a request's table, which are full according to
        `keys` and which nobody writes any more. Return the pages to use from now on: where a page with the same tokens
        is already known, that page is shared and ours is released. `tokens` gives the tokens of the request to those
        who watch the pages."""
        self._expect(pages, PageState.OWNED)
        if not self.prefix_cache:
            return tuple(pages)
        kept, added = list(pages), []
        first = len(kept)
        while first and kept[first - 1] not in self._index:
            first -= 1
        for at in range(first, len(kept)):
            known = self._index.pages.get(keys[at])
            if known is not None:
                self.share((known,))
                self.release((kept[at],))
                kept[at] = known
            elif self._users[kept[at]] == 1:
                self._index.add(keys[at], kept[at], kept[at - 1] if at else None)
                added.append(at)
            else:
                break  # forgotten while others use it: its parent in the index would be a page that they do not use
        if added and self.watchers.all:  # they follow each other: what continues an unknown page is unknown
            size, parent = self.layout.page_size, keys[added[0] - 1] if added[0] else None
            its_tokens = tokens()[added[0] * size : (added[-1] + 1) * size]
            self.watchers.stored([keys[at] for at in added], parent, its_tokens, size)
        return tuple(kept)

    @typed
    def forget(self, pages: Sequence[int]) -> None:
        """Make these pages, and all pages that continue them, impossible to find: their contents are in doubt."""
        for page in pages:
            if page in self._index:
                for rested in self._index.drop(page):
                    self._to_free(rested)

    # -- after an interrupt -----------------------------------------------------------------------------------------

    @own_modes()
    def rebuild(self) -> None:
        """Rebuild the accounts from the pages that the engines of this pool hold, after an interrupt may have left a
        call here or in an engine half done. All other pages become free with a new generation, and no prefix is
        known."""
        held = self.holders.held()
        users = Counter(page for owned, _ in held for page in owned)
        self._granted = {page for _, pages in held for page in pages} - users.keys()
        self._users = [users[page] for page in range(self.num_pages)]
        self._free, self._index = [], PrefixIndex(self.watchers.removed)
        for page in range(self.num_pages - 1, -1, -1):
            if self._state(page) is PageState.FREE:
                self._to_free(page)
        self.watchers.cleared()

    # -- inside -----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise PDInferError unless every page is counted once and is in the state that the counts say."""
        states = self.states(range(self.num_pages))
        counts = {state: states.count(state) for state in PageState}
        said = {
            PageState.FREE: self.num_free,
            PageState.OWNED: self.num_owned,
            PageState.GRANTED: self.num_granted,
            PageState.CACHED: self.num_cached,
        }
        if counts != said or any(states[page] is not PageState.FREE for page in self._free):
            raise PDInferError(f"page accounting is broken: counted {counts}, recorded {said}")
        if twice := [page for page in self._granted if self._users[page] or page in self._index]:
            raise PDInferError(f"page accounting is broken: peers may write {twice}, which requests use or find")
        self._index.check(page for page, users in enumerate(self._users) if users)

    def _state(self, page: int) -> PageState:
        if self._users[page]:
            return PageState.OWNED
        if page in self._granted:
            return PageState.GRANTED
        return PageState.CACHED if page in self._index else PageState.FREE

    def _take(self, count: int) -> tuple[int, ...]:
        if count < 0:
            raise PDInferError(f"{count} pages were asked for")
        if count > self.num_available:
            raise Overloaded(f"{count} pages asked for, {self.num_available} of {self.num_pages} are free or cached")
        while len(self._free) < count:
            self._to_free(self._index.evict())
        return tuple(self._free.pop() for _ in range(count))

    def _to_free(self, page: int) -> None:
        self._generations[page] += 1
        self._free.append(page)

    def _expect(self, pages: Sequence[int], state: PageState) -> None:
        if len(set(pages)) != len(pages):
            raise PDInferError(f"a page is named twice in {clip(list(pages))}")
        if any(not 0 <= page < self.num_pages for page in pages):
            raise PDInferError(f"a page of {clip(list(pages))} is not in a pool of {self.num_pages}")
        for page in pages:
            if (found := self._state(page)) is not state:
                raise PDInferError(f"page {page} is {found.value}, expected {state.value}")
