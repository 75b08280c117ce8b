"""Tell what hosts lose between a release and now: public names that are gone or changed and were not deprecated before.

The rules are those of `docs/stability.md`. Public names are lines as `tests/public.py` writes them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

import attrs

READ_ONLY = {"property", "member_descriptor", "cached_property"}
"""Kinds of attributes between which a host sees no difference."""


def lost(released: Iterable[str], now: Iterable[str], changelog: str) -> list[str]:
    """Return the released names that are gone or changed now, though no released version deprecated them."""
    here = {path_of(line): line for line in now}
    broken = {path_of(line) for line in released if not still_fits(line, here.get(path_of(line)))}
    told = deprecated(changelog)
    return sorted(path for path in broken if not any(is_within(path, name) for name in told))


def path_of(line: str) -> str:
    """Return the name that a line is about."""
    return re.split(r"[:(]", line, maxsplit=1)[0]


def is_within(path: str, name: str) -> bool:
    """Return whether a path is a name, or a member of what has this name."""
    return f"{path}.".startswith(f"{name}.")


def released_versions(changelog: str) -> dict[str, str]:
    """Return what the changelog says of each version that has a date, the newest first."""
    parts = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    dated = [(re.match(r"\[(\d+\.\d+\.\d+)\] - \d{4}-\d\d-\d\d\n", part), part) for part in parts]
    return {found[1]: part for found, part in dated if found}


def deprecated(changelog: str) -> set[str]:
    """Return the names in backticks under **Deprecated** of every version that has a date."""
    sections = [text for part in released_versions(changelog).values() for text in re.split(r"\n### ", part)[1:]]
    return {
        name for text in sections if text.startswith("Deprecated\n") for name in re.findall(r"`(pd\.[\w.]+)`", text)
    }


def still_fits(before: str, now: str | None) -> bool:
    """Return whether code that was written for a name as it was may use it as it is."""
    if now is None or before == now:
        return now is not None
    kinds = [line.removeprefix(f"{path_of(line)}: ") for line in (before, now)]
    if READ_ONLY.issuperset(kinds):
        return True
    try:
        was, has = Signature.parse(before), Signature.parse(now)
    except SyntaxError:  # no function, or a default value that Python cannot read
        return False
    return has.takes_calls_of(was)


@attrs.frozen
class Parameter:
    """A parameter: the types it takes, and its default as text, or None where it has none."""

    types: frozenset[str]
    default: str | None

    @classmethod
    def parse(cls, argument: ast.arg, default: ast.expr | None) -> Parameter:
        text = "" if argument.annotation is None else ast.unparse(argument.annotation).strip("'\"")
        return cls(frozenset(text.split(" | ")), None if default is None else ast.unparse(default))

    def takes(self, before: Parameter) -> bool:
        """Return whether whatever was passed before may be, and whether leaving it out means the same."""
        return self.types >= before.types and before.default in (None, self.default)


@attrs.frozen
class Signature:
    """The parameters of a function or a class, and everything else that its line says."""

    by_place: dict[str, Parameter]
    by_name: dict[str, Parameter]
    rest: tuple[str, ...]

    @classmethod
    def parse(cls, line: str) -> Signature:
        text = line.removeprefix(path_of(line))
        kind, rest = re.fullmatch(r"(: class\([^)]*\) )?(.*)", text).groups("")  # type: ignore[union-attr]
        function = ast.parse(f"def f{rest}: ...").body[0]
        assert isinstance(function, ast.FunctionDef)
        told = function.args
        places = [*told.posonlyargs, *told.args]
        defaults = [*[None] * (len(places) - len(told.defaults)), *told.defaults]
        return cls(
            {one.arg: Parameter.parse(one, default) for one, default in zip(places, defaults, strict=True)},
            {
                one.arg: Parameter.parse(one, default)
                for one, default in zip(told.kwonlyargs, told.kw_defaults, strict=True)
            },
            (kind, *(ast.unparse(one) if one else "" for one in (function.returns, told.vararg, told.kwarg))),
        )

    def takes_calls_of(self, before: Signature) -> bool:
        """Return whether every call of the old signature is one of this: what is new may be left out."""
        ours, theirs = {**self.by_place, **self.by_name}, {**before.by_place, **before.by_name}
        return (
            self.rest == before.rest
            and list(self.by_place)[: len(before.by_place)] == list(before.by_place)
            and all(name in ours and ours[name].takes(one) for name, one in theirs.items())
            and all(one.default is not None for name, one in ours.items() if name not in theirs)
        )
