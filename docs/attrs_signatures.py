"""Show classes made by attrs with the signature that attrs gives them: an extension of griffe, which reads sources."""

from __future__ import annotations

from typing import Any

import griffe


class AttrsSignatures(griffe.Extension):
    """Gives each class of attrs its `__init__`, and each field its default in place of `attrs.field(...)`."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the classes of a package that was read."""
        for module in [pkg, *_submodules(pkg)]:
            for found in module.classes.values():
                if not found.is_alias and _decorator(found):
                    _sign(found)


def _submodules(module: griffe.Module) -> list[griffe.Module]:
    return [inner for child in module.modules.values() if not child.is_alias for inner in (child, *_submodules(child))]


def _decorator(found: griffe.Class) -> str | None:
    return next((str(one.value) for one in found.decorators if str(one.value).startswith("attrs.")), None)


def _sign(found: griffe.Class) -> None:
    kind = griffe.ParameterKind
    fields = {name: field for base in [*reversed(found.mro()), found] for name, field in _fields(base)}
    parameters = [griffe.Parameter("self", kind=kind.positional_or_keyword)]
    by_name = "kw_only=True" in (_decorator(found) or "")
    for name, field in fields.items():
        field.value = _default(field.value)
        passed = kind.keyword_only if by_name else kind.positional_or_keyword
        parameters.append(
            griffe.Parameter(name.lstrip("_"), kind=passed, annotation=field.annotation, default=field.value)
        )
    init = griffe.Function("__init__", parameters=griffe.Parameters(*parameters), returns="None", parent=found)
    found.set_member("__init__", init)


def _fields(found: griffe.Class) -> list[tuple[str, griffe.Attribute]]:
    return [
        (name, field)
        for name, field in found.attributes.items()
        if not field.is_alias
        and field.annotation is not None
        and "ClassVar" not in str(field.annotation)
        and "property" not in field.labels
        and "init=False" not in str(field.value)
    ]


def _default(value: Any) -> Any:
    """Return the default of a field, `...` in place of one that is computed, or None where there is none."""
    if not isinstance(value, griffe.ExprCall):
        return value
    if not str(value.function).endswith("field"):  # a private function makes fields that are alike
        return "..." if str(value.function).startswith("_") else value
    named = {one.name: one.value for one in value.arguments if isinstance(one, griffe.ExprKeyword)}
    return named.get("default", "..." if "factory" in named else None)
