"""The prompts of a call: texts and tokens as they are, or a chat by the checkpoint's template."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from pdinfer.checks import clip
from pdinfer.errors import RequestError
from pdinfer.text.chat import ChatTemplate
from pdinfer.text.dialects import dialect_of, shows_tools
from pdinfer.text.openai.body import MAX_CHOICES, ChatBody, CompletionBody
from pdinfer.text.openai.messages import normalized, with_system_text
from pdinfer.text.openai.tools import Tools
from pdinfer.text.tokenizer import Tokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


class TooLong(RequestError):
    """More tokens than a prompt and its answer may have. Some clients shorten the chat then, and ask again."""


@attrs.frozen
class Prompt:
    """The tokens of a prompt, and its text where the client wants that before the answer."""

    tokens: tuple[int, ...]
    echoed: str = ""


def prompts_of(
    body: CompletionBody | ChatBody, tokenizer: Tokenizer, tools: Tools, *, limit: int, num_new: int
) -> Iterator[Prompt]:
    """Yield the prompts of a call, each of which leaves `num_new` of `limit` tokens. Raise TooLong for one that does
    not, and RequestError for anything but a prompt, and for what the template would not show."""
    made = iter((_chat(body, tokenizer, tools),)) if isinstance(body, ChatBody) else _completions(body, tokenizer)
    for prompt in made:
        if len(prompt.tokens) + num_new > limit:
            raise TooLong(
                f"the prompt has {len(prompt.tokens)} tokens, and its answer may have {num_new}; {limit} are all that "
                "fit: shorten it, or ask for fewer"
            )
        yield prompt


def _completions(body: CompletionBody, tokenizer: Tokenizer) -> Iterator[Prompt]:
    prompts: Any = body.prompt
    if isinstance(prompts, str) or (prompts and all(isinstance(token, int) for token in prompts)):
        prompts = [prompts]
    if any(isinstance(prompt, int) for prompt in prompts):
        raise RequestError("prompt must be a text, tokens, or a list of either; got tokens among others")
    if not 1 <= len(prompts) * (body.n or 1) <= MAX_CHOICES:
        raise RequestError(f"a call has 1 to {MAX_CHOICES} prompts times n, got {len(prompts) * (body.n or 1)}")
    if body.echo and body.logprobs is not None:
        raise RequestError("echo with logprobs is not served: a prompt has no log-probabilities here")
    with_special = body.add_special_tokens is not False
    for prompt in prompts:
        if isinstance(prompt, str):
            yield Prompt(tokenizer.encode(prompt, add_special_tokens=with_special), prompt if body.echo else "")
        else:
            yield Prompt(tuple(prompt), tokenizer.decode(prompt) if body.echo else "")


def _chat(body: ChatBody, tokenizer: Tokenizer, tools: Tools) -> Prompt:
    template = tokenizer.template_for(tools.shown or None)
    messages = normalized(body.messages, template)
    shown = tools.shown or None
    if shown and (text := _tools_text(tokenizer, template, tools)) is not None:
        messages, shown = with_system_text(messages, text), None
    if body.documents and "documents" not in template.source:
        raise RequestError("the checkpoint's chat template does not show documents: say them in a message")
    tokens = tokenizer.chat(
        messages,
        tools=shown,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt is not False,
        variables={**_effort(body.reasoning_effort), **(body.chat_template_kwargs or {})},
    )
    return Prompt(tokens)


def _tools_text(tokenizer: Tokenizer, template: ChatTemplate, tools: Tools) -> str | None:
    """Return what the system's turn has to say of tools, or None where the template shows them. Raise RequestError for
    tools that the model would not see, or whose calls could not be read."""
    dialect = dialect_of(tokenizer)
    text = None if dialect is None else dialect.tools_text(tools.shown)
    if text is None and not shows_tools(template):
        raise RequestError(
            "tools are not served with this checkpoint: its chat template does not show them to the model; the host "
            "may put a chat_template.jinja that reads `tools` into the folder of the tokenizer"
        )
    if tools.are_parsed and (dialect is None or not dialect.reads_calls):
        why = "its markers are of no family that is known" if dialect is None else dialect.why_not
        raise RequestError(
            f"calls that the model may make or leave are not read from this checkpoint: {why}; "
            "tool_choice can force one"
        )
    return text


def _effort(effort: str | None) -> dict[str, Any]:
    """Return what templates know `reasoning_effort` by: its name, and for "none" their switches of thinking."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise RequestError(f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {clip(effort)}")
    off = {"thinking": False, "enable_thinking": False} if effort == "none" else {}
    return {"reasoning_effort": effort, **off}
