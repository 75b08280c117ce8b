"""Values that a model wrote as plain text, as JSON. The schemas come from clients, and may be anything."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

TEXT = frozenset({"string"})


def properties_of(tools: Iterable[object]) -> dict[str, Mapping[str, Any]]:
    """Return the schemas of the parameters of each function that OpenAI's list of tools describes."""
    found = {}
    for tool in tools:
        match tool:
            case {"function": {"name": str(name), "parameters": {"properties": Mapping() as properties}}}:
                found[name] = properties
    return found


def types_of(schema: object) -> frozenset[str]:
    """Return the types that a schema allows, or none where it says none or says them in a more complicated way."""
    match schema:
        case {"type": str(kind)}:
            return frozenset({kind})
        case {"type": [*kinds]}:
            return frozenset(kind for kind in kinds if isinstance(kind, str))
        case {"anyOf": [{"type": str(one)}, {"type": str(other)}]}:
            return frozenset({one, other})
    return frozenset()


def as_json(text: str, types: frozenset[str]) -> str:
    """Return a value of these types as JSON: the text itself where it is JSON, and else a JSON string."""
    stripped = text.strip()
    if stripped == "null" or types != TEXT | {"null"}:
        try:
            msgspec.json.decode(stripped)
        except (msgspec.DecodeError, RecursionError):
            pass
        else:
            return stripped
    return quoted(text)


def quoted(text: str) -> str:
    """Return the JSON string of a text."""
    return json.dumps(text, ensure_ascii=False)
