"""Planted bugs in what is told to a host that has set something, or makes a mistake."""

from __future__ import annotations

from tests.planted.mutant import Mutant

SETTINGS = "test_host_settings.py"
MISUSE = "test_misuse.py"
MODES = "test_modes.py"
TOKENS = f"{SETTINGS}::test_what_the_host_has_set_changes_no_token"

INTERRUPTS = "test_interrupts.py"
WAITS = f"{INTERRUPTS}::test_ctrl_c_waits_for_the_end_of_a_step_and_costs_no_request"

MUTANTS = [
    Mutant(
        "engines that were dropped keep their thread and their pages",
        "        if self._channel.engine is not None and self._channel.engine() is None:\n",
        "        if False:\n",
        f"{MISUSE}::test_engines_that_a_host_drops_give_back_their_thread_and_their_pages[tcp]",
    ),
    Mutant(
        "Ctrl-C breaks a step off in the middle",
        "            and _signal.getsignal(SIGINT) is _signal.default_int_handler",
        "            and False",
        f"{WAITS}[shared-Broker-_tell]",
    ),
    Mutant(
        "Ctrl-C in a step is forgotten",
        "        self._came = True\n",
        "        pass\n",
        f"{WAITS}[shared-Broker-_tell]",
    ),
    Mutant(
        "a second Ctrl-C waits, too",
        "        if self._came:\n            _signal",
        "        if False:\n            _signal",
        f"{INTERRUPTS}::test_a_second_ctrl_c_ends_the_step",
    ),
    Mutant(
        "a step takes away the handler that was set in it",
        "        if _signal.getsignal(SIGINT) == self._note:",
        "        if True:",
        f"{INTERRUPTS}::test_a_handler_that_is_set_in_a_step_stays",
    ),
    Mutant(
        "an engine that is interrupted at the end of its step recovers from it",
        "        self._num_changes += had_work or self.num_unfinished > 0\n        self._unfinished_call = False\n",
        "        self._num_changes += had_work or self.num_unfinished > 0\n",
        f"{INTERRUPTS}::test_ctrl_c_in_a_step_of_an_engine_that_a_host_steps_keeps_its_events",
    ),
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
        "while self.is_empty and self._undo:",
        "while self._undo:",
        f"{SETTINGS}::test_settings_are_given_back_when_the_last_step_has_ended",
    ),
    Mutant(
        "a step computes with tensors that hold nothing",
        "    if kind is not None:\n        raise ConfigError(",
        "    if False:\n        raise ConfigError(",
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
        'return f"{type(error).__name__}: {text}" if text else type(error).__name__',
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
        "if owner is not None and owner is not self:",
        "if False:",
        f"{MISUSE}::test_an_engine_is_a_port_of_one_pairing",
    ),
    Mutant(
        "an engine that was removed belongs to its pairing for ever",
        "        self._broker.remove(port)\n        self._joining.release(port)\n",
        "        self._broker.remove(port)\n",
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
        "super().__reduce_ex__(protocol) if self._is_shared_by_fork else object",
        "object",
        f"{MISUSE}::test_what_belongs_to_a_process_is_not_copied",
    ),
    Mutant(
        "a policy's number is taken for a choice",
        "        if not isinstance(choice, Choice):",
        "        if False:",
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
        "if key in self.pages or page in self._nodes or (parent",
        "if key in self.pages or (parent",
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
    Mutant(
        "what an alarm raises in a step counts as a policy's word, and events are lost",
        "        except OfPolicy as error:\n            failed = error.error\n",
        "        except Exception as error:\n            failed = error\n",
        "test_interrupts.py::test_an_alarm_in_a_step_reaches_the_host_and_costs_no_port",
        "pairing/pairing.py",
    ),
    Mutant(
        "half of what was sent before an alarm keeps its prompt for ever",
        "        except BaseException:\n            self.in_doubt = True\n            raise",
        "        except BaseException:\n            raise",
        "test_interrupts.py::test_an_alarm_while_bytes_are_sent_leaves_no_prompt_behind",
        "kv/channel/channel.py",
    ),
    Mutant(
        "a policy that raises costs the events of other requests",
        "                except OfPolicy as error:\n                    failed = error\n",
        "                except OfPolicy:\n                    raise\n",
        "test_interrupts.py::test_what_a_policy_raises_about_one_request_costs_no_event_of_another",
        "pairing/broker.py",
    ),
    Mutant(
        "products are cut for threads that do not come",
        "    check_threads(num_threads)\n    _PROCESS",
        "    _PROCESS",
        "test_openmp.py::test_threads_that_openmp_may_not_give_are_refused[limit]",
    ),
    Mutant(
        "a limit of OpenMP that is as high as it must be is refused",
        '(limit := runtime.omp_get_thread_limit())}": limit < num_threads',
        '(limit := runtime.omp_get_thread_limit())}": limit <= num_threads',
        "test_openmp.py::test_what_openmp_gives_is_used",
    ),
    Mutant(
        "OpenMP may give as few threads as it likes",
        '"OMP_DYNAMIC is set": runtime.omp_get_dynamic(),',
        '"OMP_DYNAMIC is set": False,',
        "test_openmp.py::test_the_runtime_of_torch_is_asked",
    ),
    Mutant(
        "a transform's tensors without memory are computed with",
        '        return None if made.data_ptr() else "shadow"\n',
        "        return None\n",
        f"{MODES}::test_transforms_in_which_tensors_have_no_memory_are_refused[functionalize]",
    ),
    Mutant(
        "Python ends while a thread is inside torch",
        "while not _EXACT.is_empty and",
        "while False and",
        f"{MODES}::test_the_end_of_python_waits_for_steps_and_lets_none_begin",
    ),
    Mutant(
        "a step begins while Python ends",
        "    _EXACT.door.acquire()\n",
        "",
        f"{MODES}::test_the_end_of_python_waits_for_steps_and_lets_none_begin",
    ),
    Mutant(
        "a forked child counts its parent's steps",
        "        os.register_at_fork(after_in_child=self._begin_as_child)\n",
        "",
        f"{MODES}::test_a_forked_child_waits_for_no_thread_of_its_parent",
    ),
    Mutant(
        "a forked child keeps what its parent set for a step",
        "new_lock(), new_lock(), 0\n        while self._undo:\n            self._undo.pop()()\n",
        "new_lock(), new_lock(), 0\n        self._undo.clear()\n",
        f"{MODES}::test_a_forked_child_waits_for_no_thread_of_its_parent",
    ),
    Mutant(
        "a temporary folder outlives its process",
        "no other\n        shutil.rmtree(path, ignore_errors=True)\n",
        "no other\n",
        "test_scratch.py::test_it_is_gone_with_its_owner",
    ),
    Mutant(
        "a folder that cannot be locked is left",
        "        except OSError:\n            self.path.rmdir()\n            raise",
        "        except OSError:\n            raise",
        "test_scratch.py::test_where_no_file_can_be_opened_nothing_is_left",
    ),
    Mutant(
        "a transport that has no thread leaves its listener",
        '            listener.close()\n            raise ConfigError(f"cannot serve',
        '            raise ConfigError(f"cannot serve',
        f"{MISUSE}::test_a_transport_that_the_system_refuses_leaves_nothing",
    ),
    Mutant(
        "a transport is copied",
        "    __reduce_ex__ = NotCopied.__reduce_ex__  # nor is it copied before that\n",
        "",
        f"{MISUSE}::test_what_belongs_to_a_process_is_not_copied[deepcopy]",
    ),
    Mutant(
        "a host of asyncio is copied",
        "class AsyncPairing(NotCopied):",
        "class AsyncPairing:",
        f"{MISUSE}::test_what_belongs_to_a_process_is_not_copied[copy]",
    ),
    Mutant(
        "whoever closes a host in another loop waits for one that is gone",
        "        await asyncio.to_thread(self.pairing.close if self._loop is None else self._stepping.join)\n",
        "        while self._stepping.is_alive():\n            self._news.clear()\n            await self._news.wait()\n",
        f"{MISUSE}::test_a_host_of_asyncio_may_be_closed_in_another_loop_than_its_own",
    ),
]
