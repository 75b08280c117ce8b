"""Calls in OpenAI's form, answers of a schema, and several streams at once."""

from __future__ import annotations

from tests.planted.mutant import Mutant

_CALLS = "openai/test_call.py::"

MUTANTS = [
    Mutant(
        "all answers to a question have one seed",
        "drawn.seed + number",
        "drawn.seed",
        _CALLS + "test_what_is_asked_arrives_in_the_requests",
    ),
    Mutant(
        "an unknown field of a call is passed over",
        "class CompletionBody(Body, kw_only=True, forbid_unknown_fields=True):",
        "class CompletionBody(Body, kw_only=True, forbid_unknown_fields=False):",
        _CALLS + "test_what_cannot_be_served_is_refused",
    ),
    Mutant(
        "a prompt is counted once for each of its answers",
        "for usage in used[:: self._num_each] if usage]",
        "for usage in used if usage]",
        _CALLS + "test_a_call_that_does_not_stream_gets_one_answer",
    ),
    Mutant(
        "a processor goes on from an output that is not its own",
        "        self._states[output] = state\n",
        "        self._states[output[:1]] = state\n",
        "test_schema.py::test_a_processor_is_a_function_of_the_output_alone",
    ),
    Mutant(
        "nobody but readers gets events",
        "        if self._on_events is not None and events:",
        "        if False:",
        "test_aio.py::test_several_requests_are_one_stream_and_leaving_it_leaves_all",
    ),
]
