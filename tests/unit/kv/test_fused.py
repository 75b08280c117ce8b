"""Copies and digests in one pass give the bytes and the digest of two passes, however memory is cut."""

from __future__ import annotations

import ctypes
import logging
import random
import struct
from pathlib import Path

import pytest
import xxhash

from pdinfer.kv import fused
from pdinfer.kv.layout import Spans


@pytest.fixture(scope="module")
def loops() -> ctypes.CDLL:
    found = fused.library()
    if found is None:
        pytest.skip("needs a C compiler")
    return found


def address_of(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def packed(spans: Spans) -> bytes:
    return b"".join(struct.pack("<QQ", *span) for span in spans)


def cut(chance: random.Random, num_bytes: int) -> Spans:
    """Return spans of `num_bytes` in all, in any order, with gaps between them, some of them empty."""
    lengths: list[int] = []
    while sum(lengths) < num_bytes:
        longest = chance.choice([1, 65, 5000, num_bytes])
        lengths.append(min(chance.randrange(longest + 1), num_bytes - sum(lengths)))
    offsets, at = [], 0
    for length in lengths:
        at += chance.randrange(70)
        offsets.append(at)
        at += length
    spans = list(zip(offsets, lengths, strict=True))
    chance.shuffle(spans)
    return spans


def size_of(spans: Spans) -> int:
    return max(offset + length for offset, length in spans)


SIZES = (241, 256, 1024, 1025, 1088, 4096, 4097, 8192, 30000, 100_003)


@pytest.mark.parametrize("num_bytes", SIZES)
def test_what_is_read_has_the_digest_of_xxhash(loops: ctypes.CDLL, num_bytes: int) -> None:
    chance = random.Random(num_bytes)
    for _ in range(20):
        spans = cut(chance, num_bytes)
        memory = bytearray(chance.randbytes(size_of(spans)))
        start = chance.randbytes(chance.choice([1, 40, 64]))
        digest = fused.FusedDigest(loops, start)
        middle = chance.randrange(len(spans) + 1)
        for part in (spans[:middle], spans[middle:]):
            digest.read(address_of(memory), packed(part))
        data = b"".join(memory[offset : offset + length] for offset, length in spans)
        assert digest.intdigest() == xxhash.xxh3_64_intdigest(start + data)


@pytest.mark.parametrize("digested", [True, False])
@pytest.mark.parametrize("num_bytes", SIZES)
def test_what_is_copied_lies_where_it_belongs_and_is_digested(
    loops: ctypes.CDLL, num_bytes: int, digested: bool
) -> None:
    chance = random.Random(num_bytes)
    for _ in range(20):
        spans, targets = cut(chance, num_bytes), cut(chance, num_bytes)
        memory = bytearray(chance.randbytes(size_of(spans)))
        found, wanted = bytearray(size_of(targets) + 64), bytearray(size_of(targets) + 64)
        digest = fused.FusedDigest(loops, b"start") if digested else None
        copies = fused.FusedCopy(loops, address_of(found), packed(targets), digest)
        middle = chance.randrange(len(spans) + 1)
        taken = sum(copies.take(address_of(memory), packed(part)) for part in (spans[:middle], spans[middle:]))
        data = b"".join(memory[offset : offset + length] for offset, length in spans)
        at = 0
        for offset, length in targets:
            wanted[offset : offset + length] = data[at : at + length]
            at += length
        assert taken == num_bytes
        assert found == wanted
        if digest is not None:
            assert digest.intdigest() == xxhash.xxh3_64_intdigest(b"start" + data)


def test_nothing_is_copied_beyond_the_targets(loops: ctypes.CDLL) -> None:
    memory, found = bytearray(b"x" * 200), bytearray(100)
    copies = fused.FusedCopy(loops, address_of(found), packed([(10, 30), (60, 10)]), None)
    assert copies.take(address_of(memory), packed([(0, 35), (100, 100)])) == 40
    assert found == b"\0" * 10 + b"x" * 30 + b"\0" * 20 + b"x" * 10 + b"\0" * 30
    assert copies.take(address_of(memory), packed([(0, 1)])) == 0


def test_where_nothing_is_compiled_it_is_told_and_done_in_two_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fused, "find_or_build", lambda *_: {"fused": "needs a C compiler"})
    fused.library.cache_clear()
    try:
        with caplog.at_level(logging.INFO, "pdinfer"):
            assert fused.library() is None
        assert "in two passes: C for one pass needs a C compiler" in caplog.text
    finally:
        fused.library.cache_clear()
