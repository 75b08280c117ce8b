"""Bugs in what peers, engines in other processes and ranks send."""

from __future__ import annotations

from tests.planted.mutant import Mutant

MUTANTS = [
    Mutant(
        "a session never subtracts the bytes it has sent",
        "                    self._unsent_bytes -= len(data)",
        "                    pass",
        "test_session.py::test_what_has_left_does_not_count_as_waiting",
    ),
    Mutant(
        "the hand-off's token is not compared with the vocabulary",
        "not all(0 <= token < vocab_size for token in ids)",
        "False",
        "test_faulty_peers.py::test_a_hand_off_that_cannot_be_so_fails_its_request_alone",
    ),
    Mutant(
        "the hand-off's token is compared with one id too many",
        "0 <= token < vocab_size for",
        "0 <= token <= vocab_size for",
        "test_faulty_peers.py::test_a_hand_off_that_cannot_be_so_fails_its_request_alone",
    ),
    Mutant(
        "more cached tokens than the request has are believed",
        "if not 0 <= found <= self.num_tokens:",
        "if not 0 <= found:",
        "test_faulty_peers.py::test_a_hand_off_that_cannot_be_so_fails_its_request_alone",
    ),
    Mutant(
        "alternatives that nobody asked for are passed on by decode",
        "if len(first.top_logprobs) > (self.request.sampling.logprobs or 0):",
        "if False:",
        "test_faulty_peers.py::test_a_hand_off_that_cannot_be_so_fails_its_request_alone",
    ),
    Mutant(
        "a resumed request counts what prefill found again",
        "        if self.first_token_at is None:\n            self.cached_tokens = found",
        "        self.cached_tokens = found",
        "test_prefix.py::test_a_retracted_request_finds_its_own_pages_again",
    ),
    Mutant(
        "a seen submit still counts as unseen",
        "if number > self._num_seen]",
        "if number >= self._num_seen]",
        "test_faulty_peers.py::test_submits_count_on_top_of_a_load_until_it_includes_them",
    ),
    Mutant(
        "a client forgets how many submits were seen",
        "        else:\n            self._num_seen = report.num_seen\n",
        "",
        "test_faulty_peers.py::test_submits_count_on_top_of_a_load_until_it_includes_them",
    ),
    Mutant(
        "a served engine does not count the submits it takes",
        "            self.num_seen += 1\n            self.submit_decode(engine, command)",
        "            self.submit_decode(engine, command)",
        "test_faulty_peers.py::test_a_served_engine_tells_how_many_submits_it_has_seen",
    ),
    Mutant(
        "an answer about another peer is accepted",
        "                if report.peer in self._answers:  # otherwise it comes too late\n"
        "                    self._answers[report.peer] = report\n",
        "                for peer in self._answers:\n                    self._answers[peer] = report\n",
        "test_faulty_peers.py::test_an_answer_about_another_peer_is_not_taken_for_the_one_that_was_asked",
    ),
    Mutant(
        "a grant is forwarded though decode was asked to end the request",
        "        if tracked.failure is not None or tracked.cancelled:\n            return  # decode has been asked to end it\n",
        "",
        "test_faulty_peers.py::test_a_grant_that_comes_late_is_not_forwarded_when_decode_was_asked_to_end_the_request",
    ),
    Mutant(
        "a grant is forwarded though the request was cancelled",
        "if tracked.failure is not None or tracked.cancelled:\n            return",
        "if tracked.failure is not None:\n            return",
        "test_faulty_peers.py::test_a_grant_that_comes_late_is_not_forwarded_when_decode_was_asked_to_end_the_request",
    ),
    Mutant(
        "orphans are not counted as unfinished",
        "len(self._sequences) + self._tables.num_orphans + len(self._inbox.peek())",
        "len(self._sequences) + len(self._inbox.peek())",
        "test_faulty_peers.py::test_a_decode_is_not_done_before_the_writers_of_what_it_gave_up_have_stopped",
    ),
    Mutant(
        "a sequence is retracted though an orphan's pages are coming back",
        "if victim is sequence and (self.granted or self._pages.num_orphans):",
        "if victim is sequence and self.granted:",
        "test_faulty_peers.py::test_a_sequence_waits_for_the_pages_of_a_room_that_is_given_up_instead_of_losing_its_own",
    ),
    Mutant(
        "events out of order are passed on",
        "if event.index != self.num_tokens:",
        "if event.index < self.num_tokens:",
        "test_faulty_peers.py::test_an_event_that_cannot_be_costs_the_port_and_reaches_nobody",
    ),
    Mutant(
        "a token may come with an end that has none",
        "elif (event.token is None) != (event.finish_reason in TOKENLESS):",
        "elif event.token is None and event.finish_reason not in TOKENLESS:",
        "test_faulty_peers.py::test_an_event_that_cannot_be_costs_the_port_and_reaches_nobody",
    ),
    Mutant(
        "a port that sends an impossible value stays",
        "        except TransferError as error:\n            self._lose(port, error)\n",
        "        except TransferError:\n",
        "test_faulty_peers.py::test_an_event_that_cannot_be_costs_the_port_and_reaches_nobody",
    ),
    Mutant(
        "a port takes the place of another of the same identity",
        "if port.address in self._tokens or port.address in (known.address for known in self._ports.all):",
        "if False:",
        "test_faulty_peers.py::test_a_port_with_the_identity_of_another_does_not_join",
    ),
    Mutant(
        "a client takes the load of another engine",
        "if ready is None or (load is not None and load.address != ready.address):",
        "if ready is None:",
        "test_faulty_peers.py::test_a_report_that_cannot_be_costs_the_port_and_changes_nothing",
    ),
    Mutant(
        "a client takes tokens of no vocabulary",
        "        if max(ids) >= vocab_size:",
        "        if max(ids) > vocab_size:",
        "test_faulty_peers.py::test_a_report_that_cannot_be_costs_the_port_and_changes_nothing",
    ),
    Mutant(
        "an engine of another version is taken",
        "if ready.version != messages.VERSION:",
        "if ready.version < messages.VERSION:",
        "test_faulty_peers.py::test_an_engine_that_is_not_ready_for_this_client_is_refused",
    ),
    Mutant(
        "an end links to a peer that claims its own identity",
        "    if peer_key(message.address) == peer_key(us):\n",
        "    if False:\n",
        "test_handshake.py::test_who_says_that_he_is_this_very_end_is_refused",
    ),
    Mutant(
        "what a layout keeps of itself travels with it",
        "self._layout = attrs.evolve(layout)",
        "self._layout = layout",
        "test_golden.py::test_bytes_are_those_of_their_version",
    ),
    Mutant(
        "a log-probability may be minus infinity",
        "Meta(ge=-3.5e38, le=LOGPROB_ROUNDING)",
        "Meta(le=LOGPROB_ROUNDING)",
        "test_bounds.py",
    ),
    Mutant(
        "counts may be negative",
        "Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]",
        "Count = Annotated[int, Meta(le=MAX_COUNT)]",
        "test_bounds.py",
    ),
    Mutant(
        "times may have no bound",
        "Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]",
        "Seconds = float",
        "test_bounds.py",
    ),
    Mutant(
        "an error's text is not escaped",
        "                return error_from_code(code, escaped(message))",
        "                return error_from_code(code, message)",
        "test_bounds.py test_faulty_peers.py::test_text_of_a_prefills_error_is_escaped_in_the_event_and_in_the_log",
    ),
    Mutant(
        "an Overloaded's text is not escaped",
        "return error_from_code(Overloaded.code, escaped(message), retry_after_s)",
        "return error_from_code(Overloaded.code, message, retry_after_s)",
        "test_bounds.py",
    ),
    Mutant(
        "a grant may have fewer generations than pages",
        "if len(self.pages) != len(self.generations):",
        "if len(self.pages) < len(self.generations):",
        "test_bounds.py",
    ),
    Mutant(
        "a grant may come with another request",
        "if grant.grant.request_id != request.request.request_id:",
        "if not grant.grant.request_id:",
        "test_bounds.py",
    ),
    Mutant(
        "negative page ids pass between ranks",
        '        wire.check_ids("pages", self.pages)\n',
        "",
        "test_bounds.py",
    ),
    Mutant(
        "a frame's tag does not cover its direction",
        "self.session + bytes([self.from_dialler])",
        "self.session + bytes([1])",
        "test_golden.py::test_bytes_are_those_of_their_version",
    ),
    Mutant(
        "frames are numbered big-endian",
        'self._number.to_bytes(8, "little")',
        'self._number.to_bytes(8, "big")',
        "test_golden.py::test_bytes_are_those_of_their_version",
    ),
    Mutant(
        "a field of a frame is renamed in an unchanged version",
        'class Abort(msgspec.Struct, tag="abort"):',
        'class Abort(msgspec.Struct, tag="abort", rename={"error": "why"}):',
        "test_golden.py::test_bytes_are_those_of_their_version",
        where="wire.py",
    ),
    Mutant(
        "the digest of a session's message is a different one",
        "return body + xxhash.xxh3_64_digest(body)",
        "return body + xxhash.xxh64_digest(body)",
        "test_golden.py::test_bytes_are_those_of_their_version",
    ),
    Mutant(
        "a rank that waits to be woken listens on every interface",
        "self._socket.bind((LOOPBACK if len(hosts) == 1 else own, 0))",
        'self._socket.bind(("", 0))',
        "test_wakeup.py",
    ),
    Mutant(
        "anybody wakes a rank",
        "        if hmac.compare_digest(secret, self._secret):\n",
        "        if True:\n",
        "test_wakeup.py",
    ),
    Mutant(
        "a shared pool can be opened anew for writing",
        "seals | F_SEAL_FUTURE_WRITE)",
        "seals)",
        "test_memfd.py::test_who_is_shown_a_pool_reads_all_of_it_and_writes_none",
    ),
    Mutant(
        "a shared pool keeps the mode of a memfd",
        "    os.fchmod(descriptor, 0o400)\n",
        "",
        "test_memfd.py::test_who_is_shown_a_pool_reads_all_of_it_and_writes_none",
    ),
]
