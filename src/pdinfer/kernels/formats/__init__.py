"""How numbers are held in memory: matrices of weights, activations between ops, and rows of cache pages.

A weight is a float tensor [..., O, I] or a value of a class here, a file each. Leading axes are experts. A new format
is a file and a name in `WEIGHT_FORMATS`; and a `linear_<name>` (with experts also `grouped_mlp_<name>`) in
`kernels.reference`, with its line in `_LINEARS` there, and in `kernels.torch`, since every model resolves all ops. What
reads it from files is a line in `checkpoint.schemes.STORED_FORMS`, what plans with it one in `planning.rank_memory`.

    weights.py      what can be done with a weight of any format
    format.py       what a format of weights is
    floats.py       plain tensors, and floats with a bias; arithmetic that rounds to no model's dtype
    fp8.py          e4m3 with a scale per block of 128 x 128, and its arithmetic
    int8.py         int8 with a scale per row, also with scales of activations that were found beforehand
    four_bits.py    INT4 and MXFP4, with a scale per 32 inputs of a row
    strips.py       bfloat16, FP8 blocks and four bits in the order in which CPU kernels multiply them
    activations.py  activations that were rounded to FP8, as a value
    cache_rows.py   what a row of a cache page holds

May import: the ground."""

from __future__ import annotations

from types import MappingProxyType

from pdinfer.kernels.formats.floats import Plain
from pdinfer.kernels.formats.format import Format
from pdinfer.kernels.formats.four_bits import MXFP4, Int4
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic, Int8Static
from pdinfer.kernels.formats.strips import FP8Strips, Int4Strips, MXFP4Strips, Strips

WEIGHT_FORMATS: tuple[type[Format], ...] = (
    Plain,
    FP8Blocks,
    Int8Dynamic,
    Int8Static,
    Int4,
    MXFP4,
    Strips,
    FP8Strips,
    Int4Strips,
    MXFP4Strips,
)
"""The formats that products read."""
IN_STRIPS = MappingProxyType({kind.strips_of: kind for kind in WEIGHT_FORMATS if kind.strips_of is not None})
"""The formats that can lie in strips, and those that they have then."""
