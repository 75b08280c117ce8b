"""Bugs in what other engines' pages and grants need: offers over links, and the connector inside vLLM."""

from __future__ import annotations

from tests.planted.mutant import Mutant

OFFERS = "test_offers.py::"
PROMPTS = "test_vllm_prompts.py::"
VLLM = "test_vllm.py::"
DECODE_RANKS = "test_vllm_decode_ranks.py::"
DATA_RANKS = "test_vllm_data_ranks.py::"
TOLD = "test_vllm_overrides.py::"
ORDER = "test_vllm_order.py::"
DIALLING = "test_vllm_dialling.py::"

MUTANTS = [
    Mutant(
        "anyone may offer a grant for somebody else's pages",
        "if peer not in map(peer_key, grant.destinations):",
        "if False:",
        f"{OFFERS}test_an_offer_that_is_not_the_peers_to_make_costs_its_link",
    ),
    Mutant(
        "grants that nobody takes are not counted",
        "        self._waiting[grant.room] = peer, packed\n        self._num_bytes += _num_bytes(packed)",
        "        self._waiting[grant.room] = peer, packed",
        f"{OFFERS}test_offers_that_nobody_takes_are_bounded",
    ),
    Mutant(
        "the grant of a declined room waits for its decode's lease",
        "        if grant.room in self._declined:\n            return DECLINED\n",
        "",
        f"{OFFERS}test_a_declined_room_is_answered_without_a_step",
    ),
    Mutant(
        "a grant that waits when its room is declined is kept",
        "            self._drop(room)\n            return peer\n",
        "            return peer\n",
        f"{OFFERS}test_a_declined_room_is_answered_without_a_step",
    ),
    Mutant(
        "declined rooms are remembered for ever",
        "if len(self._declined) > MAX_DECLINED:",
        "if False:",
        f"{OFFERS}test_declined_rooms_are_bounded",
    ),
    Mutant(
        "a prefill that vLLM never asked about turns no grant away",
        "        ask = self._ask(request)  # vLLM may never have asked about it\n        del self._asks[req_id]\n",
        "        ask = self._asks.pop(req_id, Ask())\n",
        f"{VLLM}test_a_grant_that_comes_behind_its_request_is_answered_at_once",
    ),
    Mutant(
        "prompts that nobody has asked for are computed before one that a decode waits for",
        "(waited_s >= hold_s and not self._has_granted(now - hold_s))",
        "waited_s >= hold_s",
        f"{ORDER}test_a_prompt_with_a_grant_is_computed_before_those_that_nobody_has_asked_for",
    ),
    Mutant(
        "a prompt without a grant waits for as long as others have one",
        "waited_s >= 2 * hold_s or ",
        "",
        f"{ORDER}test_prompts_without_a_grant_go_on_however_many_others_come",
    ),
    Mutant(
        "a grant without a prompt holds others up for as long as it is remembered",
        "came > since and room not in started",
        "room not in started",
        f"{ORDER}test_a_grant_without_a_prompt_is_waited_for_as_long_as_a_prompt_without_a_grant",
    ),
    Mutant(
        "a prompt that is begun holds up those without a grant",
        "came > since and room not in started",
        "came > since",
        f"{ORDER}test_a_prompt_that_is_begun_holds_nothing_up",
    ),
    Mutant(
        "a pool full of kept prompts waits for their leases",
        "            if self.orders.lacks_blocks:\n",
        "            if self.orders.lacks_blocks and not self.orders.is_idle:\n",
        f"{ORDER}test_a_prompt_with_a_grant_gets_the_blocks_of_one_that_nobody_has_asked_for",
    ),
    Mutant(
        "the prompt that was kept last makes way",
        "next((each for each in self._ended if",
        "next((each for each in reversed(self._ended) if",
        f"{ORDER}test_a_prompt_with_a_grant_gets_the_blocks_of_one_that_nobody_has_asked_for",
    ),
    Mutant(
        "prompts that nobody has asked for displace each other",
        "            return self._held(req_id)\n",
        "            self._unallocated.add(req_id)\n            return self._held(req_id)\n",
        f"{ORDER}test_prompts_that_nobody_has_asked_for_do_not_displace_each_other",
    ),
    Mutant(
        "a grant for blocks that were let go waits for its decode's lease",
        "self._decline(self._kept.pop(req_id).room, why)",
        "self._kept.pop(req_id)",
        f"{VLLM}test_a_grant_that_comes_behind_its_request_is_answered_at_once",
    ),
    Mutant(
        "a writer that is frozen is waited for as one in a long step",
        "if peer.key in late or silent_s >= MUTE_S:",
        "if peer.key in late:",
        "test_receiver.py::test_a_writer_that_is_silent_as_well_is_not_waited_for_as_long",
    ),
    Mutant(
        "a writer in a long step is cut off though its heart beats",
        "if peer.key in late or silent_s >= MUTE_S:",
        "if peer.key in owing:",
        "test_receiver.py::test_a_writer_that_is_silent_as_well_is_not_waited_for_as_long",
    ),
    Mutant(
        "who refuses a second link does not say who it is",
        "refuser=self._book.us if is_occupied else None",
        "refuser=None",
        f"{OFFERS}test_a_peer_is_found_under_another_name_too",
    ),
    Mutant(
        "an end that dials does not look for whom it was refused by",
        "self.book.linked_at(endpoint, refuser)) is not None",
        "self.book.linked_at(endpoint)) is not None",
        f"{OFFERS}test_a_peer_is_found_under_another_name_too",
    ),
    Mutant(
        "any linked peer is taken for the one that refused",
        "peer_key(peer) == key)",
        "key is not None)",
        f"{OFFERS}test_a_peer_is_found_under_another_name_too",
    ),
    Mutant(
        "a refusal carries every endpoint of who refuses",
        "attrs.evolve(refuser, endpoints=())",
        "refuser",
        "test_handshake.py::test_a_refusal_fits_an_untrusted_link_whatever_it_says",
    ),
    Mutant(
        "a prompt that decode gave up stays in vLLM's queue",
        "            if not self._channel_of(grant).receiver.awaits(room):",
        "            if False:",
        "test_vllm_prefill.py::test_a_prompt_that_decode_gave_up_is_dropped_at_vllm",
    ),
    Mutant(
        "a server goes on with a prompt that nobody wants",
        "if (call := self._calls.get(room)) is not None:",
        "if (call := None) is not None:",
        f"{PROMPTS}test_a_server_is_left_when_its_prompt_is_dropped",
    ),
    Mutant(
        "a server that was left before it answered is heard to its end",
        "                is_left = self.is_left\n",
        "                is_left = False\n",
        f"{PROMPTS}test_a_server_is_left_when_its_prompt_is_dropped",
    ),
    Mutant(
        "what vLLM refuses once its answer has begun is tried again",
        "if _is_theirs(code):\n                raise",
        "if code < 0:\n                raise",
        f"{PROMPTS}test_a_server_streams_tokens_until_it_is_done_or_says_something_else",
    ),
    Mutant(
        "every rank of a prefill opens a channel",
        "        if not self._takes_part:\n            return\n",
        "",
        f"{VLLM}test_the_first_of_several_ranks_of_a_prefill_sends",
    ),
    Mutant(
        "blocks are held until ranks that send nothing have sent them",
        "1 if settings.sends else workers",
        "workers",
        f"{VLLM}test_the_first_of_several_ranks_of_a_prefill_sends",
    ),
    Mutant(
        "a prefill that decodes as well starts with several ranks, and only the first one has what lands",
        'if role == "kv_both" or size',
        "if size",
        f"{VLLM}test_set_ups_that_are_not_served_end_at_start",
    ),
    Mutant(
        "ranks that hold some heads each start, and those of one are sent",
        " or has_heads(model):",
        ":",
        "test_vllm_heads.py::test_ranks_that_hold_some_heads_each_are_refused_at_start",
    ),
    Mutant(
        "a cancelled load is reported while its writer may still write",
        "        if entry.grant is None:\n            self._fail(entry, reason, why)",
        '        if entry.grant is None or reason == "cancelled":\n            self._fail(entry, reason, why)',
        f"{VLLM}test_a_cancelled_load_keeps_its_blocks_until_its_writer_has_stopped",
    ),
    Mutant(
        "prefill takes a grant for another prompt",
        "if Terms.of(grant.request_id).proof not in save.proofs:",
        "if False:",
        f"{VLLM}test_two_ends_with_other_prompts_hand_nothing_over",
    ),
    Mutant(
        "loads have no lease",
        "if self._clock() - entry.since > self._lease_s and not entry.reason:",
        "if False:",
        f"{VLLM}test_the_lease_of_decode_ends_a_wait_that_vllm_would_not",
    ),
    Mutant(
        "blocks that did not land count as loaded",
        "        self._bad_blocks |= set(entry.load.blocks)\n",
        "",
        f"{VLLM}test_a_prefill_that_nobody_finds_ends_the_request_by_its_policy",
    ),
    Mutant(
        "a preempted prompt is sent again from its beginning",
        "tokens = range(out.sent, min(",
        "tokens = range(out.grant.tokens.start, min(",
        f"{VLLM}test_a_preempted_prefill_goes_on_where_it_was {VLLM}test_chunks_and_local_hits_on_either_side",
    ),
    Mutant(
        "blocks are let go while a transfer reads them",
        "if any(out.transfer is None or not out.transfer.done for out in outs):",
        "if any(out.transfer is None for out in outs):",
        f"{VLLM}test_blocks_are_held_until_no_transfer_reads_them",
    ),
    Mutant(
        "blocks whose grant never comes are held for ever",
        "                if self._clock() - since <= self._lease_s:\n                    continue",
        "                continue",
        f"{VLLM}test_a_request_without_a_grant_waits_and_then_keeps_its_blocks_for_a_lease",
    ),
    Mutant(
        "a waiting engine spins",
        "if self._news.wait(self._idle_s):",
        "if self._news.is_set():",
        f"{VLLM}test_a_waiting_pair_hardly_steps",
    ),
    Mutant(
        "overrides of a checkpoint's config are no part of the model's id",
        "model_id=folded(layout.model_id, changes))",
        "model_id=layout.model_id)",
        f"{TOLD}test_overrides_at_one_end_are_refused_by_name_and_at_both_served",
    ),
    Mutant(
        "a vLLM that was told something keeps the id of the files",
        "    if not changes:\n        return model_id\n",
        "    return model_id\n",
        f"{TOLD}test_every_value_that_is_told_gives_another_id",
    ),
    Mutant(
        "an id depends on how a number was written",
        "return int(value) if value.is_integer() else value",
        "return value",
        f"{TOLD}test_equal_values_have_one_id_however_they_are_written",
    ),
    Mutant(
        "a quantized checkpoint counts as one that vLLM was told to quantize",
        'getattr(arch, "quantization_config", None) is None and',
        "True and",
        f"{TOLD}test_a_plain_set_up_keeps_the_id_of_the_files",
    ),
    Mutant(
        "random weights pass for the checkpoint's",
        "not in FORMATS:",
        "in ():",
        f"{TOLD}test_what_has_no_value_ends_at_start",
        where="overrides.py",
    ),
    Mutant(
        "all data-parallel ranks listen at one address",
        "if rank and is_given else self",
        "if rank and False else self",
        f"{DATA_RANKS}test_prompts_land_from_either_rank",
    ),
    Mutant(
        "a data-parallel rank is read where vLLM resets it",
        '"data_parallel_index", 0)',
        '"data_parallel_rank", 0)',
        f"{DATA_RANKS}test_prompts_land_from_either_rank",
    ),
    Mutant(
        "a data-parallel rank that waits holds up the others",
        "(IN_STEP_S, IN_STEP_S) if in_step",
        "(IN_STEP_S, IN_STEP_S) if False",
        f"{DATA_RANKS}test_a_rank_that_waits_hardly_holds_up_those_in_step_with_it",
    ),
    Mutant(
        "of a decode's workers only the first one takes part",
        "self._rank == 0 or not settings.sends",
        "self._rank == 0",
        f"{DECODE_RANKS}test_prompts_land_at_every_worker",
    ),
    Mutant(
        "a request has landed when one worker says so",
        "1 if settings.sends else workers",
        "1",
        f"{DECODE_RANKS}test_a_request_has_landed_when_it_has_landed_at_the_last_worker",
    ),
    Mutant(
        "a prompt is computed when the first worker's grant is here",
        "return rooms if all(each in self._grants for each in rooms) else []",
        "return [each for each in rooms if each in self._grants]",
        f"{DECODE_RANKS}test_a_prefill_waits_for_the_grants_of_all_workers",
    ),
    Mutant(
        "the grants of other workers than the first wait for their lease",
        "for rank in range(self._most_workers)):",
        "for rank in range(1)):",
        f"{DECODE_RANKS}test_grants_that_come_behind_their_request_are_answered_at_once",
    ),
    Mutant(
        "every worker of a decode wants the one address",
        "return attrs.evolve(self, listen=scheme) if rank else self",
        "return self",
        f"{DECODE_RANKS}test_a_listen_of_its_own_is_that_of_the_first_worker",
    ),
    Mutant(
        "a decode may have any number of workers",
        "if terms.rank < terms.num_workers <= MAX_WORKERS else cls(text)",
        "",
        f"{DECODE_RANKS}test_terms_that_no_decode_has_are_no_proof",
    ),
    Mutant(
        "a room in capitals is another one",
        "        room = bytes.fromhex(room).hex()  # both ends compare text\n",
        "",
        f"{VLLM}test_a_room_may_be_written_in_capitals",
    ),
    Mutant(
        "a sampling parameter that vLLM is not told is lost",
        "    _check_all_is_sent(sampling)\n",
        "",
        f"{PROMPTS}test_what_vllm_is_not_told_is_refused_by_name",
    ),
    Mutant(
        "a field of a request that vLLM is not told is lost",
        "    _check_all_is_sent(request)\n",
        "",
        f"{PROMPTS}test_what_vllm_is_not_told_is_refused_by_name",
    ),
    Mutant(
        "a request with the log-probability that vLLM says is refused",
        "    if sampling.logprobs == 0:",
        "    if False:",
        f"{PROMPTS}test_what_vllm_need_not_be_told_is_no_reason_to_refuse",
    ),
    Mutant(
        "a decode dials whatever a request names",
        "    elif loads and not settings.may_dial(prefill):",
        "    elif False:",
        f"{DIALLING}test_a_request_chooses_among_the_prefills_that_its_decode_may_dial",
    ),
    Mutant(
        "without a key a stranger elsewhere writes into a decode's prefix cache",
        "return self.key_file is not None or leads_here(prefill)",
        "return True",
        f"{DIALLING}test_a_request_chooses_among_the_prefills_that_its_decode_may_dial",
    ),
    Mutant(
        "a host is judged by another reading of its address than that by which it is dialled",
        "not endpoint.startswith(TCP) or _is_local(_split(endpoint)[0])",
        'not endpoint.startswith(TCP) or endpoint.startswith((TCP + "127.", TCP + "[::1]"))',
        f"{DIALLING}test_a_request_chooses_among_the_prefills_that_its_decode_may_dial",
    ),
    Mutant(
        "with a key the list of prefills counts for nothing",
        "        if self.prefills is not None:\n            return prefill in",
        "        if self.prefills is not None and not self.key_file:\n            return prefill in",
        f"{DIALLING}test_with_a_key_a_request_may_name_any_prefill",
    ),
    Mutant(
        "a decode dials as many addresses at once as requests name",
        "if not self._turns.acquire(blocking=False):",
        "if self._turns.acquire(blocking=False) and False:",
        f"{DIALLING}test_so_many_addresses_are_dialled_at_a_time",
    ),
    Mutant(
        "an address that did not answer keeps its turn",
        "        self._turns.release()\n",
        "",
        f"{DIALLING}test_so_many_addresses_are_dialled_at_a_time",
    ),
    Mutant(
        "log-probabilities of a prompt that was loaded are what memory held",
        'elif loads and getattr(request, "skip_reading_prefix_cache", False):',
        "elif False:",
        f"{VLLM}test_a_prompt_that_vllm_must_compute_itself_is_not_loaded",
    ),
]
