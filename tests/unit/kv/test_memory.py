"""How a payload is cut into blocks of a device's host copies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdinfer.kv.layout import Spans
from pdinfer.kv.memory import in_blocks
from tests.conformance.transport_ends import STAGED_BYTES, BytesMemory

spans = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 3 * STAGED_BYTES)), max_size=8)


def bytes_of(spans: Spans) -> list[int]:
    return [start + step for start, length in spans for step in range(length)]


@given(spans)
def test_blocks_are_full_but_the_last_and_hold_every_byte_in_order(spans: Spans) -> None:
    blocks = list(in_blocks(spans, BytesMemory(0, staged=True)))
    assert [byte for block in blocks for byte in bytes_of(block)] == bytes_of(spans)
    sizes = [sum(length for _, length in block) for block in blocks]
    assert all(size == STAGED_BYTES for size in sizes[:-1])
    assert 0 <= sizes[-1] <= STAGED_BYTES
    assert all(sizes) or sizes == [0]


def test_what_the_host_has_in_place_is_one_block() -> None:
    spans = [(0, 700), (900, 2000)]
    assert list(in_blocks(spans, BytesMemory(5000))) == [spans]
