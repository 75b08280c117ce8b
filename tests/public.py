"""List what a host sees of pdinfer, as lines of text: every public name with its signature, classes with their members.

`python -m tests.public` writes `tests/public.txt`, which `tests/test_public.py` compares with the code. A line that
changes is a change for hosts: its reason belongs in `docs/decisions/0023-rooms.md`. `python -m tests.public --release`
also writes `tests/released/<version>.txt`, whose names change only as `docs/stability.md` says (`tests/releases.py`).
"""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import get_origin

import pdinfer

SNAPSHOT = Path(__file__).with_suffix(".txt")
RELEASED = SNAPSHOT.with_name("released")


def _objects(module: types.ModuleType) -> Iterator[object]:
    for name in _names(module):
        value = getattr(module, name)
        yield from _objects(value) if isinstance(value, types.ModuleType) else (value,)


def _names(module: types.ModuleType) -> list[str]:
    return getattr(module, "__all__", None) or [name for name in vars(module) if _is_of(name, module)]


def surface() -> list[str]:
    """Return one line per name, sorted, each with the path by which hosts call it: `pd.PagePool.grant(self,
    count)`."""
    return sorted(set(_members("pd", pdinfer)))


def _members(prefix: str, module: types.ModuleType) -> Iterator[str]:
    for name in _names(module):
        value = getattr(module, name)
        if isinstance(value, types.ModuleType):
            yield from _members(f"{prefix}.{name}", value)
        else:
            yield from _described(f"{prefix}.{name}", value)


def _is_of(name: str, module: types.ModuleType) -> bool:
    """Return, for a module without `__all__`, the names that it defines itself."""
    return not name.startswith("_") and getattr(getattr(module, name), "__module__", None) == module.__name__


def _described(name: str, value: object) -> Iterator[str]:
    if isinstance(value, type):
        bases = ", ".join(base.__name__ for base in value.__bases__ if base in _PUBLIC or issubclass(base, Exception))
        yield f"{name}: class({bases}) {_signature(value)}"
        for member in sorted(dir(value)):
            if not member.startswith("_") and not _is_foreign(value, member) and not _is_of_a_base(value, member):
                yield _member(f"{name}.{member}", inspect.getattr_static(value, member))
    elif callable(value):
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name}: {type(value).__name__}"


def _is_foreign(cls: type, member: str) -> bool:
    """Return whether a class has the member from outside, as exceptions and enums do."""
    owner = next((base for base in cls.__mro__ if member in vars(base)), None)
    return owner is None or not owner.__module__.startswith("pdinfer")


def _is_of_a_base(cls: type, member: str) -> bool:
    """Return whether a public base lists the member just so."""
    line = _member(member, inspect.getattr_static(cls, member))
    bases = (base for base in cls.__mro__[1:] if base in _PUBLIC and member in dir(base))
    return any(_member(member, inspect.getattr_static(base, member)) == line for base in bases)


def _member(name: str, value: object) -> str:
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return f"{name}{_signature(value)}" if inspect.isfunction(value) else f"{name}: {type(value).__name__}"


def _signature(value: object) -> str:
    plain = isinstance(value, type) and (issubclass(value, Enum) or getattr(value, "_is_protocol", False))
    if plain or get_origin(value) is not None:
        return "(...)"  # Pythons disagree on what enums, protocols and aliases take
    try:
        text = str(inspect.signature(value))  # type: ignore[arg-type]
    except ValueError:
        return "(...)"
    # A host does not write where a type lives, nor where a default value happened to be in memory.
    text = re.sub(r"\bpdinfer\.(?:\w+\.)*", "", text)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


_PUBLIC = frozenset(each for each in _objects(pdinfer) if isinstance(each, type))


def _version() -> str:
    return str(tomllib.loads((SNAPSHOT.parents[1] / "pyproject.toml").read_text("utf-8"))["project"]["version"])


if __name__ == "__main__":
    written = [SNAPSHOT]
    if "--release" in sys.argv[1:]:
        RELEASED.mkdir(exist_ok=True)
        written.append(RELEASED / f"{_version()}.txt")
    for path in written:
        path.write_text("\n".join(surface()) + "\n")
