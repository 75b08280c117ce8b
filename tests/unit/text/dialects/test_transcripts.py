"""Answers as the makers publish them. Sources and dates: docs/decisions/0059-what-models-say.md."""

from __future__ import annotations

import random
import re

import attrs
import pytest

from tests.unit.text.dialects.folders import Answer, dialect, read


@attrs.frozen
class Transcript:
    """An answer, behind the end of a prompt, and what it means."""

    dialect: str
    prompt: str
    text: str
    means: Answer


# As the chat template of R1-0528 writes calls, and the model card thoughts: "<think>\n".
R1 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    '```json\n{"city": "Zürich", "unit": "c"}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n"
    '```json\n{"query": "café \\"best\\"", "filters": {"tags": ["a", "b"], "max": 3}}\n```<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜>"
)
ZURICH = ("#0", "get_weather", '{"city": "Zürich", "unit": "c"}')
CAFE = ("#1", "search", '{"query": "café \\"best\\"", "filters": {"tags": ["a", "b"], "max": 3}}')
V3_1 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Zürich", "unit": "c"}'
    "<｜tool▁call▁end｜><｜tool▁call▁begin｜>search<｜tool▁sep｜>"
    '{"query": "café \\"best\\"", "filters": {"tags": ["a", "b"], "max": 3}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
# From encoding/test_output.txt of DeepSeek-V3.2, with an argument that is no text.
V3_2 = (
    "User is now asking about the day after tomorrow, which is 2024-01-17. I can query directly since I already know "
    "today's date.</think>\n\n<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="location" string="true">San Francisco</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="date" string="true">2024-01-17</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="location" string="true">New "York" <b></｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="hours" string="false">[1, 2]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n"
    "</｜DSML｜function_calls>"
)
V3_2_RESULTS = (
    "<｜Assistant｜><think>What <think> is for.</think>\n\n<｜DSML｜function_calls>…<｜end▁of▁sentence｜>\n\n"
    "<function_results>\n<result><think></result>\n</function_results>\n\n"
)
# docs/tool_call_guidance.md of MoonshotAI/Kimi-K2; the thoughts as the chat template of Kimi-K2-Thinking.
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Beijing"}<|tool_call_end|><|tool_call_begin|> functions.get_weather:1 <|tool_call_argument_begin|> '
    '{\n  "city": "Shanghai"\n} <|tool_call_end|><|tool_calls_section_end|>'
)
KIMI_CALLS = (
    ("functions.get_weather:0", "get_weather", '{"city": "Beijing"}'),
    ("functions.get_weather:1", "get_weather", '{\n  "city": "Shanghai"\n}'),
)
# As the chat templates of GLM-4.5 and 4.6 write it, and resources/glm_4.6_tir_guide.md of zai-org/GLM-4.5 reads it.
GLM_4_5 = (
    "\n<think>I should call the tools.</think>\nTwo cities.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n"
    "<arg_value>Zürich</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>c</arg_value>\n</tool_call>\n"
    "<tool_call>browser.search\n<arg_key>query</arg_key>\n"
    '<arg_value>café "best"</arg_value>\n<arg_key>filters</arg_key>\n'
    '<arg_value>{"tags": ["a", "b"], "max": 3}</arg_value>\n</tool_call>'
)
# As the chat templates of GLM-4.7 and 5 write it.
GLM_4_7 = (
    "I should call the tools.</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>  12\n</arg_value>"
    "<arg_key>days</arg_key><arg_value>12</arg_value><arg_key>unit</arg_key><arg_value>12</arg_value></tool_call>"
    "<tool_call>now</tool_call>"
)
GLM_SEARCH = ("#1", "browser.search", '{"query": "café \\"best\\"", "filters": {"tags": ["a", "b"], "max": 3}}')

TRANSCRIPTS = {
    "r1": Transcript(
        "deepseek_r1", "<｜Assistant｜><think>\n", "Two.\n</think>\n\nBoth.\n\n" + R1,
        Answer("Two.", "Both.\n\n", (ZURICH, CAFE)),
    ),
    "r1-0528": Transcript(
        "deepseek_r1", "<｜Assistant｜>", "<think>\nTwo.\n</think>\n\n" + R1, Answer("Two.", "", (ZURICH, CAFE))
    ),
    "r1-behind-tools": Transcript("deepseek_r1", "<think><｜tool▁outputs▁end｜>", "It is.", Answer("", "It is.")),
    "v3-0324": Transcript("deepseek_v3", "<｜Assistant｜>", "Both:\n" + R1, Answer("", "Both:\n", (ZURICH, CAFE))),
    "v3.1": Transcript("deepseek_v3_1", "<think><｜Assistant｜></think>", V3_1, Answer("", "", (ZURICH, CAFE))),
    "v3.1-thinking": Transcript(
        "deepseek_v3_1", "<｜Assistant｜><think>", f"\nTwo.</think>\n{V3_1}", Answer("\nTwo.", "\n", (ZURICH, CAFE))
    ),
    "v3.2": Transcript(
        "deepseek_v3_2", "<｜User｜>Thanks!<｜Assistant｜><think>", V3_2,
        Answer(
            V3_2.partition("</think>")[0], "",
            (
                ("#0", "get_weather", '{"location": "San Francisco", "date": "2024-01-17"}'),
                ("#1", "get_weather", '{"location": "New \\"York\\" <b>", "hours": [1, 2]}'),
            ),
        ),
    ),
    "v3.2-results": Transcript(
        "deepseek_v3_2", V3_2_RESULTS + "<think>", "Got it.</think>Here's the forecast:\n\n**New York**",
        Answer("Got it.", "Here's the forecast:\n\n**New York**"),
    ),
    "v3.2-results-chat": Transcript("deepseek_v3_2", V3_2_RESULTS + "</think>", "Here", Answer("", "Here")),
    "kimi-k2": Transcript(
        "kimi_k2", "<|im_assistant|>assistant<|im_middle|>", "Let me check. " + KIMI,
        Answer("", "Let me check. ", KIMI_CALLS),
    ),
    "kimi-k2-thinking": Transcript(
        "kimi_k2", "<think></think><|im_assistant|>assistant<|im_middle|>", f"<think> Two. </think>Both.{KIMI}",
        Answer(" Two. ", "Both.", KIMI_CALLS),
    ),
    "kimi-k2-thinking-no-end": Transcript("kimi_k2", "", f"<think>Two.{KIMI}", Answer("Two.", "", KIMI_CALLS)),
    "glm-4.5": Transcript(
        "glm", "<|user|>\n<think><|assistant|>", GLM_4_5,
        Answer("I should call the tools.", "Two cities.", (ZURICH, GLM_SEARCH)),
    ),
    "glm-4.5-nothink": Transcript("glm", "<|assistant|>\n<think></think>", "\nHi.\n", Answer("", "Hi.")),
    "glm-4.7": Transcript(
        "glm", "<|assistant|><think>", GLM_4_7,
        Answer(
            "I should call the tools.", "",
            (("#0", "get_weather", '{"city": "  12\\n", "days": 12, "unit": "12"}'), ("#1", "now", "{}")),
        ),
    ),
    "glm-5-prefilled": Transcript("glm", "<|assistant|><think>I ", "think.\n</think>Hi", Answer("think.", "Hi")),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_an_answer_of_the_maker_is_read_whole_and_in_any_pieces(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    text, speaks, rng = transcript.text, dialect(transcript.dialect), random.Random(name)
    cuts = [sorted(rng.sample(range(len(text)), min(len(text), 7))) for _ in range(20)]
    for way in ([text], list(text), *([text[a:b] for a, b in zip([0, *at], [*at, None], strict=True)] for at in cuts)):
        assert read(speaks, way, transcript.prompt) == transcript.means, way


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_without_tools_calls_are_content(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    answer = read(dialect(transcript.dialect), [transcript.text], transcript.prompt, tools=None)
    assert not answer.calls
    if name != "kimi-k2-thinking-no-end":
        assert answer.reasoning == transcript.means.reasoning
    end = re.split("</?think>", transcript.text)[-1].strip()
    assert (answer.content or answer.reasoning).strip().endswith(end)
