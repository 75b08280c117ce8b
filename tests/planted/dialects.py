"""Planted bugs in how answers of models are read: reasoning, content, calls."""

from __future__ import annotations

from tests.planted.mutant import Mutant

TRANSCRIPT = "test_transcripts.py::test_an_answer_of_the_maker_is_read_whole_and_in_any_pieces"
PARSER = "dialects/test_parser.py::"
DIALECT = "test_dialect.py::"

MUTANTS = [
    Mutant(
        "the beginning of a marker is told before it is known to be none",
        "shown = done if self._place in _UNDECIDED else len(text) - num_held",
        "shown = done if self._place in _UNDECIDED else len(text)",
        f"{PARSER}test_cuts_change_nothing {PARSER}test_text_flows_and_only_the_beginning_of_a_marker_is_held",
    ),
    Mutant(
        "a user who writes <think> opens the thoughts",
        "(prompt_text.rfind(marker, begin) for marker in (THINK, END_OF_THOUGHT))",
        "(prompt_text.rfind(marker) for marker in (THINK, END_OF_THOUGHT))",
        f"{TRANSCRIPT}[glm-4.5] {TRANSCRIPT}[r1-behind-tools]",
    ),
    Mutant(
        "a model that opens its thoughts itself has none",
        "place = Place.OPENING if self.thinks and opened == closed else Place.CONTENT",
        "place = Place.CONTENT",
        f"{TRANSCRIPT}[r1-0528] {TRANSCRIPT}[kimi-k2-thinking]",
    ),
    Mutant(
        "thoughts begin wherever <think> stands",
        "<= MAX_WHITE and not text[done : at - num_held].strip(WHITE)",
        "<= MAX_WHITE",
        f"{PARSER}test_text_flows_and_only_the_beginning_of_a_marker_is_held",
    ),
    Mutant(
        "what is no call is lost with its marker",
        "        self._out.append(Delta(content=begin))\n",
        "",
        f"{PARSER}test_what_is_malformed_is_content_or_the_arguments_are_what_came",
    ),
    Mutant(
        "what only begins like a call is held back for ever",
        "is_whole = at - done <= MAX_NAME",
        "is_whole = True",
        f"{PARSER}test_what_is_held_back_is_bounded",
    ),
    Mutant(
        "white space before a marker is held back without a bound",
        "shown = max(len(text.rstrip(self._white_behind)), len(text) - MAX_WHITE)",
        "shown = len(text.rstrip(self._white_behind))",
        f"{PARSER}test_what_is_held_back_is_bounded",
    ),
    Mutant(
        "a text that looks like a number becomes one",
        'if stripped == "null" or types != _TEXT | {"null"}:',
        "if True:",
        f"{PARSER}test_the_schema_says_what_is_text_and_else_what_is_json_is_json {TRANSCRIPT}[glm-4.7]",
    ),
    Mutant(
        "quotes in a text end the arguments",
        "            self._argue(_quoted(text)[1:-1])\n",
        "            self._argue(text)\n",
        f"{PARSER}test_arguments_of_a_whole_call_are_the_json_that_was_meant {TRANSCRIPT}[v3.2]",
    ),
    Mutant(
        "a value that is no JSON breaks the arguments",
        "        except (msgspec.DecodeError, RecursionError):\n            pass\n",
        "        except (msgspec.DecodeError, RecursionError):\n            return stripped\n",
        f"{PARSER}test_the_schema_says_what_is_text_and_else_what_is_json_is_json",
    ),
    Mutant(
        "a call without arguments has none",
        '        if not self._has_arguments:\n            self._argue("{}")\n',
        '        if not self._has_arguments:\n            self._argue("")\n',
        f"{TRANSCRIPT}[glm-4.7] {PARSER}test_what_is_malformed_is_content_or_the_arguments_are_what_came",
    ),
    Mutant(
        "a call that is cut off loses what came",
        "        elif self._place is Place.VALUE:\n            self._argue(text)\n        return",
        "        return",
        f"{PARSER}test_what_is_malformed_is_content_or_the_arguments_are_what_came",
    ),
    Mutant(
        "Kimi's ids are not the model's",
        'named.groupdict().get("id")',
        "None",
        f"{TRANSCRIPT}[kimi-k2]",
    ),
    Mutant(
        "newlines around calls are content",
        "            self._white_before = WHITE\n",
        "            pass\n",
        f"{PARSER}test_what_is_malformed_is_content_or_the_arguments_are_what_came",
    ),
    Mutant(
        "tools that the template never shows may be asked for",
        'return bool(re.search(r"\\btools\\b", re.sub(r"\\{#.*?#\\}", "", template.source, flags=re.DOTALL)))',
        "return True",
        f"{DIALECT}test_what_cannot_be_read_or_would_not_be_shown_is_said",
    ),
    Mutant(
        "V3.1's calls are read as R1 writes them",
        '(_SEP, THINK), _OF_DEEPSEEK, (_SEP, _JSON_BLOCK), _V3, white="\\n"',
        '(_SEP, THINK), _OF_DEEPSEEK, (_SEP,), _V3, white="\\n"',
        f"{DIALECT}test_a_folder_is_recognised_and_its_markers_are_its_added_tokens {TRANSCRIPT}[v3.1]",
    ),
]
