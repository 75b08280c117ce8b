"""Bugs with several ranks and several writers of a room, as the simulation and small tests see them."""

from __future__ import annotations

from tests.planted.mutant import Mutant

MUTANTS = [
    Mutant(
        "a share before what decode lacks runs backwards",
        "range(prompt.num_pushed, max(prompt.num_pushed, stop))",
        "range(prompt.num_pushed, stop)",
        "test_rank_groups.py::test_a_prompt_of_which_decode_knows_more_than_prefill_lands",
    ),
    Mutant(
        "a refused request is not answered to destinations that are linked",
        "                self.answer_turned_away(peer)\n            raise",
        "                pass\n            raise",
        "test_sender.py::test_every_destination_of_a_refused_grant_is_told",
    ),
    Mutant(
        "a room that one destination aborted is refused without a word to the others",
        'raise StaleFrame(f"room {grant.room.hex()} was aborted before its request arrived")',
        'raise TransferError(f"room {grant.room.hex()} was aborted before its request arrived")',
        "test_sender.py::test_every_destination_of_a_refused_grant_is_told",
    ),
    Mutant(
        "what a follower lost counts as landed",
        "        if error is None or any(",
        "        if True or any(",
        "test_runs.py::test_every_promise_holds",
    ),
    Mutant(
        "a follower pushes into rooms it refused",
        "            self._refused.add(grant.room)\n",
        "            pass\n",
        "test_follower.py::test_a_room_that_its_channel_refused_is_reported_and_never_pushed_into",
    ),
    Mutant(
        "a follower reports every room as landed",
        "            tell(say.Settled(room, None if landed else first_error(handoffs)))\n",
        "            tell(say.Settled(room, None))\n",
        "test_runs.py::test_every_promise_holds",
    ),
    Mutant(
        "a follower keeps every draft",
        "                self._drafts.pop(number, None)\n",
        "                pass\n",
        "test_runs.py::test_every_promise_holds",
    ),
    Mutant(
        "a follower does not report what it has sent",
        "            tell(say.SentMessage(room))\n",
        "            pass\n",
        "test_runs.py::test_every_promise_holds",
    ),
    Mutant(
        "one abort asks one writer",
        "        state.stopped = True\n        return state.owing()",
        "        state.stopped = True\n        return state.owing()[:1]",
        "test_rooms.py::TestReceiverRooms::runTest",
    ),
    Mutant(
        "a room settles after the hand-off of one writer",
        "if len(state.handoffs) == len(state.writers):",
        "if state.handoffs:",
        "test_rooms.py::TestReceiverRooms::runTest",
    ),
    Mutant(
        "coverage of a room with several writers is not checked",
        "if whole and state.fault is None and not state.coverage.complete:",
        "if whole and len(state.writers) == 1 and state.fault is None and not state.coverage.complete:",
        "test_rooms.py::test_landed_handoffs_without_all_bytes_are_aborted",
    ),
    Mutant(
        "tombstones of one peer count for all peers",
        "if any(self.tombstones.has(peer, grant.room) for peer in destinations):",
        "if all(self.tombstones.has(peer, grant.room) for peer in destinations):",
        "test_sender.py::test_every_destination_of_a_refused_grant_is_told",
    ),
    Mutant(
        "prefill hears of a room before followers expect it",
        "return self._num_expecting[room] >= self._num_followers",
        "return True",
        "test_leader.py::test_a_room_is_expected_when_every_rank_has_said_so",
    ),
    Mutant(
        "decode announces a room at once",
        "if self._channel.expects(event.grant.room):",
        "if True:",
        "test_decode.py::test_a_grant_is_told_when_every_rank_expects_its_room",
    ),
    Mutant(
        "a follower does not say that it expects a room",
        "        self._lockstep.tell(say.Expecting(grant.room))\n",
        "",
        "test_follower.py::test_orders_are_obeyed_in_order_with_the_pages_own_generations",
    ),
]
