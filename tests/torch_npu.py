"""The signatures of torch_npu's ops, read from its wheel, and whether a call that is written as text fits one.

torch_npu cannot be imported without CANN, so `tests/torch_npu.json` has the lines of its wheel for the ops that the
profile of Ascend calls, and the public names of its module `torch.npu`. `python -m tests.torch_npu WHEEL` writes them
anew from a wheel of PyPI, without importing it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pdinfer.planning.profiles import deployments

SIGNATURES = Path(__file__).with_suffix(".json")
DECLARED = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
"""Where a wheel has the signatures of all its ops, one a line."""
MODULE = "torch_npu/npu/__init__.py"
LITERALS = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
"""What may be written out for an argument of a type. Any name may stand for any value."""


def calls() -> list[str]:
    """Return every call of the profile of Ascend, as it is written there."""
    ops = [op for deployment in deployments() for op in (*deployment.ops, *deployment.beside_ops)]
    return sorted({call for op in ops for call in op.calls})


def name_of(call: str) -> str:
    return call.partition("(")[0]


def schemas_of(name: str) -> list[Any]:
    """Return the schemas of an op, one for each overload: of torch_npu as its wheel has them, of torch as it says
    itself."""
    library, _, op = name.rpartition(".")
    if library == "torch_npu":
        return [torch._C.parse_schema(f"npu::{line}") for line in _stored()["signatures"].get(op, ())]
    packet = getattr(torch.ops.aten, op)
    return [getattr(packet, overload)._schema for overload in packet.overloads()]


@cache
def _stored() -> Any:
    return json.loads(SIGNATURES.read_text("utf-8"))


def names_of_module() -> set[str]:
    """Return the public names of `torch.npu`."""
    return set(_stored()["module"])


def why_not(call: str, schemas: Sequence[Any]) -> list[str]:
    """Return why a call fits none of the schemas, a sentence for each. Nothing where it fits one, or more."""
    expression = ast.parse(call, mode="eval").body
    assert isinstance(expression, ast.Call), call
    problems = [next(_problems(expression, schema), "") for schema in schemas]
    if not problems:
        return [f"there is no {name_of(call)}"]
    return problems if all(problems) else []


def _problems(call: ast.Call, schema: Any) -> Iterator[str]:
    by_place = [argument for argument in schema.arguments if not argument.kwarg_only]
    if len(call.args) > len(by_place):
        yield f"{schema.name} takes {len(by_place)} arguments by place, not {len(call.args)}"
    by_name = {keyword.arg: keyword.value for keyword in call.keywords}
    given = {argument.name: value for argument, value in zip(by_place, call.args, strict=False)}
    for name in given.keys() & by_name.keys():
        yield f"{schema.name} gets {name} twice"
    given |= by_name
    known = {argument.name: argument for argument in schema.arguments}
    for name, value in given.items():
        if name not in known:
            yield f"{schema.name} has no {name}"
        elif not _fits(value, str(known[name].type)):
            yield f"{name} of {schema.name} is {known[name].type}, not {ast.unparse(value)}"
    for name, argument in known.items():
        if name not in given and not argument.has_default_value():
            yield f"{schema.name} needs {name}"


def _fits(value: ast.expr, kind: str) -> bool:
    """Return whether an expression may be a value of a type, as torch writes it."""
    if optional := re.fullmatch(r"Optional\[(.*)\]", kind):
        return (isinstance(value, ast.Constant) and value.value is None) or _fits(value, optional[1])
    items = re.fullmatch(r"List\[(.*)\]", kind)
    if isinstance(value, ast.List):
        return items is not None and all(_fits(each, items[1]) for each in value.elts)
    try:
        literal = ast.literal_eval(value)  # -1 is an operation
    except ValueError:
        return True
    return type(literal) in LITERALS.get(kind, ())


def read(wheel: Path) -> dict[str, object]:
    """Return what a wheel declares of the ops in `calls`, and which wheel it is."""
    with zipfile.ZipFile(wheel) as files:
        text, module = files.read(DECLARED).decode(), ast.parse(files.read(MODULE))
    (public,) = (
        ast.literal_eval(node.value)
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    declared = re.findall(r"func: ((\w+)(?:\.\w+)?\(.*\) -> .*)", text)
    wanted = sorted(
        {op for call in calls() for library, _, op in [name_of(call).rpartition(".")] if library == "torch_npu"}
    )
    return {
        "wheel": wheel.name,
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "module": public,
        "signatures": {op: sorted({line for line, name in declared if name == op}) for op in wanted},
    }


if __name__ == "__main__":
    SIGNATURES.write_text(json.dumps(read(Path(sys.argv[1])), indent=1) + "\n", "utf-8")
