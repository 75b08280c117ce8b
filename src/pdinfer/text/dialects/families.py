"""The dialects, as their makers publish them: sources and dates are in docs/decisions/0059-what-models-say.md."""

from __future__ import annotations

from pdinfer.text.dialects.grammar import THINK, WHITE, Calls, Family, Place, ToolsText

_WORD = r"\s*(?P<name>[^\s<>]+)\s*"


def _with_json(section: tuple[str, str], call: tuple[str, ...], arguments: str, name: str) -> Calls:
    """Return the form of calls whose arguments are JSON: `section` has the markers around all calls, `call` the one
    before each and those that may follow it, `arguments` is the one before its arguments."""
    begin, *ends = call
    return Calls(
        {
            Place.CONTENT: {section[0]: Place.CALLS},
            Place.CALLS: {begin: Place.NAME, section[1]: Place.CONTENT},
            Place.NAME: {arguments: Place.JSON, begin: Place.NAME},
            Place.JSON: {**dict.fromkeys(ends, Place.CALLS), section[1]: Place.CONTENT},
        },
        name,
    )


_OF_DEEPSEEK = ("<｜Assistant｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>", "</function_results>")
_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_BEGIN, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_JSON_BLOCK = "```json"
_V3 = _with_json(_SECTION, (_BEGIN, "```" + _END, _END), _JSON_BLOCK, rf"\s*function{_SEP}{_WORD}")
_V3_1 = _with_json(_SECTION, (_BEGIN, _END), _SEP, _WORD)
_V3_1_TOOLS = ToolsText(
    "## Tools\nYou have access to the following tools:\n\n",
    "### {}\nDescription: {}\n\nParameters: {}\n\n",
    "IMPORTANT: ALWAYS adhere to this exact format for tool use:\n"
    f"{_SECTION[0]}{_BEGIN}tool_call_name{_SEP}tool_call_arguments{_END}{{additional_tool_calls}}{_SECTION[1]}\n\n"
    "Where:\n- `tool_call_name` must be an exact match to one of the available tools\n"
    "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema\n"
    "- For multiple tool calls, chain them directly without separators or spaces",
)
"""The words of V3.1's model card, which the model was trained on."""

_DSML = "｜DSML｜"
_INVOKE, _SECTION_END = f'<{_DSML}invoke name="', f"</{_DSML}function_calls>"
_V3_2 = Calls(
    {
        Place.CONTENT: {f"\n\n<{_DSML}function_calls>": Place.CALLS, f"<{_DSML}function_calls>": Place.CALLS},
        Place.CALLS: {_INVOKE: Place.NAME, _SECTION_END: Place.CONTENT},
        Place.NAME: {'">': Place.PARAMETERS, _INVOKE: Place.NAME},
        Place.PARAMETERS: {
            f'<{_DSML}parameter name="': Place.KEY,
            f"</{_DSML}invoke>": Place.CALLS,
            _SECTION_END: Place.CONTENT,
        },
        Place.KEY: {'">': Place.VALUE},
        Place.VALUE: {f"</{_DSML}parameter>": Place.PARAMETERS},
    },
    r'(?P<name>[^\s"<>]+)',
    r'(?P<key>.*)"\s+string="(?P<is_text>true|false)',
)

_KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_KIMI = _with_json(
    _KIMI_SECTION,
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
    "<|tool_call_argument_begin|>",
    r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<>]+):\d+)\s*",
)

_GLM = Calls(
    {
        Place.CONTENT: {"<tool_call>": Place.NAME},
        Place.NAME: {"<arg_key>": Place.KEY, "</tool_call>": Place.CONTENT, "<tool_call>": Place.NAME},
        Place.PARAMETERS: {"<arg_key>": Place.KEY, "</tool_call>": Place.CONTENT},
        Place.KEY: {"<arg_value>": Place.VALUE},
        Place.VALUE: {"</arg_value>": Place.PARAMETERS},
    },
    _WORD,
    r"(?P<key>.*)</arg_key>\s*",
)

FAMILIES = (
    Family(
        "deepseek_v4",
        (_DSML, "<｜latest_reminder｜>"),
        _OF_DEEPSEEK,
        why_not="the checkpoint writes calls as DeepSeek-V4 does, in a form that is not known here",
    ),
    Family("deepseek_v3_2", (_DSML,), _OF_DEEPSEEK, calls=_V3_2),
    Family("deepseek_r1", (_SEP, THINK), _OF_DEEPSEEK, (_SEP, _JSON_BLOCK), _V3, white="\n"),
    Family("deepseek_v3", (_SEP,), _OF_DEEPSEEK, (_SEP, _JSON_BLOCK), _V3),
    Family("deepseek_v3_1", (_SEP,), _OF_DEEPSEEK, (_SEP,), _V3_1, tools_text=_V3_1_TOOLS),
    Family(
        "deepseek",
        (_SEP,),
        _OF_DEEPSEEK,
        why_not="the chat template of the checkpoint writes no calls, which would show their form",
        white="\n",
    ),
    Family("kimi_k2", _KIMI_SECTION, ("<|im_middle|>",), ("<|im_middle|>",), _KIMI, call_ends_thought=True),
    Family("glm", ("<arg_key>",), ("<|assistant|>",), ("<|assistant|>",), _GLM, white=WHITE, white_behind=WHITE),
)
"""A checkpoint speaks the first that it matches."""
