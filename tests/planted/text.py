"""Where requests stop, and the text around them."""

from __future__ import annotations

from tests.planted.mutant import Mutant

STOPS = "test_stops.py::"
STREAM = "test_stream.py::"
DETOKENIZER = "test_detokenizer.py::"
CHAT = "test_chat.py::"

MUTANTS = [
    Mutant(
        "tokens behind a stop count as output",
        "usage=usage and attrs.evolve(usage, output_tokens=num_tokens)",
        "usage=usage",
        STOPS + "test_what_decode_says_behind_a_stop_changes_nothing "
        + STOPS + "test_a_matcher_that_fails_ends_its_request_alone",
    ),
    Mutant(
        "a request that has stopped is looked at again",
        "        if self.stopping is not None and self.ending is None:\n            self.ending = self._stopped(event, self.stopping)\n",
        "        if self.stopping is not None:\n            self.ending = self._stopped(event, self.stopping) or self.ending\n",
        STOPS + "test_what_decode_says_behind_a_stop_changes_nothing",
    ),
    Mutant(
        "a request that stopped ends as cancelled when its decode does not tell",
        "        if self.ending is not None:\n            return self._ended(self.ending, usage)\n",
        "",
        STOPS + "test_whatever_happens_before_decode_answers_a_request_that_stopped_has_stopped",
    ),
    Mutant(
        "a stopped request waits for its decode for ever",
        "CANCEL_GRACE_S if self.ending is None else STOP_GRACE_S",
        "CANCEL_GRACE_S if self.ending is None else float('inf')",
        STOPS + "test_a_decode_that_does_not_answer_holds_the_end_up_for_a_second",
    ),
    Mutant(
        "decode is not told that a request has stopped",
        "        elif not has_stopped:\n            self._ask_to_end(tracked)\n",
        "        elif not has_stopped:\n            tracked.end_requested(self._clock())\n",
        STOPS + "test_a_request_ends_with_the_token_that_completes_its_stop",
    ),
    Mutant(
        "a stop ends a request before min_new_tokens",
        "return bool(stops) and self._num_tokens >= self._min_tokens",
        "return bool(stops)",
        STOPS + "test_no_stop_ends_a_request_before_min_new_tokens",
    ),
    Mutant(
        "the output that a request came with is not looked at",
        "for index, token in enumerate(request.output):",
        "for index, token in enumerate(()):",
        STOPS + "test_a_request_that_is_resumed_stops_where_it_would_have",
    ),
    Mutant(
        "a sequence inside a longer one is overlooked",
        "found[state] = found[state] or found[shorter[state]]",
        "found[state] = found[state]",
        "test_stop.py::test_every_state_says_what_plain_comparison_says "
        + STREAM + "test_no_beginning_of_a_stop_string_is_shown_before_it_is_known_to_be_none",
    ),
    Mutant(
        "a stop string that came too early is held back for ever",
        "held[state] = depth[state] if children[state] else held[shorter[state]]",
        "held[state] = depth[state]",
        "test_stop.py::test_every_state_says_what_plain_comparison_says",
    ),
    Mutant(
        "the beginning of a stop string is shown",
        "num_shown = len(text) - self._search.num_held",
        "num_shown = len(text)",
        STREAM + "test_no_beginning_of_a_stop_string_is_shown_before_it_is_known_to_be_none "
        + STREAM + "test_what_was_held_back_comes_when_it_is_no_stop",
    ),
    Mutant(
        "what is shown of a character that is not whole is a replacement",
        "while len(text) - end < MAX_HELD and text.endswith(REPLACEMENT, 0, end):",
        "while False:",
        DETOKENIZER + "test_any_split_of_multi_byte_text_gives_the_text",
    ),
    Mutant(
        "text waits until no character is open",
        "elif len(self._pending) >= MAX_PENDING:",
        "elif False:",
        DETOKENIZER + "test_a_token_costs_the_same_however_many_came",
    ),
    Mutant(
        "the output begins a text, whatever stands before it",
        "            self._context.insert(0, token)\n",
        "            pass\n",
        DETOKENIZER + "test_the_output_is_what_it_adds_to_the_text_of_the_prompt",
    ),
    Mutant(
        "templates see the messages of the host",
        'values = _as_json({"messages"',
        'values = dict({"messages"',
        CHAT + "test_a_chat_that_is_none_is_refused",
    ),
    Mutant(
        "templates write HTML",
        '        self.filters["tojson"] = _tojson\n',
        "",
        CHAT + "test_a_template_renders_as_in_transformers",
    ),
]  # fmt: skip
