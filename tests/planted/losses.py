"""Planted bugs in what is lost with a port, and in how ports and requests find each other again."""

from __future__ import annotations

from tests.planted.mutant import Mutant

LOSSES = "test_losses.py::"
KILLER = LOSSES + "test_a_request_that_breaks_every_engine_takes_four_and_its_companions_none"
WAITING = LOSSES + "test_ports_that_are_lost_while_a_request_waits_never_count"
JOINING = "test_joining.py::"

MUTANTS = [
    Mutant(
        "a request may break every engine of a fleet",
        "return len(self.computing) > MAX_COMPUTING or",
        "return",
        f"{KILLER}[prefill] {KILLER}[decode]",
    ),
    Mutant(
        "what may break engines shares its last step",
        "self.request = attrs.evolve(self.request, alone=True)",
        "pass",
        f"{KILLER}[decode]",
    ),
    Mutant(
        "prefill computes a request that must run alone beside others",
        'share_a_step(self.active, attrgetter("alone"), num_steps=self.num_steps)',
        "self.active",
        LOSSES + "test_a_request_that_must_run_alone_takes_turns_with_the_others",
    ),
    Mutant(
        "who must run alone is not told of it in another process",
        'PAIRING_FIELDS = ("stop",)',
        'PAIRING_FIELDS = ("stop", "alone")',
        "test_messages.py::test_every_field_of_a_request_arrives[alone]",
    ),
    Mutant(
        "others wait until who runs alone has ended",
        "return turns[num_steps % len(turns)]",
        "return turns[0]",
        "test_rules.py::test_who_must_run_alone_has_turns_of_its_own",
    ),
    Mutant(
        "a prefill that is lost before it began counts",
        "return self.attempt.forwarded if computing is None else self.request_id in computing",
        "return self.attempt.forwarded",
        f"{WAITING}[prefill] {WAITING}[decode]",
    ),
    Mutant(
        "no loss counts",
        "        if was_computing:",
        "        if False:",
        f"{KILLER}[prefill] {KILLER}[decode]",
    ),
    Mutant(
        "an end does not say which ports were lost",
        "{last}{tracked.losses}",
        "{last}",
        LOSSES + "test_an_end_says_how_many_ports_were_lost_and_which",
    ),
    Mutant(
        "links that break under a request cost it nothing",
        "                tracked.losses.links.append(attempt.prefill)\n",
        "",
        LOSSES + "test_a_link_that_breaks_under_every_attempt_is_a_failure",
    ),
    Mutant(
        "prompts fail with a rank of their prefill",
        "        except (MemoryError, RankLost):  # what it had is not to blame for a lost rank, and goes on elsewhere\n"
        "            raise\n        except Exception as error:  # noqa: BLE001 - a failing chunk",
        "        except MemoryError:\n"
        "            raise\n        except Exception as error:  # noqa: BLE001 - a failing chunk",
        LOSSES + "test_a_rank_that_dies_in_a_step_fails_no_request_that_another_engine_can_take[prefill]",
    ),
    Mutant(
        "streams fail with a rank of their decode",
        "        except (MemoryError, RankLost):  # what it had is not to blame for a lost rank, and goes on elsewhere\n"
        "            raise\n        except Exception as error:  # noqa: BLE001 - a failing batch",
        "        except MemoryError:\n"
        "            raise\n        except Exception as error:  # noqa: BLE001 - a failing batch",
        LOSSES + "test_a_rank_that_dies_in_a_step_fails_no_request_that_another_engine_can_take[decode]",
    ),
    Mutant(
        "an attempt counts though another prefill has taken over",
        "sequence.num_taken_over += len(sequence.cuts) + ends",
        "sequence.num_taken_over += len(sequence.cuts)",
        LOSSES + "test_an_attempt_that_another_prefill_takes_over_is_not_counted",
    ),
    Mutant(
        "a last attempt ends with its link, whatever became of the port",
        "        is_cut = not self._has_writers(sequence)",
        "        is_cut = False",
        LOSSES + "test_a_last_attempt_has_failed_once_the_writer_turns_out_to_live[another]",
    ),
    Mutant(
        "attempts over links that break never end",
        "return bool(sequence.cuts) and sequence.num_failed >= self._config.max_attempts",
        "return False",
        LOSSES + "test_a_last_attempt_has_failed_once_the_writer_turns_out_to_live[back]",
    ),
    Mutant(
        "a process says what it computes once it has",
        "            self._begin(prompt.request.request_id for prompt in prompts)\n            self._compute(prompts, counts)\n",
        "            self._compute(prompts, counts)\n            self._begin(prompt.request.request_id for prompt in prompts)\n",
        f"{KILLER}[prefill]",
    ),
    Mutant(
        "a process dies before it has told what it computes",
        "lambda: not self._unsent_bytes or self.loss is not None, TOLD_S)",
        "lambda: True, TOLD_S)",
        "test_session.py::test_what_is_told_has_left_when_the_call_returns",
    ),
    Mutant(
        "a process does not tell what it computes",
        "        engine.tell_computing(self.tell_computing)\n",
        "",
        LOSSES + "test_a_client_knows_what_is_computed_before_the_step_that_may_end_its_process",
    ),
    Mutant(
        "requests fail though the process of their port is started again",
        "PORT_WAIT_S if isinstance(port, ReturningPort) else 0.0",
        "0.0",
        LOSSES + "test_requests_wait_for_a_process_that_is_lost_and_not_for_an_engine_that_is_here",
    ),
    Mutant(
        "requests wait in silence for an engine that is closed here",
        "PORT_WAIT_S if isinstance(port, ReturningPort) else 0.0",
        "PORT_WAIT_S",
        LOSSES + "test_requests_wait_for_a_process_that_is_lost_and_not_for_an_engine_that_is_here",
    ),
    Mutant(
        "ports that were cut for a minute never find each other",
        "                self._ports.dial()\n",
        "                pass\n",
        LOSSES + "test_ports_find_each_other_though_their_channels_have_given_up",
    ),
    Mutant(
        "a request waits at a decode that no prefill reaches beside a pair that could serve it",
        "now >= attempt.stranded_at + STRANDED_S",
        "False",
        LOSSES + "test_a_request_leaves_a_decode_that_no_prefill_reaches_if_another_pair_can_serve_it",
    ),
    Mutant(
        "a request leaves its decode at the first sign of a broken link",
        "now >= attempt.stranded_at + STRANDED_S",
        "True",
        LOSSES + "test_a_request_leaves_a_decode_that_no_prefill_reaches_if_another_pair_can_serve_it",
    ),
    Mutant(
        "deadlines are late while the thread that steps adds a port",
        "        if self._stepper is not threading.current_thread() or self._unfinished_call:",
        "        if True:",
        JOINING + "test_deadlines_are_kept_while_the_thread_that_steps_adds_a_port",
    ),
    Mutant(
        "a step runs inside another when a policy adds a port",
        " or self._unfinished_call:  # or from inside a step",
        ":",
        JOINING + "test_a_port_may_be_added_from_inside_a_step",
    ),
    Mutant(
        "what add raises is lost in its thread",
        "        joined.result()\n",
        "",
        JOINING + "test_what_add_raises_is_raised_in_the_thread_that_steps",
    ),
    Mutant(
        "a port joins whose joining was given up",
        "        finally:\n            self._end(port, token)\n        joined.result()\n",
        "        finally:\n            pass\n        joined.result()\n",
        JOINING + "test_a_port_whose_joining_is_given_up_stays_out_and_may_join_later",
    ),
    Mutant(
        "a port whose joining was given up belongs to the pairing for ever",
        "                if port not in self._ports.all:\n                    self.release(port)\n",
        "",
        JOINING + "test_a_port_whose_joining_is_given_up_stays_out_and_may_join_later",
    ),
    Mutant(
        "a port that joins during a dispatch is asked for a load that the board lacks",
        "[address for address in decodes if address in self._decodes]",
        "list(decodes)",
        JOINING + "test_a_port_that_joins_while_requests_are_dispatched_is_chosen_at_the_next_step",
    ),
    Mutant(
        "a stream that went on twice waited while it ran",
        "self.streamed_s += now - self.submitted_at - attempt.runs_from_s",
        "self.streamed_s = now - self.submitted_at - attempt.runs_from_s",
        "test_moving.py::test_times_of_a_stream_that_went_on_twice_leave_out_what_both_lost_decodes_ran",
    ),
]
