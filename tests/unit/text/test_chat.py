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
    "joined": "{{ bos_token ~ messages[0].content ~ 1 ~ none }}{% filter upper %}{{ level }}x{% endfilter %}"
    "{% set all %}{% for m in messages %}{{ loop.last }}{{ loop.length }}{{ loop.index }}{{ loop.previtem is defined }}"
    "{% endfor %}{% endset %}{{ all }}{{ '%s is %05.1f' % ('x', 2) }}{{ '{:>4}'.format(7) }}{{ [1] * 3 + [2 ** 9] }}",
    "trees": "{% for x in [[1, [2, 3]], 4] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
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


DEEP = {
    "expression": "{{" + "(" * 5000,
    "not": "{{ " + "not " * 5000 + "a }}",
    "blocks": "{% if a %}" * 300 + "{% endif %}" * 300,
    "loops": "{% for a in b %}" * 60 + "{% endfor %}" * 60,
    "indented": "{% if a %}" * 99 + "{% endif %}" * 99,
    "digits": "{{ " + "9" * 5000 + " }}",
    "long": "x" * (1 << 17) + "x",
}


@pytest.mark.parametrize("source", ["{% for %}", "{{ 'a' ", "{% endif %}", *DEEP])
def test_a_broken_template_is_refused_when_it_is_made(source: str) -> None:
    with pytest.raises(
        pd.CheckpointError, match=r"the chat template (is broken: line 1|cannot be compiled|has 131073)"
    ):
        ChatTemplate(DEEP.get(source, source))


BIG = {
    "text": "{{ 'a' * 10**9 }}",
    "text of a number": "{{ 10**9 * 'a' }}",
    "list": "{% if ['a'] * 10**9 %}{% endif %}",
    "power": "{{ 10**(10**8) }}",
    "product": "{% set ns = namespace(x=9) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "filled": "{{ 'a' | center(1000000000) }}",
    "filled by a method": "{{ 'a'.ljust(10**9) }}",
    "filled by a keyword": "{{ 'a' | indent(width=1000000000) }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "width of a filter": "{{ '%1000000000d' | format(1) }}",
    "computed width": "{{ '%*d' % (10**9, 1) }}",
    "width of a format": "{{ '{:1000000000}'.format(1) }}",
    "computed width of a format": "{{ '{:{}}'.format(1, 10**9) }}",
    "doubled": "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "joined": "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "written": "{% set x = 'a' * 10**7 %}{% for i in range(99) %}{{ x }}{% endfor %}",
    "kept": "{% set x = 'a' * 10**7 %}{% set y %}{% for i in range(99) %}{{ x }}{% endfor %}{% endset %}",
}


@pytest.mark.parametrize("name", BIG)
def test_a_template_makes_no_more_than_a_chat_can_need(name: str) -> None:
    """It is not computed when the template is compiled, either."""
    template = ChatTemplate(BIG[name])
    with pytest.raises(pd.RequestError, match=r"asks for too much with this chat: it (makes|fills|computes)"):
        template.render(CHAT)


TAKES_LONG = {
    "loops": "{% for i in range(9) %}{% for j in range(9) %}{% endfor %}{% endfor %}",
    "conditions": "{% for i in range(99) if i > 100 %}{% endfor %}",
    "calls": "{% macro m(n) %}{% if n > 0 %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(6) }}",
    "filters": "{{ messages" + " | list" * 99 + " }}",
    "operators": "{{ 1" + " + 1" * 99 + " }}",
    "trees": "{% for x in [[[[1, 2], 1], 1], 1] recursive %}{{ loop([x, x, x]) if loop.depth < 4 }}{% endfor %}",
}


@pytest.mark.parametrize("name", TAKES_LONG)
def test_a_template_has_so_much_of_its_threads_time(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By a clock that goes on by a second whenever it is looked at."""
    seconds = iter(range(10_000))
    monkeypatch.setattr(sandbox_module.time, "thread_time", lambda: float(next(seconds)))
    template = ChatTemplate(TAKES_LONG[name], max_cpu_s=50)
    with pytest.raises(pd.RequestError, match="asks for too much with this chat: it takes more than 50 s"):
        template.render(CHAT)
    assert ChatTemplate("{% for m in messages %}{{ m.role | upper }}{% endfor %}", max_cpu_s=50).render(CHAT)


class Writes:
    """A value with a method that a template must not call."""

    def write(self) -> None:
        raise AssertionError("a template called a method of the host")


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one message"),
        (["Hi"], r"messages\[0\] must be a dict"),
        ([{"role": "user", "content": Writes()}], "JSON values only: got 'Writes'"),
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
