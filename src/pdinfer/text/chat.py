"""The chat template of a checkpoint: a chat goes in, the text that the model was trained on comes out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pdinfer.checks import clip
from pdinfer.errors import BackendUnavailable, RequestError

if TYPE_CHECKING:
    from pdinfer.text.sandbox import Template

Message = Mapping[str, Any]
"""A message in OpenAI's sense: {"role": "user", "content": "Hi"}, with whatever else the template reads."""


def _local_now() -> datetime:
    return datetime.now()  # noqa: DTZ005 - templates write today's date, as on the wall


class ChatTemplate:
    """Renders chats as transformers' `apply_chat_template` does, with the same settings and names. Messages reach the
    template as they are: version 5 of transformers drops their keys that are None, and with `content` a turn that only
    calls tools vanishes from the templates of DeepSeek.

    `special_tokens` are the texts that templates know as `bos_token` and the like, and `now` is what `strftime_now`
    reads. A chat may take `max_cpu_s` of its thread's CPU time. Raises CheckpointError for a template that is broken,
    and BackendUnavailable without jinja2.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        *,
        now: Callable[[], datetime] = _local_now,
        max_cpu_s: float = 5.0,
    ) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._template = _compile(source, now, max_cpu_s)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a chat. `add_generation_prompt` ends it where the assistant's answer begins. `variables`
        are further values that the template reads, such as {"enable_thinking": False}.

        All values are JSON: None, booleans, numbers, texts, lists and dicts. Raises RequestError for others, for no
        message, and for a chat that the template refuses, cannot render or renders for too long, and CheckpointError
        for a template that tries what the sandbox does not allow.
        """
        return self.text_of(plain_chat(messages, tools, documents, variables), add_generation_prompt)

    def text_of(self, values: Mapping[str, Any], add_generation_prompt: bool) -> str:
        """Return the text of a chat of plain values, see `render`."""
        return self._template.render(
            {
                **self._special_tokens,
                **values["variables"],
                "messages": values["messages"],
                "tools": values["tools"],
                "documents": values["documents"],
                "add_generation_prompt": add_generation_prompt,
            }
        )


def plain_chat(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    documents: Sequence[Mapping[str, Any]] | None,
    variables: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Return a copy of what a template reads, in values of JSON alone. Raises RequestError for what has none."""
    if not messages:
        raise RequestError("a chat needs at least one message")
    values = _as_json({"messages": messages, "tools": tools, "documents": documents, "variables": variables or {}})
    for index, message in enumerate(values["messages"]):
        if not isinstance(message, dict):
            raise RequestError(f"messages[{index}] must be a dict with a role and a content, got {clip(message)}")
    return values


def _compile(source: str, now: Callable[[], datetime], max_cpu_s: float) -> Template:
    try:
        from pdinfer.text.sandbox import Template
    except ImportError as error:
        raise BackendUnavailable(
            f"chat templates are rendered by jinja2, which cannot be imported ({error}): pip install 'pdinfer[text]'"
        ) from error
    return Template(source, now, max_cpu_s)


def _as_json(values: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of plain values, so that a template meets no object with methods of its own, and changes none."""
    try:
        copied: dict[str, Any] = json.loads(json.dumps(values, default=_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"a chat holds JSON values only: {error}") from error
    return copied


def _plain(value: object) -> object:
    """Return mappings and sequences as those that JSON has."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"got {clip(type(value).__name__)}")
