"""Who owns which page: the accounting of one pool. No tensors here; the bytes belong to `memory`.

A page is FREE, OWNED (by this engine's own requests) or GRANTED (a peer may be writing it). Returning a page gives it a
new generation, so that a grant which outlived its pages is recognised.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from pdinfer.checks import clip
from pdinfer.config import CacheConfig
from pdinfer.errors import Overloaded, PDInferError
from pdinfer.kv.layout import KVLayout
from pdinfer.kv.transport import Memory


class PageState(enum.Enum):
    """Where a page is."""

    FREE = "free"
    OWNED = "owned"
    GRANTED = "granted"


class CacheShape(Protocol):
    """What a pool asks of a model: the meaning of a page, and memory for pages."""

    def kv_layout(self, cache: CacheConfig) -> KVLayout: ...

    def auto_num_pages(self, layout: KVLayout, mem_fraction_static: float | None) -> int: ...

    def allocate_pages(self, layout: KVLayout, num_pages: int, memory: str = "auto") -> Memory: ...


class PagePool:
    """The pages of one engine on one rank. Used from the thread that steps the engine.

    `free + owned + granted == num_pages` always holds; every transition that does not fit raises and changes nothing.
    Raises ConfigError when the pool does not fit the device's memory.
    """

    def __init__(self, model: CacheShape, config: CacheConfig | None = None) -> None:
        config = config or CacheConfig()
        self.layout = model.kv_layout(config)
        self.num_pages = config.num_pages or model.auto_num_pages(self.layout, config.mem_fraction_static)
        self.memory = model.allocate_pages(self.layout, self.num_pages, config.memory)
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._states = [PageState.FREE] * self.num_pages
        self._generations = [0] * self.num_pages
        self._num_granted = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_granted(self) -> int:
        return self._num_granted

    @property
    def num_owned(self) -> int:
        return self.num_pages - len(self._free) - self._num_granted

    def own(self, count: int) -> tuple[int, ...]:
        """Takes free pages for a request of this engine; Overloaded when there are too few."""
        return self._take(count, PageState.OWNED)

    def grant(self, count: int) -> tuple[int, ...]:
        """Takes free pages for a peer to write; they come back through `adopt` or, the writer stopped, `release`."""
        pages = self._take(count, PageState.GRANTED)
        self._num_granted += count
        return pages

    def adopt(self, pages: Sequence[int]) -> None:
        """Granted pages whose hand-off landed become owned."""
        self._expect(pages, PageState.GRANTED)
        for page in pages:
            self._states[page] = PageState.OWNED
        self._num_granted -= len(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Owned pages, or granted ones whose writer is proven to have stopped, become free."""
        granted = bool(pages) and 0 <= pages[0] < self.num_pages and self._states[pages[0]] is PageState.GRANTED
        self._expect(pages, PageState.GRANTED if granted else PageState.OWNED)
        for page in pages:
            self._states[page] = PageState.FREE
            self._generations[page] += 1
            self._free.append(page)
        if granted:
            self._num_granted -= len(pages)

    def generations(self, pages: Sequence[int]) -> tuple[int, ...]:
        """How often each page has been returned."""
        return tuple(self._generations[page] for page in pages)

    def check(self) -> None:
        """Raises PDInferError unless every page is counted once and in the state that the counts say."""
        counts = {state: self._states.count(state) for state in PageState}
        said = {
            PageState.FREE: self.num_free,
            PageState.OWNED: self.num_owned,
            PageState.GRANTED: self.num_granted,
        }
        free = {page for page, state in enumerate(self._states) if state is PageState.FREE}
        if counts != said or set(self._free) != free:
            raise PDInferError(f"page accounting is broken: counted {counts}, recorded {said}")

    def _take(self, count: int, state: PageState) -> tuple[int, ...]:
        if count < 0:
            raise PDInferError(f"{count} pages were asked for")
        if count > len(self._free):
            raise Overloaded(f"{count} pages asked for, {len(self._free)} of {self.num_pages} are free")
        pages = tuple(self._free.pop() for _ in range(count))
        for page in pages:
            self._states[page] = state
        return pages

    def _expect(self, pages: Sequence[int], state: PageState) -> None:
        if len(set(pages)) != len(pages):
            raise PDInferError(f"a page is named twice in {clip(list(pages))}")
        if any(not 0 <= page < self.num_pages for page in pages):
            raise PDInferError(f"a page of {clip(list(pages))} is not in a pool of {self.num_pages}")
        for page in pages:
            if self._states[page] is not state:
                raise PDInferError(f"page {page} is {self._states[page].value}, expected {state.value}")
