"""Every field of examples/kubernetes is one that the published schemas know, and has a value of its kind.

`kubernetes_schemas.json` says where the schemas are from. It has the names of all fields beside those that the
manifests use, and the kinds of those that they use; any value goes for the others ("any").
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.backends import ROOT

KINDS: dict[str, Any] = json.loads((ROOT / "tests/kubernetes_schemas.json").read_text("utf-8"))["kinds"]
PLAIN: dict[str, tuple[type, ...]] = {
    "any": (object,),
    "object": (dict,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "int-or-string": (int, str),
}


def manifests() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((ROOT / "examples/kubernetes/group.yaml").read_text("utf-8")))


def wrong(value: Any, schema: Any, where: str) -> Iterator[str]:
    """Say what of a value its schema does not know."""
    if isinstance(schema, str):
        is_bool = isinstance(value, bool) and "boolean" not in schema and schema != "any"
        if is_bool or not isinstance(value, PLAIN[schema]):
            yield f"{where} is {value!r}, and no {schema}"
    elif "enum" in schema:
        if value not in schema["enum"]:
            yield f"{where} is {value!r}, and none of {schema['enum']}"
    elif not isinstance(value, list if "items" in schema else dict):
        yield f"{where} is {value!r}"
    elif "items" in schema:
        for at, each in enumerate(value):
            yield from wrong(each, schema["items"], f"{where}[{at}]")
    elif "values" in schema:
        for key, each in value.items():
            yield from wrong(each, schema["values"], f"{where}.{key}")
    else:
        known = schema["properties"]
        yield from (f"{where} has no {name}" for name in schema["required"] if name not in value)
        for key, each in value.items():
            if key in known:
                yield from wrong(each, known[key], f"{where}.{key}")
            else:
                yield f"{where}.{key} is unknown"


def complaints(objects: list[dict[str, Any]]) -> list[str]:
    return [
        told
        for each in objects
        for told in wrong(each, KINDS[f"{each['apiVersion']} {each['kind']}"], each["metadata"]["name"])
    ]


def test_the_published_schemas_know_the_manifests() -> None:
    assert complaints(manifests()) == []


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        (("spec", "leaderWorkerTemplate", "size"), "two", "size is 'two', and no integer"),
        (("spec", "leaderWorkerTemplate", "restartPolicy"), "Always", "is 'Always', and none of"),
        (("spec", "leaderWorkerTemplates"), {}, "spec.leaderWorkerTemplates is unknown"),
        (("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "containers", 0, "readyProbe"), {}, "is unknown"),
        (("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "containers", 0, "env"), {}, "env is {}"),
    ],
)
def test_a_manifest_that_is_wrong_is_found(path: tuple[Any, ...], value: Any, told: str) -> None:
    objects = copy.deepcopy(manifests())
    place: Any = next(each for each in objects if each["kind"] == "LeaderWorkerSet")
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (found,) = complaints(objects)
    assert told in found
