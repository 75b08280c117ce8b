"""The pages of a decode engine: those that its sequences hold, and those that nobody may have yet."""

from __future__ import annotations

from collections.abc import Iterable

from pdinfer.config import EngineConfig
from pdinfer.engine.sequence import Sequence
from pdinfer.execution.drafting import Draft
from pdinfer.kv.pool import Held, PagePool
from pdinfer.scheduling.rules import (
    expected_growth,
    forecast_tokens,
    growth_watermark,
    learn_growth,
    may_grant,
    withheld_pages,
)
from pdinfer.types import PageGrant, PeerAddress


class PageTables:
    """Reserves, adopts, extends and returns the pages of sequences. The engine decides for which sequence.

    A sequence shares the known pages of its beginning with others and is granted the rest. No shared page is ever
    written: only full pages are known, and a sequence writes behind them. The granted pages of a room that was given up
    are *orphans*. They stay granted until `settle`, since the writers of the room may still be writing them.
    """

    def __init__(self, pool: PagePool, config: EngineConfig) -> None:
        self._pool = pool
        self._max_attempts = config.max_attempts
        self._num_draft_tokens = config.num_draft_tokens
        self._watermark = growth_watermark(pool.num_pages, config.growth_watermark)
        self._num_withheld = withheld_pages(
            pool.num_pages, page_size=pool.layout.page_size, max_total_tokens=config.max_total_tokens
        )
        self._growth_share = 0.0
        self._orphans: dict[bytes, tuple[int, ...]] = {}

    @property
    def num_orphans(self) -> int:
        """How many rooms were given up and have writers that have not stopped yet."""
        return len(self._orphans)

    @property
    def orphans(self) -> frozenset[bytes]:
        """The rooms that were given up and have writers that have not stopped yet."""
        return frozenset(self._orphans)

    def belong(self, sequence: Sequence, *, shared: bool) -> None:
        """Set whose pages the sequence may find: those that its current writers wrote. In a pool that is `shared` with
        the writers there are only our own. Call it before the sequence reserves pages."""
        writers = () if shared else sequence.writers
        chain = self._pool.chain(sequence.request.cache_salt, writers=writers)
        if chain.root != sequence.chain.root:
            sequence.chain = chain
        sequence.extend_chain()

    def held(self, sequences: Iterable[Sequence]) -> Held:
        """Return the pages that these sequences and the orphans hold."""
        owned: list[int] = []
        granted = [page for pages in self._orphans.values() for page in pages]
        for sequence in sequences:
            own = len(sequence.pages) - (0 if sequence.grant is None else len(sequence.grant.pages))
            owned += [*sequence.pages[:own], *sequence.spare]
            granted += sequence.pages[own:]
        return owned, granted

    def may_reserve(self, sequence: Sequence, *, holding: Iterable[Sequence]) -> bool:
        """Return whether the pool has pages for the next attempt of the sequence. Those `holding` pages will grow."""
        known = self._known(sequence)
        in_use_anyway = len(known) - self._pool.num_unused(known)
        others = list(holding)
        return may_grant(
            self._pool.layout.num_pages(sequence.tokens_to_find(self._max_attempts)) - in_use_anyway,
            available=self._num_available,
            watermark=max(self._watermark, self._expected_growth(others)),
            others=len(others) + len(self._orphans),
        )

    def learn(self, *, num_retracted: int) -> None:
        """Learn from a step how many sequences it retracted."""
        self._growth_share = learn_growth(self._growth_share, num_retracted=num_retracted)

    def _expected_growth(self, sequences: Iterable[Sequence]) -> int:
        """Return how many pages these sequences are expected to need. A protected sequence has all it needs."""
        if not self._growth_share:
            return 0
        growing = [sequence for sequence in sequences if not sequence.protected]
        owed = sum(max(0, forecast_tokens(sequence.request) - sequence.num_tokens) for sequence in growing)
        return expected_growth(self._growth_share, owed, page_size=self._pool.layout.page_size)

    @property
    def _num_available(self) -> int:
        """How many pages can be had without going beyond `max_total_tokens`; zero or less when there are none."""
        return self._pool.num_available - self._num_withheld

    def reserve(self, sequence: Sequence, room: bytes, destinations: tuple[PeerAddress, ...]) -> PageGrant:
        """Take the pages of an attempt: known and granted pages for its tokens so far, owned pages for those that may
        follow."""
        layout = self._pool.layout
        reserved = sequence.tokens_to_reserve(self._max_attempts)
        sequence.protected = reserved == sequence.max_tokens
        known = self._known(sequence)
        self._pool.share(known)
        granted = self._pool.grant(layout.num_pages(sequence.num_tokens) - len(known))
        sequence.pages = [*known, *granted]
        sequence.spare = list(self._pool.own(layout.num_pages(reserved) - len(sequence.pages)))
        sequence.grant = PageGrant(
            room=room,
            request_id=sequence.request_id,
            writers=sequence.writers,
            destinations=destinations,
            tokens=range(len(known) * layout.page_size, sequence.num_tokens),
            pages=granted,
            generations=self._pool.generations(granted),
            layout_id=layout.layout_id,
        )
        return sequence.grant

    def adopt(self, sequence: Sequence) -> None:
        """Take over the granted pages of a sequence whose room has landed."""
        assert sequence.grant is not None
        self._pool.adopt(sequence.grant.pages)
        sequence.grant = None

    def keep(self, sequence: Sequence) -> None:
        """Let other sequences find the pages that are full. Call it when the model has run all tokens of the sequence
        and its logits were finite: then nobody writes these pages any more, and their contents are good. With an MTP
        layer a page is full one token later, since the layer's entry for a token needs the token after it."""
        if not self._pool.prefix_cache:
            return
        full = sequence.chain.num_full(sequence.num_tokens)
        if full and not self._pool.is_kept(sequence.pages[full - 1]):
            sequence.extend_chain()
            kept = self._pool.keep(sequence.chain.keys[:full], sequence.pages[:full], sequence.all_tokens)
            if [*kept] != sequence.pages[:full]:  # a new list tells the runner that pages behind the newest changed
                sequence.pages = [*kept, *sequence.pages[full:]]

    def forget(self, sequence: Sequence) -> None:
        """Let no other sequence find these pages, because their contents are in doubt."""
        self._pool.forget(sequence.pages)

    def extend(self, sequence: Sequence, num_drafts: int = 0) -> bool:
        """Make sure that the next token of the sequence and the `num_drafts` tokens after it have slots. Only the last
        of them may lack one before the call. Return False when the pool has no page for it."""
        if self._pool.layout.num_pages(sequence.num_tokens + num_drafts) <= len(sequence.pages):
            return True
        if sequence.spare:
            sequence.pages.append(sequence.spare.pop())
            return True
        if self._num_available <= 0:
            return False
        sequence.pages += self._pool.own(1)
        return True

    def extend_for_drafts(self, sequence: Sequence) -> int:
        """Return how many tokens may be drafted after the next one: those that could be used and have a slot."""
        if not sequence.draft.num_newest:
            return 0
        wanted = min(self._num_draft_tokens, sequence.max_tokens - sequence.num_tokens - 1)
        return next((count for count in range(wanted) if not self.extend(sequence, count + 1)), wanted)

    def trim(self, sequence: Sequence) -> None:
        """Take back the pages that drafts needed and the next token of the sequence does not, so that drafts never
        leave fewer pages to others."""
        needed = self._pool.layout.num_pages(sequence.num_tokens)
        if len(sequence.pages) > needed:
            surplus = sequence.pages[needed:]
            del sequence.pages[needed:]
            if sequence.protected:
                sequence.spare += reversed(surplus)
            else:
                self._pool.release(surplus)

    def release(self, sequence: Sequence) -> None:
        """Return all pages of a sequence to the pool. If it has a room, the writers of the room must have stopped."""
        granted = () if sequence.grant is None else sequence.grant.pages
        self._pool.release(granted)
        self._pool.release(sequence.pages[: len(sequence.pages) - len(granted)])
        self._pool.release(sequence.spare)
        sequence.pages, sequence.spare, sequence.grant, sequence.draft = [], [], None, Draft()

    def orphan(self, sequence: Sequence) -> PageGrant:
        """Give up the room of a sequence, and return the grant to abort. Its pages wait for `settle`."""
        grant = sequence.grant
        assert grant is not None
        self._orphans[grant.room] = grant.pages
        del sequence.pages[len(sequence.pages) - len(grant.pages) :]
        sequence.grant = None
        self.release(sequence)
        return grant

    def settle(self, room: bytes) -> bool:
        """Note that the writers of a room have stopped. Return True if it was an orphan, whose pages are free now."""
        pages = self._orphans.pop(room, None)
        if pages is not None:
            self._pool.release(pages)
        return pages is not None

    def _known(self, sequence: Sequence) -> tuple[int, ...]:
        """Return the pages that already hold the beginning of the sequence, without the page of its last token. Prefill
        must run that token to draw the next one, and it cannot run in a shared page, which is not written again."""
        return self._pool.find(sequence.chain.keys[: (sequence.num_tokens - 1) // self._pool.layout.page_size])
