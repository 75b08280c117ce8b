"""Calls in OpenAI's form: what clients send, and what they are told."""

from __future__ import annotations

from tests.planted.mutant import Mutant

_CHATS = "openai/test_chats.py::"
_MESSAGES = "openai/test_messages.py::"
_TOOLS = "openai/test_tools.py::"
_NAMES = "openai/test_logprobs.py::"
_SERVED = "e2e/test_serve_openai.py::"

MUTANTS = [
    Mutant(
        "a turn that only calls has an empty text",
        'made["content"] = None if calls else _refusal(made)',
        'made["content"] = _refusal(made)',
        _MESSAGES + "test_a_turn_that_only_calls_has_no_content_and_one_that_says_nothing_an_empty_one",
    ),
    Mutant(
        "instructions of a developer keep a role that no template knows",
        'if role == "developer" and not names_role(template, role):',
        "if False:",
        _MESSAGES + "test_instructions_of_a_developer_are_those_of_the_system_unless_the_template_knows_the_role",
    ),
    Mutant(
        "empty tool_calls stay in a message",
        'calls = made.pop("tool_calls", None) or []',
        'calls = made.get("tool_calls") or []',
        _MESSAGES + "test_a_turn_that_only_calls_has_no_content_and_one_that_says_nothing_an_empty_one",
    ),
    Mutant(
        "a picture is left out of a message",
        "        if not isinstance(text, str):\n            what =",
        "        if text is None:\n            continue\n        if not isinstance(text, str):\n            what =",
        _MESSAGES + "test_what_a_template_cannot_show_is_refused_with_its_place",
    ),
    Mutant(
        "every template gets arguments as an object",
        "return PROBE in template.render(chat)",
        "return False",
        _MESSAGES + "test_arguments_of_calls_reach_each_template_as_it_takes_them",
    ),
    Mutant(
        "every template gets arguments as a text",
        "return PROBE in template.render(chat)",
        "return True",
        _MESSAGES + "test_arguments_of_calls_reach_each_template_as_it_takes_them",
    ),
    Mutant(
        "a schema refers to the parts of another",
        'moved["$ref"] = root + to[1:]',
        'moved["$ref"] = to',
        _TOOLS + "test_a_choice_becomes_the_schema_of_the_tool_or_of_any",
    ),
    Mutant(
        "the brace of the wrapping is an argument's",
        "yield self._delta(len(self._held) - self._is_wrapped)",
        "yield self._delta(len(self._held))",
        _TOOLS + "test_a_forced_call_comes_in_any_pieces",
    ),
    Mutant(
        "a call that was cut off loses its last brace",
        "elif self._held and not self._is_whole():",
        "elif False:",
        _TOOLS + "test_a_forced_call_that_was_cut_off_is_told_as_far_as_it_came",
    ),
    Mutant(
        "calls that may not be parallel are all told",
        "if not (self._at_most_one and delta.call is not None and delta.call.index):",
        "if True:",
        _CHATS + "test_of_calls_that_may_not_be_parallel_the_first_is_told",
    ),
    Mutant(
        "a turn that calls ends with stop",
        'return "tool_calls" if self._has_calls and',
        'return "tool_calls" if False and',
        _CHATS + "test_thoughts_content_and_calls_are_told_apart",
    ),
    Mutant(
        "a turn that was cut off ends for its calls",
        "if self._has_calls and reason is FinishReason.STOP else",
        "if self._has_calls and reason is not None else",
        _CHATS + "test_thoughts_content_and_calls_are_told_apart",
    ),
    Mutant(
        "what a parser has held back is lost",
        "*(self._parser.end() if is_last else ())",
        "*()",
        _CHATS + "test_what_looked_like_markup_to_the_last_is_content",
    ),
    Mutant(
        "tools that may not be called are told to the model",
        'if body.tool_choice == "none" or not tools:',
        "if not tools:",
        _TOOLS + "test_tools_are_told_unless_none_may_be_called",
    ),
    Mutant(
        "what the client says of sampling counts less than the folder",
        "    options |= {name: value for name in _AS_THEY_ARE",
        "    options = {name: value for name in _AS_THEY_ARE",
        _CHATS + "test_the_folder_says_how_tokens_are_drawn_and_the_client_may_say_otherwise",
    ),
    Mutant(
        "the tokenizer's eos ends nothing",
        'options["stop_token_ids"] += tuple(sorted(others))',
        "pass",
        _CHATS + "test_the_folder_says_how_tokens_are_drawn_and_the_client_may_say_otherwise",
    ),
    Mutant(
        "a limit is a forecast",
        "expected = SamplingParams().max_new_tokens",
        "expected = None",
        _CHATS + "test_a_chat_may_run_to_the_end_of_what_fits_and_is_not_charged_for_that",
    ),
    Mutant(
        "a body is read before it is measured",
        "if len(data) > max_bytes(limit):",
        "if False:",
        _CHATS + "test_a_body_that_no_prompt_could_fill_is_not_read",
    ),
    Mutant(
        "a value that asks for something counts as idle",
        "if not any(value == known and type(value) is type(known) for known in idle):",
        "if value not in idle:",
        _CHATS + "test_what_cannot_be_served_is_refused_by_name",
    ),
    Mutant(
        "the drawn token is told with another one's probability",
        "best = {self.name(event.token): event.logprob}",
        "best = {}",
        _NAMES + "test_each_of_several_tokens_of_one_text_is_told_and_the_drawn_one_under_its_text",
    ),
    Mutant(
        "a token loses its leading space",
        "return self._tokenizer.joined([token, token]).removeprefix(self._tokenizer.joined([token])).encode()",
        "return self._tokenizer.joined([token]).encode()",
        _NAMES + "test_spaces_stay_and_bytes_are_bytes_where_a_tokenizer_writes_them_out",
    ),
    Mutant(
        "an answer ends by one of its ends alone",
        "logits_V.copy_(_ending_alike(_of_shape(changed, logits_V), logits_V, draw))",
        "logits_V.copy_(_of_shape(changed, logits_V))",
        "test_sampling.py::test_where_a_processor_lets_an_answer_end_it_may_end_by_each_of_its_ends",
    ),
    Mutant(
        "what a processor keeps is changed",
        "changed_V = changed_V.clone()  #",
        "pass  #",
        "test_sampling.py::test_where_a_processor_lets_an_answer_end_it_may_end_by_each_of_its_ends",
    ),
    Mutant(
        "a tenant is charged the limits of its requests",
        "self._shares.add(tracked.request.cache_salt, forecast_tokens(tracked.request))",
        "self._shares.add(tracked.request.cache_salt, tracked.max_tokens)",
        "pairing/test_queue.py::test_a_tenant_is_charged_what_its_requests_are_expected_to_use",
    ),
    Mutant(
        "pages are kept for a mere limit",
        "owed = sum(max(0, one.expected_tokens - one.num_tokens) for one in growing)",
        "owed = sum(one.max_tokens - one.num_tokens for one in growing)",
        "test_page_tables.py::test_pages_are_kept_for_the_growth_that_is_expected_and_not_for_a_mere_limit",
    ),
    Mutant(
        "requests that end in the queue have no duration",
        "            usage=usage,\n            at_s=now - self.submitted_at,\n        )\n\n    def _timeline",
        "            usage=usage,\n        )\n\n    def _timeline",
        "test_recorder.py::test_requests_that_end_in_the_queue_count_in_the_durations",
    ),
    Mutant(
        "a host that drains is ready",
        "if self._num_drains and health.takes_requests:",
        "if False:",
        "test_aio.py::test_health_says_whether_a_host_serves_with_all_that_it_has",
    ),
    Mutant(
        "a port that stands still is healthy",
        "if age > STILL_S}",
        "if age < 0}",
        "test_aio.py::test_health_is_degraded_while_ports_are_lost_or_do_not_reach_each_other",
    ),
    Mutant(
        "chunks of activations begin anew",
        "row = Row(chunk, start, range(memory.num_pages)",
        "row = Row(chunk, 0, range(memory.num_pages)",
        "unit/model/test_model.py::test_activations_are_those_of_transformers",
    ),
    Mutant(
        "the experts of another layer are told",
        "router = self._routers[block.layer] = _NotingRouter.of(block.mlp.router)",
        "router = self._routers[max(self.layers)] = _NotingRouter.of(block.mlp.router)",
        "unit/model/test_model.py::test_activations_are_those_of_transformers",
    ),
    Mutant(
        "JSON begins before a reasoning has ended",
        "return self.rest if END_OF_THOUGHT in text else",
        "return self.rest if text else",
        "test_schema.py::test_json_begins_behind_a_reasoning_that_the_prompt_or_the_answer_opens",
    ),
    Mutant(
        "an answer may end among its thoughts",
        "        self.free[list(self.ends)] = False\n",
        "",
        "test_schema.py::test_json_begins_behind_a_reasoning_that_the_prompt_or_the_answer_opens",
    ),
    Mutant(
        "added tokens are text of JSON",
        "        self.texts[list(tokenizer.library.get_added_tokens_decoder())] = False\n",
        "",
        "test_schema.py::test_only_ends_end_an_answer_and_markers_are_no_text",
    ),
    Mutant(
        "an answer ends by the tokenizer's eos alone",
        "allowed[list(known.ends)] = found[known.eos]",
        "allowed[[known.eos]] = found[known.eos]",
        "test_schema.py::test_only_ends_end_an_answer_and_markers_are_no_text",
    ),
    Mutant(
        "a stop string that is a special token never comes",
        "token in self.special or search",
        "search",
        "test_stream.py::test_a_special_token_is_a_stop_string_and_shows_nothing",
    ),
    Mutant(
        "the text of a special token that stops is shown",
        "            if self.stop_string is not None:\n                return self._held + self._detokenizer.flush()\n",
        "            if self.stop_string is not None:\n                return self._held + self.stop_string\n",
        "test_stream.py::test_a_special_token_is_a_stop_string_and_shows_nothing",
    ),
    Mutant(
        "a client says the salt of another tenant",
        'return len(tenant).to_bytes(2) + tenant + salt if tenant or salt else b""',
        "return tenant + salt",
        _CHATS + "test_a_client_cannot_say_the_salt_of_another_tenant",
    ),
    Mutant(
        "a forced call has arguments that its tool does not list",
        'return {**parameters, "additionalProperties": False} if is_whole else parameters',
        "return parameters",
        _TOOLS + "test_a_forced_call_has_the_arguments_that_the_tool_lists",
    ),
    Mutant(
        "one of several schemas of the arguments excludes the others",
        'is_whole = "properties" in parameters and not OTHERS & parameters.keys()',
        'is_whole = "properties" in parameters',
        _TOOLS + "test_a_forced_call_has_the_arguments_that_the_tool_lists",
    ),
    Mutant(
        "headers of a second request may take for ever",
        "        super().data_received(data)\n        self.set_deadline()\n",
        "        super().data_received(data)\n        if self.cycle is not None:\n            self.deadline = self.deadline and self.deadline.cancel()\n",
        _SERVED + "test_headers_must_come_in_time_those_of_later_requests_too",
        where="examples/",
    ),
    Mutant(
        "each byte of the headers gives them more time",
        "        elif self.deadline is None:\n",
        "        else:\n",
        _SERVED + "test_headers_must_come_in_time_those_of_later_requests_too",
        where="examples/",
    ),
    Mutant(
        "uvicorn breaks off the streams that it should wait for",
        "            await end()\n        finally:\n",
        "            uvicorn_ends(signal.SIGTERM, None)\n            await end()\n        finally:\n",
        _SERVED + "test_streams_end_before_uvicorn_hears_that_it_is_to_end",
        where="examples/",
    ),
    Mutant(
        "a server that drains takes new calls",
        'if engines.is_closing or host.health().state.value == "draining":',
        "if engines.is_closing:",
        _SERVED + "test_probes_and_models_and_what_is_not_served",
        where="examples/",
    ),
    Mutant(
        "calls that are not served are told in a form of FastAPI's own",
        "exception_handlers={404: not_served, 405: not_served}",
        "exception_handlers={405: not_served}",
        _SERVED + "test_probes_and_models_and_what_is_not_served",
        where="examples/",
    ),
    Mutant(
        "a prompt that leaves no room for its answer is told by the engines alone",
        "if len(prompt.tokens) + num_new > limit:",
        "if len(prompt.tokens) >= limit:",
        _CHATS + "test_what_is_too_long_is_told_so_that_clients_shorten_it",
    ),
    Mutant(
        "clients do not know that a chat is too long",
        'code = "context_length_exceeded" if isinstance(error, TooLong) else error.code.lower()',
        "code = error.code.lower()",
        _CHATS + "test_what_is_too_long_is_told_so_that_clients_shorten_it",
    ),
    Mutant(
        "a server that starts another engine is dead",
        '(lost or state != "down")',
        'state != "down"',
        _SERVED + "test_probes_and_models_and_what_is_not_served",
        where="examples/",
    ),
    Mutant(
        "a server with one engine less is as ready as before",
        'state = "degraded" if lost and health.takes_requests else health.state.value',
        "state = health.state.value",
        _SERVED + "test_probes_and_models_and_what_is_not_served",
        where="examples/",
    ),
    Mutant(
        "bodies have to be short while an engine is replaced",
        "limit = host.pairing.max_tokens or tokenizer.max_tokens or 0",
        "limit = host.pairing.max_tokens",
        _SERVED + "test_probes_and_models_and_what_is_not_served",
        where="examples/",
    ),
    Mutant(
        "an empty content ends a reasoning",
        "if not message and self._is_content:",
        "if not message:",
        _CHATS + "test_a_stream_has_the_same_in_pieces_one_chunk_for_each_token",
    ),
]
