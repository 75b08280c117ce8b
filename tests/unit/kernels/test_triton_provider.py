"""Where the kernels in Triton run, and what is said where they do not."""

from __future__ import annotations

import importlib
import importlib.metadata

import attrs
import pytest
import torch

from pdinfer.kernels import DeviceSpec, OpSpec
from pdinfer.kernels.ops import OP_NAMES
from pdinfer.kernels.triton import provider

HOPPER = OpSpec(device="H100")


def test_every_op_has_one_family() -> None:
    ops = [op for family in provider.FAMILIES.values() for op in family]
    assert len(ops) == len(set(ops))
    assert set(ops) <= set(provider.PLACES) <= set(OP_NAMES)


def test_every_family_has_its_ops() -> None:
    pytest.importorskip("triton")
    assert all(callable(provider.function(op)) for op in provider.PLACES)


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("cpu", "is for CUDA, device is cpu (TRITON_INTERPRET=1 is for tests)"),
        ("meta", "is for CUDA, device is meta"),
        ("A100", "is for compute capability 9.0 and more, A100 has 8.0"),
        (DeviceSpec("cuda"), "is for compute capability 9.0 and more, cuda has an unknown one"),
    ],
)
def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch, device: str | DeviceSpec, told: str) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert provider.unavailable(OpSpec(device=device)) == told


@pytest.mark.parametrize(("version", "told"), [("3.3.1", "must be 3.4 or newer, found 3.3.1"), ("3.10.0", None)])
def test_an_old_triton_is_refused(monkeypatch: pytest.MonkeyPatch, version: str, told: str | None) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)
    assert provider.unavailable(HOPPER) == told


@pytest.mark.parametrize("op", ["linear[int4]", "grouped_mlp[mxfp4]"])
def test_four_bits_are_for_models_of_bfloat16(op: str) -> None:
    """A float16 may not hold what a scale makes of a code."""
    pytest.importorskip("triton")
    assert provider.refuses(op, HOPPER) is None
    told = "multiplies weights of four bits for models of float32 and bfloat16, not of float16"
    assert provider.refuses(op, attrs.evolve(HOPPER, dtype=torch.float16)) == told
    assert provider.refuses("grouped_mlp", attrs.evolve(HOPPER, dtype=torch.float16)) is None


def test_idle_room_is_not_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepEP's low-latency mode has room for 256 tokens of each of 32 ranks, and an expert gets few of them."""
    pytest.importorskip("triton")
    activations = importlib.import_module("pdinfer.kernels.triton.activations")
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(activations, "launch", lambda _kernel, grid, *_, **__: grids.append(grid))
    x = torch.empty(9, 8192, 4096, dtype=torch.bfloat16, device="meta")
    activations.gated_silu_fp8(x, ue8m0=False, counts_E=torch.empty(9, dtype=torch.int32, device="meta"))
    activations.gated_silu_fp8(x.flatten(0, 1), ue8m0=False)
    assert grids == [(9 * 32, 2), (9 * 8192, 2)]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert provider.unavailable(HOPPER) == "is not installed; pip install 'pdinfer[triton]'"


def test_a_cpu_is_taken_where_kernels_are_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert provider.unavailable(attrs.evolve(HOPPER, device="cpu", dtype=torch.float32)) is None
