"""Planted bugs in what is told to a host that has set something, or makes a mistake."""

from __future__ import annotations

from tests.planted.mutant import Mutant

SETTINGS = "test_host_settings.py"
MISUSE = "test_misuse.py"
TOKENS = f"{SETTINGS}::test_what_the_host_has_set_changes_no_token"

MUTANTS = [
    Mutant(
        "pages that were made in inference mode can be written in it alone",
        "        if torch.is_inference_mode_enabled():\n            stack.enter_context(torch.inference_mode(False))\n",
        "",
        f"{TOKENS}[inference-mode-bfloat16]",
    ),
    Mutant(
        "steps round as the host's autocast says",
        "            if torch.is_autocast_enabled(kind):",
        "            if False:",
        f"{TOKENS}[autocast-float32]",
    ),
    Mutant(
        "float32 is rounded as the host has set for all products",
        '            torch.set_float32_matmul_precision("highest")\n',
        "",
        f"{TOKENS}[rounded-products-float32]",
    ),
    Mutant(
        "float32 is rounded as the host has set for a backend",
        '        place.fp32_precision = "ieee"\n',
        "        pass\n",
        f"{TOKENS}[rounded-products-of-each-backend-float32]",
    ),
    Mutant(
        "a backend is exact and all of them are not",
        '            torch.set_float32_matmul_precision("highest")\n            return',
        '            places[0].fp32_precision = places[1].fp32_precision = "ieee"\n            return',
        f"{SETTINGS}::test_products_find_settings_that_agree",
    ),
    Mutant(
        "the host's precision is not what it was",
        "                self._undo.pop()()",
        "                self._undo.pop()",
        f"{SETTINGS}::test_the_host_finds_its_settings_as_they_were",
    ),
    Mutant(
        "another thread's precision is given back in the middle of a step",
        "while self._num_inside <= 0 and self._undo:",
        "while self._undo:",
        f"{SETTINGS}::test_settings_are_given_back_when_the_last_step_has_ended",
    ),
    Mutant(
        "a step computes with tensors that hold nothing",
        "is not Tensor:\n        raise ConfigError(",
        "is None:\n        raise ConfigError(",
        f"{SETTINGS}::test_tensors_that_hold_nothing_are_refused_and_nothing_is_lost",
    ),
    Mutant(
        "an engine that finds a mode of the host is lost for good",
        "                check_tensors_are_real()  # an engine",
        "                # an engine",
        f"{SETTINGS}::test_tensors_that_hold_nothing_are_refused_and_nothing_is_lost",
    ),
    Mutant(
        "a failed step does not say why",
        'return f"{type(error).__name__}: {said}" if said else type(error).__name__',
        "return type(error).__name__",
        f"{SETTINGS}::test_a_failed_step_says_what_has_failed",
    ),
    Mutant(
        "a closed engine is a port for ever",
        'if getattr(port, "closed", False):',
        "if False:",
        f"{MISUSE}::test_an_engine_that_its_host_closes_is_a_lost_port_at_once",
    ),
    Mutant(
        "two pairings take each other's events",
        "if owner is not None and owner is not pairing:",
        "if False:",
        f"{MISUSE}::test_an_engine_is_a_port_of_one_pairing",
    ),
    Mutant(
        "an engine that was removed belongs to its pairing for ever",
        '"its port was removed from the pairing"))\n        release(port)\n',
        '"its port was removed from the pairing"))\n',
        f"{MISUSE}::test_an_engine_is_a_port_of_one_pairing",
    ),
    Mutant(
        "the last lost port is not named",
        "found = next((lost for _, lost in reversed(self._lost) if lost.role == role), None)",
        "found = None",
        f"{MISUSE}::test_without_another_engine_the_request_fails_and_names_the_closed_one",
    ),
    Mutant(
        "a copy shares sockets and memory",
        "        if not self.is_shared_by_fork:\n            return super().__reduce_ex__(protocol)",
        "        if True:\n            return super().__reduce_ex__(protocol)",
        f"{MISUSE}::test_what_belongs_to_a_process_is_not_copied",
    ),
    Mutant(
        "a policy's number is taken for a choice",
        "    if choice is None or isinstance(choice, Choice):",
        "    if True:",
        f"{MISUSE}::test_a_policy_that_returns_no_choice_is_told",
    ),
    Mutant(
        "a prompt of any length is copied first",
        "    if len(given) > MAX_TOKENS:",
        "    if len(given) > MAX_TOKENS**2:",
        f"{MISUSE}::test_a_prompt_that_no_engine_can_hold_is_refused_before_it_is_copied",
    ),
    Mutant(
        "a pool keeps every engine that has used it",
        "WeakMethod(holder)]",
        "lambda: holder]",
        f"{MISUSE}::test_a_pool_forgets_the_engines_that_have_used_it",
    ),
    Mutant(
        "a stream of another loop waits for ever",
        "        if asyncio.get_running_loop() is not self._loop:",
        "        if False:",
        "test_aio.py::test_streams_are_read_in_the_loop_that_was_entered",
    ),
    Mutant(
        "a thread that submits outlives the loop",
        "        self._submitting.shutdown(wait=False)  # the loop",
        "        pass  # the loop",
        "test_aio.py::test_a_host_whose_loop_has_ended_closes_its_pairing",
    ),
    Mutant(
        "the host's Ctrl-C reaches the engines that it spawned",
        "                start_new_session=True,  # a Ctrl-C",
        "                start_new_session=False,  # a Ctrl-C",
        "test_spawn.py::test_engines_in_processes_of_their_own_serve_and_end",
        "remote/spawning.py",
    ),
    Mutant(
        "a writer that was restarted shares pages with its former self",
        'b"%d %d " % (epoch, rank) + engine_id',
        'b"%d " % rank + engine_id',
        "kv/test_prefix.py::test_who_wrote_pages_is_another_with_each_start_and_each_rank",
    ),
    Mutant(
        "pages are kept apart by their writers though all are trusted",
        "domain_of(writers) if writers and self.by_writer else",
        "domain_of(writers) if writers else",
        "kv/test_prefix.py::test_writers_are_told_apart_where_that_is_asked_for",
    ),
    Mutant(
        "a page may have two keys",
        "if key in self._pages or page in self._nodes or (parent",
        "if key in self._pages or (parent",
        "kv/test_prefix.py::test_a_page_has_one_key",
    ),
    Mutant(
        "a simulated rank that is stopped as its work ends is waited for in vain",
        "            is_last = self._killed  # what happens behind the release is for the next turn\n"
        "            self._back.release()\n",
        "            self._back.release()\n            is_last = self._killed\n",
        "sim/test_ranks.py::test_a_rank_may_be_stopped_before_its_thread_has_noticed_that_its_work_is_done",
        "tests/sim/ranks.py",
    ),
]
