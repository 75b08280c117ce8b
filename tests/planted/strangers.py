"""Strangers at the door, and peers that are welcome and hostile."""

from __future__ import annotations

from tests.planted.mutant import Mutant

MUTANTS = [
    Mutant(
        "the youngest stranger of a full source gives way",
        "src/pdinfer/kv/door.py",
        "            leaves = next(iter(own))\n",
        "            leaves = next(reversed(own))\n",
        "tests/unit/test_door.py::test_of_a_full_source_the_oldest_gives_way_and_others_stay",
    ),
    Mutant(
        "any source gives way at a full door",
        "src/pdinfer/kv/door.py",
        "key=lambda each: len(self._waiting[each])",
        "key=lambda each: 0",
        "tests/unit/test_door.py::test_of_a_full_door_the_source_with_most_gives_way",
    ),
    Mutant(
        "a stranger has no time of its own",
        "src/pdinfer/kv/door.py",
        "return max(0.0, self._waiting[source][oldest] + self._strangers.grace_s - now)",
        "return 0.0",
        "tests/unit/test_door.py::test_who_has_just_come_has_time",
    ),
    Mutant(
        "a full door turns newcomers away",
        "src/pdinfer/kv/stream.py",
        "                self._pause(now + wait_s)\n                return\n",
        "                self._pause(now + wait_s)\n                self._listener.sock.accept()[0].close()\n                return\n",
        "tests/conformance/test_socket_transport.py::test_a_newcomer_waits_while_all_before_it_have_just_come",
    ),
    Mutant(
        "who must give way stays",
        "src/pdinfer/kv/stream.py",
        "        if leaves is not None:\n",
        "        if leaves is None:\n            assert True\n        elif leaves.closed:\n",
        "tests/conformance/test_socket_transport.py::test_a_newcomer_takes_the_place_of_who_has_waited_longest",
    ),
    Mutant(
        "an end without descriptors keeps its strangers",
        "src/pdinfer/kv/stream.py",
        "if error.errno not in (errno.EMFILE, errno.ENFILE) or not len(self._door):",
        "if error.errno != 0:",
        "tests/conformance/test_socket_transport.py::test_who_is_out_of_descriptors_turns_out_a_stranger",
    ),
    Mutant(
        "a first message may take as long as a later one",
        "src/pdinfer/kv/door.py",
        "self._strangers.message_s if connection.num_messages else self._strangers.first_message_s",
        "self._strangers.message_s",
        "tests/conformance/test_socket_transport.py::test_a_slow_stranger_is_cut",
    ),
    Mutant(
        "what waits for a peer that does not read is not bounded",
        "src/pdinfer/kv/budget.py",
        "            if self._num_bytes <= self._limit_bytes:\n",
        "            if self._num_bytes <= 1 << 60:\n",
        "tests/unit/test_peers.py::test_a_peer_that_lives_and_does_not_read_loses_its_link",
    ),
    Mutant(
        "what has left still counts as waiting",
        "src/pdinfer/kv/connection.py",
        "                    self._limits.waiting.give(self, _cost(self._leaving))\n",
        "                    pass\n",
        "tests/unit/test_budget.py::test_a_link_that_is_read_holds_nothing_in_the_end",
    ),
    Mutant(
        "who holds little gives way for who holds much",
        "src/pdinfer/kv/budget.py",
        "if share.num_bytes >= even)",
        "if share.num_bytes >= 0)",
        "tests/unit/test_budget.py::test_who_holds_little_or_moves_never_gives_way_first",
    ),
    Mutant(
        "the answer to an unknown room carries what the peer said",
        "src/pdinfer/kv/channel.py",
        'TransferError("the room was aborted before its request came")',
        "error",
        "tests/unit/test_peers.py::test_an_answer_does_not_carry_what_the_peer_said",
    ),
    Mutant(
        "tombstones stay for ever",
        "src/pdinfer/kv/tombstones.py",
        "< now - TOMBSTONE_S:",
        "< -1.0:",
        "tests/unit/test_protocol.py::test_tombstones_are_kept_for_a_while",
    ),
    Mutant(
        "a flood of tombstones pushes out another peer's",
        "src/pdinfer/kv/tombstones.py",
        "most = max(self._rooms, key=lambda each: len(self._rooms[each]))",
        "most = next(iter(self._rooms))",
        "tests/unit/test_protocol.py::test_a_flood_of_tombstones_pushes_out_those_of_its_own_peer",
    ),
    Mutant(
        "guests are as many as come",
        "src/pdinfer/kv/peers.py",
        "if len(guests) > MAX_GUESTS else None",
        "if len(guests) > MAX_GUESTS + 1000 else None",
        "tests/unit/test_peers.py::test_guests_are_few_and_who_has_something_to_do_is_none",
    ),
    Mutant(
        "who has something to do is a guest all the same",
        "src/pdinfer/kv/traffic.py",
        "if not traffic.granted and key in linked]",
        "if key in linked]",
        "tests/unit/test_peers.py::test_guests_are_few_and_who_has_something_to_do_is_none",
    ),
    Mutant(
        "peers of the past are told for ever",
        "src/pdinfer/kv/traffic.py",
        "self[key].left_at < now - PAST_S]",
        "self[key].left_at < 0.0]",
        "tests/unit/test_peers.py::test_peers_that_come_and_go_are_forgotten",
    ),
]
