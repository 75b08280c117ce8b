"""Our calls of libraries for cards fit what their wheels declare."""

from __future__ import annotations

import ast
import inspect
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pdinfer.kernels import deep_gemm
from pdinfer.kv.transports.mooncake import MooncakeEngine
from pdinfer.kv.transports.one_sided.block import RingEngine
from tests import wheels
from tests.backends import ROOT, need_mooncake

CALLERS = ("src/pdinfer/kernels/deep_gemm.py", "benchmarks/gpu/mega_moe.py")
COMPILED = {"get_mk_alignment_for_contiguous_layout", "get_m_alignment_for_contiguous_layout"}
OF_THE_RING = [name for name in vars(RingEngine) if not name.startswith("_")]


def named_of_deep_gemm() -> set[str]:
    """Return the functions of the library that our sources name: by constants of the adapter, and as attributes."""
    found = {name for names in (deep_gemm.DENSE, deep_gemm.CONTIGUOUS, deep_gemm.MASKED) for name in names}
    for path in CALLERS:
        for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("deep_gemm", "self.library"):
                found.add(node.attr)
    return found


def test_every_function_that_we_call_is_declared_by_a_wheel() -> None:
    assert named_of_deep_gemm() == {*wheels.CALLED["deep_gemm"]}
    assert {*deep_gemm.ALIGNMENT} == COMPILED
    for library, names in wheels.CALLED.items():
        assert not [name for name in names if not wheels.parameters_of(library, name)]


@pytest.mark.parametrize("name", OF_THE_RING)
def test_mooncakes_methods_take_what_the_protocol_gives(name: str) -> None:
    """By position, of these types."""
    ours = [*inspect.signature(getattr(RingEngine, name)).parameters.values()][1:]
    for declared in wheels.parameters_of("mooncake", name).values():
        theirs = [*wheels.signature(declared).parameters.values()]
        assert [each.annotation for each in ours] == [each.annotation for each in theirs[: len(ours)]]
        assert all(each.default is None for each in theirs[len(ours) :])


def test_an_engine_of_mooncake_is_started_as_its_wheel_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Library:
        class TransferEngine:
            pass

    def initialize(*given: str) -> int:
        asked.append(given)
        return 0

    for function in (initialize, lambda: 12):
        name = getattr(function, "__name__", "").replace("<lambda>", "get_rpc_port")
        setattr(Library.TransferEngine, name, staticmethod(wheels.called_as("mooncake", function, name)))
    monkeypatch.setattr("pdinfer.kv.transports.mooncake._load", lambda *_: Library)
    MooncakeEngine(host="node-7")
    assert asked == [("node-7", "P2PHANDSHAKE", "tcp", "")]


def test_the_installed_mooncake_declares_what_is_written_down() -> None:
    need_mooncake()
    for name, declared in wheels.read_mooncake():
        assert declared in wheels.parameters_of("mooncake", name).values()


def test_a_wheel_is_read_without_importing_it(tmp_path: Path) -> None:
    path = tmp_path / "sgl_deep_gemm-9-none-any.whl"
    source = """
raise ImportError
try:
    def fp8_fp4_gemm_nt(a, b: int, c=(1, 128)): ...
    fp8_gemm_nt = fp8_fp4_gemm_nt
except AttributeError:
    pass
def fp8_mega_moe(y, *, sym): ...
"""
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("deep_gemm/__init__.py", source)
    assert wheels.read(path) == {"fp8_gemm_nt": "a, b: int, c=(1, 128)", "fp8_mega_moe": "y, *, sym"}


@pytest.mark.parametrize(
    ("given", "named"), [((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14), {}), ((1, 2), {}), ((1, 2, 3), {"out": 4})]
)
def test_a_call_that_does_not_fit_is_refused(given: tuple[int, ...], named: dict[str, Any]) -> None:
    call = wheels.called_as("deep_gemm", lambda *_, **__: None, "fp8_gemm_nt")
    call(1, 2, 3)
    with pytest.raises(TypeError):
        call(*given, **named)
