"""What a parser promises of any text."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdinfer.stop import Automaton
from pdinfer.text.dialects.families import FAMILIES
from pdinfer.text.dialects.parser import MAX_NAME, MAX_WHITE
from tests.unit.text.dialects.folders import DEEPSEEK, FOLDERS, GLM, KIMI, THOUGHT, TOOLS, Answer, dialect, read
from tests.unit.text.dialects.test_transcripts import TRANSCRIPTS

NAMES = [
    # the others are of one form with V3
    pytest.param(name, marks=pytest.mark.full) if name in ("deepseek_r1", "deepseek_v3_1") else name
    for name in FOLDERS
]
DSML = (
    *("<｜DSML｜function_calls>", "</｜DSML｜function_calls>", "</｜DSML｜invoke>", "</｜DSML｜parameter>"),
    *('<｜DSML｜invoke name="', '<｜DSML｜parameter name="', '" string="true', '" string="false', '">', "\n\n"),
)
MARKUP = {
    "deepseek_r1": (*DEEPSEEK, "```json", "```", "function<｜tool▁sep｜>"),
    "deepseek_v3": (*DEEPSEEK, "```json", "```", "function<｜tool▁sep｜>"),
    "deepseek_v3_1": DEEPSEEK,
    "deepseek_v3_2": DSML,
    "kimi_k2": (*KIMI, "functions.", ":0"),
    "glm": GLM,
}
PIECES = (
    "<",
    "｜",
    "`",
    "{",
    '"',
    "\\",
    "é",
    "\U0001f600",
    "get_weather",
    "city",
    "days",
    "12",
    "null",
    " ",
    "\n",
    "\n" * 70,
)


def texts(name: str) -> st.SearchStrategy[str]:
    """Texts that consist of what the dialect's markup does, mostly out of place, of beginnings of that, and of parts of
    what its model says."""
    markup = st.sampled_from([*THOUGHT, *MARKUP[name]])
    beginnings = markup.flatmap(lambda text: st.integers(1, len(text)).map(lambda length: text[:length]))
    said = [each.text for each in TRANSCRIPTS.values() if each.dialect == name]
    parts = st.tuples(st.sampled_from(said), st.integers(0, 99), st.integers(1, 999)).map(
        lambda s: s[0][s[1] :][: s[2]]
    )
    piece = st.one_of(markup, beginnings, st.sampled_from(PIECES), st.just("x" * 100), parts)
    return st.lists(piece, max_size=20).map("".join)


def prompts() -> st.SearchStrategy[str]:
    return st.sampled_from(["", "<think>", "</think>"])


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), prompt=prompts(), tools=st.sampled_from([None, TOOLS]))
def test_cuts_change_nothing(
    name: str, data: st.DataObject, prompt: str, tools: list[dict[str, object]] | None
) -> None:
    text, speaks = data.draw(texts(name)), dialect(name)
    whole = read(speaks, [text], prompt, tools)
    assert read(speaks, list(text), prompt, tools) == whole
    at = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    assert read(speaks, [text[a:b] for a, b in zip([0, *at], [*at, None], strict=True)], prompt, tools) == whole


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data(), prompt=prompts())
def test_no_word_is_lost_and_none_is_told_twice(name: str, data: st.DataObject, prompt: str) -> None:
    pieces, word = data.draw(st.lists(st.sampled_from([*THOUGHT, *MARKUP[name], *PIECES, "word"]), max_size=25)), 0
    for index, piece in enumerate(pieces):
        if piece == "word":
            pieces[index] = f"(w{word})"
            word += 1
    answer = read(dialect(name), pieces, prompt)
    told = [*answer.calls, answer.reasoning, answer.content]
    found = [
        each for text in told for each in re.findall(r"\(w\d+\)", text if isinstance(text, str) else " ".join(text[1:]))
    ]
    assert sorted(found) == sorted(f"(w{each})" for each in range(word))


@pytest.mark.parametrize("name", NAMES)
def test_text_flows_and_only_the_beginning_of_a_marker_is_held(name: str) -> None:
    speaks = dialect(name)
    parser = speaks.parser("</think>", TOOLS)
    assert [[delta.content for delta in parser.push(character)] for character in "a<b"] == [["a"], [], ["<b"]]
    parser = speaks.parser("<think>", TOOLS)
    assert [[delta.reasoning for delta in parser.push(character)] for character in "a<b"] == [["a"], [], ["<b"]]
    parser = speaks.parser("", TOOLS)
    opening = [parser.push("a"), parser.push("<think>b</think>")]
    assert ["".join(delta.content for delta in deltas) for deltas in opening] == ["a", "<think>b</think>"]


@pytest.mark.parametrize(
    ("name", "pieces", "steps"),
    [
        (
            "deepseek_v3_1",
            [
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>",
                '{"a": ',
                '"<｜tool',
                '"}',
                "\n",
                "<｜tool▁call▁end｜>",
            ],
            [("", "f"), '{"a":', ' "', '<｜tool"}'],
        ),
        (
            "kimi_k2",
            [
                "<|tool_calls_section_begin|><|tool_call_begin|>f:1<|tool_call_argument_begin|>",
                " ",
                "{",
                "<|tool_call_end|>",
            ],
            [("", "f"), "{"],
        ),
        (
            "deepseek_v3_2",
            [
                '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">',
                '\n<｜DSML｜parameter name="a" string="true">',
                'x"',
                "\ny</",
            ],
            [("", "f"), '{"a": "', 'x\\"', "\\ny"],
        ),
        (
            "glm",
            ["<tool_call>get_weather<arg_key>", "city</arg_key><arg_value>", "a\t", "b", "</arg_value></tool_call>"],
            [("", "get_weather"), '{"city": "', "a\\t", "b", '"}'],
        ),
    ],
)
def test_names_are_told_at_once_and_text_and_json_as_they_come(
    name: str, pieces: list[str], steps: list[object]
) -> None:
    parser = dialect(name).parser("", TOOLS)
    told = [[delta.call for delta in parser.push(piece) if delta.call] for piece in pieces]
    said = [
        (calls[0].arguments, calls[0].name) if calls[0].name else "".join(c.arguments for c in calls)
        for calls in told
        if calls
    ]
    assert said == steps


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=6,
)
KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters='<>"'), min_size=1).filter(
    lambda key: key == key.strip()
)


@given(st.dictionaries(KEYS, JSON, max_size=4))
def test_arguments_of_a_whole_call_are_the_json_that_was_meant(arguments: dict[str, object]) -> None:
    texts_of = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    if any("</" in value for value in texts_of.values()):
        return
    is_text = {key: json.dumps(isinstance(value, str)) for key, value in arguments.items()}
    dsml = "".join(
        f'<｜DSML｜parameter name="{key}" string="{is_text[key]}">{texts_of[key]}</｜DSML｜parameter>\n'
        for key in arguments
    )
    text = (
        f'\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n{dsml}</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    )
    ((_, _, told),) = read(dialect("deepseek_v3_2"), [text]).calls
    assert json.loads(told) == arguments
    kinds = {key: {"type": "string"} if isinstance(value, str) else {} for key, value in arguments.items()}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": kinds}}}]
    pairs = "".join(f"<arg_key>{key}</arg_key><arg_value>{texts_of[key]}</arg_value>" for key in arguments)
    ((_, _, told),) = read(dialect("glm"), [f"<tool_call>f{pairs}</tool_call>"], tools=tools).calls
    assert json.loads(told) == arguments


@pytest.mark.parametrize(
    ("value", "city", "days", "unit", "other"),
    [
        ("12", '"12"', "12", '"12"', "12"),
        (" [1] ", '" [1] "', "[1]", '" [1] "', "[1]"),
        ("null", '"null"', "null", "null", "null"),
        ("{broken", *['"{broken"'] * 4),
        ("NaN", *['"NaN"'] * 4),
        ("", *['""'] * 4),
        ("[" * 5000, *[f'"{"[" * 5000}"'] * 4),
    ],
)  # fmt: skip
def test_the_schema_says_what_is_text_and_else_what_is_json_is_json(
    value: str, city: str, days: str, unit: str, other: str
) -> None:
    for key, expected in (("city", city), ("days", days), ("unit", unit), ("other", other)):
        text = f"<tool_call>get_weather<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
        assert read(dialect("glm"), [text]).calls == (("#0", "get_weather", f'{{"{key}": {expected}}}'),)


@pytest.mark.parametrize(
    "parameters", [None, [], {"properties": []}, {"properties": {"a": 1}}, {"properties": {"a": {"type": [[]]}}}]
)
def test_schemas_that_say_nothing_do_no_harm(parameters: object) -> None:
    tools = [{"function": {"name": "f", "parameters": parameters}}, {}]
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
    assert read(dialect("glm"), [text], tools=tools).calls == (("#0", "f", '{"a": 1}'),)


CALL, END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
MALFORMED = {
    "the json is broken": ("deepseek_v3_1", f"{CALL}f<｜tool▁sep｜>{{a}}{END}", Answer("", "", (("#0", "f", "{a}"),))),
    "the json is cut off": ("deepseek_v3_1", f'{CALL}f<｜tool▁sep｜>{{"a": ', Answer("", "", (("#0", "f", '{"a":'),))),
    "no json": ("deepseek_v3_1", f"{CALL}f<｜tool▁sep｜> {END}", Answer("", "", (("#0", "f", "{}"),))),
    "the name is cut off": ("deepseek_v3_1", f"{CALL}f<｜tool", Answer("", f"{CALL}f<｜tool")),
    "the name is none": ("deepseek_v3_1", f"{CALL}a b<｜tool▁sep｜>", Answer("", f"{CALL}a b<｜tool▁sep｜>")),
    "words between calls": (
        "deepseek_v3_1",
        f"{CALL}f<｜tool▁sep｜>{{}}{END} and {CALL}g<｜tool▁sep｜>{{}}{END}",
        Answer("", "and", (("#0", "f", "{}"), ("#1", "g", "{}"))),
    ),
    "a call does not end": (
        "deepseek_v3_1",
        f"{CALL}f<｜tool▁sep｜>{{}}<｜tool▁calls▁end｜>\n so",
        Answer("", "so", (("#0", "f", "{}"),)),
    ),
    "no fence": ("deepseek_v3", f"{CALL}function<｜tool▁sep｜>f", Answer("", f"{CALL}function<｜tool▁sep｜>f")),
    "no end of the fence": (
        "deepseek_v3",
        f"{CALL}function<｜tool▁sep｜>f\n```json\n{{}}{END}",
        Answer("", "", (("#0", "f", "{}"),)),
    ),
    "an id without a number": (
        "kimi_k2",
        ("<|tool_call_begin|>functions.f<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_call_begin|>a.b:3<|tool_call_argument_begin|>{}<|tool_call_end|>"),
        Answer(
            "",
            "<|tool_call_begin|>functions.f<|tool_call_argument_begin|>{}<|tool_call_end|>",
            (("a.b:3", "a.b", "{}"),),
        ),
    ),
    "an argument without its kind": (
        "deepseek_v3_2",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a">1</｜DSML｜parameter></｜DSML｜invoke>',
        Answer("", "", (("#0", "f", '{"a": 1}'),)),
    ),
    "an argument is cut off": (
        "deepseek_v3_2",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="false">[1, ',
        Answer("", "", (("#0", "f", '{"a": [1, '),)),
    ),
    "a key is cut off": (
        "deepseek_v3_2",
        '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a',
        Answer("", "", (("#0", "f", '{"a'),)),
    ),
    "talk of a call": ("glm", "Write <tool_call> and more.", Answer("", "Write <tool_call> and more.")),
    "talk of two": ("glm", "\n<tool_call> <tool_call>f</tool_call>", Answer("", "<tool_call>", (("#0", "f", "{}"),))),
    "a text is cut off": (
        "glm",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Zü</arg_v",
        Answer("", "", (("#0", "get_weather", '{"city": "Zü</arg_v'),)),
    ),
    "words between arguments": (
        "glm",
        "<tool_call>f<arg_key>a</arg_key>\n<arg_value>1</arg_value> so <arg_key>b<arg_value>2</arg_value></tool_call>",
        Answer("", "so", (("#0", "f", '{"a": 1, "b": 2}'),)),
    ),
}  # fmt: skip
SECTION = {"kimi_k2": KIMI[0], "deepseek_v3_2": "<｜DSML｜function_calls>", "glm": ""}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_malformed_is_content_or_the_arguments_are_what_came(case: str) -> None:
    name, text, expected = MALFORMED[case]
    text = SECTION.get(name, DEEPSEEK[0]) + text
    assert read(dialect(name), [text], "</think>") == read(dialect(name), list(text), "</think>") == expected


def test_what_is_held_back_is_bounded() -> None:
    speaks, count = dialect("glm"), 10_000
    for repeated, most in ((" ", MAX_WHITE), ("<", 1), ("<tool_call>", 11), ("<tool_call>\n", 13)):
        for piece in (repeated, repeated * 100):
            parser = speaks.parser("</think>", TOOLS)
            parser.push("a")
            told = sum(len(delta.content) for _ in range(count // 100) for delta in parser.push(piece))
            assert 0 < len(piece) * (count // 100) - told <= most
    parser = speaks.parser("</think>", TOOLS)
    assert not parser.push("<tool_call>" + "x" * MAX_NAME)
    assert "".join(delta.content for delta in parser.push("x")) == "<tool_call>" + "x" * (MAX_NAME + 1)
    parser = speaks.parser("", TOOLS)
    assert not parser.push("\n" * MAX_WHITE)
    assert parser.push("<thin") == []
    assert read(speaks, ["\n" * (MAX_WHITE + 1), "<think>a</think>"]).content == "<think>a</think>"


@pytest.mark.parametrize("name", NAMES)
def test_a_character_costs_the_same_however_long_the_answer_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read again is read again once or twice."""
    steps, real = 0, Automaton.next

    def counted(automaton: Automaton[str], state: int, symbol: str) -> int:
        nonlocal steps
        steps += 1
        return real(automaton, state, symbol)

    rng, speaks = random.Random(1), dialect(name)
    monkeypatch.setattr(Automaton, "next", counted)
    pieces = [rng.choice([*THOUGHT, *MARKUP[name], *PIECES, "x" * 100]) for _ in range(3000)]
    read(speaks, pieces, "</think>")
    assert steps <= 3 * len("".join(pieces))


def test_every_family_that_reads_calls_is_tested() -> None:
    assert {family.name for family in FAMILIES if family.calls} == set(FOLDERS) == set(MARKUP)
