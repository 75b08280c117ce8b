"""Packed FP8 rows, byte by byte, compared with a plain packer that knows nothing of tensors."""

from __future__ import annotations

import math
import struct
from bisect import bisect_left

import numpy as np
import pytest
import torch
from torch import Tensor

from pdinfer.kernels.formats import cache_rows


def e4m3_values() -> list[float]:
    """Return the value of each code from 0x00 to 0x7E: 4 bits of exponent, bias 7, 3 of mantissa. 0x7F is NaN."""
    values = []
    for code in range(0x7F):
        exponent, mantissa = divmod(code, 8)
        values.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return values


VALUES = e4m3_values()


def e4m3(value: float) -> int:
    """Return the nearest code, of two the even one, with the sign in the highest bit."""
    above = bisect_left(VALUES, abs(value))
    near = range(max(above - 1, 0), min(above + 1, 0x7F))
    code = min(near, key=lambda code: (abs(VALUES[code] - abs(value)), code % 2))
    return code | (0x80 if math.copysign(1, value) < 0 else 0)


def power_of_two_scale(values: list[float]) -> float:
    amax = max(np.float32(1e-4), *(abs(value) for value in values))
    scale = 2.0**-100
    while amax > 448 * scale:
        scale *= 2
    return scale


def packed_group(values: list[float]) -> tuple[bytes, bytes]:
    scale = power_of_two_scale(values)
    return bytes(e4m3(value / scale) for value in values), struct.pack("<f", scale)


def packed_latent(values: list[float], rank: int) -> bytes:
    groups = [packed_group(values[start : start + 128]) for start in range(0, rank, 128)]
    rope = b"".join(struct.pack("<f", value)[2:] for value in values[rank:])  # values that bfloat16 holds exactly
    return b"".join(codes for codes, _ in groups) + b"".join(scale for _, scale in groups) + rope


def hadamard_of(values: list[float]) -> list[float]:
    """Return the transform by its definition: the sign of entry (i, j) is the parity of the ones in i & j."""
    width = len(values)
    signs = [[-1 if (i & j).bit_count() % 2 else 1 for j in range(width)] for i in range(width)]
    scale = np.float32(width**-0.5)
    return [float(np.float32(sum(s * v for s, v in zip(row, values, strict=True))) * scale) for row in signs]


def packed_key(values: list[float]) -> bytes:
    return b"".join(packed_group(hadamard_of(values)))


def rows_of(kind: str, rank: int, rope: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(5, rank + rope, generator=generator).to(torch.bfloat16).float()
    match kind:
        case "wide":  # from subnormal codes to the largest in one group
            x *= (2.0 ** torch.randint(-14, 1, x.shape, generator=generator)).float()
        case "borders":  # amax at 448 times a power of two, and beside it; ties between codes
            x[:, ::128] = torch.tensor([448.0, 449.0, 450.0, 224.0, 7.0])[:, None]
            x[:, 1:rank:2] = torch.arange(len(x[0, 1:rank:2])) % 32 + 0.5
        case "zero":
            x[:] = 0
        case "tiny":
            x *= 2.0**-40
        case "huge":
            x *= 2.0**100
    return x


KINDS = ("normal", "wide", "borders", "zero", "tiny", "huge")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rank", "rope"), [(128, 2), (512, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_are_packed_byte_by_byte(kind: str, rank: int, rope: int, dtype: torch.dtype) -> None:
    latent = rows_of(kind, rank, rope).to(dtype)
    packed = cache_rows.latent_rows(latent[:, :rank], latent[:, rank:], torch.uint8)
    assert packed.shape == (5, rank + rank // 32 + 2 * rope)
    assert [bytes(row.tolist()) for row in packed] == [packed_latent(row, rank) for row in latent.tolist()]


def test_the_sizes_of_deepseek_v32() -> None:
    assert cache_rows.latent_rows(torch.zeros(1, 512), torch.zeros(1, 64), torch.uint8).shape == (1, 656)
    assert cache_rows.index_rows(torch.zeros(1, 128), torch.uint8).shape == (1, 132)


@pytest.mark.parametrize("width", [2, 16, 64, 128])
@pytest.mark.parametrize("size", [1.0, 2.0**-30, 2.0**90])
def test_index_keys_are_packed_byte_by_byte(width: int, size: float) -> None:
    """Use integers, so that the sums of the transform need no rounding."""
    generator = torch.Generator().manual_seed(width)
    keys = torch.randint(-9, 10, (7, width), generator=generator).float() * size
    packed = cache_rows.index_rows(keys, torch.uint8)
    assert [bytes(row.tolist()) for row in packed] == [packed_key(row) for row in keys.tolist()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_latents_are_unpacked_to_what_the_bytes_say(dtype: torch.dtype) -> None:
    rank, rope = 256, 6
    latent = rows_of("wide", rank, rope)
    rows = cache_rows.latent_rows(latent[:, :rank], latent[:, rank:], torch.uint8)
    expected = []
    for row in rows.tolist():
        scales = struct.unpack("<2f", bytes(row[rank : rank + 8]))
        codes = [VALUES[code & 0x7F] * (-1 if code & 0x80 else 1) for code in row[:rank]]
        turned = [struct.unpack("<f", b"\0\0" + bytes(row[at : at + 2]))[0] for at in range(rank + 8, len(row), 2)]
        expected.append([code * scales[at // 128] for at, code in enumerate(codes)] + turned)
    got = cache_rows.latents(rows.view(5, 1, -1), rank, dtype)
    assert torch.equal(got[:, 0], torch.tensor(expected).to(dtype))


def test_an_element_changes_by_a_sixteenth_at_most() -> None:
    latent = rows_of("normal", 512, 64)
    again = cache_rows.latents(
        cache_rows.latent_rows(latent[:, :512], latent[:, 512:], torch.uint8), 512, torch.float32
    )
    assert torch.equal(again[:, 512:], latent[:, 512:])
    least = 2.0**-9 * 2.0**-6  # half the smallest code, times the largest scale of such values
    assert ((again - latent).abs() <= latent.abs() / 16 + least).all()


def test_index_keys_and_queries_keep_their_dot_products() -> None:
    generator = torch.Generator().manual_seed(0)
    q, keys = torch.randn(3, 4, 64, dtype=torch.float64, generator=generator), torch.randn(7, 64, generator=generator)
    unpacked = cache_rows.index_keys(cache_rows.index_rows(keys, torch.uint8)).double()
    exact = q @ keys.double().T
    assert not torch.allclose(q @ unpacked.T, exact, atol=1)
    turned_q, turned_keys = cache_rows.index_queries(q, torch.uint8), cache_rows.hadamard(keys.double())
    # an element keeps four bits of itself, or as many of the largest as the smallest code has
    off = turned_keys.abs() / 16 + turned_keys.abs().amax(-1, keepdim=True) * 2.0**-15
    assert ((turned_q @ unpacked.T - exact).abs() <= turned_q.abs() @ off.T).all()
    torch.testing.assert_close(cache_rows.hadamard(cache_rows.hadamard(q)), q)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(value: float) -> None:
    latent = torch.zeros(1, 130)
    latent[0, 3] = value
    again = cache_rows.latents(
        cache_rows.latent_rows(latent[:, :128], latent[:, 128:], torch.uint8), 128, torch.float32
    )
    assert not again[0, 3].isfinite()
    assert not cache_rows.index_keys(cache_rows.index_rows(latent[:, :128], torch.uint8)).isfinite().any()


def test_pages_that_are_not_packed_hold_elements() -> None:
    c, k_rope, keys = torch.randn(2, 7), torch.randn(2, 4), torch.randn(2, 5)
    rows = cache_rows.latent_rows(c, k_rope, torch.float32)
    assert torch.equal(rows, torch.cat((c, k_rope), -1))
    assert cache_rows.latents(rows, 7, torch.float32) is rows
    assert cache_rows.index_keys(cache_rows.index_rows(keys, torch.float32)) is keys
    assert cache_rows.index_queries(keys, torch.float32) is keys
