"""The fields of a body that become SamplingParams."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from pdinfer.errors import RequestError
from pdinfer.text.openai.body import Body, ChatBody, CompletionBody
from pdinfer.text.tokenizer import Tokenizer
from pdinfer.types import SamplingParams

PROCESSOR = "json_schema"
"""The name that engines must know `text.json_schema` by."""
_NAMESAKES = tuple(field.name for field in attrs.fields(SamplingParams) if field.name in Body.__struct_fields__)
"""The fields of a body that are sampling parameters by the same name."""


def sampling_of(
    body: CompletionBody | ChatBody, tokenizer: Tokenizer, schema: Mapping[str, Any] | None, *, has_schemas: bool
) -> SamplingParams:
    """Return how the tokens of a call are drawn: as the body says, else as the checkpoint's generation_config.json
    does, else as SamplingParams do. An answer also ends by the tokenizer's eos_token, where the model has another.
    `schema` is that of a forced call. Raise RequestError for what contradicts itself or needs a library that is not
    there; the engines check ranges."""
    options: dict[str, Any] = dict(tokenizer.sampling_defaults)
    options |= {name: value for name in _NAMESAKES if (value := getattr(body, name)) is not None}
    if body.top_k == -1:  # as vLLM has it
        options["top_k"] = SamplingParams().top_k
    options["logit_bias"] = tuple((body.logit_bias or {}).items())
    options["min_new_tokens"] = body.min_tokens or 0
    options["stop_token_ids"] = tuple(body.stop_token_ids or ())
    if not body.ignore_eos:
        others = tokenizer.eos_token_ids - tokenizer.model_eos_token_ids - {*options["stop_token_ids"]}
        options["stop_token_ids"] += tuple(sorted(others))
    options["logprobs"] = _logprobs(body)
    if (most := most_tokens(body)) is not None:
        options["max_new_tokens"] = most
    wanted = _schema(body.response_format or {"type": "text"})
    if schema is not None and wanted is not None:
        raise RequestError("response_format and a tool_choice that forces a call exclude each other")
    if (schema := schema or wanted) is not None:
        if not has_schemas:
            raise RequestError(
                "response_format, and a tool_choice that forces a call, need the library llguidance or xgrammar, and "
                "this server has neither: pip install 'pdinfer[structured]'"
            )
        options |= {"logits_processor": PROCESSOR, "logits_processor_argument": json.dumps(schema)}
    return SamplingParams(**options)


def most_tokens(body: CompletionBody | ChatBody) -> int | None:
    """Return how many tokens an answer may have, if the body says it."""
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        return body.max_completion_tokens
    return body.max_tokens


def _logprobs(body: CompletionBody | ChatBody) -> int | None:
    if isinstance(body, CompletionBody):
        return body.logprobs
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise RequestError("top_logprobs needs logprobs to be true")
    return None


def _schema(wanted: Mapping[str, Any]) -> dict[str, Any] | None:
    kind, named = wanted.get("type"), wanted.get("json_schema")
    schema = named.get("schema") if isinstance(named, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema" and isinstance(schema, dict):
        return schema
    raise RequestError(
        'response_format must be {"type": "text"}, {"type": "json_object"} or '
        '{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
    )
