"""The pages of an engine: at decode those of its sequences and those that nobody may have yet, at prefill those of its
prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from functools import partial

import attrs

from pdinfer.engine.ranks.leader import RankChannel
from pdinfer.engine.sequence import Prompt, Sequence
from pdinfer.errors import PDInferError, TransferError
from pdinfer.execution.drafting import Draft
from pdinfer.kv.channel.channel import KVChannel
from pdinfer.kv.channel.rooms import by_room
from pdinfer.kv.pool import Held, PagePool
from pdinfer.kv.prefix import PrefixChain
from pdinfer.types import Granted, Handoff, PageGrant, PeerAddress


class _Tables:
    """The pages of a pool that may be used, which are those beyond `num_withheld`. Of the `num_looked_up` tokens of
    requests that were given pages, `num_found` were in known ones."""

    def __init__(self, pool: PagePool, channel: KVChannel | RankChannel, *, num_withheld: int) -> None:
        self._pool = pool
        self._channel = channel
        self._num_withheld = num_withheld
        self.num_looked_up = self.num_found = 0

    @property
    def num_available(self) -> int:
        """How many pages can be had without going beyond `max_total_tokens`; zero or less when there are none."""
        return self._pool.num_available - self._num_withheld

    def _to_find(self, keys: Seq[bytes], num_tokens: int) -> Seq[bytes]:
        """Return the keys under which the beginning of a request is looked up, without the page of its last token.
        Prefill must run that token to draw the next one, and it cannot run in a shared page, which is not written
        again."""
        return keys[: (num_tokens - 1) // self._pool.layout.page_size]


class PageTables(_Tables):
    """Reserves, adopts, extends and returns the pages of sequences, as the scheduler decides (`SequencePages`).

    A sequence shares the known pages of its beginning with others and is granted the rest. No shared page is ever
    written: only full pages are known, and a sequence writes after them. The granted pages of a room that was given up
    are *orphans*. They stay granted until `settle`, since the writers of the room may still be writing them."""

    def __init__(self, pool: PagePool, channel: KVChannel | RankChannel, *, num_withheld: int) -> None:
        super().__init__(pool, channel, num_withheld=num_withheld)
        self.clear()

    def clear(self) -> None:
        """Forget the orphans, whose writers are all gone."""
        self.orphans: dict[bytes, tuple[int, ...]] = {}
        """Their pages, by room."""

    @property
    def num_orphans(self) -> int:
        return len(self.orphans)

    def held(self, sequences: Iterable[Sequence]) -> Held:
        """Return the pages that these sequences and the orphans hold."""
        owned: list[int] = []
        granted = [page for pages in self.orphans.values() for page in pages]
        for sequence in sequences:
            own = len(sequence.pages) - (0 if sequence.grant is None else len(sequence.grant.pages))
            owned += [*sequence.pages[:own], *sequence.spare]
            granted += sequence.pages[own:]
        return owned, granted

    def num_in_use(self, sequence: Sequence, /) -> int:
        """Return how many pages with the beginning of a waiting sequence are in use anyway. It may find those that its
        current writers wrote, or those that this process computed itself; in a pool that is shared with the writers
        there are only the latter."""
        chain = self._chain(sequence)
        if chain.root != sequence.chain.root:
            sequence.chain = chain
        sequence.extend_chain()
        known = self._known(sequence)
        return len(known) - self._pool.num_unused(known)

    def _chain(self, sequence: Sequence) -> PrefixChain:
        """Return the chain by which a waiting sequence finds most: that of its writers or, where this process was a
        prefill before, one that begins with pages of its own."""
        scheme, request = self._pool.key_scheme, sequence.request
        own = scheme.chain(request.cache_salt)
        if not scheme.by_writer or self._channel.shares_pool(sequence.writers):
            return own
        written, width = scheme.chain(request.cache_salt, writers=sequence.writers), own.page_size + own.lookahead
        own.extend((*request.prompt[:width], *sequence.output[:width])[:width])
        if not self._pool.count_known(own.keys):  # as in an engine that never was a prefill
            return written
        tokens = sequence.all_tokens()
        own.extend(tokens)
        num_own = self._pool.count_known(self._to_find(own.keys, sequence.num_tokens))
        if not num_own:
            return written
        chains = written, own.continued(num_own, written.root)
        for chain in chains:
            chain.extend(tokens)
        return max(chains, key=lambda chain: self._pool.count_known(chain.keys))

    def reserve(self, sequence: Sequence, room: bytes, destinations: tuple[PeerAddress, ...]) -> PageGrant:
        """Take the pages of an attempt: known and granted pages for its tokens so far, owned pages for those that may
        follow."""
        layout = self._pool.layout
        known = self._known(sequence)
        self._pool.share(known)
        self.num_looked_up += sequence.num_tokens
        self.num_found += len(known) * layout.page_size
        granted = self._pool.grant(layout.num_pages(sequence.num_tokens) - len(known))
        sequence.pages = [*known, *granted]
        sequence.spare = list(self._pool.own(layout.num_pages(sequence.reserved_tokens) - len(sequence.pages)))
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
            if [*kept] != sequence.pages[:full]:  # a new list shows the runner that pages before the newest changed
                sequence.pages = [*kept, *sequence.pages[full:]]

    def forget(self, sequence: Sequence) -> None:
        """Let no other sequence find these pages, because their contents are in doubt."""
        self._pool.forget(sequence.pages)

    def extend(self, sequence: Sequence, num_drafts: int = 0, /) -> bool:
        if sequence.num_tokens + num_drafts <= len(sequence.pages) * self._pool.layout.page_size:
            return True
        if sequence.spare:
            sequence.pages.append(sequence.spare.pop())
            return True
        if self.num_available <= 0:
            return False
        sequence.pages += self._pool.own(1)
        return True

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

    def release(self, sequence: Sequence, /) -> None:
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
        self.orphans[grant.room] = grant.pages
        del sequence.pages[len(sequence.pages) - len(grant.pages) :]
        sequence.grant = None
        self.release(sequence)
        return grant

    def settle(self, room: bytes) -> bool:
        """Note that the writers of a room have stopped. Return True if it was an orphan, whose pages are free now."""
        pages = self.orphans.pop(room, None)
        if pages is not None:
            self._pool.release(pages)
        return pages is not None

    def _known(self, sequence: Sequence) -> tuple[int, ...]:
        return self._pool.find(self._to_find(sequence.chain.keys, sequence.num_tokens))


@attrs.define(eq=False, repr=False)
class GrantedRooms:
    """The rooms of granted sequences, and those that were given up, until their writers have stopped. `_untold` are
    grants of which the host may not learn yet: a writer that came sooner would find a rank that expects no room."""

    _tables: PageTables
    _channel: KVChannel | RankChannel
    _destinations: tuple[PeerAddress, ...]
    _random_bytes: Callable[[int], bytes]
    _untold: list[tuple[Sequence, Granted]] = attrs.field(factory=list)

    def clear(self) -> None:
        """Forget all of them: their writers are all gone."""
        self._untold = []
        self._tables.clear()

    def open(self, sequence: Sequence, clock: Callable[[], float]) -> None:
        """Reserve the pages of a sequence, and let its writers write those that it is granted."""
        grant = self._tables.reserve(sequence, self._random_bytes(16), self._destinations)
        request = sequence.granted(clock())
        self._channel.expect(grant)
        self._untold.append((sequence, Granted(grant=grant, request=request)))

    def take_granted(self) -> Iterator[Granted]:
        """Yield the grants that the host may learn of now, once each."""
        untold, self._untold = self._untold, []
        for sequence, event in untold:
            if sequence.grant is event.grant:  # otherwise it was given up meanwhile
                if self._channel.expects(event.grant.room):
                    yield event
                else:
                    self._untold.append((sequence, event))

    def give_up(self, sequence: Sequence, error: PDInferError) -> None:
        """Abort an open room. Its pages stay granted until its writers have stopped."""
        self._channel.abort(self._tables.orphan(sequence), error)

    def settled(self) -> Iterator[tuple[bytes, list[Handoff]]]:
        """Yield the rooms whose writers have stopped, with their hand-offs. The pages of those that were given up are
        free now."""
        for room, handoffs in by_room(self._channel.poll()).items():
            if not self._tables.settle(room):
                yield room, handoffs


class PromptTables(_Tables):
    """Finds, lays out and returns the pages of prompts, as the scheduler decides (`PromptPages`)."""

    def is_full(self, prompt: Prompt, /) -> bool:
        return self._channel.is_full(prompt.grant)

    def num_needed(self, prompt: Prompt, /) -> int:
        """Return how many available pages the prompt takes when it starts: none in a pool shared with decode."""
        if self._channel.shares_pool(prompt.grant.destinations):
            return 0
        known = self._known(prompt)
        return self._pool.layout.num_pages(prompt.num_tokens) - len(known) + self._pool.num_unused(known)

    def look_up(self, prompt: Prompt) -> None:
        """Give a new prompt its keys, and note how much of it is known."""
        chain = self._pool.key_scheme.chain(prompt.request.cache_salt)
        chain.extend(prompt.request.tokens)
        prompt.keys = chain.keys
        found = self._pool.count_known(self._to_find(prompt.keys, prompt.num_tokens))
        prompt.num_found = found * self._pool.layout.page_size

    def lay_out(self, prompt: Prompt) -> None:
        """Give the prompt its page table. In a pool shared with decode, the known pages are those that decode did not
        grant. Decode uses them, so they are still known unless one of their users has failed since; then raise
        TransferError."""
        pool, size = self._pool, self._pool.layout.page_size
        if self._channel.shares_pool(prompt.grant.destinations):
            if pool.generations(prompt.grant.pages) != prompt.grant.generations:
                raise TransferError("the granted pages have changed hands since")
            start = prompt.grant.tokens.start
            known = pool.find(prompt.keys[: start // size])
            if len(known) * size != start:
                raise TransferError(f"the grant starts at token {start} and the pages before it are not known any more")
            pool.share(known)
            prompt.held, prompt.pages = known, (*known, *prompt.grant.pages)
        else:
            known = self._known(prompt)
            pool.share(known)
            prompt.held = prompt.pages = (*known, *pool.own(pool.layout.num_pages(prompt.num_tokens) - len(known)))
        prompt.num_cached = prompt.num_computed = len(known) * size
        self.num_looked_up += prompt.num_tokens
        self.num_found += prompt.num_cached

    def release(self, prompt: Prompt) -> None:
        """Return the pages of a prompt that nothing reads any more. Others may find those of one that has landed."""
        if prompt.landed:
            full = prompt.held[: len(prompt.keys)]
            kept = self._pool.keep(prompt.keys, full, partial(getattr, prompt.request, "tokens"))
            prompt.held = (*kept, *prompt.held[len(full) :])
        self._pool.release(prompt.held)

    def _known(self, prompt: Prompt) -> tuple[int, ...]:
        return self._pool.find(self._to_find(prompt.keys, prompt.num_tokens))
