"""Chats with tools, reasoning and schemas: what the checkpoint's own markup says becomes what clients read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.scheduling.admission import MAX_SALT_BYTES
from pdinfer.text.openai import Call, error_answer, max_bytes
from tests.backends import ROOT
from tests.unit.text.dialects.folders import DEEPSEEK, THOUGHT, TOOLS
from tests.unit.text.tokenizers_of import tiny_folder

pytest.importorskip("tokenizers", reason="text needs the package tokenizers")
pytest.importorskip("jinja2", reason="chats need the package jinja2")

TINY = ROOT / "examples" / "tiny"
V3_1 = (
    "{{ bos_token }}{% set s = namespace(text='') %}{% for m in messages if m.role == 'system' %}"
    "{% set s.text = s.text + m.content %}{% endfor %}{{ s.text }}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<｜Assistant｜></think>{% if m.content is not none %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
    "{{ c.function.arguments + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}{% endfor %}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}"
    "<｜Assistant｜>{% if thinking %}<think>{% else %}</think>{% endif %}"
)
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> pd.text.Tokenizer:
    """The tokenizer of a checkpoint that speaks as DeepSeek-V3.1."""
    markers = [*THOUGHT, *DEEPSEEK[:2], "<｜tool▁sep｜>"]
    return pd.text.Tokenizer.load(tiny_folder(tmp_path_factory.mktemp("v31") / "m", V3_1, markers))


def parse(tokenizer: pd.text.Tokenizer, messages: Any = ASKED, **more: Any) -> Call:
    options = {name: more.pop(name) for name in ("limit", "has_schemas", "tenant") if name in more}
    body = json.dumps({"messages": messages, **more})
    return Call.parse(body, tokenizer, is_chat=True, model="m", **options)


def said(call: Call, tokenizer: pd.text.Tokenizer, text: str, reason: str = "stop") -> Iterator[dict[str, Any]]:
    """What a call tells of an answer with this text."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    (request,) = call.requests
    for index, token in enumerate(tokens):
        last = index == len(tokens) - 1
        usage = pd.metrics.Usage(prompt_tokens=1, output_tokens=index + 1, cached_tokens=0, queue_s=0.0, ttft_s=0.1)
        yield from call.push(
            pd.TokenEvent(
                request_id=str(request.request_id),
                token=token,
                index=index,
                finish_reason=pd.FinishReason(reason) if last else None,
                usage=usage if last else None,
            )
        )


CALLED = (
    "Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rom"}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)


def test_thoughts_content_and_calls_are_told_apart(speaker: pd.text.Tokenizer) -> None:
    call = parse(speaker, tools=TOOLS, chat_template_kwargs={"thinking": True})
    assert speaker.library.decode(call.requests[0].prompt, skip_special_tokens=False).endswith("<｜Assistant｜><think>")
    (answer,) = said(call, speaker, f"Where?</think>{CALLED}")
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"], message["reasoning_content"]) == (
        "tool_calls",
        "Look.",
        "Where?",
    )
    assert [one["function"] for one in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": json.dumps({"city": city})} for city in ("Oslo", "Rom")
    ]
    assert {(one["type"], one["id"][:5]) for one in message["tool_calls"]} == {("function", "call_")}
    (cut,) = said(parse(speaker, tools=TOOLS), speaker, CALLED, reason="length")
    assert cut["choices"][0]["finish_reason"] == "length"


def test_a_stream_has_the_same_in_pieces_one_chunk_for_each_token(speaker: pd.text.Tokenizer) -> None:
    call = parse(speaker, tools=TOOLS, stream=True, chat_template_kwargs={"thinking": True})
    text = f"Where, 😀?</think>{CALLED}"
    chunks = list(said(call, speaker, text))
    assert len(chunks) == len(speaker.encode(text, add_special_tokens=False))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Where, 😀?"
    assert "".join(delta.get("content", "") for delta in deltas) == "Look."
    first, last = ([name in delta for delta in deltas].index(True) for name in ("content", "tool_calls"))
    assert {} in deltas[1:first]  # parts of the character; a content, though empty, would end the reasoning for some
    assert [delta for delta in deltas[last:] if "content" in delta] == []
    pieces = [piece for delta in deltas for piece in delta.get("tool_calls", ())]
    for index, city in enumerate(("Oslo", "Rom")):
        of_call = [piece for piece in pieces if piece["index"] == index]
        assert [("id" in piece, "name" in piece["function"]) for piece in of_call].count((True, True)) == 1
        assert "".join(piece["function"]["arguments"] for piece in of_call) == json.dumps({"city": city})
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [*[None] * (len(chunks) - 1), "tool_calls"]


def test_of_calls_that_may_not_be_parallel_the_first_is_told(speaker: pd.text.Tokenizer) -> None:
    (answer,) = said(parse(speaker, tools=TOOLS, parallel_tool_calls=False), speaker, CALLED)
    (one,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(one["function"]["arguments"]) == {"city": "Oslo"}


def test_without_tools_markup_of_calls_is_content(speaker: pd.text.Tokenizer) -> None:
    for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        call = parse(speaker, **more)
        assert "get_weather" not in speaker.decode(call.requests[0].prompt)
        (answer,) = said(call, speaker, CALLED)
        assert answer["choices"][0]["message"]["content"] == CALLED
        assert "tool_calls" not in answer["choices"][0]["message"]


def test_what_looked_like_markup_to_the_last_is_content(speaker: pd.text.Tokenizer) -> None:
    (answer,) = said(parse(speaker, tools=TOOLS), speaker, "a <", reason="length")
    assert answer["choices"][0]["message"]["content"] == "a <"


def test_a_template_without_tools_tells_them_in_the_makers_words_or_they_are_refused(
    speaker: pd.text.Tokenizer, tmp_path: Path
) -> None:
    prompt = speaker.decode(
        parse(speaker, [{"role": "system", "content": "Be kind."}, *ASKED], tools=TOOLS).requests[0].prompt
    )
    assert prompt.startswith(
        "Be kind.\n\n## Tools\nYou have access to the following tools:\n\n### get_weather\nDescription: "
    )
    assert prompt.endswith("chain them directly without separators or spaces<｜User｜>Hi<｜Assistant｜></think>")
    assert speaker.decode(parse(speaker, tools=TOOLS).requests[0].prompt).startswith("## Tools")
    other = pd.text.Tokenizer.load(tiny_folder(tmp_path / "m", "{{ messages[0].content }}"))
    for more in ({}, {"tool_choice": "required"}):
        with pytest.raises(pd.RequestError, match="does not show them"):
            parse(other, tools=TOOLS, **more)
    shows = pd.text.Tokenizer.load(tiny_folder(tmp_path / "s", "{{ tools }}{{ messages[0].content }}"))
    assert parse(shows, tools=TOOLS, tool_choice="required").requests
    with pytest.raises(pd.RequestError, match="of no family that is known; tool_choice can force one"):
        parse(shows, tools=TOOLS)


def test_a_history_of_calls_is_rendered_as_the_model_wrote_it(speaker: pd.text.Tokenizer) -> None:
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    history = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "4 C"}]},
    ]
    text = speaker.library.decode(parse(speaker, history).requests[0].prompt, skip_special_tokens=False)
    assert '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Oslo"}<｜tool▁call▁end｜>' in text
    assert "<｜tool▁output▁begin｜>4 C<｜tool▁output▁end｜>" in text


def test_a_forced_call_is_an_answer_of_its_schema(speaker: pd.text.Tokenizer) -> None:
    call = parse(speaker, tools=TOOLS, tool_choice="required", chat_template_kwargs={"thinking": True})
    schema = {**TOOLS[0]["function"]["parameters"], "additionalProperties": False}
    assert json.loads(call.requests[0].sampling.logits_processor_argument) == schema
    (answer,) = said(call, speaker, 'Hm.</think>{"city":"Oslo"}')
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
    assert choice["message"]["reasoning_content"] == "Hm."
    (one,) = choice["message"]["tool_calls"]
    assert one["function"] == {"name": "get_weather", "arguments": '{"city":"Oslo"}'}
    with pytest.raises(pd.RequestError, match="need the library"):
        parse(speaker, tools=TOOLS, tool_choice="required", has_schemas=False)
    with pytest.raises(pd.RequestError, match="exclude each other"):
        parse(speaker, tools=TOOLS, tool_choice="required", response_format={"type": "json_object"})


def test_real_engines_make_the_call_that_is_forced(tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="a forced call is made with llguidance here")
    template = "{{ bos_token }}{{ tools | length if tools }}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = tiny_folder(tmp_path / "m", template)
    tokenizer = pd.text.Tokenizer.load(folder)
    number = {
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/N"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    number["$defs"] = {"N": {"type": "integer", "minimum": 0, "maximum": 99}}
    tools = [{"type": "function", "function": {"name": name, "parameters": number}} for name in ("add", "look")]
    choice = {"type": "function", "function": {"name": "look"}}
    processors = pd.text.schema_processors(folder, library="llguidance")
    with pd.Pairing.local(folder, logits_processors=processors) as pairing:
        for asked in (choice, "required"):
            call = parse(tokenizer, tools=tools, tool_choice=asked, temperature=0, limit=pairing.max_tokens)
            (answer,) = (told for event in pairing.generate(call.requests) for told in call.push(event))
            (made,) = answer["choices"][0]["message"]["tool_calls"]
            assert made["function"]["name"] in (("look",) if asked is choice else ("add", "look"))
            assert 0 <= json.loads(made["function"]["arguments"])["n"] <= 99
            assert answer["choices"][0]["finish_reason"] == "tool_calls"


def test_the_folder_says_how_tokens_are_drawn_and_the_client_may_say_otherwise(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}"
    tokenizer = pd.text.Tokenizer.load(
        tiny_folder(tmp_path / "m", template, temperature=0.6, top_p=0.95, eos_token_id=[258])
    )
    drawn = parse(tokenizer, temperature=None).requests[0].sampling
    assert (drawn.temperature, drawn.top_p) == (0.6, 0.95)
    assert drawn.stop_token_ids == (257,)  # the tokenizer's eos, at which engines do not end
    drawn = parse(tokenizer, temperature=1, top_p=1, ignore_eos=True).requests[0].sampling
    assert (drawn.temperature, drawn.top_p, drawn.stop_token_ids) == (1, 1, ())


def test_a_chat_may_run_to_the_end_of_what_fits_and_is_not_charged_for_that(speaker: pd.text.Tokenizer) -> None:
    (request,) = parse(speaker, limit=100).requests
    assert len(request.prompt) + request.sampling.max_new_tokens == 100
    assert request.expected_new_tokens == pd.SamplingParams().max_new_tokens
    (request,) = parse(speaker, limit=100, max_completion_tokens=7).requests
    assert (request.sampling.max_new_tokens, request.expected_new_tokens) == (7, None)
    assert (
        sum(len(parse(speaker).requests[0].prompt) + parse(speaker).requests[0].sampling.max_new_tokens for _ in "a")
        == 4096
    )
    body = json.dumps({"prompt": "a"})
    (request,) = Call.parse(body, speaker, is_chat=False, model="m", limit=1000).requests
    assert (request.sampling.max_new_tokens, request.expected_new_tokens) == (128, None)


def test_what_is_too_long_is_told_so_that_clients_shorten_it(speaker: pd.text.Tokenizer) -> None:
    num = len(parse(speaker).requests[0].prompt)
    assert parse(speaker, limit=num + 1).requests
    assert parse(speaker, limit=num + 7, max_tokens=7).requests
    for options in ({"limit": num}, {"limit": num + 6, "max_tokens": 7}, {"limit": num, "user": "u" * max_bytes(num)}):
        with pytest.raises(pd.RequestError, match="shorten it") as caught:
            parse(speaker, **options)
        assert error_answer(caught.value)[2]["error"]["code"] == "context_length_exceeded"


def test_a_client_cannot_say_the_salt_of_another_tenant(speaker: pd.text.Tokenizer) -> None:
    def salt(tenant: bytes, said: str | None) -> bytes:
        return parse(speaker, tenant=tenant, **({} if said is None else {"cache_salt": said})).requests[0].cache_salt

    assert salt(b"", None) == b""
    assert salt(b"", "\0\1ab") != salt(b"a", "b")
    assert len(salt(b"a" * 100_000, "b" * 1000)) <= MAX_SALT_BYTES, "both may be long"
    assert len({salt(*each) for each in ((b"a", None), (b"a", "b"), (b"ab", None), (b"b", "a"), (b"b", None))}) == 5
    assert salt(b"a", "b") == salt(b"a", "b")


def test_a_body_that_no_prompt_could_fill_is_not_read(
    speaker: pd.text.Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdinfer.text.openai.call.read", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(pd.RequestError, match=f"at most {max_bytes(10)} are read"):
        Call.parse(b" " * (max_bytes(10) + 1), speaker, is_chat=True, model="m", limit=10)


def test_templates_get_what_clients_mean_for_them(tmp_path: Path) -> None:
    template = "{{ reasoning_effort }},{{ thinking }},{{ enable_thinking }},{{ documents | length }},"
    template += "{{ add_generation_prompt }}"
    tokenizer = pd.text.Tokenizer.load(tiny_folder(tmp_path / "m", template))

    def rendered(**more: Any) -> str:
        return tokenizer.decode(parse(tokenizer, documents=[{"text": "a"}], **more).requests[0].prompt)

    assert rendered(reasoning_effort="low") == "low,,,1,True"
    assert rendered(reasoning_effort="none", add_generation_prompt=False) == "none,False,False,1,False"
    assert rendered(chat_template_kwargs={"thinking": "x"}) == ",x,,1,True"
    with pytest.raises(pd.RequestError, match="reasoning_effort must be one of"):
        rendered(reasoning_effort="much")
    other = pd.text.Tokenizer.load(tiny_folder(tmp_path / "o", "{{ messages[0].content }}"))
    with pytest.raises(pd.RequestError, match="does not show documents"):
        parse(other, documents=[{"text": "a"}])


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "safety_identifier": "s"},
        {"prediction": {"type": "content", "content": "a"}, "prompt_cache_key": "k", "modalities": ["text"]},
        {"prompt_cache_options": {"mode": "explicit"}},
        {"best_of": 1, "length_penalty": 1.0, "use_beam_search": False, "functions": None, "verbosity": "medium"},
        {"stream_options": {"include_usage": False, "include_obfuscation": False}, "skip_special_tokens": True},
    ],
    ids=["who", "hints", "cache", "idle", "stream"],
)
def test_what_changes_no_answer_is_taken(speaker: pd.text.Tokenizer, harmless: dict[str, Any]) -> None:
    assert parse(speaker, **harmless, seed=1).requests[0].sampling == parse(speaker, seed=1).requests[0].sampling


@pytest.mark.parametrize(
    ("refused", "says"),
    [
        ({"prompt_logprobs": 0}, "prompt_logprobs is 0, which is not served"),
        ({"best_of": 2}, "best_of is 2"),
        ({"best_of": True}, "best_of is True"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "it became tools"),
        ({"function_call": "auto"}, "it became tool_choice"),
        ({"guided_json": {}}, "use response_format"),
        ({"include_stop_str_in_output": True}, "a stop string is not shown"),
        ({"web_search_options": {}}, "nothing is looked up"),
        ({"moderation": {"model": "m"}}, "not moderated"),
        ({"echo": True}, "unknown field `echo`"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    speaker: pd.text.Tokenizer, refused: dict[str, Any], says: str
) -> None:
    with pytest.raises(pd.RequestError, match=says):
        parse(speaker, **refused)


def test_a_prompt_is_echoed_before_its_answer(speaker: pd.text.Tokenizer) -> None:
    for prompt, more in (("Hi ", {}), ([72, 105, 32], {}), ("Hi ", {"stream": True})):
        body = json.dumps({"prompt": prompt, "echo": True, **more})
        call = Call.parse(body, speaker, is_chat=False, model="m")
        told = list(said(call, speaker, "you"))
        assert "".join(part["choices"][0]["text"] for part in told) == "Hi you"
    with pytest.raises(pd.RequestError, match="echo with logprobs"):
        Call.parse(json.dumps({"prompt": "a", "echo": True, "logprobs": 1}), speaker, is_chat=False, model="m")
