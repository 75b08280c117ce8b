"""The signatures of libraries for cards, read from their wheels, and stand-ins that are called as these are.

deep_gemm cannot be imported without CUDA, and Mooncake's functions are compiled. So `tests/wheels.json` has the
parameters of what we call, of each wheel as its Python source or its docstrings declare them. `python -m tests.wheels
WHEEL…` writes them anew: from wheels of sgl-deep-gemm, without importing them, and from the Mooncake that is installed.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

DECLARED = Path(__file__).with_suffix(".json")
CALLED = {
    "deep_gemm": (
        "fp8_gemm_nt",
        "m_grouped_fp8_gemm_nt_contiguous",
        "m_grouped_fp8_gemm_nt_masked",
        "fp8_m_grouped_gemm_nt_masked",
        "get_symm_buffer_for_sm90_mega_moe",
        "transform_weights_for_mega_moe_sm90",
        "mega_moe_pre_dispatch_sm90",
        "fp8_mega_moe",
    ),
    "mooncake": (
        "initialize",
        "get_rpc_port",
        "batch_register_memory",
        "batch_unregister_memory",
        "transfer_submit_write",
        "transfer_check_status",
    ),
}
"""What we call of each library, and its parameters are known: `get_mk_alignment_for_contiguous_layout` is compiled."""


def parameters_of(library: str, name: str) -> dict[str, str]:
    """Return the parameters of a function, as its declaration has them in parentheses, by the wheels that have it."""
    declared = json.loads(DECLARED.read_text("utf-8"))[library]
    return {wheel: names[name] for wheel, names in declared.items() if name in names}


def signature(parameters: str) -> inspect.Signature:
    """Return the signature of a function with these parameters. Defaults are None, and annotations are text."""
    (function,) = ast.parse(f"def function({parameters}): ...").body
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    assert not any((given.vararg, given.kwarg, given.kwonlyargs, given.posonlyargs)), parameters
    required = len(given.args) - len(given.defaults)
    return inspect.Signature(
        [
            inspect.Parameter(
                each.arg,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=inspect.Parameter.empty if at < required else None,
                annotation=inspect.Parameter.empty if each.annotation is None else ast.unparse(each.annotation),
            )
            for at, each in enumerate(given.args)
        ]
    )


def called_as(library: str, function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Return a stand-in that raises TypeError for a call that does not fit the function of that name of a wheel. Its
    own parameters, unless it takes any, have the names of the wheels' first ones, in their order."""
    signatures = [signature(each) for each in parameters_of(library, name or function.__name__).values()]
    assert signatures, f"no wheel of {library} has {name or function.__name__}"
    ours = inspect.signature(function).parameters
    if not any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in ours.values()):
        assert all([*each.parameters][: len(ours)] == [*ours] for each in signatures), function.__name__

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        for each in signatures:
            each.bind(*arguments, **named)
        return function(*arguments, **named)

    return call


def read(wheel: Path) -> dict[str, str]:
    """Return the parameters of the functions of deep_gemm that a wheel declares and CALLED names."""
    with zipfile.ZipFile(wheel) as files:
        tree = ast.parse(files.read("deep_gemm/__init__.py"))
    functions = {each.name: each.args for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    for each in ast.walk(tree):
        if isinstance(each, ast.Assign) and isinstance(each.value, ast.Name) and each.value.id in functions:
            functions |= {to.id: functions[each.value.id] for to in each.targets if isinstance(to, ast.Name)}
    return {name: ast.unparse(functions[name]) for name in CALLED["deep_gemm"] if name in functions}


def read_mooncake() -> Iterator[tuple[str, str]]:
    """Yield the functions of the installed Mooncake, with the parameters that their docstrings declare behind self."""
    engine = importlib.import_module("mooncake.engine").TransferEngine
    for name in CALLED["mooncake"]:
        declared = getattr(engine, name).__doc__.partition(f"{name}(")[2].rpartition(") -> ")[0]
        yield name, declared.partition(", ")[2]


def _name_of(wheel: Path) -> str:
    return f"{wheel.name} sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}"


if __name__ == "__main__":
    from pdinfer.kv.transports.mooncake import DISTRIBUTIONS

    here = {each.metadata["Name"]: each.version for each in importlib.metadata.distributions()}
    mooncake = next(f"{name} {here[name]}" for name in DISTRIBUTIONS if name in here)
    found = {
        "deep_gemm": {_name_of(Path(wheel)): read(Path(wheel)) for wheel in sys.argv[1:]},
        "mooncake": {mooncake: dict(read_mooncake())},
    }
    DECLARED.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
