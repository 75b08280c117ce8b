"""The order of the C sources as data, and a function that finds what breaks it.

A unit is a source and the header of its name. It includes, and calls, units below it alone. A header without a source
says what several sources share, or what one of several bodies has to define: its declarations are no calls.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath

# The units of each folder, top to bottom. What stands in a row uses only rows below it.
UNITS: dict[str, tuple[tuple[str, ...], ...]] = {
    "kernels/native": (
        ("products", "experts", "int8", "fp8_strips", "four_bits", "decode", "prefill", "rows", "draws"),
        ("parts", "tiles", "pairs", "floats", "fp8", "decode_tiles"),
        ("few_rows", "strips", "decode_body"),
        ("amx", "attention", "thread_scratch"),
        ("vectors",),
        ("sets",),
    ),
    "kv": (("fused",),),
}

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DECLARED = re.compile(r"^(?!typedef|#)\w[\w *]*(\([^;{}]*\))?;", re.MULTILINE)
_FUNCTION = re.compile(r"^(?!static|INLINE|EXPORT|typedef)\w[\w *]*?\b(\w+)\([^;{}]*\) \{", re.MULTILINE)
_OBJECT = re.compile(r"^(?!static|typedef|extern)\w[\w *]*?\b(\w+)(?:\[\w*\])? = ", re.MULTILINE)


def read_c(root: Path) -> dict[str, str]:
    """Return the C sources and headers below a folder, by their paths in it."""
    files = sorted(path for path in root.rglob("*") if path.suffix in (".c", ".h"))
    return {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in files}


def c_order(sources: Mapping[str, str]) -> list[str]:
    """Units include and call what is below them: no circles, and no arrows up."""
    texts = {PurePath(path): _DECLARED.sub("", _COMMENT.sub("", text)) for path, text in sources.items()}
    owners = [(name, path) for path, text in texts.items() for name in _defined(path, text)]
    complaints = []
    for path, text in texts.items():
        rows = UNITS.get(path.parent.as_posix(), ())
        level = {unit: at for at, row in enumerate(rows) for unit in row}
        if path.stem not in level:
            complaints.append(f"{path} has no place: give {path.stem!r} a row in UNITS, tests/c_order.py")
            continue
        for how, unit in _used(path, text, owners):
            if level.get(unit, -1) <= level[path.stem]:
                complaints.append(f"{path} {how} of {unit}, which is not below it")
    return complaints


def _defined(path: PurePath, text: str) -> set[str]:
    """Return what other sources can call and read. Exported functions are for Python alone."""
    return {*_FUNCTION.findall(text), *_OBJECT.findall(text)} if path.suffix == ".c" else set()


def _used(path: PurePath, text: str, owners: list[tuple[str, PurePath]]) -> Iterator[tuple[str, str]]:
    """Yield how a file uses other units of its folder."""
    for header in re.findall(r'^ *# *include "([\w.]+)"', text, re.MULTILINE):
        if PurePath(header).stem != path.stem:
            yield f"includes {header}", PurePath(header).stem
    code = re.sub(r"^ *# *include .*", "", text, flags=re.MULTILINE)
    mine = {name for name, owner in owners if owner.stem == path.stem}
    for name, owner in owners:
        if owner.parent == path.parent and name not in mine and re.search(rf"\b{name}\b", code):
            yield f"uses {name}", owner.stem
