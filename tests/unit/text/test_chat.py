"""Chat templates render what transformers renders of the same messages, and refuse what it refuses."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.text import ChatTemplate
from pdinfer.text import sandbox as sandbox_module

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"größe": ["<a>", 1.5, None, True]}}}
CHAT = [
    {"role": "system", "content": "Be <brief> & kind — 汉字."},
    {"role": "user", "content": "Hi  \n", "name": None},
    {"role": "assistant", "content": "Hello", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "g", "arguments": {}}}]},
    {"role": "user", "content": "{{ bos_token }} 'quoted' \"twice\""},
]

TEMPLATES = {
    "plain": "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}",
    "blocks": """
{% for message in messages %}
    {% if message.role == 'user' %}
<|user|>{{ message.content | trim }}
    {% else %}
<|other|>{{ message.content }}
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
""",
    "tools": "{{ tools | tojson }}|{{ tools | tojson(indent=2) }}|{{ messages | tojson(sort_keys=true) }}|"
    "{{ 'é<' | tojson(ensure_ascii=true) }}|{{ {'a': 1} | tojson(separators=(',', ':')) }}",
    "namespace": "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% if m.role == 'assistant' %}{% set ns.last = m.content %}{% endif %}{% endfor %}{{ ns.n }} {{ ns.last }}",
    "loops": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}{{ loop.index }}{{ m.content }}"
    "{% if loop.first %}!{% endif %}{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{% set word = m.content %}{{ word }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{{ word is defined }}",
    "macro": "{% macro show(m, mark='>') %}{{ mark }}{{ m.content.split()[-1] if m.content else '' }}{% endmacro %}"
    "{% for m in messages[1:] %}{{ show(m) }}{{ show(m, mark='#') }}{% endfor %}",
    "variables": "{{ enable_thinking is defined and not enable_thinking }}{{ level }}{{ documents[0].title }}",
    "nothing said": "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name }}"
    "{% endif %}{% endfor %}",
    "keys": "{% for m in messages %}{{ m.keys() | list }}{{ m.get('name', 'nobody') }}{% endfor %}"
    "{{ dict(a=1, b=[2]) }}{{ messages | map(attribute='role') | join(',') }}{{ messages[2].tool_calls is iterable }}",
}
REFUSING = {
    "refuses": "{{ raise_exception('roles must alternate') }}",
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "append": "{{ messages.append(1) }}",
    "update": "{% for m in messages %}{{ m.update({'content': ''}) }}{% endfor %}",
    "namespace": "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "import": "{% import 'os' as os %}{{ os }}",
    "include": "{% include '/etc/passwd' %}",
    "missing": "{{ messages[99].content.strip() }}",
    "range": "{% for i in range(10000000) %}{{ i }}{% endfor %}",
    "recursion": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "types": "{{ 1 + 'a' }}",
}
EMPTY = {
    "attribute": "{{ messages.__class__ }}{{ raise_exception.__globals__ }}",
    "format": "{{ '{0.__class__}'.format(messages) }}",
    "name": "{{ undefined_name }}{{ os }}{{ __import__ }}",
}
MORE = {"enable_thinking": False, "level": 3}
DOCUMENTS = [{"title": "T", "text": "t"}]


def theirs(source: str, *, prompt: bool) -> str:
    """What transformers makes of messages as they are. Its apply_chat_template drops keys that are None before."""
    from transformers.utils.chat_template_utils import render_jinja_template  # takes a second, which no process that
    # only collects tests shall pay

    given: dict[str, Any] = TOKENS | MORE
    (rendered,), _ = render_jinja_template(
        [CHAT], tools=[TOOL], documents=DOCUMENTS, chat_template=source, add_generation_prompt=prompt, **given
    )
    assert isinstance(rendered, str)
    return rendered


def ours(source: str, *, prompt: bool = True) -> str:
    return ChatTemplate(source, TOKENS).render(
        CHAT, tools=[TOOL], documents=DOCUMENTS, add_generation_prompt=prompt, variables=MORE
    )


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("name", [*TEMPLATES, *EMPTY])
def test_a_template_renders_as_in_transformers(name: str, prompt: bool) -> None:
    source = {**TEMPLATES, **EMPTY}[name]
    rendered = ours(source, prompt=prompt)
    assert rendered == theirs(source, prompt=prompt)
    assert (rendered == "") == (name in EMPTY)


@pytest.mark.parametrize("name", REFUSING)
def test_what_a_template_must_not_do_is_refused_as_in_transformers(name: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 - whatever jinja2 raises
        theirs(REFUSING[name], prompt=True)
    with pytest.raises((pd.RequestError, pd.CheckpointError)) as raised:
        ours(REFUSING[name])
    about = "does what it must not" if name in ("classes", "append", "update", "namespace") else ""
    assert about in str(raised.value)
    assert isinstance(raised.value, pd.CheckpointError) == bool(about)


def test_a_refusal_says_what_the_template_says() -> None:
    with pytest.raises(pd.RequestError, match=r"^the chat template refuses this chat: roles must alternate$"):
        ours(REFUSING["refuses"])


def test_the_time_is_the_hosts() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2031, 2, 3))  # noqa: DTZ001
    assert template.render(CHAT) == "03 Feb 2031"
    now = ChatTemplate("{{ strftime_now('%Y') }}").render(CHAT)
    assert now == theirs("{{ strftime_now('%Y') }}", prompt=False)


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'a' ", "{% endif %}", "{{" + "(" * 5000])
def test_a_broken_template_is_refused_when_it_is_made(source: str) -> None:
    with pytest.raises(pd.CheckpointError, match=r"the chat template (is broken: line 1|cannot be compiled)"):
        ChatTemplate(source)


class Writes:
    """A value with a method that a template must not call."""

    def write(self) -> None:
        raise AssertionError("a template called a method of the host")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one message"),
        (["Hi"], r"messages\[0\] must be a dict"),
        ([{"role": "user", "content": Writes()}], "JSON values only: 'Writes' is none"),
        ([{"role": "user", "content": b"Hi"}], "JSON values only"),
    ],
)
def test_a_chat_that_is_none_is_refused(messages: list[Any], says: str) -> None:
    with pytest.raises(pd.RequestError, match=says):
        ChatTemplate("{{ messages[0].content.write() }}").render(messages)


def test_a_template_changes_nothing_of_the_hosts() -> None:
    class Frozen(Mapping[str, str]):
        def __getitem__(self, key: str) -> str:
            return {"role": "user", "content": "Hi"}[key]

        def __iter__(self) -> Any:
            return iter(("role", "content"))

        def __len__(self) -> int:
            return 2

    assert ChatTemplate("{{ messages[0].content }}").render((Frozen(),)) == "Hi"


def test_an_old_jinja2_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module.jinja2, "__version__", "3.1.5")
    with pytest.raises(pd.BackendUnavailable, match=re.escape("jinja2 3.1.6 or later, and this is 3.1.5")):
        ChatTemplate("{{ messages }}")


def test_without_jinja2_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "pdinfer.text.sandbox")
    with pytest.raises(pd.BackendUnavailable, match=re.escape("pip install 'pdinfer[text]'")):
        ChatTemplate("{{ messages }}")


def test_templates_of_a_folder(tmp_path: Path) -> None:
    """A file of its own goes before tokenizer_config.json, and tools have a template of their own."""
    source = Path(__file__).parents[3] / "examples" / "tiny"
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    named = '[{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]'
    (tmp_path / "tokenizer_config.json").write_text(f'{{"chat_template": {named}}}')
    made = pd.text.Tokenizer.load(tmp_path)
    assert (made.chat(CHAT), made.chat(CHAT, tools=[TOOL])) == ((ord("D"),), (ord("T"),))
    (tmp_path / "chat_template.jinja").write_text("F")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    made = pd.text.Tokenizer.load(tmp_path)
    assert made.chat(CHAT) == (ord("F"),)
    assert made.templates["rag"].render(CHAT) == "R"
