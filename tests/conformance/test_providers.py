"""A provider that this machine could have serves what it offers. The suites make cases of what is served, so that a
provider which cannot be loaded would be missed by nobody else. (Triton, in an interpreter: test_triton_interpreter.py.)
"""

from __future__ import annotations

from importlib import import_module

import pytest

from pdinfer.kernels import OpSpec, compositions
from pdinfer.kernels.ops import OP_NAMES
from pdinfer.kernels.resolve import PROVIDERS
from tests.conformance.native_builds import why_no_native
from tests.conformance.op_suite import DTYPES, NAMES, serves

HERE = ["torch", "reference"] if why_no_native() else ["native", "torch", "reference"]


@pytest.mark.parametrize("provider", HERE)
def test_a_provider_that_could_be_here_serves_what_it_offers(provider: str) -> None:
    module = import_module(dict(PROVIDERS)[provider])
    refuses = getattr(module, "refuses", lambda op, spec: None)
    served = 0
    for dtype in DTYPES:
        if provider == "native" and str(dtype) != "torch.bfloat16":
            continue
        wanted = {op for op in OP_NAMES if op in dir(module) and not refuses(op, OpSpec(device="cpu", dtype=dtype))}
        assert wanted == {op for op in wanted if serves(provider, op, "cpu", dtype)}, dtype
        served += len(wanted)
    assert served > 15


def test_every_op_has_cases() -> None:
    assert {"torch", "reference", "triton", "native"} <= set(NAMES)
    for dtype in DTYPES:
        lacking = [op for op in OP_NAMES if not serves("reference", op, "cpu", dtype)]
        assert not lacking
    assert [op for op in OP_NAMES if not hasattr(import_module(dict(PROVIDERS)["reference"]), op)] == [
        op for op in OP_NAMES if hasattr(compositions, op)
    ]
