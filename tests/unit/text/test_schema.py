"""Answers of a JSON schema, by both libraries."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import pdinfer as pd
from pdinfer.text.schema import schema_library
from tests.backends import ROOT
from tests.unit.text.tokenizers_of import tiny_folder

pytest.importorskip("tokenizers", reason="text needs the package tokenizers")

TINY = str(ROOT / "examples" / "tiny")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "n": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "€"]},
    },
    "required": ["name", "n", "kind"],
    "additionalProperties": False,
}
LIBRARIES = ("llguidance", "xgrammar")
each_library = pytest.mark.parametrize(
    "library", [pytest.param(library, marks=pytest.mark.needs(library)) for library in LIBRARIES]
)


def answer(library: str, num_draft_tokens: int, **more: Any) -> str:
    tokenizer = pd.text.Tokenizer.load(TINY)
    sampling = pd.SamplingParams(
        max_new_tokens=80, logits_processor="json_schema", logits_processor_argument=json.dumps(SCHEMA), **more
    )
    with pd.Pairing.local(
        TINY,
        cache=pd.CacheConfig(page_size=16, num_pages=64),
        engine=pd.EngineConfig(num_draft_tokens=num_draft_tokens),
        logits_processors=pd.text.schema_processors(TINY, library=library),
    ) as pairing:
        events = list(pairing.generate([pd.Request(prompt=tokenizer.encode("set kqz="), sampling=sampling)]))
    assert events[-1].error is None
    assert events[-1].finish_reason is pd.FinishReason.STOP
    return tokenizer.decode([event.token for event in events if event.token is not None])


@each_library
def test_the_answer_is_json_of_the_schema_with_and_without_drafts(library: str) -> None:
    answers = {answer(library, drafts, temperature=0) for drafts in (0, 2)}
    assert len(answers) == 1
    said = json.loads(answers.pop())
    assert list(said) == ["name", "n", "kind"]
    assert (len(said["name"]) <= 4, 0 <= said["n"] <= 99, said["kind"] in ("a", "€")) == (True, True, True)


@pytest.mark.full
@pytest.mark.needs(*LIBRARIES)
def test_both_libraries_give_the_same_json() -> None:
    for seed in range(20):
        answers = {answer(library, drafts, temperature=1.0, seed=seed) for library in LIBRARIES for drafts in (0, 2)}
        assert len(answers) == 1, seed
        json.loads(answers.pop())


@each_library
@pytest.mark.parametrize("argument", ["nope", "[1]", '{"type": 5}', '{"type": "colour"}'])
def test_what_is_no_schema_is_refused(library: str, argument: str) -> None:
    with pytest.raises(pd.RequestError, match="schema"):
        pd.text.json_schema(argument, checkpoint=TINY, library=library)


@pytest.mark.needs("llguidance")
def test_where_the_library_gives_up_the_answer_fails_and_does_not_end() -> None:
    processor = pd.text.json_schema('{"$ref": "#"}', checkpoint=TINY, library="llguidance")
    with pytest.raises(pd.RequestError, match="llguidance cannot go on with the JSON schema: NoExtensionBias"):
        processor((), (), torch.zeros(264))


@each_library
def test_a_processor_is_a_function_of_the_output_alone(library: str) -> None:
    once = pd.text.json_schema('{"enum": ["ab", "cd"]}', checkpoint=TINY, library=library)
    outputs = [(), (34,), (34, 97), (34, 99), (34, 97, 98), (34,), (34, 99, 100, 34), ()]
    for output in outputs:
        new = pd.text.json_schema('{"enum": ["ab", "cd"]}', checkpoint=TINY, library=library)
        masked = once((), output, torch.zeros(264))
        assert torch.equal(masked, new((), output, torch.zeros(264)))
        allowed = masked.isfinite().nonzero().flatten().tolist()
        assert allowed == {(): [34], (34,): [97, 99], (34, 97): [98], (34, 99): [100], (34, 97, 98): [34]}.get(
            output, [257]
        )
    with pytest.raises(pd.RequestError, match="does not allow token 98"):
        once((), (34, 98), torch.zeros(264))


def test_without_a_library_there_is_no_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in LIBRARIES:
        monkeypatch.setitem(__import__("sys").modules, library, None)
    assert pd.text.schema_processors(TINY) == {}
    with pytest.raises(pd.BackendUnavailable, match=r"pip install 'pdinfer\[structured\]'"):
        schema_library()
    with pytest.raises(pd.ConfigError, match="library must be one of"):
        schema_library("other")


@pytest.mark.needs("llguidance")
def test_processors_can_be_named_to_other_processes() -> None:
    made = pd.text.schema_processors(TINY, library="llguidance")["json_schema"]
    assert isinstance(made, functools.partial)
    assert made.keywords == {"checkpoint": TINY, "library": "llguidance", "trusted_roots": ()}


def folder_of(path: Path, eos: list[int], added: Sequence[str] = ()) -> str:
    """A copy of the tiny model's folder with these ends and added tokens."""
    return str(tiny_folder(path, None, added, eos_token_id=eos))


def allowed(processor: Any, prompt: str, output: Sequence[int], size: int = 264) -> list[int]:
    masked = processor((256, *prompt.encode()), tuple(output), torch.zeros(size))
    found: list[int] = masked.isfinite().nonzero().flatten().tolist()
    return found


@each_library
def test_only_ends_end_an_answer_and_markers_are_no_text(library: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", [258, 257, 300], ["<|user|>"])
    processor = pd.text.json_schema('{"type": "string", "maxLength": 1}', checkpoint=folder, library=library)
    inside = allowed(processor, "", b'"', 310)
    assert ord("a") in inside
    assert not {256, 257, 258, 259, 260, 300} & set(inside)
    assert allowed(processor, "", b'"a"', 310) == [257, 258, 300]
    assert allowed(processor, "", (*b'"a"', 300), 310) == [257, 258, 300]
    other = pd.text.json_schema('{"type": "string"}', checkpoint=folder_of(tmp_path / "o", [258]), library=library)
    assert allowed(other, "", b'"a"') == [258]  # and not the tokenizer's eos, at which nothing ends


@each_library
def test_json_begins_behind_a_reasoning_that_the_prompt_or_the_answer_opens(library: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", [257], ["<think>", "</think>"])
    processor = pd.text.json_schema('{"enum": ["a"]}', checkpoint=folder, library=library)
    json_alone, begin = [ord('"')], [ord('"'), 259]
    assert allowed(processor, "Hi", ()) == begin
    assert allowed(processor, "Hi</think>", ()) == json_alone
    for prompt, opened in (("Hi<think>\n", ()), ("Hi", (259,))):
        thinking = allowed(processor, prompt, (*opened, *b"So"))
        assert {ord("a"), 259, 260} <= set(thinking)
        assert not {257, 261} & set(thinking)
        assert allowed(processor, prompt, (*opened, *b"So", 260)) == json_alone
        assert allowed(processor, prompt, (*opened, *b"So</think>")) == json_alone
        assert allowed(processor, prompt, (*opened, 260, *b'"a"')) == [257]
