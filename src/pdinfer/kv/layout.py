"""What the bytes of a page mean: components, sizes and where each token lies. Plain ints, no tensors.

A pool is one flat block of bytes. It is cut into regions, one per (component, layer), component first; a region holds
`num_pages` pages, a page `page_size` tokens, a token `token_bytes` bytes. One page id therefore names one page in every
region, and a token's address needs no table but the page table:

    region(component, layer) + (page * page_size + token % page_size) * token_bytes

A component with a `shape` has heads, and its axes may lie in another order; see `shapes`."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated

import attrs
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from pdinfer.bounds import MANY, MAX_INDEX, SOME, Digest, Index, Name, PageSize
from pdinfer.errors import ConfigError, LayoutMismatch
from pdinfer.kv.shapes import ONE_HEAD, Ints, PageShape, Strides, joined, slots_of
from pdinfer.values import Value

MTP_PREFIX = "mtp."
"""The prefix of the names of an MTP layer's components."""

WEIGHTS_IDS = ("weights_id", "mtp_weights_id", "sampled_weights_id")
"""The fields of a layout that tell weights apart."""

Spans = list[tuple[int, int]]
"""(offset, length) pieces of a pool's bytes, in the order in which their contents are sent."""


@attrs.frozen(kw_only=True)
class KVComponent(Value):
    """One kind of cached value. `format` names the dtype, the widths and the rope pairing, so equal text means equal
    bytes. `layers` are global ids in ascending order. With a `shape` it has heads, and `width` and `token_bytes` are
    those of one head; without one it has none, and no bytes of it in a frame."""

    name: Name
    format: Name
    dtype: Name
    width: Index
    token_bytes: Annotated[int, Meta(ge=1, le=MAX_INDEX)]
    layers: Annotated[tuple[Index, ...], MANY]
    shape: PageShape | UnsetType = UNSET

    @property
    def axes(self) -> PageShape:
        """Its shape: that of a single head without a head axis."""
        return ONE_HEAD if self.shape is UNSET else self.shape

    @property
    def num_heads(self) -> int:
        """The number of heads that this rank holds: 1 without a head axis."""
        return len(self.axes.heads)

    def strides(self, page_size: int, num_pages: int) -> Strides:
        if self.shape is UNSET:
            page_bytes = page_size * self.token_bytes
            return Strides(num_pages * page_bytes, page_bytes, 0, self.token_bytes)
        sizes = {"L": len(self.layers), "B": num_pages, "H": self.num_heads, "N": page_size, "C": self.token_bytes}
        strides, stride = {}, 1
        for axis in reversed(self.axes.order.value):
            strides[axis] = stride
            stride *= sizes[axis]
        return Strides(strides["L"], strides["B"], strides["H"], strides["N"])

    def page_bytes(self, page_size: int) -> int:
        return page_size * self.num_heads * self.token_bytes

    def part_of(self, layers: range) -> range:
        """Return the positions of those of its layers that are in `layers`. They are adjacent, since the ids ascend."""
        return range(bisect_left(self.layers, layers.start), bisect_left(self.layers, layers.stop))


@attrs.frozen(kw_only=True)
class KVLayout(Value):
    """The meaning of every byte in a pool.

    `model_id` and the ids of weights tie a cached latent to the model that made it: latents of other weights have the
    same shape and mean nothing. `weights_id` is a digest of all weights of the main model, and `mtp_weights_id` of
    those of an MTP layer, which are compared where both ends have them. An end that has not read its weights leaves
    `weights_id` empty and has `sampled_weights_id`, which depends on little of each tensor. That is compared with
    such an end alone. Layers are global ids, so ends that hold different slices still agree."""

    model_id: Digest
    weights_id: Digest
    page_size: PageSize
    components: Annotated[tuple[KVComponent, ...], SOME]
    mtp_weights_id: Digest | UnsetType = UNSET
    sampled_weights_id: Digest | UnsetType = UNSET

    def __attrs_post_init__(self) -> None:
        """Raise ValueError unless all components have the same heads, packed or not, or none has heads."""
        for component in self.components[1:]:
            first, shape = self.components[0].shape, component.shape
            if shape is UNSET or first is UNSET:
                are_alike = shape is first
            else:
                are_alike = attrs.evolve(shape, order=first.order) == first
            if not are_alike:
                raise ValueError(f"{component.name} and {self.components[0].name} do not have the same heads")

    @cached_property
    def layout_id(self) -> bytes:
        """SHA-256 over every field but the heads of this rank, so that the ranks of an engine have one. Each grant
        carries it."""
        text = "\n".join(f"{name}={value}" for name, value in self._described())
        return hashlib.sha256(text.encode()).digest()

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of one token over all components and layers."""
        return sum(part.token_bytes * part.num_heads * len(part.layers) for part in self.components)

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
    def shape(self) -> PageShape | None:
        """The heads of every component, None without a head axis. Orders may differ between components."""
        shape = self.components[0].shape
        return None if shape is UNSET else shape

    @property
    def heads(self) -> range | None:
        """The global ids of the heads that this rank holds, None without a head axis."""
        return None if self.shape is None else self.shape.heads

    @property
    def by_token(self) -> bool:
        """Whether payloads out of these pages hold token by token all heads, and not head by head all tokens."""
        return self.shape is not None and self.shape.order.by_token

    @property
    def lookahead(self) -> int:
        """Number of tokens after a token that its cached values also depend on: 1 with an MTP layer, otherwise 0."""
        return int(any(component.name.startswith(MTP_PREFIX) for component in self.components))

    def num_pages(self, num_tokens: int) -> int:
        """Return the number of pages for `num_tokens` tokens when the first one starts a page."""
        return -(-num_tokens // self.page_size)

    def border(self, stop: int, *, up: bool) -> int:
        """Return up to which token pages move when `stop` is asked for: up to `stop`, or where pages are packed to the
        border of pages at or below it, with `up` at or above it."""
        if not self.components[0].axes.packed:
            return stop
        return (stop + (self.page_size - 1 if up else 0)) // self.page_size * self.page_size

    def part(self, tokens: range, heads: range | None = None, first_token: int = 0) -> range | None:
        """Return the heads that move when `heads` are asked for: all of this rank's by default, None without a head
        axis. Raise ConfigError for heads that this rank does not hold, and for parts of packed pages, of which the
        first one begins with `first_token`."""
        if self.shape is None:
            if heads is not None:
                raise ConfigError(f"heads {text_of(heads)} are asked for, and these pages have no heads")
            return None
        held, size = self.shape.heads, self.page_size
        asked = held if heads is None else heads
        if common(asked, held) != asked:
            raise ConfigError(f"heads {text_of(asked)} are asked for, and these pages hold {text_of(held)}")
        if self.shape.packed:
            if asked != held:
                raise ConfigError(
                    f"heads {text_of(asked)} are asked for, and packed pages hold {text_of(held)} as a whole"
                )
            if (tokens.start - first_token) % size or (tokens.stop - first_token) % size:
                raise ConfigError(
                    f"tokens {text_of(tokens)} are not whole pages of {size} tokens, and packed pages move whole"
                )
        return asked

    def region_offset(self, name: str, layer: int, num_pages: int) -> int:
        """Return the first byte of (component, layer) in a pool of `num_pages` pages."""
        for component, offset in self._regions(num_pages):
            if component.name == name:
                return offset + component.layers.index(layer) * component.strides(self.page_size, num_pages).layer
        raise ConfigError(f"layout has no component {name!r}; it has {[c.name for c in self.components]}")

    def payload_bytes(self, layers: range, tokens: range, heads: range | None = None) -> int:
        """Return the bytes of `tokens` in `layers` over all components, of `heads` where there are some."""
        per_token = 0
        for component in self.components:
            per_token += component.token_bytes * len(component.part_of(layers))
        return per_token * len(tokens) * (1 if heads is None else len(heads))

    def spans(
        self,
        num_pages: int,
        *,
        layers: range,
        tokens: range,
        pages: Sequence[int],
        first_token: int,
        heads: range | None = None,
        by_token: bool = False,
    ) -> Spans:
        """Return where `tokens` of `layers` lie in a pool of `num_pages` pages. `pages[i]` holds the tokens from
        `first_token + i * page_size`. The order is component, layer, token: that of every payload, whatever the page
        size of either end. Where there are heads, `heads` are those asked for, and the order is component, layer, head,
        token, or with `by_token` component, layer, token, head, whatever the order in memory; packed pages follow each
        other whole. Raise ConfigError when `pages` do not hold the tokens or are not in the pool, and for parts of
        packed pages."""
        held = range(first_token, first_token + len(pages) * self.page_size)
        if tokens and not (held.start <= tokens.start and tokens.stop <= held.stop):
            raise ConfigError(f"tokens {tokens} are asked for, but the pages hold {held}")
        heads = self.part(tokens, heads, first_token)
        runs = list(self._runs(tokens, pages, first_token))
        if any(start < 0 or start + count > num_pages * self.page_size for start, count in runs):
            raise ConfigError(f"one of the pages {list(pages)[:8]} … is not in a pool of {num_pages}")
        spans: Spans = []
        for component, region in self._regions(num_pages):
            strides, size = component.strides(self.page_size, num_pages), component.token_bytes
            if heads is None:  # the tokens of a page are adjacent: no more than its runs need be looked at
                within = [(start * size, count * size) for start, count in runs]
            else:
                slots = slots_of(tokens, pages, first_token, self.page_size)
                within = joined(*self._rows(component, strides, slots, heads, by_token))
            for index in component.part_of(layers):
                first = region + index * strides.layer
                spans += [(first + start, length) for start, length in within]
        return spans

    def _regions(self, num_pages: int) -> Iterator[tuple[KVComponent, int]]:
        """Yield each component and its first byte in a pool of `num_pages` pages."""
        offset = 0
        for component in self.components:
            yield component, offset
            offset += num_pages * component.page_bytes(self.page_size) * len(component.layers)

    def _rows(
        self, component: KVComponent, strides: Strides, slots: tuple[Ints, Ints], heads: range, by_token: bool
    ) -> tuple[Ints, int]:
        """Return the offsets, after the first byte of a layer, of the smallest units in the order of a payload, and
        their bytes: those of a token of one head, or of a page when pages are packed."""
        page, within = slots
        if component.axes.packed:
            return page[:: self.page_size] * strides.page, component.page_bytes(self.page_size)
        tokens_T = page * strides.page + within * strides.token
        heads_H = (np.arange(heads.start, heads.stop) - component.axes.heads.start) * strides.head
        rows = tokens_T[:, None] + heads_H if by_token else heads_H[:, None] + tokens_T
        return rows.ravel(), component.token_bytes

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

    def compatible_with(self, other: KVLayout) -> None:
        """Raise LayoutMismatch with every field in which `self` (ours) and `other` (theirs) differ, unless pages move
        between them. The page size, the heads of a rank and the order of the axes may differ, except with packed
        pages."""
        ours, theirs = dict(self._described()), dict(other._described())
        if self.shape is not None and self.shape.packed:
            may_differ: set[str] = set()
            ours["heads"], theirs["heads"] = text_of(self.shape.heads), text_of(other.heads or range(0))
        else:
            may_differ = {"page_size", *(f"components.{part.name}.order" for part in self.components)}
        may_differ |= self._ids_not_compared(other)
        pairs = [(name, ours.get(name, "absent"), theirs.get(name, "absent")) for name in {**ours, **theirs}]
        fields = tuple(pair for pair in pairs if pair[1] != pair[2] and pair[0] not in may_differ)
        if fields:
            raise LayoutMismatch.of(fields)

    def _ids_not_compared(self, other: KVLayout) -> set[str]:
        """Return which ids of weights say nothing of whether two ends have the same."""
        is_sampled = UNSET not in (self.sampled_weights_id, other.sampled_weights_id)
        if is_sampled and not (self.weights_id and other.weights_id):
            return {"weights_id", "mtp_weights_id"}
        has_both = UNSET not in (self.mtp_weights_id, other.mtp_weights_id)
        return {"sampled_weights_id"} if has_both else {"sampled_weights_id", "mtp_weights_id"}

    def _described(self) -> Iterator[tuple[str, str]]:
        """Yield every field but the heads of this rank as (name, text), for comparing and hashing."""
        yield "model_id", self.model_id.hex()
        for name in WEIGHTS_IDS:
            if (value := getattr(self, name)) is not UNSET:
                yield name, value.hex()
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
            if component.shape is not UNSET:
                yield f"{prefix}.num_heads", str(component.shape.num_heads)
                yield f"{prefix}.packed", str(component.shape.packed)
                yield f"{prefix}.order", component.shape.order.value


def common(left: range, right: range) -> range:
    """Return what two ranges have in common, which may be nothing."""
    start = max(left.start, right.start)
    return range(start, max(start, min(left.stop, right.stop)))


def text_of(span: range) -> str:
    """Return a range as a half-open interval."""
    return f"[{span.start}, {span.stop})"
