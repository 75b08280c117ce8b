"""Bugs in what other engines' pages and grants need: offers over links, and the connector inside vLLM."""

from __future__ import annotations

from tests.planted.mutant import Mutant

OFFERS = "tests/unit/kv/channel/test_offers.py::"
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
        "the grant of a declined room waits for its decode's lease",
        "src/pdinfer/kv/channel/offers.py",
        "        if grant.room in self._declined:\n            return DECLINED\n",
        "",
        f"{OFFERS}test_a_declined_room_is_answered_without_a_step",
    ),
    Mutant(
        "a grant that waits when its room is declined is kept",
        "src/pdinfer/kv/channel/offers.py",
        "            self._drop(room)\n            return peer\n",
        "            return peer\n",
        f"{OFFERS}test_a_declined_room_is_answered_without_a_step",
    ),
    Mutant(
        "declined rooms are remembered for ever",
        "src/pdinfer/kv/channel/offers.py",
        "if len(self._declined) > MAX_DECLINED:",
        "if False:",
        f"{OFFERS}test_declined_rooms_are_bounded",
    ),
    Mutant(
        "a prefill that vLLM never asked about turns no grant away",
        "src/pdinfer/adapters/vllm/scheduler.py",
        "        ask = self._ask(request)  # vLLM may never have asked about it\n        del self._asks[req_id]\n",
        "        ask = self._asks.pop(req_id, None)\n",
        f"{VLLM}test_a_grant_that_comes_behind_its_request_is_answered_at_once",
    ),
    Mutant(
        "a grant for blocks that were let go waits for its decode's lease",
        "src/pdinfer/adapters/vllm/sending.py",
        "self._channel.decline(bytes.fromhex(self._kept.pop(req_id).room))",
        "self._kept.pop(req_id)",
        f"{VLLM}test_a_grant_that_comes_behind_its_request_is_answered_at_once",
    ),
    Mutant(
        "a writer that is frozen is waited for as one in a long step",
        "src/pdinfer/kv/channel/receiver.py",
        "if peer.key in late or silent_s >= MUTE_S:",
        "if peer.key in late:",
        "tests/unit/kv/channel/test_receiver.py::test_a_writer_that_is_silent_as_well_is_not_waited_for_as_long",
    ),
    Mutant(
        "a writer in a long step is cut off though its heart beats",
        "src/pdinfer/kv/channel/receiver.py",
        "if peer.key in late or silent_s >= MUTE_S:",
        "if peer.key in owing:",
        "tests/unit/kv/channel/test_receiver.py::test_a_writer_that_is_silent_as_well_is_not_waited_for_as_long",
    ),
    Mutant(
        "a peer of an older version is sent a frame that it does not know",
        "src/pdinfer/kv/channel/receiver.py",
        "if peer.version < wire.OFFERS_SINCE:",
        "if False:",
        f"{OFFERS}test_a_peer_of_a_version_without_offers_is_sent_none",
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
