"""The provider "torch": fast eager torch, batched where the reference loops, in the tensors' own dtype where rounding
allows it."""

from __future__ import annotations

from pdinfer.kernels import reference
from pdinfer.kernels.spec import OpSpec
from pdinfer.kernels.torch import attention, experts, products

MODULES = (products, attention, experts, reference)
"""The reference is last: norms, rotations, routing and draws have no faster form in eager
torch."""


def slow(op: str, spec: OpSpec) -> str | None:
    """Return why an op on quantized weights is slower here than its float form, or None where it is not."""
    if op.endswith("[fp8]") and (reason := products.why_no_fp8(spec.device)):
        told = "makes floats of FP8 weights in every call"
        return told if spec.device.type == "cpu" else f"{told}: {reason}"
    if op.endswith(("[w8a8_dynamic]", "[w8a8]")) and not products.has_int8(spec.device):
        return "has no fused INT8 kernel"
    return None
