"""The queue, requests that go to another decode, and ports that join."""

from __future__ import annotations

from tests.planted.mutant import Mutant

QUEUE = "test_queue.py::"
MOVING = "test_moving.py::"
JOINING = "test_joining.py::"

MUTANTS = [
    Mutant(
        "the first request that cannot go holds up all others",
        "                held.append(fitting)\n",
        "                return\n",
        QUEUE + "test_nobody_waits_behind_a_request_whose_only_decode_is_leaving",
    ),
    Mutant(
        "a request that cannot go holds up none, though others need the same ports",
        "                held.append(fitting)\n",
        "                pass\n",
        QUEUE + "test_of_requests_for_the_same_ports_none_is_overtaken",
    ),
    Mutant(
        "a full queue refuses high priorities",
        "displaced = gives_way(self._queued(), tracked.request.priority)",
        "displaced = None",
        QUEUE + "test_a_high_priority_takes_the_place_of_the_youngest_of_the_lowest",
    ),
    Mutant(
        "one request gives way twice",
        "if tracked.attempt.decode is None and tracked.displaced is None]",
        "if tracked.attempt.decode is None]",
        QUEUE + "test_a_high_priority_takes_the_place_of_the_youngest_of_the_lowest",
    ),
    Mutant(
        "a stream that has begun gives way",
        " and not one.is_resumed]",
        "]",
        QUEUE + "test_a_stream_and_an_equal_priority_displace_nobody_and_are_not_displaced",
    ),
    Mutant(
        "who has left the queue is displaced all the same",
        "            return\n        tracked.displaced = None\n",
        "            return\n        if tracked.displaced is not None:\n"
        "            self.end(tracked, FinishReason.FAILED, tracked.displaced)\n",
        QUEUE + "test_who_has_left_the_queue_meanwhile_is_not_displaced",
    ),
    Mutant(
        "a retracted stream is the newest at its prefill",
        "is_new = not self.is_resumed",
        "is_new = True",
        QUEUE + "test_a_retracted_stream_does_not_wait_behind_a_backlog_of_its_prefill",
    ),
    Mutant(
        "decode grants by priority alone",
        "oldest = by_age(able(), SINCE, num_turns=self._num_turns, now=self._clock())",
        "oldest = None",
        QUEUE + "test_a_low_priority_runs_though_high_ones_never_end",
    ),
    Mutant(
        "the queue goes by priority alone",
        "            if is_turn_of_oldest(self._num_turns):\n",
        "            if False:\n",
        "test_queue.py::test_the_oldest_has_one_turn_in_so_many_and_only_when_it_has_waited_long",
    ),
    Mutant(
        "a tenant that was away has saved up",
        "self._least = min(map(self.of, tenants), default=self._least)",
        "self._least = 0",
        "test_queue.py::test_who_was_away_has_saved_up_nothing",
    ),
    Mutant(
        "a stream goes on elsewhere although the host forbids it",
        "self.first_token_s is not None and not may_continue)",
        "False)",
        "test_ports.py::test_a_decode_that_breaks_fails_streams_that_may_not_go_on_and_no_others",
    ),
    Mutant(
        "a stream goes on behind its prompt",
        "output=(*self.request.output, *attempt.tokens))",
        "output=self.request.output)",
        MOVING + "test_streams_go_on_as_if_nothing_had_happened",
    ),
    Mutant(
        "a decode that was removed is heard when it is back",
        "        assert decode is not None\n        self._awaiting_release.add(tracked.request_id, decode)\n",
        "        assert decode is not None\n",
        MOVING + "test_a_decode_that_is_removed_and_added_again_says_nothing_of_what_was_taken_from_it",
    ),
    Mutant(
        "events of any decode are accepted for a request",
        "if tracked is None or tracked.attempt.decode != decode:",
        "if tracked is None:",
        MOVING + "test_a_decode_that_is_removed_and_added_again_says_nothing_of_what_was_taken_from_it",
    ),
    Mutant(
        "a cancelled request moves to another decode",
        "        if tracked.cancelled:\n            self.end(tracked, FinishReason.CANCELLED)\n        elif tracked.failure is not None or",
        "        if tracked.failure is not None or",
        MOVING + "test_a_request_that_nobody_wants_any_more_does_not_move",
    ),
    Mutant(
        "connecting a port holds up the steps",
        "            unlinked |= link(port, newcomers, timeout_s=self._timeout_s)\n",
        "            with self._intake.lock:\n"
        "                unlinked |= link(port, newcomers, timeout_s=self._timeout_s)\n",
        JOINING + "test_every_call_goes_on_while_a_port_is_connected",
    ),
    Mutant(
        "one known port that cannot be reached keeps a new one out",
        "if others and all(other.address in unlinked for other in others):",
        "if others and any(other.address in unlinked for other in others):",
        JOINING + "test_a_pair_that_cannot_be_linked_now_is_down_until_it_can",
    ),
    Mutant(
        "a pair without a link is chosen",
        "self._ports.add(port, unlinked)",
        "self._ports.add(port)",
        JOINING + "test_a_pair_that_cannot_be_linked_now_is_down_until_it_can",
    ),
    Mutant(
        "a pair without a link is not dialled again",
        "                _connect(port, known[address], 0.0)\n",
        "                pass\n",
        JOINING + "test_a_pair_that_cannot_be_linked_now_is_down_until_it_can",
    ),
    Mutant(
        "a port that joined meanwhile is not linked",
        "                if not newcomers:\n",
        "                if not newcomers or met:\n",
        JOINING + "test_ports_of_both_sides_that_join_at_once_are_linked_to_each_other",
    ),
    Mutant(
        "a removed port joins",
        "if self._intake.closed or self._tokens.get(port.address) is not token:",
        "if self._intake.closed:",
        JOINING + "test_a_port_that_is_removed_while_it_is_added_does_not_join_and_may_later",
    ),
]
