"""Checkpoints of each family, as small as they can be told apart, and what their makers' examples of answers mean."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import tokenizers

from pdinfer.text import Tokenizer
from pdinfer.text.dialects import Delta, Dialect, dialect_of
from pdinfer.text.files import TextFiles

THOUGHT = ("<think>", "</think>")
DEEPSEEK = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
KIMI = tuple(f"<|tool_{name}|>" for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_end"))
KIMI += ("<|tool_call_argument_begin|>",)
GLM = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

TEMPLATES = {
    "v3": "{{ tools }}<｜Assistant｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
    "v3_1": "{{ tools }}<｜Assistant｜></think><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
    "kimi": "{{ tools }}<|im_assistant|>assistant<|im_middle|>",
    "glm": "[gMASK]<sop>{{ tools }}<|assistant|>",
}


def tokenizer(added: Iterable[str], *templates: str, special: bool = False) -> Tokenizer:
    """A tokenizer with these added tokens and templates: the one for chats, and then the one for tools."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = [{"id": 1 + at, "content": text, "special": special} | flags for at, text in enumerate(added)]
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    spec = {"version": "1.0", "added_tokens": tokens, "model": model}
    named = dict(zip(("default", "tool_use"), templates, strict=False))
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)), TextFiles(templates=named))


FOLDERS = {
    "deepseek_r1": ((*THOUGHT, *DEEPSEEK), TEMPLATES["v3"]),
    "deepseek_v3": (DEEPSEEK, TEMPLATES["v3"]),
    "deepseek_v3_1": ((*THOUGHT, *DEEPSEEK), TEMPLATES["v3_1"]),
    "deepseek_v3_2": ((*THOUGHT, *DEEPSEEK, "｜DSML｜"),),
    "kimi_k2": ((*THOUGHT, *KIMI), TEMPLATES["kimi"]),
    "glm": ((*THOUGHT, *GLM), TEMPLATES["glm"]),
}
"""By the name of the dialect: added tokens, then templates."""


def dialect(name: str) -> Dialect:
    found = dialect_of(tokenizer(*FOLDERS[name]))
    assert found is not None
    assert found.name == name
    return found


TOOLS: Sequence[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get weather information",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
            },
        },
    }
]


@attrs.frozen
class Answer:
    """All that an answer has told: calls as (id, name, arguments)."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()


def joined(deltas: Iterable[Delta]) -> Answer:
    """The deltas joined, of which each has one thing, and the first of a call its id and name."""
    reasoning, content, calls = "", "", list[tuple[str, str, str]]()
    for delta in deltas:
        assert bool(delta.reasoning) + bool(delta.content) + (delta.call is not None) == 1
        reasoning += delta.reasoning
        content += delta.content
        if (call := delta.call) is None:
            continue
        if call.index == len(calls):
            assert call.call_id
            assert call.name
            calls.append((call.call_id, call.name, call.arguments))
        else:
            assert call.index == len(calls) - 1
            assert call.arguments
            assert (call.call_id, call.name) == (None, None)
            call_id, name, arguments = calls[-1]
            calls[-1] = call_id, name, arguments + call.arguments
    return Answer(reasoning, content, tuple(calls))


def read(
    dialect: Dialect, pieces: Iterable[str], prompt: str = "", tools: Sequence[dict[str, Any]] | None = TOOLS
) -> Answer:
    """What a dialect reads in an answer that comes in these pieces. Ids are counted: "#0", "#1"."""
    numbers = iter(range(1000))
    parser = dialect.parser(prompt, tools, new_id=lambda: f"#{next(numbers)}")
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return joined([*deltas, *parser.end()])
