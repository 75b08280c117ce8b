"""The bytes of a pool as tensors, in place on the host and through copies on a device."""

from __future__ import annotations

import gc
import itertools
import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdinfer.config import CacheConfig
from pdinfer.errors import ConfigError
from pdinfer.kernels.torch import attention as torch_attention
from pdinfer.kv.layout import KVComponent, KVLayout, Spans
from pdinfer.kv.memfd import CAN_SHARE, PeerMemfd
from pdinfer.kv.view import KVView, PageMemory
from pdinfer.testing import random_model
from tests.slices import examples

CPU = torch.device("cpu")
NUM_PAGES = 5
WIDTHS = {"latent": (6, "bfloat16", 2), "scale": (3, "float32", 4)}


def layout_of(page_size: int = 4) -> KVLayout:
    """Return a layout of two components of different types in layers 2 and 3."""
    parts = tuple(
        KVComponent(name=name, format="f", dtype=dtype, width=width, token_bytes=width * size, layers=(2, 3))
        for name, (width, dtype, size) in WIDTHS.items()
    )
    return KVLayout(model_id=b"m", weights_id=b"w", page_size=page_size, components=parts)


def memory_of(*, on_host: bool = True, filled: bool = False, kind: str = "auto") -> PageMemory:
    """Return a memory. When it is not on the host it behaves as a device's: every read and every write goes through a
    copy."""
    memory = PageMemory(layout_of(), NUM_PAGES, device=CPU, memory=kind)
    if not on_host:
        memory.copies = memory._on_device(torch_attention)
    if filled:
        memory.buffer.copy_(torch.arange(memory.num_bytes) % 251)
    return memory


def contents(memory: PageMemory, spans: Spans) -> bytes:
    return b"".join(memory.buffer[start : start + length].numpy().tobytes() for start, length in spans)


@st.composite
def scattered(draw: st.DrawFn, lengths: Sequence[int]) -> Spans:
    """Draw spans of these lengths anywhere in the memory, in any order, without overlap."""
    num_bytes = NUM_PAGES * layout_of().page_bytes
    slack = num_bytes - sum(lengths)
    starts, position = {}, 0
    for index in draw(st.permutations(range(len(lengths)))):
        gap = draw(st.integers(0, slack // 3))
        slack -= gap
        starts[index] = position + gap
        position += gap + lengths[index]
    return [(starts[index], length) for index, length in enumerate(lengths)]


lengths = st.lists(st.integers(0, 60), max_size=6)


@st.composite
def two_cuts(draw: st.DrawFn) -> tuple[Spans, Spans]:
    """Draw two span lists of the same total length."""
    left = draw(lengths)
    total = sum(left)
    borders = [0, *sorted(draw(st.lists(st.integers(0, total), max_size=5))), total]
    right = [end - start for start, end in itertools.pairwise(borders)]
    return draw(scattered(left)), draw(scattered(right))


def test_a_pool_starts_at_zero_and_has_its_size() -> None:
    memory = memory_of()
    assert memory.num_bytes == NUM_PAGES * layout_of().page_bytes == NUM_PAGES * 4 * 2 * (12 + 12)
    assert not memory.buffer.any()


@pytest.mark.parametrize("name", WIDTHS)
@pytest.mark.parametrize("layer", [2, 3])
def test_pages_are_a_view_of_their_region(name: str, layer: int) -> None:
    memory = memory_of()
    pages = memory.pages(name, layer)
    assert pages.shape == (NUM_PAGES, 4, WIDTHS[name][0])
    pages[:] = torch.arange(pages.numel()).view(pages.shape)
    assert torch.equal(memory.pages(name, layer), pages)
    start = memory.layout.region_offset(name, layer, NUM_PAGES)
    region = [(start, pages.numel() * pages.element_size())]
    assert contents(memory, region) == pages.view(torch.uint8).numpy().tobytes()
    memory.buffer[start : start + region[0][1]] = 0
    assert not memory.buffer.any(), "nothing beside the region was written"


def test_spans_address_the_same_tokens_as_pages() -> None:
    memory = memory_of(filled=True)
    spans = memory.layout.spans(NUM_PAGES, layers=range(3, 4), tokens=range(5, 7), pages=[4, 2], first_token=0)
    expected = b"".join(
        memory.pages(name, 3)[2, 1:3].contiguous().view(torch.uint8).numpy().tobytes() for name in WIDTHS
    )
    assert b"".join(memory.read(spans)) == expected


@pytest.mark.parametrize("on_host", [True, False])
@settings(max_examples=30)
@given(data=st.data())
def test_reading_gives_the_bytes_of_each_span(on_host: bool, data: st.DataObject) -> None:
    memory = memory_of(on_host=on_host, filled=True)
    spans = data.draw(scattered(data.draw(lengths)))
    pieces = memory.read(spans)
    assert [len(piece) for piece in pieces] == [length for _, length in spans]
    assert b"".join(pieces) == contents(memory, spans)


@pytest.mark.parametrize("on_host", [True, False])
@settings(max_examples=30)
@given(data=st.data(), chance=st.randoms(use_true_random=False))
def test_what_landed_is_visible_after_commit(on_host: bool, data: st.DataObject, chance: random.Random) -> None:
    memory = memory_of(on_host=on_host)
    spans = data.draw(scattered(data.draw(lengths)))
    sent = [chance.randbytes(length) for _, length in spans]
    landing = memory.landing(spans)
    for piece, payload in zip(landing.views, sent, strict=True):
        assert not piece.readonly
        piece[:] = payload
    if not on_host:
        assert not memory.buffer.any(), "before commit nothing of a device's memory changes"
    landing.commit()
    assert contents(memory, spans) == b"".join(sent)
    for start, length in spans:
        memory.buffer[start : start + length] = 0
    assert not memory.buffer.any(), "nothing beside the spans was written"


def test_host_memory_is_read_and_written_in_place() -> None:
    memory = memory_of()
    (read,), (landing,) = memory.read([(8, 4)]), memory.landing([(8, 4)]).views
    landing[:] = b"abcd"
    assert bytes(read) == contents(memory, [(8, 4)]) == b"abcd"


@pytest.mark.parametrize("source_on_host", [True, False])
@pytest.mark.parametrize("on_host", [True, False])
@examples(60)
@given(cuts=two_cuts())
def test_copying_keeps_the_order_of_bytes_however_they_are_cut(
    on_host: bool, source_on_host: bool, cuts: tuple[Spans, Spans]
) -> None:
    spans, source_spans = cuts
    memory, source = memory_of(on_host=on_host), memory_of(on_host=source_on_host, filled=True)
    memory.copy_from(spans, source, source_spans)
    assert contents(memory, spans) == contents(source, source_spans)
    for start, length in spans:
        memory.buffer[start : start + length] = 0
    assert not memory.buffer.any()


def test_only_page_memory_can_be_copied_from() -> None:
    with pytest.raises(ConfigError, match="cannot copy pages from a bytearray"):
        memory_of().copy_from([], bytearray(), [])  # type: ignore[arg-type]


@pytest.mark.skipif(not CAN_SHARE, reason="memfds need Linux")
@pytest.mark.parametrize("kind", ["auto", "shared"])
def test_host_memory_is_a_memfd_that_others_may_read(kind: str) -> None:
    memory = memory_of(kind=kind)
    assert memory.memfd is not None
    assert not memory.buffer.any()
    peer = PeerMemfd(memory.memfd.readable(), memory.num_bytes)
    memory.landing([(0, 2)]).views[0][:] = b"ab"
    memory.buffer[2] = ord("c")
    assert bytes(peer.view[:4]) == contents(memory, [(0, 4)]) == b"abc\0"
    with pytest.raises(TypeError):
        peer.view[0] = 1
    peer.close()


@pytest.mark.skipif(not CAN_SHARE, reason="memfds need Linux")
def test_a_memfd_is_freed_with_its_memory() -> None:
    descriptors = Path("/proc/self/fd")
    gc.collect()
    before = len(os.listdir(descriptors))
    memory = memory_of()
    assert len(os.listdir(descriptors)) > before
    del memory
    assert len(os.listdir(descriptors)) == before


def test_where_no_memory_can_be_shared_it_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdinfer.kv.view.CAN_SHARE", False)
    memory = memory_of()
    assert memory.memfd is None
    assert memory_of(kind="shared").buffer.is_shared()
    memory.landing([(0, 2)]).views[0][:] = b"ab"
    assert contents(memory, [(0, 2)]) == b"ab"


def test_pinned_memory_without_a_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r'memory="pinned" needs a device that torch sees, and there is none'):
        memory_of(kind="pinned")


@pytest.mark.parametrize("kind", ["pinned", "shared"])
def test_kinds_of_main_memory_are_refused_for_a_device(kind: str) -> None:
    told = rf'memory="{kind}" is about pools in main memory, .* on cuda:1 .* use "auto"'
    with pytest.raises(ConfigError, match=told):
        PageMemory(layout_of(), NUM_PAGES, device=torch.device("cuda:1"), memory=kind)


def test_a_step_sees_one_tensor_per_layer() -> None:
    model = random_model()
    layout = model.kv_layout(CacheConfig(page_size=8))
    memory = model.allocate_pages(layout, 3)
    view = KVView.of(memory)
    assert len(view.latents) == len(layout.layers)
    assert all(latent.shape == (3, 8, layout.components[0].width) for latent in view.latents.values())
    view.latents[1].fill_(1.0)
    assert memory.pages("latent", 1).all()
    assert not memory.pages("latent", 0).any()
