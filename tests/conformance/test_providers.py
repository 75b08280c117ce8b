"""A provider that this machine could have serves what it offers. The suites make cases of what is served, so that a
provider which cannot be loaded would be missed by nobody else. (Triton, in an interpreter: test_triton_interpreter.py.)
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

from pdinfer.kernels import compositions, reference
from pdinfer.kernels.formats.strips import FP8Strips, Strips
from pdinfer.kernels.ops import OP_NAMES, function_of
from pdinfer.kernels.resolve import PROVIDERS, _offers
from tests.conformance.native_builds import why_no_native
from tests.conformance.op_suite import DTYPES, NAMES, serves

HERE = {
    "native": (torch.bfloat16,) if not why_no_native() else (),
    "torch": DTYPES,
    "reference": DTYPES,
}
"""The dtypes of models that each is for, on this CPU."""
STRIPS = {*Strips.ops(), *FP8Strips.ops()}
BY_CPU = {"native": {"mla_prefill", *STRIPS}}
"""What a provider refuses where something else is faster on a CPU. Whatever else it lacks was lost."""


@pytest.mark.parametrize(("provider", "dtype"), [(name, dtype) for name, dtypes in HERE.items() for dtype in dtypes])
def test_a_provider_that_could_be_here_serves_what_it_offers(provider: str, dtype: torch.dtype) -> None:
    module = next(import_module(each.module) for each in PROVIDERS if each.name == provider)
    wanted = {op for op in OP_NAMES if _offers(module, op)} - BY_CPU.get(provider, set())
    assert len(wanted) > 15
    assert [op for op in sorted(wanted) if not serves(provider, op, "cpu", dtype)] == []


def test_every_op_has_cases() -> None:
    suites = "".join(
        path.read_text("utf-8") for path in Path(__file__).parent.glob("test_*.py") if path.stem != "test_providers"
    )
    unnamed = [op for op in OP_NAMES if f'"{op}"' not in suites]
    assert not unnamed, f"no suite here names {unnamed}: nothing compares their numbers with the reference"
    assert {"torch", "reference", "triton", "native"} <= set(NAMES)
    for dtype in DTYPES:
        lacking = [op for op in OP_NAMES if not serves("reference", op, "cpu", dtype)]
        assert not lacking
    assert [op for op in OP_NAMES if function_of(reference, op) is None] == [
        op for op in OP_NAMES if function_of(compositions, op) is not None
    ]
