"""The choice of a provider for each op, and how it is explained."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels import explain_backends, reference, resolve, resolve_ops
from pdinfer.kernels.ops import OP_NAMES

CPU = torch.device("cpu")


def test_without_a_wish_the_first_provider_serves_everything() -> None:
    assert [(choice.op, choice.provider) for choice in resolve_ops(CPU, torch.float32).choices] == [
        (op, "torch") for op in OP_NAMES
    ]


def test_one_name_forces_all_ops() -> None:
    resolved = resolve_ops(CPU, torch.float32, forced="reference")
    assert {choice.provider for choice in resolved.choices} == {"reference"}
    assert all(getattr(resolved.ops, op) is getattr(reference, op) for op in OP_NAMES)


@pytest.mark.parametrize("op", OP_NAMES)
def test_one_op_is_forced_alone(op: str) -> None:
    resolved = resolve_ops(CPU, torch.float32, forced={op: "reference"})
    assert {choice.op for choice in resolved.choices if choice.provider == "reference"} == {op}
    assert getattr(resolved.ops, op) is getattr(reference, op)


@pytest.mark.parametrize("forced", ["cuda-magic", {"linear": "cuda-magic"}], ids=["all", "one"])
def test_an_unknown_provider_is_refused_by_name(forced: Any) -> None:
    with pytest.raises(
        BackendUnavailable, match=r"no provider is called 'cuda-magic'; there are native, torch, reference"
    ):
        resolve_ops(CPU, torch.float32, forced=forced)


@pytest.fixture
def newcomers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add two preferred providers: one cannot run here, and one has nothing but `linear`."""
    absent, partial = ModuleType("tests_absent_ops"), ModuleType("tests_partial_ops")
    absent.unavailable = lambda device, dtype: f"needs a quantum device, got {device}"  # type: ignore[attr-defined]
    partial.unavailable = lambda device, dtype: None  # type: ignore[attr-defined]
    partial.linear = reference.linear  # type: ignore[attr-defined]
    for module in (absent, partial):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    added = (("absent", absent.__name__), ("partial", partial.__name__))
    everywhere = [provider for provider in resolve.PROVIDERS if provider[0] != "native"]
    monkeypatch.setattr(resolve, "PROVIDERS", (*added, *everywhere))


@pytest.mark.usefixtures("newcomers")
def test_each_provider_passed_over_has_a_reason() -> None:
    choices = {choice.op: choice for choice in resolve_ops(CPU, torch.float32).choices}
    assert choices["linear"].provider == "partial"
    assert choices["linear"].refusals == ("absent: needs a quantum device, got cpu",)
    assert choices["route"].provider == "torch"
    assert choices["route"].refusals == ("absent: needs a quantum device, got cpu", "partial: has no route")


@pytest.mark.usefixtures("newcomers")
@pytest.mark.parametrize(
    ("forced", "sentence"),
    [
        ("absent", "op rms_norm cannot run on cpu: absent: needs a quantum device, got cpu"),
        ({"route": "partial"}, "op route cannot run on cpu: partial: has no route"),
    ],
    ids=["cannot-run", "lacks-the-op"],
)
def test_a_forced_provider_that_cannot_run_says_why(forced: Any, sentence: str) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        resolve_ops(CPU, torch.float32, forced=forced)
    assert str(caught.value) == sentence


def test_explain_backends_is_a_table_of_all_ops() -> None:
    head, *lines = explain_backends("cpu", torch.float32).splitlines()
    assert head.split() == ["op", "provider"]
    slow = [line.strip() for line in lines if "slow: " in line]
    refusals = [line.strip() for line in lines if " not native: " in line]
    assert set(refusals) == {"not native: is for bfloat16, the model runs in torch.float32"}
    lines = [line for line in lines if "slow: " not in line and " not native: " not in line]
    assert [line.split() for line in lines] == [[op, "torch"] for op in OP_NAMES]
    assert slow.count("slow: makes floats of FP8 weights in every call") == 2
    assert len({line.index("torch") for line in lines} | {head.index("provider")}) == 1


@pytest.mark.usefixtures("newcomers")
def test_explain_backends_shows_reasons_below_their_op() -> None:
    lines = [line.strip() for line in explain_backends("cpu").splitlines()]
    at = lines.index(f"{'route':<{max(map(len, OP_NAMES))}}  torch")
    assert lines[at + 1 : at + 3] == ["not absent: needs a quantum device, got cpu", "not partial: has no route"]
