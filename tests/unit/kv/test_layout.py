"""Spans name every byte of every token once, in an order that does not depend on the page size."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from pdinfer.errors import ConfigError, LayoutMismatch
from pdinfer.kv.layout import KVComponent, KVLayout, Spans
from pdinfer.kv.view import PageMemory, _paired


@attrs.frozen
class Case:
    """A layout, a pool, and a stretch of tokens held by some of its pages."""

    layout: KVLayout
    num_pages: int
    pages: tuple[int, ...]
    first_token: int
    tokens: range
    layers: range

    def spans(self) -> Spans:
        return self.layout.spans(
            self.num_pages, layers=self.layers, tokens=self.tokens, pages=self.pages, first_token=self.first_token
        )

    def addresses(self) -> Iterator[int]:
        """Yield every byte address, one at a time, by the definition in the module's docstring."""
        region = 0
        for component in self.layout.components:
            for layer in component.layers:
                for token in self.tokens if layer in self.layers else ():
                    page, within = divmod(token - self.first_token, self.layout.page_size)
                    slot = self.pages[page] * self.layout.page_size + within
                    yield from range(region + slot * component.token_bytes, region + (slot + 1) * component.token_bytes)
                region += self.num_pages * self.layout.page_size * component.token_bytes


def component(name: str, token_bytes: int, layers: tuple[int, ...]) -> KVComponent:
    return KVComponent(
        name=name, format=f"{name}-v1", dtype="uint8", width=token_bytes, token_bytes=token_bytes, layers=layers
    )


def layout_of(components: tuple[KVComponent, ...], page_size: int) -> KVLayout:
    return KVLayout(model_id=b"m" * 32, weights_id=b"w" * 32, page_size=page_size, components=components)


@st.composite
def component_lists(draw: st.DrawFn) -> tuple[KVComponent, ...]:
    start = draw(st.integers(0, 60))
    layers = st.sets(st.integers(start, start + 4), min_size=1)
    return tuple(
        component(name, draw(st.integers(1, 5)), tuple(sorted(draw(layers))))
        for name in ("latent", "index", "scale")[: draw(st.integers(1, 3))]
    )


@st.composite
def token_stretches(draw: st.DrawFn) -> tuple[int, range]:
    """Draw (first token of the page table, tokens)."""
    first = draw(st.integers(0, 100))
    start = first + draw(st.integers(0, 20))
    return first, range(start, start + draw(st.integers(0, 40)))


def case_of(
    draw: Callable[[Any], Any], components: tuple[KVComponent, ...], stretch: tuple[int, range], layers: range
) -> Case:
    page_size = draw(st.sampled_from([1, 2, 3, 4, 8, 16]))
    first, tokens = stretch
    needed = -(-(tokens.stop - first) // page_size)
    num_pages = needed + draw(st.integers(0, 4)) + 1
    # A pool that is nearly full of this request makes neighbours, which are joined, common.
    order = draw(st.one_of(st.just(list(range(num_pages))), st.permutations(range(num_pages))))
    return Case(layout_of(components, page_size), num_pages, tuple(order[:needed]), first, tokens, layers)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    components = draw(component_lists())
    low = draw(st.integers(0, 64))
    return case_of(draw, components, draw(token_stretches()), range(low, low + draw(st.integers(0, 64))))


@given(cases())
def test_spans_cover_each_token_once_and_in_order(case: Case) -> None:
    spans = case.spans()
    assert [byte for start, length in spans for byte in range(start, start + length)] == list(case.addresses())
    assert all(length > 0 for _, length in spans)
    assert sum(length for _, length in spans) == case.layout.payload_bytes(case.layers, case.tokens)
    assert all(0 <= start <= case.num_pages * case.layout.page_bytes - length for start, length in spans)


@given(cases())
def test_neighbouring_pages_are_joined(case: Case) -> None:
    for component in case.layout.components:
        for layer in component.layers:
            spans = attrs.evolve(case, layers=range(layer, layer + 1)).spans()
            inside = case.layout.region_offset(component.name, layer, case.num_pages)
            region = range(inside, inside + case.num_pages * case.layout.page_size * component.token_bytes)
            ours = [span for span in spans if span[0] in region]
            assert all(start + length != following for (start, length), (following, _) in itertools.pairwise(ours))


@given(st.data())
def test_a_payload_means_the_same_in_pages_of_another_size(data: st.DataObject) -> None:
    components = data.draw(component_lists())
    stretch = data.draw(token_stretches())
    layers = range(data.draw(st.integers(0, 62)), 64)
    left = case_of(data.draw, components, stretch, layers)
    right = case_of(data.draw, components, stretch, layers)
    ours, theirs = list(left.addresses()), list(right.addresses())
    cut = [
        (source + step, target + step)
        for source, target, length in _paired(left.spans(), right.spans())
        for step in range(length)
    ]
    assert cut == list(zip(ours, theirs, strict=True))


@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 9), max_size=30), st.randoms())
def test_paired_cuts_at_every_border(lefts: list[int], rights: list[int], chance: random.Random) -> None:
    short = sum(lefts) - sum(rights)
    (rights if short > 0 else lefts).append(abs(short))
    left = [(chance.randrange(1000), length) for length in lefts]
    right = [(chance.randrange(1000), length) for length in rights]

    def bytes_of(spans: Spans) -> list[int]:
        return [start + step for start, length in spans for step in range(length)]

    pairs = _paired(left, right)
    assert bytes_of([(a, length) for a, _, length in pairs]) == bytes_of(left)
    assert bytes_of([(b, length) for _, b, length in pairs]) == bytes_of(right)
    assert len(pairs) <= len(left) + len(right)


LAYOUT = layout_of((component("latent", 4, (0, 1, 2)), component("index", 2, (1, 2))), 16)


def test_sizes() -> None:
    assert LAYOUT.token_bytes == 3 * 4 + 2 * 2
    assert LAYOUT.page_bytes == 256
    assert LAYOUT.layers == range(3)
    assert [LAYOUT.num_pages(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert LAYOUT.region_offset("index", 2, 10) == 3 * 640 + 320
    with pytest.raises(ConfigError, match=r"'missing'.*'latent', 'index'"):
        LAYOUT.region_offset("missing", 0, 10)


def changed(component: KVComponent, field: str, value: Any) -> KVComponent:
    return attrs.evolve(component, **{field: value})


CHANGES = {
    "model_id": attrs.evolve(LAYOUT, model_id=b"other"),
    "weights_id": attrs.evolve(LAYOUT, weights_id=b"other"),
    **{
        f"components.index.{field}": attrs.evolve(
            LAYOUT, components=(LAYOUT.components[0], changed(LAYOUT.components[1], field, value))
        )
        for field, value in (
            ("format", "other"),
            ("dtype", "float32"),
            ("width", 3),
            ("token_bytes", 3),
            ("layers", (0, 1)),
        )
    },
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_difference_is_named(field: str) -> None:
    with pytest.raises(LayoutMismatch, match=field) as caught:
        LAYOUT.compatible_with(CHANGES[field])
    assert [name for name, _, _ in caught.value.fields] == [field]
    assert CHANGES[field].layout_id != LAYOUT.layout_id


@pytest.mark.parametrize("field", ["model_id", "weights_id"])
def test_every_byte_of_an_id_counts(field: str) -> None:
    other = attrs.evolve(LAYOUT, **{field: getattr(LAYOUT, field)[:-1] + b"x"})
    assert other.layout_id != LAYOUT.layout_id
    with pytest.raises(LayoutMismatch, match=field):
        LAYOUT.compatible_with(other)


READ = attrs.evolve(LAYOUT, weights_id=b"r" * 32, sampled_weights_id=b"s" * 32)
WITH_MTP = attrs.evolve(READ, mtp_weights_id=b"m" * 32)
SAMPLED = attrs.evolve(LAYOUT, weights_id=b"", sampled_weights_id=b"s" * 32)


@pytest.mark.parametrize(
    ("ours", "theirs", "differ"),
    [
        (READ, attrs.evolve(READ, sampled_weights_id=b"x"), []),
        (READ, attrs.evolve(READ, weights_id=b"x"), ["weights_id"]),
        (READ, SAMPLED, []),
        (SAMPLED, SAMPLED, []),
        (READ, attrs.evolve(SAMPLED, sampled_weights_id=b"x"), ["sampled_weights_id"]),
        (SAMPLED, attrs.evolve(SAMPLED, sampled_weights_id=b"x"), ["sampled_weights_id"]),
        (READ, WITH_MTP, []),
        (WITH_MTP, SAMPLED, []),
        (WITH_MTP, attrs.evolve(WITH_MTP, mtp_weights_id=b"x"), ["mtp_weights_id"]),
        (SAMPLED, LAYOUT, ["weights_id"]),
        (READ, attrs.evolve(READ, sampled_weights_id=UNSET), []),
        (attrs.evolve(LAYOUT, weights_id=b""), LAYOUT, ["weights_id"]),
    ],
)
def test_ids_of_weights_are_compared_where_they_say_something(
    ours: KVLayout, theirs: KVLayout, differ: list[str]
) -> None:
    for one, other in ((ours, theirs), (theirs, ours)):
        if not differ:
            one.compatible_with(other)
            continue
        with pytest.raises(LayoutMismatch) as caught:
            one.compatible_with(other)
        assert [name for name, _, _ in caught.value.fields] == differ


def test_every_difference_is_named_at_once() -> None:
    other = attrs.evolve(LAYOUT, weights_id=b"x", page_size=8, components=LAYOUT.components[:1])
    with pytest.raises(LayoutMismatch) as caught:
        LAYOUT.compatible_with(other)
    names = [name for name, _, _ in caught.value.fields]
    assert names[:2] == ["weights_id", "components"]
    assert {name.rpartition(".")[0] for name in names[2:]} == {"components.index"}
    assert all(theirs == "absent" for _, _, theirs in caught.value.fields[2:])


def test_only_the_page_size_may_differ() -> None:
    LAYOUT.compatible_with(attrs.evolve(LAYOUT))
    LAYOUT.compatible_with(attrs.evolve(LAYOUT, page_size=64))


def test_the_order_of_components_is_that_of_the_payload_and_must_agree() -> None:
    swapped = attrs.evolve(LAYOUT, components=LAYOUT.components[::-1])
    with pytest.raises(LayoutMismatch, match="components: ours latent,index, theirs index,latent"):
        LAYOUT.compatible_with(swapped)


@pytest.mark.parametrize("sizes", [(16, 16), (16, 4), (4, 64)])
def test_page_memory_copies_between_page_sizes(sizes: tuple[int, int]) -> None:
    """Tokens written by position at one end are found by position at the other."""
    latent = KVComponent(name="latent", format="f", dtype="float32", width=3, token_bytes=12, layers=(0, 1))
    ends = []
    for size in sizes:
        layout = layout_of((latent,), size)
        needed = layout.num_pages(50)
        memory = PageMemory(layout, needed + 3, device=torch.device("cpu"))
        pages = random.Random(size).sample(range(needed + 3), needed)
        spans = layout.spans(needed + 3, layers=range(2), tokens=range(50), pages=pages, first_token=0)
        ends.append((memory, pages, spans))
    (source, source_pages, source_spans), (target, target_pages, target_spans) = ends
    for layer in range(2):
        source.pages("latent", layer)[:] = torch.randn_like(source.pages("latent", layer))
    target.copy_from(target_spans, source, source_spans)
    for layer in range(2):
        sent = source.pages("latent", layer)[source_pages].reshape(-1, 3)[:50]
        landed = target.pages("latent", layer)[target_pages].reshape(-1, 3)[:50]
        assert torch.equal(sent, landed)
