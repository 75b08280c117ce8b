"""How kernels are cut, as data: sizes of tiles, warps and stages of pipelines, by family and class of shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs
import torch
import triton


def _frozen(tiles: Mapping[str, int]) -> Mapping[str, int]:
    return MappingProxyType(dict(tiles))


@attrs.frozen(eq=False)
class Config:
    """What a kernel is compiled with: its constexprs by name, warps per block, stages of its loops, and where more
    blocks shall fit on a multiprocessor the most registers of a thread.

    `blocks` is how many of its blocks a multiprocessor has room for, if more than one and a grid depends on it.
    `exception` is the reason why it may miss a gate of tests/unit/kernels/test_aot.py, and None where it may not."""

    tiles: Mapping[str, int] = attrs.field(factory=dict, converter=_frozen)
    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None
    blocks: int | None = None
    exception: str | None = None

    @property
    def constants(self) -> dict[str, int]:
        """The arguments of a launch."""
        limit = {} if self.maxnreg is None else {"maxnreg": self.maxnreg}
        return {**self.tiles, "num_warps": self.num_warps, "num_stages": self.num_stages, **limit}


def of_width(width: int) -> Config:
    """Return the config of a kernel whose block has one row of `width` elements: 8 of them to a thread, so that
    bfloat16 is loaded 16 bytes at a time, and up to 16 warps."""
    return Config(num_warps=min(16, max(1, width // 256)))


GROUPS_OF_ROWS = Config({"GROUPS": 8}, num_warps=4)
"""Activations: 1,024 elements of a row, 8 to a thread."""
HEADS_OF_TOKENS = Config({"HEADS": 16}, num_warps=4)
"""Rotary positions: 1,024 elements of 16 heads."""
WORDS_OF_PAGES = Config({"WORDS": 1024}, num_warps=4)
"""Pages: 8 KB of int64."""
CHANNELS_OF_TOKENS = Config({"CHANNELS": 1024}, num_warps=4)
"""Sums of experts: 8 elements of each choice to a thread."""
PAIRS = Config({"PAIRS": 128}, num_warps=4)
"""Tokens and their experts: each pair of a block is compared with each other."""
COUNTS_OF_EXPERTS = Config({"BLOCKS": 64, "EXPERTS": 16}, num_warps=4)

_ROUTE_FEW = Config({"TOKENS": 1}, num_warps=1)
_ROUTE_MANY = Config({"TOKENS": 8}, num_warps=8)


def of_routing(num_tokens: int) -> Config:
    """Return the config of the router: a token to a warp as long as there are few, which is soonest done."""
    return _ROUTE_FEW if num_tokens <= 32 else _ROUTE_MANY


DRAW = Config({"CHUNK": 2048, "SEGMENT": 128}, num_warps=4)
LIMIT = Config({"BLOCK": 4096}, num_warps=16)
SETTLE = Config(num_warps=1)


ROOM_SPLITS = 32
"""The blocks that share the rows of an expert in room, most of which are not there, where they are rounded."""


FP8 = torch.float8_e4m3fn
Multiplied = torch.dtype | str
"""What is multiplied: numbers of a dtype, or weights of "int4" or "mxfp4"."""


def _product(
    rows: int,
    channels: int,
    depth: int,
    num_warps: int,
    num_stages: int,
    *,
    splits: int = 1,
    weights_first: bool = False,
    exception: str | None = None,
) -> Config:
    tiles = {"ROWS": rows, "CHANNELS": channels, "DEPTH": depth, "NEAR": 8, "SPLITS": splits}
    # a tensor core takes 64 rows of its first factor
    first = int(rows < 64 or weights_first)
    return Config(tiles | {"WEIGHTS_FIRST": first}, num_warps, num_stages, exception=exception)


PRODUCTS: Mapping[Multiplied, Mapping[int, Config]] = MappingProxyType(
    {
        FP8: {
            16: _product(16, 128, 128, 4, 4),
            32: _product(32, 128, 128, 4, 4),
            64: _product(64, 128, 128, 4, 4, splits=2),
            128: _product(128, 128, 128, 8, 4),
        },
        torch.int8: {
            16: _product(16, 128, 128, 4, 4),
            64: _product(64, 128, 128, 4, 4, splits=2),
            128: _product(128, 128, 128, 8, 4),
        },
        torch.bfloat16: {
            16: _product(16, 64, 128, 4, 4),
            64: _product(64, 128, 64, 4, 4, splits=2),
            128: _product(128, 256, 64, 8, 4),
        },
        "int4": {
            16: _product(16, 128, 128, 4, 4),
            32: _product(32, 64, 128, 4, 4, splits=2),
            64: _product(64, 64, 128, 4, 3, weights_first=True),
            128: _product(128, 128, 64, 8, 4, weights_first=True),
        },
        "mxfp4": {
            16: _product(16, 64, 256, 4, 4),
            32: _product(32, 128, 128, 4, 4, splits=2),
            64: _product(64, 128, 128, 4, 3, weights_first=True),
            128: _product(128, 128, 128, 4, 3, weights_first=True),
        },
    }
)
"""By what is multiplied, and by the rows that an expert has room for, or on average."""
DENSE_PRODUCTS: Mapping[Multiplied, Mapping[int, Config]] = MappingProxyType(
    {
        FP8: {**PRODUCTS[FP8], 16: _product(16, 64, 128, 4, 6), 32: _product(32, 64, 128, 4, 6)},
        torch.int8: {**PRODUCTS[torch.int8], 16: _product(16, 64, 128, 4, 6)},
        "int4": {**PRODUCTS["int4"], 16: _product(16, 64, 128, 4, 4)},
        "mxfp4": PRODUCTS["mxfp4"],
    }
)
"""The same for one matrix, which for few rows is cut more finely, into enough tiles for all multiprocessors."""
GATED_PRODUCTS: Mapping[Multiplied, Mapping[int, Config]] = MappingProxyType(
    {
        FP8: {
            16: _product(16, 128, 128, 8, 3),
            32: _product(32, 128, 128, 8, 3),
            64: _product(64, 128, 128, 8, 4, splits=2),
        },
        torch.bfloat16: {
            16: _product(16, 64, 128, 4, 3),
            64: _product(64, 128, 64, 8, 4, splits=2),
            128: _product(128, 128, 64, 8, 4),
        },
        "int4": {
            16: _product(16, 64, 128, 4, 3),
            32: _product(32, 64, 128, 4, 3, splits=2),
        },
        "mxfp4": {
            16: _product(16, 64, 256, 4, 3),
            32: _product(32, 64, 256, 4, 2, splits=2),
            64: _product(64, 64, 128, 4, 3, weights_first=True),
        },
    }
)
"""The same for both halves of a gated MLP at once. In FP8 there is none of 128 rows: the sums of both halves do not fit
in registers beside those that are not scaled yet; in four bits, beside unpacked weights."""
MOST_IN_ROOM: Mapping[Multiplied, int] = MappingProxyType({"int4": 32, "mxfp4": 32})
"""The rows of a tile in room for more, if not 64: on an H200 a tile of 64 rows took 1.4 (INT4) and 1.8 times (MXFP4) as
long as one of 16, since fewer blocks unpack at one time."""
FLOAT32_PRODUCT = _product(32, 64, 32, 4, 2, exception="float32 has no tensor cores; only tests use it")


def of_product(numbers: Multiplied, rows: int, form: str = "dense") -> Config:
    """Return the config of a product of `numbers`, whose experts have so many rows, or "room" for so many, of which
    most are empty."""
    found = _of_rows(DENSE_PRODUCTS if form == "dense" else PRODUCTS, numbers, rows, form)
    assert found is not None
    return found


def of_gated_product(numbers: Multiplied, rows: int, form: str = "dense") -> Config | None:
    """Do so for `GATED_PRODUCTS`. Returns None where the halves are better multiplied one after the other."""
    return _of_rows(GATED_PRODUCTS, numbers, rows, form)


def _of_rows(
    configs: Mapping[Multiplied, Mapping[int, Config]], numbers: Multiplied, rows: int, form: str
) -> Config | None:
    if numbers == torch.float32:
        return FLOAT32_PRODUCT
    by_rows = configs[torch.bfloat16 if numbers == torch.float16 else numbers]
    most = max(PRODUCTS[torch.bfloat16])
    least = next((least for least in by_rows if rows <= least), most)
    return by_rows.get(min(least, MOST_IN_ROOM.get(numbers, 64)) if form == "room" else least)


TURN_QUERIES = Config({"ROWS": 64}, num_warps=4)
SELECT = Config({"BLOCK": 1024}, num_warps=8)
JOIN_CHOSEN = Config(num_warps=4)


def of_copy(dtype: torch.dtype) -> Config:
    """Return the config of copies of contexts. float32 is for tests."""
    return Config({"ROWS": 128 if dtype == torch.float32 else 32}, num_warps=8)


def of_prefill(dtype: torch.dtype) -> Config:
    """Return the config of attention with many queries. float32 is for tests."""
    if dtype == torch.float32:
        return Config({"BLOCK_Q": 64, "BLOCK_S": 64}, num_warps=8, num_stages=1)
    return Config({"BLOCK_Q": 128, "BLOCK_S": 128}, num_warps=8, num_stages=2)


def of_index_scores(dtype: torch.dtype, *, decode: bool) -> Config:
    """Return the config of index scores. Decode has more blocks of fewer keys. float32 is for tests."""
    if dtype == torch.float32:
        return Config({"BLOCK_Q": 16, "BLOCK_S": 64}, num_warps=4, num_stages=1)
    if decode:
        return Config({"BLOCK_Q": 1, "BLOCK_S": 128}, num_warps=4, num_stages=2)
    return Config({"BLOCK_Q": 64, "BLOCK_S": 256}, num_warps=8, num_stages=3)


def of_chosen(num_heads: int, dtype: torch.dtype) -> Config:
    """Return the config of attention to chosen positions. float32 is for tests."""
    if dtype == torch.float32:
        return Config({"BLOCK_H": 16, "BLOCK_S": 16}, num_warps=4, num_stages=1)
    return Config({"BLOCK_H": min(64, max(16, triton.next_power_of_2(num_heads))), "BLOCK_S": 32}, num_warps=8)


MULTIPROCESSORS = 132
"""Of an H100, H200 or H800."""


def _decode(rows: int, tokens: int, newest: int, stages: int = 2, **more: Any) -> Config:
    return Config({"M": rows, "N": tokens, "NEWEST_N": newest}, num_warps=8, num_stages=stages, **more)


DECODE: Mapping[str, tuple[Config, ...]] = MappingProxyType(
    {
        "plain": (_decode(16, 64, 32), _decode(32, 64, 16), _decode(64, 64, 16)),
        "packed": (
            _decode(16, 32, 32, stages=3, maxnreg=128, blocks=2),
            _decode(32, 32, 32, stages=3),
            _decode(64, 32, 32),
        ),
        "float32": (_decode(16, 16, 16, stages=1, exception="float32 is for tests: it has no tensor cores"),),
    }
)
"""How `mla_decode` is cut, by what pages hold, and by the rows (queries times heads) of a sequence."""
LEAST_BLOCKS = 4
"""A part of a context has no fewer blocks of tokens, because to start one takes as long."""
JOIN_PARTS = Config(tiles={"AT_ONCE": 8})


def of_decode(rows: int, kind: str) -> Config:
    """Return the config whose tile has all rows of a sequence, or the largest one."""
    configs = DECODE[kind]
    return next((config for config in configs if rows <= config.tiles["M"]), configs[-1])


def parts_of(count: int, blocks: int, at_once: int) -> int:
    """Return into how many parts to cut `blocks` of tokens of each of `count` tiles, of which a card has room for
    `at_once`: so that the last round leaves little room empty. To start a part costs as much as a 32nd of a tile's
    work, and not less than `LEAST_BLOCKS`."""

    def time(parts: int) -> float:
        return math.ceil(count * parts / at_once) * (1 / parts + 1 / 32)

    return min(range(1, min(blocks // LEAST_BLOCKS, at_once - 1) + 2), key=time)
