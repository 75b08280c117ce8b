"""As much of JSON Schema as the schema of a summary uses, to check documents against it without another library."""

from __future__ import annotations

from typing import Any

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}


def problems(value: Any, schema: dict[str, Any], whole: dict[str, Any], at: str = "$") -> list[str]:
    """Return where `value` breaks `schema`, whose `$ref` point into `whole`."""
    if "$ref" in schema:
        return problems(value, whole["$defs"][schema["$ref"].removeprefix("#/$defs/")], whole, at)
    if "anyOf" in schema:
        each = [problems(value, one, whole, at) for one in schema["anyOf"]]
        return [] if [] in each else [f"{at}: no alternative fits: {each}"]
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, TYPES[kind]) or isinstance(value, bool)):
        return [f"{at}: {value!r} is no {kind}"]
    found = []
    if isinstance(value, dict):
        found += [f"{at}: {name} is missing" for name in schema.get("required", []) if name not in value]
        inner = schema.get("properties", {})
        rest = schema.get("additionalProperties", {})
        for name, item in value.items():
            found += problems(item, inner.get(name, rest if isinstance(rest, dict) else {}), whole, f"{at}.{name}")
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        for number, item in enumerate(value):
            found += problems(item, schema["items"], whole, f"{at}[{number}]")
    return found
