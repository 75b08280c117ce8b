"""What the bytes of a page mean: components, sizes and where each token lies. Plain ints, no tensors.

A pool is one flat block of bytes. It is cut into regions, one per (component, layer), component first; a region holds
`num_pages` pages, a page `page_size` tokens, a token `token_bytes` bytes. One page id therefore names one page in every
region, and a token's address needs no table but the page table:

    region(component, layer) + (page * page_size + token % page_size) * token_bytes
"""

from __future__ import annotations

import enum
import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated

import attrs
from msgspec import Meta

from pdinfer.bounds import MANY, MAX_INDEX, SOME, Digest, Index, Name, PageSize
from pdinfer.errors import ConfigError, LayoutMismatch
from pdinfer.values import brief

MTP_PREFIX = "mtp."
"""The prefix of the names of an MTP layer's components."""

Spans = list[tuple[int, int]]
"""(offset, length) pieces of a pool's bytes, in the order in which their contents are sent."""


class Fit(enum.Enum):
    """How two layouts relate: the same pages, or the same tokens in pages of another size."""

    IDENTICAL = "identical"
    REPAGE = "repage"


@attrs.frozen(kw_only=True)
class KVComponent:
    """One kind of cached value. `format` names the dtype, the widths and the rope pairing, so equal text means equal
    bytes. `layers` are global ids in ascending order."""

    __repr__ = brief

    name: Name
    format: Name
    dtype: Name
    width: Index
    token_bytes: Annotated[int, Meta(ge=1, le=MAX_INDEX)]
    layers: Annotated[tuple[Index, ...], MANY]

    def part_of(self, layers: range) -> range:
        """Return the positions of those of its layers that are in `layers`. They are adjacent, since the ids ascend."""
        return range(bisect_left(self.layers, layers.start), bisect_left(self.layers, layers.stop))


@attrs.frozen(kw_only=True)
class KVLayout:
    """The meaning of every byte in a pool.

    `model_id` and `weights_id` tie a cached latent to the model that made it: latents of other weights have the same
    shape and mean nothing. Layers are global ids, so ends that hold different slices still agree.
    """

    __repr__ = brief

    model_id: Digest
    weights_id: Digest
    page_size: PageSize
    components: Annotated[tuple[KVComponent, ...], SOME]

    @cached_property
    def layout_id(self) -> bytes:
        """SHA-256 over every field. Each grant carries it."""
        text = "\n".join(f"{name}={value}" for name, value in self._described())
        return hashlib.sha256(text.encode()).digest()

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token over all components and layers."""
        return sum(component.token_bytes * len(component.layers) for component in self.components)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all components and layers."""
        return self.token_bytes * self.page_size

    @cached_property
    def layers(self) -> range:
        """The global layer ids that have a cache."""
        ids = [layer for component in self.components for layer in component.layers]
        return range(min(ids), max(ids) + 1)

    @property
    def lookahead(self) -> int:
        """Number of tokens after a token that its cached values also depend on: 1 with an MTP layer, otherwise 0."""
        return int(any(component.name.startswith(MTP_PREFIX) for component in self.components))

    def num_pages(self, num_tokens: int) -> int:
        """Return the number of pages for `num_tokens` tokens when the first one starts a page."""
        return -(-num_tokens // self.page_size)

    def region_offset(self, name: str, layer: int, num_pages: int) -> int:
        """Return the first byte of (component, layer) in a pool of `num_pages` pages."""
        offset = 0
        for component in self.components:
            region_bytes = num_pages * self.page_size * component.token_bytes
            if component.name == name:
                return offset + component.layers.index(layer) * region_bytes
            offset += region_bytes * len(component.layers)
        raise ConfigError(f"layout has no component {name!r}; it has {[c.name for c in self.components]}")

    def payload_bytes(self, layers: range, tokens: range) -> int:
        """Return the bytes of `tokens` in `layers` over all components."""
        per_token = sum(component.token_bytes * len(component.part_of(layers)) for component in self.components)
        return per_token * len(tokens)

    def spans(self, num_pages: int, *, layers: range, tokens: range, pages: Sequence[int], first_token: int) -> Spans:
        """Return where `tokens` of `layers` lie in a pool of `num_pages` pages. `pages[i]` holds the tokens from
        `first_token + i * page_size`. The order is component, layer, token: that of every payload, whatever the page
        size of either end. Raise ConfigError when `pages` do not hold the tokens or are not in the pool."""
        held = range(first_token, first_token + len(pages) * self.page_size)
        if tokens and not (held.start <= tokens.start and tokens.stop <= held.stop):
            raise ConfigError(f"tokens {tokens} are asked for, but the pages hold {held}")
        runs = list(self._runs(tokens, pages, first_token))
        if any(start < 0 or start + count > num_pages * self.page_size for start, count in runs):
            raise ConfigError(f"one of the pages {list(pages)[:8]} … is not in a pool of {num_pages}")
        spans: Spans = []
        region = 0
        for component in self.components:
            size = component.token_bytes
            region_bytes = num_pages * self.page_size * size
            for index in component.part_of(layers):
                first = region + index * region_bytes
                spans.extend((first + start * size, count * size) for start, count in runs)
            region += region_bytes * len(component.layers)
        return spans

    def _runs(self, tokens: range, pages: Sequence[int], first_token: int) -> Iterator[tuple[int, int]]:
        """Yield (token slot, count) of runs of adjacent slots. Runs that are neighbours in the pool are joined."""
        start = count = 0
        position = tokens.start
        while position < tokens.stop:
            page, within = divmod(position - first_token, self.page_size)
            slot = pages[page] * self.page_size + within
            length = min(self.page_size - within, tokens.stop - position)
            if count and slot == start + count:
                count += length
            else:
                if count:
                    yield start, count
                start, count = slot, length
            position += length
        if count:
            yield start, count

    def compatible_with(self, other: KVLayout) -> Fit:
        """Return how pages move between `self` (ours) and `other` (theirs). Only the page size may differ: raise
        LayoutMismatch with every other field that differs."""
        ours, theirs = dict(self._described()), dict(other._described())
        pairs = [(name, ours.get(name, "absent"), theirs.get(name, "absent")) for name in {**ours, **theirs}]
        fields = tuple(pair for pair in pairs if pair[1] != pair[2] and pair[0] != "page_size")
        if fields:
            raise LayoutMismatch.of(fields)
        return Fit.IDENTICAL if self.page_size == other.page_size else Fit.REPAGE

    def _described(self) -> Iterator[tuple[str, str]]:
        """Yield every field as (name, text), for comparing and hashing."""
        yield "model_id", self.model_id.hex()[:16]
        yield "weights_id", self.weights_id.hex()[:16]
        yield "page_size", str(self.page_size)
        yield "components", ",".join(component.name for component in self.components)  # their order is the payload's
        for component in self.components:  # the most telling first: a long message may be cut
            yield f"components.{component.name}.format", component.format
        for component in self.components:
            prefix = f"components.{component.name}"
            yield f"{prefix}.dtype", component.dtype
            yield f"{prefix}.width", str(component.width)
            yield f"{prefix}.token_bytes", str(component.token_bytes)
            yield f"{prefix}.layers", ",".join(map(str, component.layers))
