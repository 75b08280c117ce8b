"""Bugs with strangers, and with peers that are welcome and hostile."""

from __future__ import annotations

from tests.planted.mutant import Mutant

MUTANTS = [
    Mutant(
        "the youngest stranger of a full source gives way",
        "            leaves = own[0]\n",
        "            leaves = own[-1]\n",
        "test_door.py::test_of_a_full_source_the_oldest_gives_way_and_others_stay",
    ),
    Mutant(
        "any source gives way at a full door",
        "((most, _),) = Counter(source for source, _ in self._waiting.values()).most_common(1)",
        "most = next(source for source, _ in self._waiting.values())",
        "test_door.py::test_of_a_full_door_the_source_with_most_gives_way",
    ),
    Mutant(
        "a stranger has no time of its own",
        "else max(0.0, self._gives_way_at(self.oldest()) - now)",
        "else 0.0",
        "test_door.py::test_who_has_just_come_has_time",
    ),
    Mutant(
        "a full door turns newcomers away",
        "                self._io.pause_listening(now + wait_s)\n                return\n",
        "                self._io.pause_listening(now + wait_s)\n                self._listener.sock.accept()[0].close()\n                return\n",
        "test_socket_transport.py::test_a_newcomer_waits_while_all_before_it_have_just_come",
    ),
    Mutant(
        "who must give way stays",
        "        if leaves is not None:\n            self._turn_out(",
        "        if leaves is not None and leaves.closed:\n            self._turn_out(",
        "test_socket_transport.py::test_a_newcomer_takes_the_place_of_who_has_waited_longest",
    ),
    Mutant(
        "an end without descriptors keeps its strangers",
        "if error.errno not in (errno.EMFILE, errno.ENFILE) or not len(self._door):",
        "if error.errno != 0:",
        "test_socket_transport.py::test_who_is_out_of_descriptors_turns_out_a_stranger",
    ),
    Mutant(
        "a first message may take as long as a later one",
        "(each, later_s if each.num_messages else first_s)",
        "(each, later_s)",
        "test_socket_transport.py::test_a_slow_stranger_is_cut",
    ),
    Mutant(
        "what waits for a peer that does not read is not bounded",
        "            if self.num_bytes <= self._limit_bytes:\n",
        "            if self.num_bytes <= 1 << 60:\n",
        "test_hostile_peers.py::test_a_peer_that_lives_and_does_not_read_loses_its_link",
    ),
    Mutant(
        "what has left still counts as waiting",
        "                    self._limits.waiting.give(self, self._leaving.cost_bytes)\n",
        "                    pass\n",
        "test_budget.py::test_a_link_that_is_read_holds_nothing_in_the_end",
    ),
    Mutant(
        "a link that holds little gives way to one that holds much",
        "if share.num_bytes >= even)",
        "if share.num_bytes >= 0)",
        "test_budget.py::test_who_holds_little_or_moves_never_gives_way_first",
    ),
    Mutant(
        "the answer to an unknown room carries what the peer said",
        'TransferError("the room was aborted before its request came")',
        "error",
        "test_hostile_peers.py::test_an_answer_does_not_carry_what_the_peer_said",
    ),
    Mutant(
        "tombstones stay for ever",
        "< now - TOMBSTONE_S:",
        "< -1.0:",
        "test_rooms.py::test_tombstones_are_kept_for_a_while",
    ),
    Mutant(
        "a flood of tombstones pushes out another peer's",
        "most = max(self._rooms, key=lambda each: len(self._rooms[each]))",
        "most = next(iter(self._rooms))",
        "test_rooms.py::test_a_flood_of_tombstones_pushes_out_those_of_its_own_peer",
    ),
    Mutant(
        "guests are as many as come",
        "if len(guests) > MAX_GUESTS else None",
        "if len(guests) > MAX_GUESTS + 1000 else None",
        "test_hostile_peers.py::test_guests_are_few_and_who_has_something_to_do_is_none",
    ),
    Mutant(
        "a peer with a room still counts as a guest",
        "if not counts.granted and key in linked]",
        "if key in linked]",
        "test_hostile_peers.py::test_guests_are_few_and_who_has_something_to_do_is_none",
    ),
    Mutant(
        "past peers are reported for ever",
        "self._left_at(key) < now - PAST_S]",
        "self[key].left_at < 0.0]",
        "test_links.py::test_peers_that_come_and_go_are_forgotten",
    ),
    Mutant(
        "links have their turns in any order",
        "sorted(ready, key=lambda each: self._used_s.get(each, 0.0))",
        "list(ready)",
        "test_turns.py::test_who_used_least_comes_first_and_the_rest_wait_for_the_next_round",
    ),
    Mutant(
        "a round of turns has no end",
        "            if after - began > round_s:\n",
        "            if False:\n",
        "test_turns.py::test_who_used_least_comes_first_and_the_rest_wait_for_the_next_round",
    ),
    Mutant(
        "a newcomer comes first",
        "self._used_s[connection] = max(self._used_s.values(), default=0.0)",
        "self._used_s[connection] = 0.0",
        "test_turns.py::test_a_newcomer_is_not_ahead_of_those_who_are_there",
    ),
    Mutant(
        "what a link used is never forgotten",
        "self._used_s[connection] /= 2",
        "self._used_s[connection] /= 1",
        "test_turns.py::test_what_was_long_ago_counts_for_little",
    ),
    Mutant(
        "strangers come as fast as they like",
        "        self._io.pause_listening(now + PACE_S)\n",
        "",
        "test_socket_transport.py::test_newcomers_come_in_at_a_pace",
    ),
]
