"""The body of a call. Each field of OpenAI's API, and each that clients of vLLM add, is served, or of no
consequence for the answer (HARMLESS), or refused by name (REFUSED). A field that is in none of them is refused, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from pdinfer.bounds import Index, escaped
from pdinfer.checks import clip
from pdinfer.errors import RequestError

MAX_CHOICES = 64

HARMLESS = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "prediction", "request_id"),
        "spaces_between_special_tokens",
    }
)
"""Fields that change no token of an answer here: who asks, what the provider keeps, and how it may be quicker."""

REFUSED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "audio": ((), "answers are text"),
    "modalities": ((["text"],), "answers are text"),
    "functions": ((), "it became tools"),
    "function_call": ((), "it became tool_choice"),
    "web_search_options": ((), "nothing is looked up"),
    "moderation": ((), "prompts and answers are not moderated here; a gateway may"),
    "verbosity": (("medium",), "no model that is served here knows it; ask in a message"),
    "suffix": (("",), "text is continued at its end only"),
    "best_of": ((0, 1), "ask for n answers and choose among them"),
    "use_beam_search": ((False,), "tokens are drawn one by one"),
    "length_penalty": ((1, 1.0), "it belongs to beam search"),
    "prompt_logprobs": ((), "log-probabilities come with the tokens of answers; Model.logits has those of a prompt"),
    "chat_template": ((), "the host chooses the template"),
    "continue_final_message": ((False,), "an answer is a turn of its own; use /v1/completions"),
    "skip_special_tokens": ((True,), "special tokens have no text"),
    "include_stop_str_in_output": ((False,), "a stop string is not shown"),
    "return_token_ids": ((False,), "ask for logprobs"),
    "return_tokens_as_token_ids": ((False,), "ask for logprobs, whose bytes distinguish tokens"),
    "priority": ((0,), "the host says which requests go first"),
    "bad_words": (([],), "use logit_bias"),
    "allowed_token_ids": ((), "use logit_bias or response_format"),
    "truncate_prompt_tokens": ((), "a prompt is taken whole or refused"),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "structural_tag"),
        ((), "use response_format"),
    ),
}
"""Fields that cannot be served: the values that ask for nothing, next to null, and why not or what to use instead."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`stream_options` of a body. `include_obfuscation` pads chunks against eavesdroppers, which is for the host."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of both kinds of calls; top_k, min_p, repetition_penalty, ignore_eos, min_tokens, stop_token_ids,
    add_special_tokens and cache_salt are also vLLM's. `check_request` has the ranges of numbers."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None


class CompletionBody(Body, kw_only=True, forbid_unknown_fields=True):
    """A body of /v1/completions. `logprobs` is how many of the best tokens are returned with each token."""

    prompt: str | list[Index | str | list[Index]]
    logprobs: int | None = None
    echo: bool | None = None


class ChatBody(Body, kw_only=True, forbid_unknown_fields=True):
    """A body of /v1/chat/completions. `documents` and `chat_template_kwargs` are for templates that know them."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None


def read(data: bytes | str, *, is_chat: bool) -> CompletionBody | ChatBody:
    """Read a body. Raise RequestError for one that cannot be read, that has an unknown field or a value of another
    type, or that asks for what is refused."""
    try:
        fields = msgspec.json.decode(data)
        if not isinstance(fields, dict):
            raise RequestError(f"the body of a call must be a JSON object, got {clip(type(fields).__name__)}")
        if is_chat:
            return msgspec.convert(_served(fields), ChatBody, str_keys=True)
        return msgspec.convert(_served(fields), CompletionBody, str_keys=True)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RequestError(f"the body of the call cannot be used: {escaped(str(error))[:200]}") from error


def _served(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that are served. Null is as good as absent."""
    served = {}
    for name, value in fields.items():
        if value is None or name in HARMLESS:
            continue
        if name not in REFUSED:
            served[name] = value
            continue
        idle, why = REFUSED[name]
        if not any(value == known and type(value) is type(known) for known in idle):
            raise RequestError(f"{name} is {clip(value)}, which is not served: {why}")
    return served
