"""What clients write in several ways reaches a template in one, and what it would not show is refused."""

from __future__ import annotations

from typing import Any

import pytest

import pdinfer as pd
from pdinfer.text.openai.messages import normalized, takes_texts

pytest.importorskip("jinja2", reason="chats need the package jinja2")

PLAIN = pd.text.ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
AS_TEXT = pd.text.ChatTemplate(
    "{% for m in messages %}{% if m.content is none %}"
    + CALLS
    + "{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
AS_JSON = pd.text.ChatTemplate(
    "{% for m in messages %}" + CALLS + "{{ c.function.arguments | tojson }}{% endfor %}{{ m.content }}{% endfor %}"
)
AS_ITEMS = pd.text.ChatTemplate(
    "{% for m in messages %}"
    + CALLS
    + "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}{% endfor %}{{ m.content }}{% endfor %}"
)


def one(message: dict[str, Any], template: pd.text.ChatTemplate = PLAIN) -> dict[str, Any]:
    (made,) = normalized([message], template)
    return made


def calling(arguments: Any, **more: Any) -> dict[str, Any]:
    function = {"name": "look", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}], **more}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"], "a\nb\nc"),
        ([], ""),
    ],
)
def test_a_content_is_one_text(content: Any, text: str) -> None:
    assert one({"role": "user", "content": content})["content"] == text


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
            r"content\[0\] is of the type",
        ),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}, r"content\[1\]"),
        ({"role": "user", "content": [7]}, r"messages\[0\].content\[0\] is 7"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\]"),
        ({"role": "user", "content": [{"type": ["text"], "text": "a"}]}, r"content\[0\] is of the type \['text'\]"),
        ({"role": "user", "content": 7}, "content must be a text or a list"),
        ({"role": "user", "content": None}, r"messages\[0\].content is missing"),
        ({"role": "tool"}, "content is missing"),
        ({"role": "owner", "content": "a"}, "role must be one of"),
        ({"content": "a"}, "role must be one of"),
        ({"role": "function", "name": "f", "content": "a"}, "deprecated"),
        ({"role": "assistant", "content": None, "function_call": {"name": "f"}}, "became tool_calls"),
        ({"role": "assistant", "content": "a", "audio": {"id": "1"}}, "audio is not served"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, r"tool_calls\[0\] must be"),
        ({"role": "assistant", "tool_calls": "look"}, r"tool_calls\[0\] must be"),
    ],
)
def test_what_a_template_cannot_show_is_refused_with_its_place(message: dict[str, Any], says: str) -> None:
    with pytest.raises(pd.RequestError, match=says):
        one(message)


def test_instructions_of_a_developer_are_those_of_the_system_unless_the_template_knows_the_role() -> None:
    message = {"role": "developer", "content": "Be short."}
    assert one(message)["role"] == "system"
    knows = pd.text.ChatTemplate("{% if messages[0].role == 'developer' %}{{ messages[0].content }}{% endif %}")
    assert one(message, knows)["role"] == "developer"


def test_a_turn_that_only_calls_has_no_content_and_one_that_says_nothing_an_empty_one() -> None:
    assert one(calling("{}", content=None))["content"] is None
    assert one(calling("{}"))["content"] is None
    assert one({"role": "assistant", "content": None, "tool_calls": []}) == {"role": "assistant", "content": ""}
    assert one({"role": "assistant", "content": "a", "tool_calls": []}) == {"role": "assistant", "content": "a"}
    assert one({"role": "assistant", "content": None, "refusal": "No."})["content"] == "No."


@pytest.mark.parametrize(
    ("template", "shown"),
    [(AS_TEXT, 'look{"a": 1}'), (AS_JSON, '{"a": 1}'), (AS_ITEMS, "a=1")],
    ids=["text", "json", "items"],
)
def test_arguments_of_calls_reach_each_template_as_it_takes_them(template: pd.text.ChatTemplate, shown: str) -> None:
    for arguments in ('{"a": 1}', {"a": 1}):
        assert template.render(normalized([calling(arguments, content=None)], template)).startswith(
            f"<call>look {shown}"
        )
    assert takes_texts(template) == (template is AS_TEXT)


def test_arguments_that_are_no_object_are_refused_where_the_template_needs_one() -> None:
    for arguments in ("{", "[1]", "7"):
        with pytest.raises(pd.RequestError, match=r"messages\[0\].tool_calls\[0\].function.arguments must be a JSON"):
            one(calling(arguments), AS_ITEMS)
    assert one(calling("{"), AS_TEXT)["tool_calls"][0]["function"]["arguments"] == "{"
