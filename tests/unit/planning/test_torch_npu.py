"""Every call that the profile of Ascend plans fits the wheel of torch_npu, whose module has what we ask of devices."""

from __future__ import annotations

import types
import zipfile
from pathlib import Path

import pytest

from pdinfer.process.streams import ASKED, _graph_class
from tests.torch_npu import DECLARED, MODULE, _stored, calls, name_of, names_of_module, read, schemas_of, why_not

NORM = "torch_npu.npu_rms_norm"


@pytest.mark.parametrize("call", calls())
def test_a_planned_call_fits_the_signature_of_the_wheel(call: str) -> None:
    assert why_not(call, schemas_of(name_of(call))) == []


def test_the_module_of_an_npu_has_what_is_asked_of_a_device() -> None:
    there = types.SimpleNamespace(type="npu")
    assert {*ASKED, _graph_class(there)} <= names_of_module()  # type: ignore[arg-type]
    assert "CUDAGraph" not in names_of_module()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (f"{NORM}(x)", "needs gamma"),
        (f"{NORM}(x, weight, eps, 1)", "takes 3 arguments by place, not 4"),
        (f"{NORM}(x, weight, eps=1e-6)", "has no eps"),
        (f"{NORM}(x, weight, gamma=weight)", "gets gamma twice"),
        (f'{NORM}(x, weight, "1e-6")', "epsilon of npu::npu_rms_norm is float, not '1e-6'"),
        (f"{NORM}([x], weight)", "self of npu::npu_rms_norm is Tensor, not [x]"),
        (f"{NORM}(x, None)", "gamma of npu::npu_rms_norm is Tensor, not None"),
        ("torch_npu.npu_swiglu(x, True)", "dim of npu::npu_swiglu is int, not True"),
        ("torch_npu.npu_grouped_matmul(x, [w], split_item='2')", "split_item of npu::npu_grouped_matmul is Optional"),
        ("torch_npu.npu_rms_normal(x, weight)", "there is no torch_npu.npu_rms_normal"),
    ],
)
def test_a_call_that_does_not_fit_is_told_why(call: str, reason: str) -> None:
    reasons = why_not(call, schemas_of(name_of(call)))
    assert reasons
    assert any(reason in each for each in reasons), reasons


def test_signatures_are_read_from_a_wheel(tmp_path: Path) -> None:
    """With their overloads, once each, and only those that are called."""
    lines = [line for of_op in _stored()["signatures"].values() for line in of_op]
    text = "".join(f"- func: {line}\n  exposed: true\n" for line in [*lines, *lines, "npu_unknown(Tensor x) -> Tensor"])
    wheel = tmp_path / "torch_npu-9.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr(DECLARED, text)
        files.writestr(MODULE, '__all__ = [\n    "Stream",\n    "NPUGraph",\n]\n')
    found = read(wheel)
    assert found["signatures"] == _stored()["signatures"]
    assert (found["wheel"], found["module"]) == ("torch_npu-9.whl", ["Stream", "NPUGraph"])
    assert all(_stored()["signatures"].values())
