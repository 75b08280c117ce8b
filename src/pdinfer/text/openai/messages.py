"""The messages of a chat, as OpenAI's clients send them, become what chat templates expect.

A template reads what its maker thought of, and what it does not read vanishes without a word. So what clients write in
several ways is written in one, and what a template would drop is refused, with its place in the body.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from pdinfer.checks import clip
from pdinfer.errors import RequestError
from pdinfer.text.chat import ChatTemplate

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
TEXTS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}
"""The kinds of parts that are text, and the field that has it."""
PROBE = '{"city": "Oslo"}'


def normalized(messages: Sequence[Message], template: ChatTemplate) -> list[Message]:
    """Return the messages with contents that are one text each, roles that the template knows, and calls of tools as it
    reads them. Raise RequestError, which says where, for what no template can show: pictures and sounds, numbers, a
    content that is missing, and arguments of a call other than a JSON object."""
    return [_normalized(message, f"messages[{number}]", template) for number, message in enumerate(messages)]


def _normalized(message: Message, at: str, template: ChatTemplate) -> Message:
    role = message.get("role")
    if role not in ROLES:
        also = " (deprecated; a tool's answer has the role tool)" if role == "function" else ""
        raise RequestError(f"{at}.role must be one of {', '.join(ROLES)}, got {clip(role)}{also}")
    if message.get("audio") is not None:
        raise RequestError(f"{at}.audio is not served: this model reads text only")
    if message.get("function_call") is not None:
        raise RequestError(f"{at}.function_call is not served: it became tool_calls")
    made = {name: value for name, value in message.items() if value is not None}
    if role == "developer" and not names_role(template, role):
        made["role"] = "system"  # which developer has been called before
    calls = made.pop("tool_calls", None) or []
    if calls:
        made["tool_calls"] = _calls(calls, f"{at}.tool_calls", template)
    content = made.get("content")
    if content is None and role != "assistant":
        raise RequestError(f"{at}.content is missing; a message of the role {role} has a text")
    if content is None:
        made["content"] = None if calls else _refusal(made)
    else:
        made["content"] = _text(content, f"{at}.content")
    return made


def _refusal(message: Message) -> str:
    refusal = message.get("refusal")
    return refusal if isinstance(refusal, str) else ""


def _text(content: object, at: str) -> str:
    """Return a content as one text: its own, or those of its parts, one a line."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{at} must be a text or a list of parts, got {clip(content)}")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        field = TEXTS.get(kind) if isinstance(kind, str) else None  # as it may be anything
        text = part.get(field) if isinstance(part, dict) and field else part
        if not isinstance(text, str):
            what = f"of the type {clip(kind)}" if isinstance(part, dict) else clip(part)
            raise RequestError(f'{at}[{number}] is {what}; this model reads texts only: {{"type": "text", "text": …}}')
        texts.append(text)
    return "\n".join(texts)


def _calls(calls: object, at: str, template: ChatTemplate) -> list[dict[str, Any]]:
    """Return calls with their arguments as the template takes them: a JSON text, as clients send it, or an object."""
    made = []
    for number, call in enumerate(calls if isinstance(calls, list) else [calls]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f'{at}[{number}] must be {{"type": "function", "function": {{"name": …}}}}')
        arguments = function.get("arguments")
        as_text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
        if takes_texts(template):
            wanted: object = as_text
        else:
            wanted = _object(as_text, f"{at}[{number}].function.arguments")
        made.append({**call, "function": {**function, "arguments": wanted}})
    return made


def _object(text: str, at: str) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{at} must be a JSON object as text: {error}") from None
    if not isinstance(found, dict):
        raise RequestError(f"{at} must be a JSON object as text, got {clip(text)}")
    return found


def with_system_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return the messages with a text after that of the first one of the system, or as one of its own."""
    for at, message in enumerate(messages):
        if message["role"] == "system":
            extended = {**message, "content": f"{message['content']}\n\n{text}"}
            return [*messages[:at], extended, *messages[at + 1 :]]
    return [{"role": "system", "content": text}, *messages]


def names_role(template: ChatTemplate, role: str) -> bool:
    """Return whether the template mentions this role."""
    return any(f"{quote}{role}{quote}" in template.source for quote in "'\"")


@functools.lru_cache(maxsize=64)
def takes_texts(template: ChatTemplate) -> bool:
    """Return whether the template shows a call whose arguments are a JSON text as they are. Others, as transformers'
    own convention has it, want an object: they write it as JSON themselves, or walk over its items."""
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": PROBE}}
    chat: list[Message] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "!", "tool_call_id": "call_1"},
    ]
    try:
        return PROBE in template.render(chat)
    except RequestError:
        return False
