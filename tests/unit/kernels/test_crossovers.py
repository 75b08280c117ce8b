"""Calls go to the provider that was measured to be faster, and the table says what the results say."""

from __future__ import annotations

import json
import math
import re
import sys
from itertools import groupby
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch

from pdinfer.kernels import DeviceSpec, OpSpec, crossovers, resolve, resolve_ops
from pdinfer.kernels.crossovers import Card, Measured, Table
from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.resolve import explain_backends
from pdinfer.kernels.torch import products as torch_products
from tests.backends import ROOT
from tests.conformance.op_suite import fp8_weight

OP = "grouped_mlp[fp8]"
EXPERTS = 3
CASES = {
    "dense": re.compile(r"dense FP8, (\d+) x"),
    "sorted": re.compile(r"contiguous grouped FP8, \d+ x (\d+) x"),
    "room": re.compile(r"masked grouped FP8, \d+ experts, \d+ of (\d+) rows"),
}
"""How results call what was measured, with its rows."""


def times(of: Measured) -> dict[str, list[float]]:
    """Return the times of each provider in the cases of a results file."""
    found: dict[str, list[float]] = {}
    for line in (ROOT / "benchmarks" / "results" / of.results).read_text().splitlines():
        said = json.loads(line)
        case = CASES[of.form].match(said["case"])
        if case is None or int(case[1]) != of.rows or "missing" in said:
            continue
        name = said.get("baseline", said["provider"])
        found.setdefault(name, []).append(said.get("baseline_value", said["value"]))
    return found


@pytest.mark.parametrize("of", crossovers.table().measured, ids=lambda of: f"{of.op}-{of.form}-{of.rows}")
def test_the_table_says_what_was_measured(of: Measured) -> None:
    """The geometric means of all cases of so many rows are in that order."""
    found = times(of)
    means = [math.prod(found[name]) ** (1 / len(found[name])) for name in of.fastest]
    assert means == sorted(means)


def test_names_and_cards_are_those_that_there_are() -> None:
    table, names = crossovers.table(), {each.name for each in resolve.PROVIDERS}
    cards = {card.name for card in table.cards}
    assert all(each.card in cards and names.issuperset(each.fastest) for each in table.measured)
    assert all(DeviceSpec.of(card.name).is_hopper for card in table.cards)
    for key, group in groupby(table.measured, key=lambda each: (each.card, each.op, each.form)):
        of_form = [*group]
        assert of_form == sorted(of_form, key=lambda each: each.rows)
        assert len(of_form) == sum((each.card, each.op, each.form) == key for each in table.measured)
        assert len({frozenset(each.fastest) for each in table.measured if (each.card, each.op) == key[:2]}) == 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two providers of experts, by the names of those that were measured, which note that they were called."""
    calls: list[str] = []
    providers = []
    for name in ("deep_gemm", "triton"):
        module = ModuleType(f"tests_{name}")
        for function in ("grouped_mlp_fp8", "linear_fp8"):
            setattr(module, function, lambda *_, name=name: calls.append(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        providers.append(resolve.Provider(name, module.__name__))
    rest = [each for each in resolve.PROVIDERS if each.name in ("composition", "torch", "reference")]
    monkeypatch.setattr(resolve, "PROVIDERS", (*providers, *rest))
    return calls


def call(rows: int, *, room: bool = False, device: str = "H200", **more: Any) -> None:
    """Call the op with so many rows of each expert, or room for them."""
    shape = (EXPERTS, rows, 256) if room else (EXPERTS * rows, 256)
    x, counts_E = torch.empty(shape, dtype=torch.bfloat16), torch.zeros(EXPERTS, dtype=torch.int64)
    gate_up, down = fp8_weight(EXPERTS, 128, 256, parts=2), fp8_weight(EXPERTS, 256, 128)
    resolve_ops(OpSpec(device=device), **more).ops[OP](x, counts_E, gate_up, down)


@pytest.mark.parametrize(
    ("rows", "room", "faster"),
    [
        *((rows, False, "triton") for rows in (0, 1, 4, 181)),
        *((rows, False, "deep_gemm") for rows in (182, 9000)),
        *((rows, True, "triton") for rows in (128, 8192)),
    ],
)
def test_a_call_goes_to_the_provider_that_was_faster(calls: list[str], rows: int, room: bool, faster: str) -> None:
    """Between 4 rows and 8192 the border is at their geometric mean, 181."""
    call(rows, room=room)
    assert calls == [faster]


WHOLE, CUT = fp8_weight(128, 256), fp8_weight(128, 136)


@pytest.mark.parametrize(
    ("weight", "rows", "faster"), [(WHOLE, 128, "triton"), (WHOLE, 129, "torch"), (CUT, 129, "triton")]
)
def test_products_of_many_rows_are_left_to_cublas(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], weight: FP8Blocks, rows: int, faster: str
) -> None:
    """Where DeepGEMM is not, and where cuBLAS reads the matrix: of others torch makes floats in every call."""
    monkeypatch.setattr(sys.modules["tests_deep_gemm"], "unavailable", lambda _spec: "is elsewhere", raising=False)
    monkeypatch.setattr(torch_products, "linear_fp8", lambda *_: calls.append("torch"))
    monkeypatch.setattr(torch_products, "why_no_fp8", lambda _device: None)
    x = torch.empty(rows, weight.numbers.shape[1], dtype=torch.bfloat16)
    resolve_ops(OpSpec(device="H200")).ops["linear[fp8]"](x, weight)
    assert calls == [faster]


def test_what_is_slow_on_a_device_does_not_join_in(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    monkeypatch.setattr(torch_products, "why_no_fp8", lambda _device: "is too old")
    x = torch.empty(4096, 256, dtype=torch.bfloat16)
    resolved = resolve_ops(OpSpec(device="H200"))
    resolved.ops["linear[fp8]"](x, WHOLE)
    assert calls == ["deep_gemm"]
    (choice,) = (choice for choice in resolved.choices if choice.op == "linear[fp8]")
    assert (choice.provider, choice.others, choice.slow) == ("deep_gemm", ("triton",), None)


def test_a_provider_that_is_asked_for_by_name_serves_what_others_do_faster(calls: list[str]) -> None:
    call(4, forced={OP: "deep_gemm"})
    assert calls == ["deep_gemm"]


def test_where_only_one_was_measured_it_serves(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    monkeypatch.setattr(sys.modules["tests_triton"], "unavailable", lambda _spec: "is elsewhere", raising=False)
    call(4)
    assert calls == ["deep_gemm"]
    (choice,) = (choice for choice in resolve_ops(OpSpec(device="H200")).choices if choice.op == OP)
    assert choice.fastest is None


@pytest.mark.usefixtures("calls")
def test_it_is_told_where_that_was_measured() -> None:
    lines = [line.strip() for line in explain_backends("H200").splitlines()]
    assert f"{OP:<{lines[0].index('provider') - 2}}  deep_gemm, else triton" in lines
    assert (
        "fastest on H200: triton up to 181 rows of each expert, deep_gemm above; in room triton "
        "(2026-11-26-gpu-h200-engines.jsonl, 2026-11-26-gpu-h200.jsonl)"
    ) in lines
    assert "fastest on H200, the nearest card to H800: triton up to 181" in explain_backends("H800")
    here = OpSpec(device=DeviceSpec("cuda", "NVIDIA H200", (9, 0)))
    assert "fastest on H200: triton up to 181" in explain_backends(here)


H20 = attrs.evolve(DeviceSpec.of("H20"), name="NVIDIA H20")


@pytest.mark.parametrize(
    ("device", "nearest"),
    [("H200", "H200"), ("H800", "H200"), (H20, "H20"), (DeviceSpec("cuda", "NVIDIA H21", (9, 0)), "H20")],
    ids=str,
)
def test_a_card_takes_the_nearest_one(monkeypatch: pytest.MonkeyPatch, device: str | DeviceSpec, nearest: str) -> None:
    """By multiprocessors and bandwidth. Of a card that the table does not know nothing is known, and the first counts.
    "H20" is no part of the name "H200"."""
    measured = [Measured(card, OP, "room", 128, ("triton", "deep_gemm"), "none.jsonl") for card in ("H20", "H200")]
    table = Table(crossovers.table().cards, tuple(measured))
    monkeypatch.setattr(crossovers, "table", lambda: table)
    found = crossovers.of(OP, OpSpec(device=device))
    assert found is not None
    assert [each.card for each in found.measured] == [nearest]


def test_other_devices_and_ops_have_no_order() -> None:
    assert crossovers.of(OP, OpSpec(device="cpu")) is None
    assert crossovers.of("rms_norm", OpSpec(device="H200")) is None
    assert crossovers.of(OP, OpSpec(device="H200", dtype=torch.float16)) is None
    assert Card("a", 100, 1000).distance(Card("b", 100, 1000)) == 0
