"""A checkpoint's own markers say which dialect it speaks."""

from __future__ import annotations

import pytest

from pdinfer.text.dialects import dialect_of
from tests.unit.text.dialects.folders import DEEPSEEK, FOLDERS, GLM, KIMI, TEMPLATES, THOUGHT, TOOLS, dialect, tokenizer


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_recognised_and_its_markers_are_its_added_tokens(name: str) -> None:
    added, *templates = FOLDERS[name]
    found = dialect_of(tokenizer([*added, "<|end|>", "<|user|>"], *templates, special=True))
    assert found is not None
    assert (found.name, found.reads_calls, found.why_not) == (name, True, "")
    assert found.markers == set(added) - ({*DEEPSEEK} if name == "deepseek_v3_2" else set())
    assert found.thinks == (THOUGHT[0] in added)


def test_others_speak_none() -> None:
    qwen = "{{ tools }}<|im_start|><tool_call>"
    for folder in (
        ([],),
        (["<tool_call>", *THOUGHT], qwen),
        (KIMI, "<|open|>"),
        (GLM, qwen),
        (KIMI,),
        ([], "{{ tools }}"),
    ):
        assert dialect_of(tokenizer(*folder)) is None


def test_markers_may_be_those_of_the_template_alone() -> None:
    found = dialect_of(tokenizer([], TEMPLATES["v3_1"].replace("</think>", "<think></think>")))
    assert found is not None
    assert (found.name, found.thinks, found.markers) == ("deepseek_v3_1", True, frozenset())


@pytest.mark.parametrize(
    ("added", "templates", "name", "why"),
    [
        (DEEPSEEK, (TEMPLATES["v3"].replace("tools", "tool_calls"),), "deepseek_v3", "does not show tools"),
        (DEEPSEEK, ("{# tools #}" + TEMPLATES["v3"].replace("{{ tools }}", ""),), "deepseek_v3", "does not show tools"),
        (DEEPSEEK, (TEMPLATES["v3"], TEMPLATES["v3"][11:]), "deepseek_v3", "does not show tools"),
        ((*THOUGHT, *DEEPSEEK), ("{{ tools }}<｜Assistant｜>",), "deepseek", "writes no calls"),
        (("｜DSML｜", "<｜latest_reminder｜>", *THOUGHT), (), "deepseek_v4", "as DeepSeek-V4 does"),
    ],
)
def test_what_cannot_be_read_or_would_not_be_shown_is_said(
    added: tuple[str, ...], templates: tuple[str, ...], name: str, why: str
) -> None:
    found = dialect_of(tokenizer(added, *templates))
    assert found is not None
    assert found.name == name
    assert not found.reads_calls
    assert why in found.why_not
    parser = found.parser("<｜Assistant｜><think>", None)
    told = parser.push("a</think>b<｜tool▁calls▁begin｜>")
    assert [(delta.reasoning, delta.content) for delta in told] == [("a", ""), ("", "b<｜tool▁calls▁begin｜>")]


def test_the_template_for_tools_is_the_one_that_has_to_show_them() -> None:
    found = dialect_of(tokenizer(DEEPSEEK, TEMPLATES["v3"][11:], TEMPLATES["v3"]))
    assert found is not None
    assert found.reads_calls


def test_ids_are_the_models_or_random() -> None:
    text = "<tool_call>a</tool_call><tool_call>b</tool_call>"
    first, second = (
        delta.call.call_id or ""
        for delta in dialect("glm").parser("", TOOLS).push(text)
        if delta.call and delta.call.name
    )
    assert first != second
    for call_id in (first, second):
        assert call_id.startswith("call_")
        assert len(bytes.fromhex(call_id[5:])) == 12
