"""Calls in OpenAI's form become requests, and events become answers, without HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.text.openai import Call, error_answer
from pdinfer.text.openai.body import ChatBody, CompletionBody
from pdinfer.text.openai.options import _NAMESAKES
from tests.backends import ROOT

pytest.importorskip("tokenizers", reason="text needs the package tokenizers")
pytest.importorskip("jinja2", reason="chats need the package jinja2")

TINY = ROOT / "examples" / "tiny"
CHAT = {"messages": [{"role": "user", "content": "set kqz=48213; get kqz="}], "temperature": 0, "max_tokens": 8}
CALC: dict[str, Any] = {"prompt": "calc 47+38=", "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def tokenizer() -> pd.text.Tokenizer:
    return pd.text.Tokenizer.load(TINY)


@pytest.fixture(scope="module")
def pairing() -> Iterator[pd.Pairing]:
    with pd.Pairing.local(TINY, cache=pd.CacheConfig(page_size=16, num_pages=128)) as pairing:
        yield pairing


def parse(tokenizer: pd.text.Tokenizer, body: object, **more: Any) -> Call:
    is_chat = isinstance(body, dict) and "messages" in body
    return Call.parse(json.dumps(body), tokenizer, **{"is_chat": is_chat, "model": "tiny", **more})


def chunks_of(pairing: pd.Pairing, call: Call) -> list[dict[str, Any]]:
    return [chunk for event in pairing.generate(call.requests) for chunk in call.push(event)]


def test_a_call_that_does_not_stream_gets_one_answer(tokenizer: pd.text.Tokenizer, pairing: pd.Pairing) -> None:
    (answer,) = chunks_of(pairing, parse(tokenizer, {**CALC, "stop": ";", "logprobs": 1}))
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    assert [(choice["text"], choice["finish_reason"]) for choice in answer["choices"]] == [("85", "stop")]
    assert answer["choices"][0]["logprobs"]["tokens"] == ["8", "5", ";"]
    assert answer["usage"]["total_tokens"] == 15
    (answer,) = chunks_of(pairing, parse(tokenizer, {**CHAT, "n": 2, "max_completion_tokens": 3}))
    assert answer["choices"][1]["message"] == {"content": "482", "role": "assistant", "refusal": None}
    assert (answer["choices"][1]["index"], answer["choices"][1]["finish_reason"]) == (1, "length")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (24, 6)
    json.dumps(answer)


def test_a_stream_is_the_answer_in_pieces(tokenizer: pd.text.Tokenizer, pairing: pd.Pairing) -> None:
    more = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}
    *chunks, last = chunks_of(pairing, parse(tokenizer, {**CHAT, **more, "stop": [";"]}))
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == "48213"
    assert ["role" in chunk["choices"][0]["delta"] for chunk in chunks] == [True, *[False] * (len(chunks) - 1)]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [*[None] * (len(chunks) - 1), "stop"]
    told = chunks[0]["choices"][0]["logprobs"]["content"][0]
    assert (told["token"], told["bytes"], len(told["top_logprobs"])) == ("4", [ord("4")], 2)
    assert (last["choices"], last["usage"]["completion_tokens"], chunks[0]["usage"]) == ([], 6, None)
    assert last["usage"]["pdinfer"][0]["timeline"]["first_token_s"] > 0


def test_what_is_asked_arrives_in_the_requests(tokenizer: pd.text.Tokenizer) -> None:
    body = {
        **CALC,
        "prompt": ["a", "b"],
        "n": 2,
        "seed": 5,
        "logit_bias": {"7": -3},
        "top_p": 0.5,
        "presence_penalty": 1,
    }
    requests = parse(tokenizer, body).requests
    assert [request.prompt for request in requests] == [(256, 97), (256, 97), (256, 98), (256, 98)]
    assert [request.sampling.seed for request in requests] == [5, 6, 5, 6]
    assert {request.sampling.logit_bias for request in requests} == {((7, -3.0),)}
    assert (requests[0].sampling.top_p, requests[0].sampling.presence_penalty) == (0.5, 1.0)
    odd = parse(tokenizer, {**CALC, "n": 2, "seed": -1, "top_k": -1}).requests
    assert [(request.sampling.seed, request.sampling.top_k) for request in odd] == [(2**64 - 1, 0), (0, 0)]
    assert parse(tokenizer, {"prompt": [1, 2]}).requests[0].prompt == (1, 2)
    assert parse(tokenizer, {"prompt": [[1, 2], [3]]}).requests[1].prompt == (3,)
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    sampling = parse(tokenizer, {**CALC, "response_format": wanted}).requests[0].sampling
    assert (sampling.logits_processor, sampling.logits_processor_argument) == ("json_schema", '{"type": "integer"}')


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ([], "object"),
        ({**CALC, "colour": 1}, "colour"),
        ({**CALC, "temperature": "hot"}, r"\$\.temperature"),
        ({**CALC, "n": 0}, "n must be from 1 to 64"),
        ({**CALC, "prompt": ["a"] * 65}, "1 to 64 prompts"),
        ({**CALC, "prompt": ["a", 1]}, "tokens among others"),
        ({**CALC, "prompt": []}, "got 0"),
        ({**CALC, "prompt": [[-1]], "echo": True}, r"Expected `int` >= 0 - at `\$\.prompt\[0\]\[0\]`"),
        ({**CALC, "prompt": [10**30], "echo": True}, r"`int` <= 2147483647 - at `\$\.prompt\[0\]`"),
        ({**CALC, "stop": [""]}, "stop string"),
        ({**CHAT, "top_logprobs": 2}, "top_logprobs needs logprobs"),
        ({**CHAT, "messages": []}, "at least one message"),
        ({**CALC, "colour" * 1000: 1}, "^.{,300}$"),
        ({**CHAT, "reasoning_effort": "much" * 1000}, "^.{,300}$"),
        ({**CHAT, "response_format": {"type": "yaml"}}, "response_format must be"),
        ({**CHAT, "response_format": {"type": "json_schema", "json_schema": {}}}, "response_format must be"),
    ],
)
def test_what_cannot_be_served_is_refused(tokenizer: pd.text.Tokenizer, body: Any, says: str) -> None:
    with pytest.raises(pd.RequestError, match=says) as caught:
        parse(tokenizer, body)
    assert error_answer(caught.value)[0] == 400


def test_a_schema_without_a_library_for_it_is_refused_with_the_way_to_get_one(tokenizer: pd.text.Tokenizer) -> None:
    with pytest.raises(pd.RequestError, match=r"pip install 'pdinfer\[structured\]'"):
        parse(tokenizer, {**CALC, "response_format": {"type": "json_object"}}, has_schemas=False)


def test_errors_have_the_status_that_clients_act_on(tokenizer: pd.text.Tokenizer) -> None:
    status, headers, body = error_answer(pd.Overloaded("full", retry_after_s=1.2))
    assert (status, headers, body["error"]["type"]) == (429, {"Retry-After": "2"}, "rate_limit_error")
    status, headers, body = error_answer(pd.TransferError("lost"))
    assert (status, headers["Retry-After"], body["error"]["message"]) == (503, "1", "lost")
    with pytest.raises(pd.RequestError, match="model 'another' is not served here, only 'tiny'") as caught:
        parse(tokenizer, {**CALC, "model": "another"})
    with pytest.raises(pd.RequestError, match=r"^.{,300}$"):
        parse(tokenizer, {**CALC, "model": "another" * 1000})
    status, headers, body = error_answer(caught.value)
    assert (status, headers, body["error"]["code"]) == (404, {}, "model_not_found")
    call = parse(tokenizer, CALC)
    name = call.requests[0].request_id
    assert name is not None
    end = pd.TokenEvent(request_id=name, token=None, index=0, finish_reason=pd.FinishReason.CANCELLED)
    with pytest.raises(pd.TransferError, match="ended early: cancelled"):
        next(call.push(end))


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_every_field_of_a_body_is_read(body: Any) -> None:
    """One that is taken and read nowhere would be lost in silence, where an unknown one is refused."""
    sources = "".join(path.read_text("utf-8") for path in (ROOT / "src/pdinfer/text/openai").glob("*.py"))
    read = {*re.findall(r"\bbody\.(\w+)", sources), *_NAMESAKES}
    assert not {*body.__struct_fields__} - read
