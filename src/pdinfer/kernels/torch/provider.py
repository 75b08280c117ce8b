"""The provider "torch": fast eager torch, batched where the reference loops, in the tensors' own dtype where rounding
allows it."""

from __future__ import annotations

from pdinfer.kernels import reference
from pdinfer.kernels.formats.floats import Plain
from pdinfer.kernels.formats.four_bits import MXFP4, Int4
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.formats.int8 import Int8Dynamic
from pdinfer.kernels.formats.int8_static import Int8Static
from pdinfer.kernels.ops import Products
from pdinfer.kernels.spec import OpSpec
from pdinfer.kernels.torch import attention, experts, products, rows

MODULES = (products, attention, experts, rows, reference)
"""The reference is last: norms, routing and draws have no faster form in eager torch."""
WEIGHTS = {
    Plain: Products(products.linear, experts.grouped_mlp),
    FP8Blocks: Products(products.linear_fp8, experts.grouped_mlp_fp8),
    Int8Dynamic: Products(products.linear_int8, experts.grouped_mlp_int8),
    Int8Static: Products(products.linear_int8_static),
    Int4: Products(products.linear_four_bits, experts.grouped_mlp_four_bits),
    MXFP4: Products(products.linear_four_bits, experts.grouped_mlp_four_bits),
}


def unavailable(spec: OpSpec) -> str | None:
    """Return None: eager torch runs on every device."""
    return None


slow = products.slow
