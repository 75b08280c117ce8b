"""Bugs in memory, placements of experts, and plans of clusters."""

from __future__ import annotations

from tests.planted.mutant import Mutant

PLACEMENT, BALANCE = "test_placement.py::", "test_balance.py::"
MEMORY, CLUSTER, DEEP_EP = (
    "test_memory.py::",
    "test_plan.py::",
    "test_deep_ep.py::",
)
REPLICAS, RANKS = "test_replicas.py::", "test_expert_ranks.py::"
FRACTION = MEMORY + "test_a_fraction_of_the_memory_is_for_what_is_in_use_and_for_pages"
NEVER_TWICE = BALANCE + "test_an_expert_twice_on_a_rank_is_never_made_and_goes_as_moves_allow"
ROOM = CLUSTER + "test_a_rank_needs_room_for_what_it_would_load"
STEP = DEEP_EP + "test_an_engine_with_larger_steps_than_can_be_dispatched_is_refused"

MUTANTS = [
    # -- memory
    Mutant(
        "a fraction of the memory is for pages alone",
        "here.total * fraction - here.in_use)",
        "here.total * fraction)",
        FRACTION,
    ),
    Mutant(
        "the weights are subtracted after the fraction is taken",
        "here.total * fraction - here.in_use)",
        "(here.total - here.in_use) * fraction)",
        FRACTION,
    ),
    Mutant(
        "a pool of automatic size counts what is in use as free",
        "free = here.total - here.in_use",
        "free = here.total",
        MEMORY + "test_a_pool_without_a_size_holds_64_full_sequences_or_half_of_what_is_free",
    ),
    Mutant(
        "each rank of a machine takes all of its memory",
        "each // (ranks[shared] if shared else 1)",
        "each",
        MEMORY + "test_ranks_have_as_many_pages_as_the_poorest_and_share_a_machine",
    ),
    Mutant(
        "ranks do not ask what others can have",
        "self.groups.world.all_gather(ours).tolist()",
        "ours.tolist()",
        "test_ranks.py::test_pools_of_a_fraction_are_alike_on_all_ranks",
    ),
    Mutant(
        "pages that nobody touched are not in use",
        "in_use=in_use + _untouched_bytes(root)",
        "in_use=in_use",
        MEMORY + "test_pages_that_nobody_has_touched_are_in_use_too",
    ),
    Mutant(
        "the control group with the lowest limit counts, however much it leaves",
        "key=lambda both: both[0] - both[1]",
        "key=lambda both: both[0]",
        MEMORY + "test_a_container_counts_where_it_leaves_less_than_the_machine",
    ),
    Mutant(
        "files that the kernel can drop are in use",
        'int((folder / usage).read_text("ascii")) - int(stat.get(droppable, 0))',
        'int((folder / usage).read_text("ascii"))',
        MEMORY + "test_a_container_counts_where_it_leaves_less_than_the_machine",
    ),
    Mutant(
        "only the innermost control group is looked at",
        "for at in (folder, *folder.parents):",
        "for at in (folder,):",
        MEMORY + "test_a_container_counts_where_it_leaves_less_than_the_machine",
    ),
    Mutant(
        "what torch's allocator keeps of a GPU is in use",
        "        torch.cuda.empty_cache()\n",
        "",
        MEMORY + "test_of_a_gpu_it_is_what_the_driver_says",
    ),
    # -- placements
    Mutant(
        "the second copy of an expert on a rank is never loaded",
        "for place in where[name]:",
        "for place in where[name][:1]:",
        RANKS + "test_logits_are_those_of_one_rank",
    ),
    Mutant(
        "tables have room for as many copies as ranks",
        "most = placement.num_slots - placement.num_logical_experts + 1",
        "most = min(placement.num_ranks, placement.num_slots - placement.num_logical_experts + 1)",
        REPLICAS + "test_another_placement_is_put_in_place",
    ),
    Mutant(
        "one rank's dispatcher counts slots and not experts",
        "placement.num_slots if group.size > 1 else placement.num_logical_experts",
        "placement.num_slots",
        RANKS + "test_one_rank_holds_each_expert_once_whatever_its_placement_says",
    ),
    Mutant(
        "the last slot of a rank is never a twin",
        "same[:, :, 1:] = experts[:, :, 1:] == experts[:, :, :-1]",
        "same[:, :, 1:-1] = experts[:, :, 1:-1] == experts[:, :, :-2]",
        PLACEMENT + "test_an_expert_twice_on_a_rank_is_legal_and_known",
    ),
    Mutant(
        "twins of the previous placement stay",
        "moves = part_twins(start, _homes(start, sizes), max_moves)",
        "moves = 0",
        NEVER_TWICE,
    ),
    Mutant(
        "moves that parted twins are free",
        "anew.take(fit), sizes, max_moves - moves)",
        "anew.take(fit), sizes, max_moves)",
        NEVER_TWICE,
    ),
    Mutant(
        "a twin is replaced by an expert that the rank has",
        "            rating[experts[rank]] = -1.0\n",
        "            rating[experts[rank, slot]] = -1.0\n",
        NEVER_TWICE,
    ),
    Mutant(
        "an exchange may bring an expert to a rank that has it",
        "score = np.where(holds | same.any(1, keepdims=True), math.inf, score)",
        "score = np.where(same.any(1, keepdims=True), math.inf, score)",
        BALANCE + "test_a_solution_is_a_placement_of_all_load",
    ),
    Mutant(
        "copies are dealt to ranks that have the expert",
        '            ranks = np.take_along_axis(ranks, np.argsort(~first, axis=1, kind="stable"), 1)\n',
        "",
        BALANCE + "test_a_solution_is_a_placement_of_all_load",
    ),
    Mutant(
        "an expert gets more copies than there are ranks",
        "np.where(copies < max_copies, load_LE[rows, expert] / copies, -1.0)",
        "load_LE[rows, expert] / copies",
        BALANCE + "test_a_solution_is_a_placement_of_all_load",
    ),
    Mutant(
        "rounding swallows the load of small experts",
        "np.where(given > 0, new * (part.sum(1, keepdims=True) / np.where(given > 0, given, 1.0)), part)",
        "new",
        BALANCE + "test_a_solution_is_a_placement_of_all_load",
    ),
    Mutant(
        "the balancer's float32 sums overflow",
        "scaled(check_load(weight), FLOAT32_EXPONENT).astype(np.float32)",
        "check_load(weight).astype(np.float32)",
        BALANCE + "test_float32_sums_that_overflow_leave_no_expert_out",
    ),
    Mutant(
        "loads are scaled to the end of float32",
        "FLOAT32_EXPONENT = 110",
        "FLOAT32_EXPONENT = 127",
        BALANCE + "test_float32_sums_that_overflow_leave_no_expert_out",
    ),
    Mutant(
        "a load that is infinite as a float is taken",
        "~(np.isfinite(floats) & (floats >= 0))",
        "~(floats >= 0)",
        BALANCE + "test_what_is_no_load_is_refused",
    ),
    Mutant(
        "experts that are twice on a rank are not reported",
        "[*lines, *resolved.weights, *remarks]",
        "[*lines, *resolved.weights]",
        REPLICAS + "test_a_model_tells_of_experts_that_are_twice_on_a_rank",
    ),
    # -- plans
    Mutant(
        "a plan counts what the files hold",
        "return self._rank_weights(self.weights)",
        'return self._rank_weights("stored")',
        ROOM,
    ),
    Mutant(
        "a plan needs no page beside the weights",
        "(self.cache.num_pages or 1) * self.layout.page_bytes",
        "(self.cache.num_pages or 0) * self.layout.page_bytes",
        ROOM,
    ),
    Mutant(
        "a plan gives weights and pages all of the memory",
        "self.device_bytes * (fraction or 1.0)",
        "self.device_bytes",
        ROOM,
    ),
    Mutant(
        "planned pages take the place of weights",
        "(int(self.device_bytes * fraction) - self.weight_bytes)",
        "int(self.device_bytes * fraction)",
        ROOM,
    ),
    Mutant(
        "a plan does not ask DeepEP",
        "        check_dispatcher(expert_sizes(config, groups.ep, placement, dtype), experts, torch.device(device.type))\n",
        "        pass\n",
        CLUSTER + "test_a_cluster_without_kernels_for_its_size_is_refused",
    ),
    Mutant(
        "a plan asks the kernels for prefill on both sides",
        'if backend == "deep_ep" and options.deepep_mode == "low_latency":\n        sizes.check_low',
        'if backend == "deep_ep" and options.deepep_mode == "high":\n        sizes.check_low',
        CLUSTER + "test_the_deployments_fit",
    ),
    Mutant(
        "every rank of a plan counts all experts",
        "        if self.group.size == 1:\n            return list",
        "        if self.replicas is None:\n            return list",
        ROOM,
    ),
    Mutant(
        "a decode engine does not look at its largest step",
        "            *self.config.largest_decode_step, tp_size",
        '            1, "", tp_size',
        STEP,
    ),
    Mutant(
        "drafts do not count among a step's tokens",
        "return requests * (1 + drafts), reason",
        "return requests * max(1, drafts), reason",
        STEP,
    ),
    Mutant(
        "parts of a step are rounded down",
        "on_rank = -(-in_batch // tp_size)",
        "on_rank = in_batch // tp_size",
        STEP,
    ),
    Mutant(
        "two batches are counted as one",
        "in_batch = num_tokens if overlap is None else -(-num_tokens // (2 * overlap)) * overlap",
        "in_batch = num_tokens",
        STEP,
    ),
    Mutant(
        "halves of a step are thought to be cut within a sequence",
        "-(-num_tokens // (2 * overlap)) * overlap",
        "-(-num_tokens // 2)",
        STEP,
    ),
    Mutant(
        "a prefill engine does not look at its largest step",
        "        self.model.experts.check_step(*largest, tp_size=self.model.topology.tp_size)\n",
        "",
        DEEP_EP + "test_a_prefill_with_larger_steps_than_can_be_dispatched_is_refused",
    ),
    Mutant(
        "a plan's decode engine may have steps of any size",
        "            engine.check_steps(*engine.engine.largest_decode_step, num_queries=1 + engine.engine.num_draft_tokens)\n",
        "            pass\n",
        CLUSTER + "test_steps_that_deep_ep_was_not_made_for_are_refused",
    ),
    # -- more of the same kinds, in neighbouring modules
    Mutant(
        "holders do not share the sending",
        "            sent[source // per_rank] += 1\n",
        "            pass\n",
        "test_placement.py::test_holders_share_the_sending",
    ),
    Mutant(
        "all ranks begin with the same copy",
        "* self.num_ranks + self.rank",
        "* self.num_ranks",
        "test_replicas.py::test_ranks_with_one_token_each_use_all_copies",
    ),
    Mutant(
        "a low-latency batch lives for ever",
        "        self.live -= 1\n",
        "",
        "test_deep_ep.py::test_a_batch_that_came_back_makes_room",
    ),
    Mutant(
        "a tuned file is not used",
        "DeepEPNormal.connect(group, sizes, ops, config)",
        "DeepEPNormal.connect(group, sizes, ops)",
        "test_deep_ep.py::test_options_reach_the_dispatcher",
    ),
    Mutant(
        "the tokens per rank of a low-latency dispatcher are the default",
        "DeepEPLowLatency.connect(group, sizes, room, device=device)",
        "DeepEPLowLatency.connect(group, sizes, 128, device=device)",
        "test_deep_ep.py::test_options_reach_the_dispatcher",
    ),
    Mutant(
        "twins are replaced without preferring experts that are at home",
        "rating = at_home * load.sum() + load / counts",
        "rating = load / counts",
        "test_balance.py::test_twins_make_room_for_experts_that_are_at_home_and_cheap_layers_come_first",
    ),
    Mutant(
        "layers with most twins come first",
        '    order = np.argsort(cost, kind="stable")\n    order = order[cost[order] > 0]',
        '    order = np.argsort(-cost, kind="stable")\n    order = order[cost[order] > 0]',
        "test_balance.py::test_twins_make_room_for_experts_that_are_at_home_and_cheap_layers_come_first",
    ),
    Mutant(
        "the state of dense_tp is that of tp in a plan",
        'dense_tp=self._alone("dense_tp", self.moe_dense_tp_size),\n            ep=self._alone("ep", self.ep_size),\n        )\n\n    def connect',
        'dense_tp=self._alone("dense_tp", self.tp_size),\n            ep=self._alone("ep", self.ep_size),\n        )\n\n    def connect',
        "test_topology.py::test_groups_of_a_plan_are_those_that_would_meet",
    ),
    Mutant(
        "cp ranks of a plan are adjacent",
        'cp=self._alone("cp", self.cp_size, stride=self.tp_size)',
        'cp=self._alone("cp", self.cp_size)',
        "test_topology.py::test_groups_of_a_plan_are_those_that_would_meet",
    ),
    Mutant(
        "MTP is left out of a plan's bytes",
        "            mtp=self.mtp,\n            experts=self.experts,",
        "            mtp=False,\n            experts=self.experts,",
        "test_plan.py::test_a_plan_knows_the_bytes_that_a_model_takes",
    ),
    Mutant(
        "a planned checkpoint holds kv_b etc. as floats",
        'self.stored == "float" or not quantized_names(self.stored, self.config)(name)',
        'self.stored == "float"',
        "test_plan.py::test_a_plan_knows_the_bytes_that_a_model_takes",
    ),
]
