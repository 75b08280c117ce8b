"""The page side of a decode engine: what its sequences hold of the pool, and what nobody may have yet."""

from __future__ import annotations

import math
from collections.abc import Iterable

from pdinfer.config import EngineConfig
from pdinfer.engine.schedule import learn_growth, may_grant, withheld_pages
from pdinfer.engine.sequence import Sequence
from pdinfer.execution.drafting import Draft
from pdinfer.kv.pool import Held, PagePool
from pdinfer.types import PageGrant, PeerAddress


class PageTables:
    """Reserves, adopts, grows and returns the pages of sequences; which sequence, the engine decides.

    A sequence shares the known pages of its beginning with others and is granted the rest. Nobody writes a shared page:
    only full ones are known, and what a sequence writes lies behind them. Granted pages of a room that was given up are
    *orphans*: they stay granted until `settle`, since its writers may still be writing them.
    """

    def __init__(self, pool: PagePool, config: EngineConfig) -> None:
        self._pool = pool
        self._max_attempts = config.max_attempts
        self._num_draft_tokens = config.num_draft_tokens
        self._watermark = max(1, int(pool.num_pages * config.growth_watermark))
        self._num_withheld = withheld_pages(
            pool.num_pages, page_size=pool.layout.page_size, max_total_tokens=config.max_total_tokens
        )
        self._growth_share = 0.0
        self._orphans: dict[bytes, tuple[int, ...]] = {}

    @property
    def num_orphans(self) -> int:
        """Rooms given up whose writers have not stopped yet."""
        return len(self._orphans)

    def belong(self, sequence: Sequence, *, shared: bool) -> None:
        """Settles whose pages the sequence may find, before it reserves any: those that its writers, as they are now,
        wrote. In a pool that is `shared` with them there are only our own."""
        writers = () if shared else sequence.writers
        chain = self._pool.chain(sequence.request.cache_salt, writers=writers)
        if chain.root != sequence.chain.root:
            sequence.chain = chain
        sequence.extend_chain()

    def held(self, sequences: Iterable[Sequence]) -> Held:
        """What these and the orphans hold of the pool."""
        owned: list[int] = []
        granted = [page for pages in self._orphans.values() for page in pages]
        for sequence in sequences:
            own = len(sequence.pages) - (0 if sequence.grant is None else len(sequence.grant.pages))
            owned += [*sequence.pages[:own], *sequence.spare]
            granted += sequence.pages[own:]
        return owned, granted

    def may_reserve(self, sequence: Sequence, *, holding: Iterable[Sequence]) -> bool:
        """Whether the pool has pages for the sequence's next attempt, beside those `holding` some, which will grow."""
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
        """A step is over that retracted so many sequences."""
        self._growth_share = learn_growth(self._growth_share, num_retracted=num_retracted)

    def _expected_growth(self, sequences: Iterable[Sequence]) -> int:
        """Pages that these are expected to need; what a protected one needs it has."""
        if not self._growth_share:
            return 0
        owed = sum(sequence.max_tokens - sequence.num_tokens for sequence in sequences if not sequence.protected)
        return math.ceil(self._growth_share * owed / self._pool.layout.page_size)

    @property
    def _num_available(self) -> int:
        """Pages that can be had without going beyond `max_total_tokens`; not positive when none can."""
        return self._pool.num_available - self._num_withheld

    def reserve(self, sequence: Sequence, room: bytes, destinations: tuple[PeerAddress, ...]) -> PageGrant:
        """Takes the pages of an attempt: known ones and granted ones for what there is, owned ones for what it may grow
        to."""
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
        """The sequence's room has landed: its pages are ours."""
        assert sequence.grant is not None
        self._pool.adopt(sequence.grant.pages)
        sequence.grant = None

    def keep(self, sequence: Sequence) -> None:
        """Lets other sequences find the pages that are full. Call it when the model has run all tokens of the sequence,
        to finite logits: then nobody writes these pages any more, and what they hold is good. With an MTP layer a page
        is full one token later, since the layer's entry of a token needs the one behind it."""
        full = sequence.chain.num_full(sequence.num_tokens)
        if self._pool.prefix_cache and full and not self._pool.is_kept(sequence.pages[full - 1]):
            sequence.extend_chain()
            sequence.pages[:full] = self._pool.keep(sequence.chain.keys[:full], sequence.pages[:full])

    def forget(self, sequence: Sequence) -> None:
        """What the sequence's pages hold is in doubt: nobody else shall find them."""
        self._pool.forget(sequence.pages)

    def extend(self, sequence: Sequence, num_drafts: int = 0) -> bool:
        """Makes sure that the sequence's next token has a slot, and the `num_drafts` behind it, the last of which is
        the only one that may lack it; False when the pool has no page for it."""
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
        """How many tokens may be drafted behind the next one: none that could not be used, and none without a slot."""
        if sequence.draft.state is None:
            return 0
        wanted = min(self._num_draft_tokens, sequence.max_tokens - sequence.num_tokens - 1)
        return next((count for count in range(wanted) if not self.extend(sequence, count + 1)), wanted)

    def trim(self, sequence: Sequence) -> None:
        """Takes back pages that drafts needed and the sequence's next token does not, so that drafts never make the
        pool any fuller for others."""
        needed = self._pool.layout.num_pages(sequence.num_tokens)
        if len(sequence.pages) > needed:
            surplus = sequence.pages[needed:]
            del sequence.pages[needed:]
            if sequence.protected:
                sequence.spare += reversed(surplus)
            else:
                self._pool.release(surplus)

    def release(self, sequence: Sequence) -> None:
        """Returns all pages of a sequence; those of a room only once its writers have stopped."""
        granted = () if sequence.grant is None else sequence.grant.pages
        self._pool.release(granted)
        self._pool.release(sequence.pages[: len(sequence.pages) - len(granted)])
        self._pool.release(sequence.spare)
        sequence.pages, sequence.spare, sequence.grant, sequence.draft = [], [], None, Draft()

    def orphan(self, sequence: Sequence) -> PageGrant:
        """The sequence's room is given up: returns the grant to abort, whose pages wait for `settle`."""
        grant = sequence.grant
        assert grant is not None
        self._orphans[grant.room] = grant.pages
        del sequence.pages[len(sequence.pages) - len(grant.pages) :]
        sequence.grant = None
        self.release(sequence)
        return grant

    def settle(self, room: bytes) -> bool:
        """The room's writers have stopped. True when it was an orphan, whose pages are free now."""
        pages = self._orphans.pop(room, None)
        if pages is not None:
            self._pool.release(pages)
        return pages is not None

    def _known(self, sequence: Sequence) -> tuple[int, ...]:
        """The pages that hold the sequence's beginning already, short of its last token: prefill must run that one to
        draw the next, and its page with it, since a shared page is not written again."""
        return self._pool.find(sequence.chain.keys[: (sequence.num_tokens - 1) // self._pool.layout.page_size])
