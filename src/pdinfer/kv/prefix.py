"""Which cached page holds which tokens: the prefix index of one pool. Plain values, no tensors, no clock.

A page's key covers everything that its latents depend on: the layout (model, weights, page size), who may share them,
who wrote them, and, through the key of the page before it, every token up to the page's last one (with an MTP layer
also the token after that). Only full pages have a key.

    root = H(layout_id, salt, domain)
    key of page i = H(key of page i - 1, or root; tokens of page i, `lookahead` more)

A sequence whose first pages this process computed itself, and whose later ones others write, changes the root between
them: to H(key of the last page of our own, root of those others)."""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence

import attrs

from pdinfer.bounds import Digest, Index, PageSize
from pdinfer.errors import PDInferError
from pdinfer.types import PeerAddress, peer_key
from pdinfer.values import Value


def digest(*fields: bytes) -> bytes:
    """Return SHA-256 over `fields`, each after its length: without lengths, salt "org_1" before "2345" would hash as
    "org_12345" before nothing. A collision would serve one user's context to another, so a fast hash will not do."""
    hashed = hashlib.sha256()
    for field in fields:
        hashed.update(len(field).to_bytes(8, "little"))
        hashed.update(field)
    return hashed.digest()


OWN_DOMAIN = b""
"""The domain of pages that this process computed from its own pages alone."""


def domain_of(writers: Iterable[PeerAddress]) -> bytes:
    """Return the trust domain of pages that these peers wrote, and of everything computed on top of them. The host
    vouches for a peer's identity, since it names the writers of a request. A restarted peer is a new one."""
    keys = sorted({peer_key(writer) for writer in writers})
    return digest(*(b"%d %d " % (epoch, rank) + engine_id for engine_id, epoch, rank in keys))


@attrs.define
class PrefixChain:
    """The keys of one sequence's full pages, in order. The chain grows with the sequence. A page is full when its
    tokens and the `lookahead` tokens after them are there. `root` takes the place of a key before page `first`; keys
    before that are those of another chain."""

    page_size: int
    root: bytes
    lookahead: int = 0
    keys: list[bytes] = attrs.field(factory=list)
    first: int = 0

    def continued(self, num_pages: int, root: bytes) -> PrefixChain:
        """Return the chain of a sequence whose first pages are those of this chain, and whose later ones are filled by
        those who fill pages below `root`. Nobody who may not find those finds them."""
        keys = self.keys[:num_pages]
        return PrefixChain(self.page_size, digest(keys[-1], root), self.lookahead, keys, num_pages)

    def num_full(self, num_tokens: int) -> int:
        """Return how many pages a sequence of `num_tokens` fills."""
        return max(0, num_tokens - self.lookahead) // self.page_size

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the keys of the pages that are full now. `tokens` is the whole sequence so far."""
        size, width = self.page_size, self.page_size + self.lookahead
        for at in range(len(self.keys), self.num_full(len(tokens))):
            page = struct.pack(f"<{width}i", *tokens[at * size : at * size + width])
            self.keys.append(digest(self.keys[-1] if at > self.first else self.root, page))


@attrs.frozen(kw_only=True)
class KeyScheme(Value):
    """How a pool makes the keys of its pages, for those who want to know whether it holds a prompt. `by_writer` says
    that pages which other engines wrote are kept apart by who wrote them."""

    layout_id: Digest
    page_size: PageSize
    lookahead: Index = 0
    by_writer: bool = False

    def chain(self, salt: bytes, writers: Sequence[PeerAddress] = ()) -> PrefixChain:
        """Return the chain of a sequence without tokens, which shares pages with sequences of equal `salt`. Its pages
        are filled by these `writers`, or by the pool's own engine."""
        domain = domain_of(writers) if writers and self.by_writer else OWN_DOMAIN
        root = digest(b"pdinfer prefix 2", self.layout_id, salt, domain)
        return PrefixChain(self.page_size, root, self.lookahead)


def count_known(keys: Sequence[bytes], known: Container[bytes]) -> int:
    """Return how many of `keys`, from the first, are `known`. An index knows no key without those before it, so the
    last known one is found by bisection."""
    if not keys or keys[0] not in known:
        return 0
    return len(keys) - bisect_left(keys[::-1], True, key=known.__contains__)


@attrs.define(eq=False)
class _Node:
    key: bytes
    parent: int | None
    children: dict[int, None] = attrs.field(factory=dict)


@attrs.define(eq=False)
class PrefixIndex:
    """A tree of pages by key. A page is *resting* while no request uses it. Resting pages are evicted, the longest at
    rest first, but never before the pages that continue them: those could not be found any more. `pages` are the pages
    by key. `removed` is told the key of every page that leaves."""

    _removed: Callable[[bytes], None] = lambda _: None
    pages: dict[bytes, int] = attrs.field(factory=dict)
    _nodes: dict[int, _Node] = attrs.field(factory=dict)
    _resting: OrderedDict[int, None] = attrs.field(factory=OrderedDict)

    def __contains__(self, page: int) -> bool:
        return page in self._nodes

    @property
    def num_resting(self) -> int:
        return len(self._resting)

    def find(self, keys: Iterable[bytes]) -> tuple[int, ...]:
        pages = []
        for key in keys:
            if (page := self.pages.get(key)) is None:
                break
            pages.append(page)
        return tuple(pages)

    def add(self, key: bytes, page: int, parent: int | None) -> None:
        """Add a page in use that continues `parent`."""
        if key in self.pages or page in self._nodes or (parent is not None and parent not in self._nodes):
            raise PDInferError(f"page {page} cannot be indexed: it or its key is there already, or its parent is not")
        self.pages[key] = page
        self._nodes[page] = _Node(key, parent)
        if parent is not None:
            self._nodes[parent].children[page] = None

    def rest(self, page: int) -> None:
        """Mark a page that nothing uses any more. The last page of a sequence must come first: see `evict`."""
        self._resting[page] = None

    def use(self, page: int) -> None:
        """Mark a page as used, so that it is not evicted."""
        self._resting.pop(page, None)

    def evict(self) -> int:
        """Remove the page that has rested longest among those that no other page continues. Raise PDInferError when
        none rests.

        A request that uses a page uses all pages before it and releases them later, so the first page in line
        qualifies."""
        for page in self._resting:
            if not self._nodes[page].children:
                self._remove(page)
                return page
        raise PDInferError("no page can be evicted: every resting page is continued by another one")

    def drop(self, page: int) -> list[int]:
        """Remove a page and all that continue it, resting or not. Return those that rested."""
        found = [page]
        for current in found:
            found += self._nodes[current].children
        rested = [current for current in found if current in self._resting]
        for current in reversed(found):
            self._remove(current)
        return rested

    def check(self, used: Iterable[int]) -> None:
        """Raise PDInferError unless the tree is whole, every page is either in `used` or resting, and every page before
        one in use is in use."""
        used = {page for page in used if page in self._nodes}
        keys = {page: key for key, page in self.pages.items()}
        for page, node in self._nodes.items():
            parent = None if node.parent is None else self._nodes.get(node.parent)
            attached = node.parent is None or (parent is not None and page in parent.children)
            if not attached or keys.get(page) != node.key or (page in used) == (page in self._resting):
                raise PDInferError(f"the prefix index is broken at page {page}")
            if page in used and node.parent is not None and node.parent not in used:
                raise PDInferError(f"page {page} is in use and the page before it, {node.parent}, is not")
        num_children = sum(len(node.children) for node in self._nodes.values())
        num_continuing = sum(node.parent is not None for node in self._nodes.values())
        whole = len(keys) == len(self._nodes) and num_children == num_continuing
        if not whole or not self._resting.keys() <= self._nodes.keys():
            raise PDInferError("the prefix index knows pages that it does not hold")

    def _remove(self, page: int) -> None:
        node = self._nodes.pop(page)
        del self.pages[node.key]
        self._removed(node.key)
        self._resting.pop(page, None)
        if node.parent is not None:
            self._nodes[node.parent].children.pop(page, None)
