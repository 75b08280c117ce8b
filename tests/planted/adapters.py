"""Bugs in what other engines' pages and grants need: offers over links, and the connector inside vLLM."""

from __future__ import annotations

from tests.planted.mutant import Mutant

OFFERS = "tests/unit/kv/channel/test_offers.py::"
PROMPTS = "tests/unit/adapters/test_vllm_prompts.py::"
VLLM = "tests/unit/adapters/test_vllm.py::"

MUTANTS = [
    Mutant(
        "anyone may offer a grant for somebody else's pages",
        "src/pdinfer/kv/channel/offers.py",
        "if peer not in map(peer_key, grant.destinations):",
        "if False:",
        f"{OFFERS}test_an_offer_that_is_not_the_peers_to_make_costs_its_link",
    ),
    Mutant(
        "grants that nobody takes are not counted",
        "src/pdinfer/kv/channel/offers.py",
        "        self._waiting[grant.room] = peer, packed\n        self._num_bytes += _num_bytes(packed)",
        "        self._waiting[grant.room] = peer, packed",
        f"{OFFERS}test_offers_that_nobody_takes_are_bounded",
    ),
    Mutant(
        "a peer of an older version is sent a frame that it does not know",
        "src/pdinfer/kv/channel/receiver.py",
        "if peer.version < wire.OFFERS_SINCE:",
        "if False:",
        f"{OFFERS}test_a_peer_of_a_version_without_offers_is_sent_none",
    ),
    Mutant(
        "who refuses a second link does not say who it is",
        "src/pdinfer/kv/channel/links.py",
        "refuser=self._book.us if is_occupied else None",
        "refuser=None",
        f"{OFFERS}test_a_peer_is_found_under_another_name_too",
    ),
    Mutant(
        "an end that dials does not look for whom it was refused by",
        "src/pdinfer/kv/channel/links.py",
        "self.book.linked_at(endpoint, refuser)) is not None",
        "self.book.linked_at(endpoint)) is not None",
        f"{OFFERS}test_a_peer_is_found_under_another_name_too",
    ),
    Mutant(
        "any linked peer is taken for the one that refused",
        "src/pdinfer/kv/channel/book.py",
        "peer_key(peer) == key)",
        "key is not None)",
        f"{OFFERS}test_a_peer_is_found_under_another_name_too",
    ),
    Mutant(
        "a refusal carries every endpoint of who refuses",
        "src/pdinfer/kv/channel/wire.py",
        "attrs.evolve(refuser, endpoints=())",
        "refuser",
        "tests/unit/kv/channel/test_handshake.py::test_a_refusal_fits_an_untrusted_link_whatever_it_says",
    ),
    Mutant(
        "a prompt that decode gave up stays in vLLM's queue",
        "src/pdinfer/adapters/vllm/prefill.py",
        "            if not self._channel_of(grant).awaits(room):",
        "            if False:",
        "tests/unit/adapters/test_vllm_prefill.py::test_a_prompt_that_decode_gave_up_is_dropped_at_vllm",
    ),
    Mutant(
        "a server goes on with a prompt that nobody wants",
        "src/pdinfer/adapters/vllm/prompts.py",
        "            call = self._calls.get(room)\n",
        "            call = None\n",
        f"{PROMPTS}test_a_server_is_left_when_its_prompt_is_dropped",
    ),
    Mutant(
        "a server that was left before it answered is heard to its end",
        "src/pdinfer/adapters/vllm/prompts.py",
        "                is_left = self._is_left\n",
        "                is_left = False\n",
        f"{PROMPTS}test_a_server_is_left_when_its_prompt_is_dropped",
    ),
    Mutant(
        "what vLLM refuses once its answer has begun is tried again",
        "src/pdinfer/adapters/vllm/prompts.py",
        "if _is_theirs(code):\n                raise",
        "if code < 0:\n                raise",
        f"{PROMPTS}test_a_server_streams_tokens_until_it_is_done_or_says_something_else",
    ),
    Mutant(
        "every rank of a prefill opens a channel",
        "src/pdinfer/adapters/vllm/worker.py",
        "        if not self._is_first:\n            return\n",
        "",
        f"{VLLM}test_the_first_of_several_ranks_of_a_prefill_sends",
    ),
    Mutant(
        "blocks are held until ranks that send nothing have sent them",
        "src/pdinfer/adapters/vllm/connector.py",
        "        return 1\n",
        "        return 2\n",
        f"{VLLM}test_the_first_of_several_ranks_of_a_prefill_sends",
    ),
    Mutant(
        "a decode of several ranks starts, and only the first one has what lands",
        "src/pdinfer/adapters/vllm/settings.py",
        'if role != "kv_producer" or has_heads',
        "if has_heads",
        f"{VLLM}test_set_ups_that_are_not_served_end_at_start",
    ),
    Mutant(
        "ranks that hold some heads each start, and those of one are sent",
        "src/pdinfer/adapters/vllm/settings.py",
        " or has_heads(str(config.model_config.model)):",
        ":",
        "tests/unit/adapters/test_vllm_heads.py::test_ranks_that_hold_some_heads_each_are_refused_at_start",
    ),
    Mutant(
        "a cancelled load is reported while its writer may still write",
        "src/pdinfer/adapters/vllm/receiving.py",
        "        if entry.grant is None:\n            self._fail(entry, reason, why)",
        '        if entry.grant is None or reason == "cancelled":\n            self._fail(entry, reason, why)',
        f"{VLLM}test_a_cancelled_load_keeps_its_blocks_until_its_writer_has_stopped",
    ),
    Mutant(
        "prefill takes a grant for another prompt",
        "src/pdinfer/adapters/vllm/sending.py",
        "if grant.request_id not in save.proofs:",
        "if False:",
        f"{VLLM}test_two_ends_with_other_prompts_hand_nothing_over",
    ),
    Mutant(
        "loads have no lease",
        "src/pdinfer/adapters/vllm/receiving.py",
        "if self._clock() - entry.since > self._lease_s and not entry.reason:",
        "if False:",
        f"{VLLM}test_the_lease_of_decode_ends_a_wait_that_vllm_would_not",
    ),
    Mutant(
        "blocks that did not land count as loaded",
        "src/pdinfer/adapters/vllm/receiving.py",
        "        self._bad_blocks |= set(entry.load.blocks)\n",
        "",
        f"{VLLM}test_a_prefill_that_nobody_finds_ends_the_request_by_its_policy",
    ),
    Mutant(
        "a preempted prompt is sent again from its beginning",
        "src/pdinfer/adapters/vllm/sending.py",
        "tokens = range(out.sent, min(",
        "tokens = range(out.grant.tokens.start, min(",
        f"{VLLM}test_a_preempted_prefill_goes_on_where_it_was {VLLM}test_chunks_and_local_hits_on_either_side",
    ),
    Mutant(
        "blocks are let go while a transfer reads them",
        "src/pdinfer/adapters/vllm/sending.py",
        "if out.transfer is None or not out.transfer.done:",
        "if out.transfer is None:",
        f"{VLLM}test_blocks_are_held_until_no_transfer_reads_them",
    ),
    Mutant(
        "blocks whose grant never comes are held for ever",
        "src/pdinfer/adapters/vllm/sending.py",
        "                if self._clock() - since <= self._lease_s:\n                    continue",
        "                continue",
        f"{VLLM}test_a_request_without_a_grant_waits_and_then_keeps_its_blocks_for_a_lease",
    ),
    Mutant(
        "a waiting engine spins",
        "src/pdinfer/adapters/vllm/worker.py",
        "if self._news.wait(self._idle_s):",
        "if self._news.is_set():",
        f"{VLLM}test_a_waiting_pair_hardly_steps",
    ),
]
