"""Chats of DeepSeek-V3.2, whose maker publishes a program that writes them. The expected texts are what that program
makes of these messages (docs/decisions/0060 says where it is, and what else was compared)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.text import ChatTemplate, Tokenizer
from pdinfer.text.files import DEEPSEEK_V32
from tests.unit.text.tokenizers_of import EXAMPLES

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "Größe <a>", "parameters": {"type": "object"}}}
    for name in ("date", "weather")
]
DESCRIBED = """## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the \
user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
{"name": "date", "description": "Größe <a>", "parameters": {"type": "object"}}
{"name": "weather", "description": "Größe <a>", "parameters": {"type": "object"}}
</functions>
"""


def call(name: str, arguments: dict[str, Any], *, as_text: bool) -> dict[str, Any]:
    given = json.dumps(arguments) if as_text else arguments
    return {"id": "call_1", "type": "function", "function": {"name": name, "arguments": given}}


def weather(*, as_text: bool = False) -> list[dict[str, Any]]:
    """A chat of the kind that the maker tests with: calls, one and two at once, and a second question."""
    cities = [call("weather", {"city": city, "days": [1, None], "hot": True}, as_text=as_text) for city in ("SF", "NY")]
    return [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Tomorrow's weather?"},
        {"role": "assistant", "reasoning_content": "Which day?", "tool_calls": [call("date", {}, as_text=as_text)]},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"today": "1"}'},
        {"role": "assistant", "content": None, "reasoning_content": "Both cities.", "tool_calls": cities},
        {"role": "tool", "tool_call_id": "call_2", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_3", "content": "rain"},
        {"role": "assistant", "reasoning_content": "Say it.", "content": "SF is better."},
        {"role": "user", "content": "And the day after?"},
        {"role": "assistant", "reasoning_content": "Ask again.", "tool_calls": cities[:1]},
        {"role": "tool", "tool_call_id": "call_4", "content": "fog"},
    ]


def invoked(city: str) -> str:
    return (
        '<｜DSML｜invoke name="weather">\n'
        f'<｜DSML｜parameter name="city" string="true">{city}</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">[1, null]</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="hot" string="false">true</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
    )


def expected(begin: str, think: str) -> str:
    """What the chat is after the system's message; `think` is what stands where the model may think."""
    reasoning = "Ask again.</think>" if think == "<think>" else ""
    return (
        f"{begin}<｜User｜>Tomorrow's weather?<｜Assistant｜></think>"
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="date">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
        + EOS + '\n\n<function_results>\n<result>{"today": "1"}</result>\n</function_results>\n\n</think>'
        f"\n\n<｜DSML｜function_calls>\n{invoked('SF')}{invoked('NY')}</｜DSML｜function_calls>{EOS}"
        "\n\n<function_results>\n<result>sunny</result>\n<result>rain</result>\n</function_results>\n\n</think>"
        f"SF is better.{EOS}<｜User｜>And the day after?<｜Assistant｜>{think}{reasoning}"
        f"\n\n<｜DSML｜function_calls>\n{invoked('SF')}</｜DSML｜function_calls>{EOS}"
        f"\n\n<function_results>\n<result>fog</result>\n</function_results>\n\n{think}"
    )  # fmt: skip


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(DEEPSEEK_V32.read_text("utf-8"))


@pytest.mark.parametrize("as_text", [False, True])
def test_calls_results_and_reasoning_are_written_as_the_maker_writes_them(
    template: ChatTemplate, as_text: bool
) -> None:
    begin = f"{BOS}Be kind.\n\n{DESCRIBED}"
    chat = weather(as_text=as_text)
    assert template.render(chat, tools=TOOLS) == expected(begin, "</think>")
    for name in ("thinking", "enable_thinking"):
        assert template.render(chat, tools=TOOLS, variables={name: True}) == expected(begin, "<think>")
    own = [{**chat[0], "tools": TOOLS}, *chat[1:]]
    assert template.render(own) == template.render(chat, tools=TOOLS)
    assert template.render(chat[1:], tools=TOOLS) == expected(f"{BOS}\n\n{DESCRIBED}", "</think>")
    assert template.render(chat) == expected(f"{BOS}Be kind.", "</think>")


def test_the_answer_begins_where_the_host_wants_one(template: ChatTemplate) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    assert template.render(chat) == f"{BOS}<｜User｜>Hi<｜Assistant｜></think>"
    assert template.render(chat, variables={"thinking": True}) == f"{BOS}<｜User｜>Hi<｜Assistant｜><think>"
    assert template.render(chat, add_generation_prompt=False) == f"{BOS}<｜User｜>Hi"
    schema = {"role": "developer", "content": "find", "response_format": {"type": "object"}}
    wanted = '## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{"type": "object"}'
    assert template.render([schema]) == (
        f"{BOS}<｜User｜>\n\n{wanted}\n\n# The user's message is: find<｜Assistant｜></think>"
    )


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        ([{"role": "tool", "content": "x"}], "a tool has answered that was not called"),
        ([{"role": "user", "content": ["x"]}], "the content of a message must be text"),
        ([{"role": "developer", "content": ""}], "role developer needs a content"),
        ([{"role": "moderator", "content": "x"}], "no chat has the role moderator"),
        ([{"role": "assistant", "content": "x"}], "needs reasoning_content or tool_calls"),
        ([{"role": "assistant", "tool_calls": [call("f", [], as_text=False)]}], "must be a JSON object"),  # type: ignore[arg-type]
        ([{"role": "assistant", "tool_calls": [call("f", [], as_text=True)]}], "must be a JSON object"),  # type: ignore[arg-type]
    ],
)
def test_what_the_maker_refuses_is_refused(template: ChatTemplate, chat: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(pd.RequestError, match=says):
        template.render([{"role": "system", "content": "s"}, *chat], variables={"thinking": True})


def test_a_folder_of_v32_without_a_template_has_this_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((EXAMPLES / "tiny" / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v3"}')
    assert Tokenizer.load(tmp_path).chat_template is None
    (tmp_path / "config.json").write_text('{"model_type": "deepseek_v32"}')
    made = Tokenizer.load(tmp_path)
    assert made.decode(made.chat([{"role": "user", "content": "Hi"}])) == f"{BOS}<｜User｜>Hi<｜Assistant｜></think>"
    (tmp_path / "chat_template.jinja").write_text("its own")
    made = Tokenizer.load(tmp_path)
    assert made.decode(made.chat([{"role": "user", "content": "Hi"}])) == "its own"
