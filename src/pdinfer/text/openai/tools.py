"""The tools of a chat: which are shown to the model, and the choice among them that a client may force.

A forced call is an answer by a schema, whatever markup the model has for calls: the arguments of the one tool, or
{"name": …, "parameters": …} where the model may choose among several.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from pdinfer.checks import clip
from pdinfer.errors import RequestError
from pdinfer.text.dialects import CallDelta, Delta, new_call_id
from pdinfer.text.openai.body import ChatBody

Tool = dict[str, Any]
MODES = ("none", "auto", "required")
NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
OTHERS = frozenset(
    {
        *("additionalProperties", "patternProperties", "unevaluatedProperties", "dependentSchemas"),
        *("$ref", "allOf", "anyOf", "oneOf", "if"),
    }
)
"""The keywords of a schema about properties other than those that it lists."""


@attrs.frozen
class Tools:
    """The tools of a chat. `shown` are those that the template shows, `schema` is what forces a call: of the tool
    `named`, or of any where that is None. `at_most_one` drops the calls after the first."""

    shown: tuple[Tool, ...] = ()
    schema: dict[str, Any] | None = None
    named: str | None = None
    at_most_one: bool = False

    @property
    def are_parsed(self) -> bool:
        """True if calls are read from the model's own markup."""
        return bool(self.shown) and self.schema is None

    @classmethod
    def of(cls, body: ChatBody) -> Tools:
        """Read `tools`, `tool_choice` and `parallel_tool_calls`. Raise RequestError for what they cannot say."""
        tools = tuple(_checked(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or []))
        names = [tool["function"]["name"] for tool in tools]
        if len(set(names)) < len(names):
            raise RequestError(f"two tools have one name; the names are {clip(names)}")
        forced = _forced(body.tool_choice, tools)
        if body.tool_choice == "none" or not tools:
            return cls()
        if not forced:
            return cls(tools, at_most_one=body.parallel_tool_calls is False)
        if len(forced) > 1:
            return cls(tools, _any_of(forced))
        return cls(tools, _parameters(forced[0]), forced[0]["function"]["name"])


def _checked(tool: Tool, at: str) -> Tool:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise RequestError(f'{at} must be {{"type": "function", "function": {{"name": …}}}}, got {clip(tool)}')
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"{at}.function.name must be 1 to 128 letters, digits, or one of _ - . :, got {clip(name)}")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"{at}.function.parameters must be a JSON schema, got {clip(parameters)}")
    return tool


def _forced(choice: str | dict[str, Any] | None, tools: Sequence[Tool]) -> Sequence[Tool]:
    """Return the tools of which one has to be called, or none where the model need not call any."""
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if choice.get("type") == "function" and isinstance(function, dict) else None
        named = [tool for tool in tools if tool["function"]["name"] == name]
        if not named:
            raise RequestError(
                f'tool_choice must be {{"type": "function", "function": {{"name": …}}}} with the name of a tool, '
                f"one of {clip([tool['function']['name'] for tool in tools])}; got {clip(choice)}"
            )
        return named
    if choice not in (None, *MODES):
        raise RequestError(f"tool_choice must be one of {', '.join(MODES)}, or name a tool, got {clip(choice)}")
    if choice == "required" and not tools:
        raise RequestError("tool_choice is required, and the call has no tools")
    return tools if choice == "required" else ()


def _parameters(tool: Tool) -> dict[str, Any]:
    """Return the schema of the arguments. A function takes those that it lists: clients leave `additionalProperties`
    out, which in a schema of anything else would allow others."""
    parameters: dict[str, Any] = tool["function"].get("parameters") or {"type": "object", "properties": {}}
    is_whole = "properties" in parameters and not OTHERS & parameters.keys()
    return {**parameters, "additionalProperties": False} if is_whole else parameters


def _any_of(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the schema of a call of any of the tools. What their own schemas refer to is in them still."""
    calls, parameters = [], {}
    for number, tool in enumerate(tools):
        root = f"#/$defs/{number}"
        parameters[str(number)] = _moved(_parameters(tool), root)
        properties = {"name": {"const": tool["function"]["name"]}, "parameters": {"$ref": root}}
        required = {"required": ["name", "parameters"], "additionalProperties": False}
        calls.append({"type": "object", "properties": properties, **required})
    return {"anyOf": calls, "$defs": parameters}


def _moved(schema: Any, root: str) -> Any:
    """Return a schema that refers to its own parts where it stands below `root` of another."""
    if isinstance(schema, list):
        return [_moved(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(part, root) for name, part in schema.items()}
    if isinstance(to := moved.get("$ref"), str) and to.startswith("#"):
        moved["$ref"] = root + to[1:]
    return moved


class ForcedCall:
    """Reads the text of a forced call, as it comes, as the deltas of one call. `named` is the tool, or None where the
    text says which."""

    _HEAD = re.compile(r'\{"name":("(?:[^"\\]|\\.)*"),"parameters":')

    def __init__(self, named: str | None, new_id: Callable[[], str] = new_call_id) -> None:
        self._name = named
        self._is_wrapped = named is None
        self._new_id = new_id
        self._held = ""
        self._written: list[str] = []
        self._has_begun = False

    def push(self, text: str) -> Iterator[Delta]:
        """Take more of the text."""
        self._held += text
        if self._is_wrapped and self._name is None:
            head = self._HEAD.match(self._held)
            if head is None:
                return
            self._name, self._held = json.loads(head[1]), self._held[head.end() :]
        if self._held:
            yield self._delta(len(self._held) - self._is_wrapped)  # the last brace belongs to the wrapping

    def end(self) -> Iterator[Delta]:
        """Take the end of the text. What never became a call is content."""
        if self._name is None:
            yield Delta(content=self._held)
        elif self._held and not self._is_whole():
            yield self._delta(len(self._held))

    def _delta(self, length: int) -> Delta:
        ready, self._held = self._held[:length], self._held[length:]
        first = {} if self._has_begun else {"call_id": self._new_id(), "name": self._name}
        self._has_begun = True
        self._written.append(ready)
        return Delta(call=CallDelta(index=0, arguments=ready, **first))

    def _is_whole(self) -> bool:
        """Return whether the arguments are, so that what is held is the brace of the wrapping."""
        try:
            json.loads("".join(self._written))
        except ValueError:
            return False
        return True
