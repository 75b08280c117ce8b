"""Rows of a component with heads lie where its order says, and a payload means the same in any two orders."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import attrs
import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdinfer.errors import ConfigError, LayoutMismatch
from pdinfer.kv.layout import KVComponent, KVLayout, Spans
from pdinfer.kv.shapes import AxisOrder, PageShape
from pdinfer.kv.view import PageMemory

ORDERS = list(AxisOrder)
WHOLE = [order for order in AxisOrder if order.keeps_pages_whole]


def heads_of(name: str, heads: range, order: AxisOrder, *, packed: bool = False, **more: Any) -> KVComponent:
    shape = PageShape(heads=heads, num_heads=8, order=order, packed=packed)
    parts: dict[str, Any] = {"dtype": "uint8", "width": 3, "token_bytes": 3, "layers": (0, 1, 4), **more}
    return KVComponent(name=name, format="kv", shape=shape, **parts)


def layout_of(*components: KVComponent, page_size: int = 4) -> KVLayout:
    return KVLayout(model_id=b"m" * 32, weights_id=b"w" * 32, page_size=page_size, components=components)


@attrs.frozen
class End:
    """Pages with heads, and some of them that hold the tokens from `first_token` on."""

    layout: KVLayout
    num_pages: int
    pages: tuple[int, ...]
    first_token: int

    def addresses(self, layers: range, tokens: range, heads: range, *, by_token: bool) -> Iterator[int]:
        """Yield every byte address, one at a time, by the letters of the order."""
        region, size = 0, self.layout.page_size
        for part in self.layout.components:
            assert isinstance(part.shape, PageShape)
            sizes = {"L": len(part.layers), "B": self.num_pages, "H": len(part.shape.heads), "N": size, "C": 3}
            rows = [(head, token) for head in heads for token in tokens]
            rows = sorted(rows, key=lambda row: row[::-1]) if by_token else rows
            for layer in (layer for layer in part.layers if layer in layers):
                for head, token in rows:
                    page, within = divmod(token - self.first_token, size)
                    index = {"L": part.layers.index(layer), "B": self.pages[page], "N": within, "C": 0}
                    index["H"] = head - part.shape.heads.start
                    at = 0
                    for axis in part.shape.order.value:
                        at = at * sizes[axis] + index[axis]
                    yield from range(region + at, region + at + 3)
            region += len(part.layers) * self.num_pages * sizes["H"] * size * 3

    def spans(self, layers: range, tokens: range, heads: range, *, by_token: bool) -> Spans:
        return self.layout.spans(
            self.num_pages,
            layers=layers,
            tokens=tokens,
            pages=self.pages,
            first_token=self.first_token,
            heads=heads,
            by_token=by_token,
        )


@st.composite
def ends(draw: st.DrawFn, order: AxisOrder, tokens: range) -> End:
    """Draw an end that holds at least heads [2, 5)."""
    size = draw(st.sampled_from([1, 2, 4, 8]))
    heads = range(draw(st.integers(0, 2)), draw(st.integers(5, 8)))
    parts = [heads_of("kv", heads, order)]
    if draw(st.booleans()):
        parts.append(heads_of("scale", heads, draw(st.sampled_from(ORDERS)), layers=(1,)))
    first = draw(st.integers(0, tokens.start))
    needed = -(-(tokens.stop - first) // size)
    num_pages = needed + draw(st.integers(0, 3)) + 1
    order_of_pages = draw(st.one_of(st.just(list(range(num_pages))), st.permutations(range(num_pages))))
    return End(layout_of(*parts, page_size=size), num_pages, tuple(order_of_pages[:needed]), first)


@st.composite
def token_ranges(draw: st.DrawFn) -> range:
    start = draw(st.integers(0, 12))
    return range(start, start + draw(st.integers(0, 20)))


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=25)
@given(st.data())
def test_spans_name_each_byte_once_and_in_the_order_of_the_payload(order: AxisOrder, data: st.DataObject) -> None:
    tokens, by_token = data.draw(token_ranges()), data.draw(st.booleans())
    end = data.draw(ends(order, tokens))
    layers = range(data.draw(st.integers(0, 2)), data.draw(st.integers(2, 6)))
    heads = range(data.draw(st.integers(2, 4)), 5)
    spans = end.spans(layers, tokens, heads, by_token=by_token)
    named = [byte for start, length in spans for byte in range(start, start + length)]
    assert named == list(end.addresses(layers, tokens, heads, by_token=by_token))
    assert sum(length for _, length in spans) == end.layout.payload_bytes(layers, tokens, heads)
    assert all(0 <= byte < end.num_pages * end.layout.page_bytes for byte in named)


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(ORDERS, ORDERS)))
def test_a_payload_means_the_same_in_another_order_page_size_and_slice_of_heads(
    ours: AxisOrder, theirs: AxisOrder
) -> None:
    """Values written by (layer, page, head, token) at one end are found by them at the other."""
    tokens, heads = range(5, 22), range(2, 4)
    source = PageMemory(layout_of(heads_of("kv", range(4), ours)), 9, device=torch.device("cpu"))
    target = PageMemory(layout_of(heads_of("kv", heads, theirs), page_size=8), 5, device=torch.device("cpu"))
    source.buffer.random_(1, 255)
    from_pages, to_pages = (7, 1, 2, 0, 8, 3), (4, 0, 2)
    for by_token in (False, True):
        target.buffer.zero_()
        target.copy_from(
            target.layout.spans(
                5, layers=range(5), tokens=tokens, pages=to_pages, first_token=0, heads=heads, by_token=by_token
            ),
            source,
            source.layout.spans(
                9, layers=range(5), tokens=tokens, pages=from_pages, first_token=0, heads=heads, by_token=by_token
            ),
        )
        for layer in (0, 1, 4):
            sent, landed = source.pages("kv", layer), target.pages("kv", layer)
            for token, head in itertools.product(tokens, heads):
                was = sent[from_pages[token // 4], head, token % 4]
                assert torch.equal(landed[to_pages[token // 8], head - 2, token % 8], was)
        assert int((target.buffer != 0).sum()) == len(tokens) * 2 * 3 * 3


@pytest.mark.parametrize(("order", "by_token"), [(AxisOrder.LBHNC, False), (AxisOrder.LBNHC, True)])
def test_pieces_are_as_long_as_the_order_allows(order: AxisOrder, by_token: bool) -> None:
    end = End(layout_of(heads_of("kv", range(8), order)), 9, (2, 3, 5), 0)
    spans = end.spans(range(1), range(12), range(8), by_token=by_token)
    lengths = [length for _, length in spans]
    assert lengths == ([2 * 96, 96] if by_token else [12] * 24)
    assert order.by_token is by_token


@pytest.mark.parametrize("order", WHOLE)
def test_packed_pages_are_named_whole(order: AxisOrder) -> None:
    layout = layout_of(heads_of("kv", range(2), order, packed=True))
    asked: dict[str, Any] = {"layers": range(1, 5), "pages": (6, 2, 3), "first_token": 8}
    spans = layout.spans(7, tokens=range(8, 20), **asked)
    stride = layout.components[0].strides(4, 7)
    starts = [stride.layer * layer + stride.page * page for layer in (1, 2) for page in (6, 2, 3)]
    assert [start for span in spans for start in range(span[0], sum(span), 24)] == starts
    assert sum(length for _, length in spans) == 6 * 24 == layout.payload_bytes(range(1, 5), range(8, 20), range(2))
    for tokens in (range(8, 19), range(9, 12), range(9, 13)):
        with pytest.raises(ConfigError, match="not whole pages of 4 tokens"):
            layout.spans(7, tokens=tokens, **asked)
    with pytest.raises(ConfigError, match=r"heads \[0, 1\) are asked for, and packed pages hold \[0, 2\) as a whole"):
        layout.spans(7, tokens=range(8, 20), heads=range(1), **asked)


def test_heads_that_are_not_held_are_refused() -> None:
    layout = layout_of(heads_of("kv", range(2, 4), AxisOrder.LBHNC))
    with pytest.raises(ConfigError, match=r"heads \[1, 3\) are asked for, and these pages hold \[2, 4\)"):
        layout.spans(4, layers=range(2), tokens=range(4), pages=(0,), first_token=0, heads=range(1, 3))


PLAIN = layout_of(heads_of("kv", range(4), AxisOrder.LBHNC))
PACKED = layout_of(heads_of("kv", range(4), AxisOrder.LBHNC, packed=True))


def changed(layout: KVLayout, page_size: int = 4, **shape: Any) -> KVLayout:
    part = layout.components[0]
    assert isinstance(part.shape, PageShape)
    part = attrs.evolve(part, shape=attrs.evolve(part.shape, **shape))
    return attrs.evolve(layout, page_size=page_size, components=(part,))


def test_ranks_of_one_engine_have_one_id_and_other_shapes_have_others() -> None:
    assert changed(PLAIN, heads=range(4, 8)).layout_id == PLAIN.layout_id
    others = [PLAIN, changed(PLAIN, num_heads=9), changed(PLAIN, order=AxisOrder.BLHNC), changed(PLAIN, packed=True)]
    bare = attrs.evolve(PLAIN.components[0], shape=msgspec.UNSET)
    others.append(attrs.evolve(PLAIN, components=(bare,)))
    assert len({layout.layout_id for layout in others}) == len(others)


def test_orders_page_sizes_and_heads_may_differ_unless_pages_are_packed() -> None:
    PLAIN.compatible_with(changed(PLAIN, 8, order=AxisOrder.BHLNC, heads=range(4, 8)))
    PACKED.compatible_with(PACKED)
    cases: list[tuple[KVLayout, KVLayout, str]] = [
        (PLAIN, changed(PLAIN, num_heads=9), "components.kv.num_heads: ours 8, theirs 9"),
        (PLAIN, PACKED, "components.kv.packed: ours False, theirs True"),
        (PACKED, changed(PACKED, 8), "page_size: ours 4, theirs 8"),
        (PACKED, changed(PACKED, heads=range(4, 8)), r"heads: ours \[0, 4\), theirs \[4, 8\)"),
        (PACKED, changed(PACKED, order=AxisOrder.LBNHC), "components.kv.order: ours LBHNC, theirs LBNHC"),
    ]
    for ours, theirs, problem in cases:
        with pytest.raises(LayoutMismatch, match=problem):
            ours.compatible_with(theirs)


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"heads range\(2, 9\) are not some of 8"):
        PageShape(heads=range(2, 9), num_heads=8)
    with pytest.raises(ValueError, match="LHBNC has one for each head"):
        PageShape(heads=range(8), num_heads=8, order=AxisOrder.LHBNC, packed=True)
    for other in (range(3), range(1, 5)):
        with pytest.raises(ValueError, match="scale and kv do not have the same heads"):
            layout_of(PLAIN.components[0], heads_of("scale", other, AxisOrder.LBHNC))
    index = KVComponent(name="index", format="f", dtype="uint8", width=1, token_bytes=1, layers=(0,))
    with pytest.raises(ValueError, match="index and kv do not have the same heads"):
        layout_of(PLAIN.components[0], index)
