"""Tools, the choice among them, and calls that a schema makes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer.text.openai.body import read
from pdinfer.text.openai.tools import ForcedCall, Tools

ADD = {"type": "object", "properties": {"a": {"$ref": "#/$defs/N"}}, "$defs": {"N": {"type": "integer"}}}


def tool(name: str, parameters: Any = None) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, **({} if parameters is None else {"parameters": parameters})},
    }


def tools_of(**more: Any) -> Tools:
    body = read(json.dumps({"messages": [{"role": "user", "content": "a"}], **more}), is_chat=True)
    return Tools.of(body)  # type: ignore[arg-type]


def test_tools_are_told_unless_none_may_be_called() -> None:
    asked = [tool("look"), tool("add", ADD)]
    for choice in ({}, {"tool_choice": None}, {"tool_choice": "auto"}):
        tools = tools_of(tools=asked, **choice)
        assert (tools.shown, tools.schema, tools.are_parsed, tools.at_most_one) == (tuple(asked), None, True, False)
    assert tools_of(tools=asked, parallel_tool_calls=False).at_most_one
    for idle in ({"tools": asked, "tool_choice": "none"}, {"tools": []}, {"tool_choice": "none"}):
        assert tools_of(**idle) == Tools()


def test_a_choice_becomes_the_schema_of_the_tool_or_of_any() -> None:
    asked = [tool("look"), tool("add", ADD)]
    named = tools_of(tools=asked, tool_choice={"type": "function", "function": {"name": "add"}})
    assert (named.named, named.schema, named.are_parsed) == ("add", {**ADD, "additionalProperties": False}, False)
    assert tools_of(tools=asked[:1], tool_choice="required").named == "look"
    schema = tools_of(tools=asked, tool_choice="required").schema
    assert schema is not None
    assert [call["properties"]["name"] for call in schema["anyOf"]] == [{"const": "look"}, {"const": "add"}]
    assert schema["$defs"]["1"]["properties"]["a"] == {"$ref": "#/$defs/1/$defs/N"}


@pytest.mark.parametrize(
    ("says", "is_closed"),
    [
        ({"properties": {}}, True),
        ({}, False),
        ({"properties": {}, "additionalProperties": {"type": "string"}}, False),
        ({"properties": {}, "allOf": [{"properties": {"b": {}}}]}, False),
    ],
    ids=["lists them", "lists none", "has others", "is one of several"],
)
def test_a_forced_call_has_the_arguments_that_the_tool_lists(says: dict[str, Any], is_closed: bool) -> None:
    schema = tools_of(tools=[tool("look", {"type": "object", **says})], tool_choice="required").schema
    assert schema == {"type": "object", **says, **({"additionalProperties": False} if is_closed else {})}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\] must be"),
        ({"tools": [tool("a"), {"type": "function"}]}, r"tools\[1\] must be"),
        ({"tools": [tool("a b")]}, r"tools\[0\].function.name"),
        ({"tools": [tool("a", [1])]}, "parameters must be a JSON schema"),
        ({"tools": [tool("a"), tool("a")]}, "two tools have one name"),
        ({"tool_choice": "required"}, "the call has no tools"),
        ({"tools": [tool("a")], "tool_choice": "always"}, "tool_choice must be one of"),
        ({"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}}, "one of"),
        ({"tools": [tool("a")], "tool_choice": {"type": "allowed_tools"}}, "tool_choice must be"),
    ],
)
def test_what_tools_cannot_say_is_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(pd.RequestError, match=says):
        tools_of(**more)


ARGUMENTS = st.dictionaries(
    st.text(max_size=4), st.integers() | st.text(max_size=6) | st.lists(st.booleans(), max_size=2)
)


@given(
    arguments=ARGUMENTS, name=st.sampled_from(["look", 'a"b']), cuts=st.lists(st.integers(0, 80)), wrapped=st.booleans()
)
def test_a_forced_call_comes_in_any_pieces(arguments: Any, name: str, cuts: list[int], wrapped: bool) -> None:
    text = json.dumps(arguments, separators=(",", ":"))
    said = f'{{"name":{json.dumps(name)},"parameters":{text}}}' if wrapped else text
    forced = ForcedCall(None if wrapped else name, lambda: "call_1")
    ends = sorted({min(cut, len(said)) for cut in cuts} | {0, len(said)})
    deltas = [delta for at, end in itertools.pairwise(ends) for delta in forced.push(said[at:end])]
    deltas += forced.end()
    calls = [delta.call for delta in deltas if delta.call is not None]
    assert [delta for delta in deltas if delta.call is None] == []
    assert [(call.call_id, call.name) for call in calls] == [("call_1", name), *[(None, None)] * (len(calls) - 1)]
    assert "".join(call.arguments for call in calls) == text


def test_a_forced_call_that_was_cut_off_is_told_as_far_as_it_came() -> None:
    forced = ForcedCall(None, lambda: "call_1")
    deltas = [*forced.push('{"name":"look","parameters":{"a":{}'), *forced.end()]
    assert "".join(delta.call.arguments for delta in deltas if delta.call) == '{"a":{}'
    forced = ForcedCall(None)
    assert [delta.content for delta in (*forced.push('{"name":"lo'), *forced.end())] == ['{"name":"lo']
