"""Bugs in the simulation of a cluster: in what it counts, what it skips over, and what it shows."""

from __future__ import annotations

from tests.planted.mutant import Mutant

_RUNS = "test_simulate.py"
_PARITY = "test_parity.py"

MUTANTS = [
    Mutant(
        "a simulated burst forgets that contexts grow",
        "contexts = np.arange(context, context + num_rows * count, num_rows)",
        "contexts = np.full(count, context)",
        f"{_RUNS}::test_bursts_are_the_steps_that_walking_gives",
    ),
    Mutant(
        "a simulated burst runs over the end of a request",
        "min(MAX_BURST, finishes[0][0] - len(self.ends))",
        "min(MAX_BURST, finishes[0][0] - len(self.ends) + 1)",
        f"{_RUNS}::test_tokens_bytes_and_slots_are_neither_lost_nor_made",
    ),
    Mutant(
        "a simulated burst is not cut when something lands",
        "if len(self._burst) > 1:",
        "if len(self._burst) > 999:",
        f"{_PARITY}::test_unlike_prompts_and_full_pools_are_alike_too",
    ),
    Mutant(
        "simulated decode grants a request one page too few",
        "found.num_own = self._num_pages(job.reserved_tokens) - found.num_known",
        "found.num_own = self._num_pages(job.reserved_tokens) - found.num_known - 1",
        f"{_RUNS}::test_tokens_bytes_and_slots_are_neither_lost_nor_made",
    ),
    Mutant(
        "simulated engines begin before everything has happened that happens at that time",
        "while self._soon and (not heap or heap[0][0] > self.now_s):",
        "while self._soon:",
        f"{_RUNS}::test_what_lands_together_joins_one_step",
    ),
    Mutant(
        "simulated grants reach the prefill in the middle of decode's step",
        "self._tell(told_s, granted, [*ended, *overdue])",
        "self._tell(self._world.now_s, granted, [*ended, *overdue])",
        f"{_PARITY}::test_unlike_prompts_and_full_pools_are_alike_too",
    ),
    Mutant(
        "a policy is not shown what was promised to simulated prefills",
        "self._promised[prefill][job] = job.num_tokens - at_prefill",
        "self._promised[prefill].pop(job, at_prefill)",
        f"{_PARITY}::test_unlike_prompts_and_full_pools_are_alike_too",
    ),
    Mutant(
        "simulated links share evenly and not max-min",
        "fullest = min(counts, key=lambda end: left[end] / counts[end])",
        "fullest = next(iter(counts))",
        "simulation/test_links.py",
    ),
    Mutant(
        "the last push of a simulated prompt takes no time",
        "ready_s = now_s + num_tokens * network.token_bytes / network.num_pushes / network.bytes_per_s",
        "ready_s = now_s",
        f"{_RUNS}::test_compute_hides_what_the_link_can_carry_meanwhile",
    ),
    Mutant(
        "simulated pages that are in use are evicted",
        "            del self._resting[run]\n                self.num_cached -= run.num_pages",
        "            self.num_cached -= run.num_pages",
        "simulation/test_pages.py",
    ),
    Mutant(
        "two simulated prompts keep what they have in common twice",
        "self.num_free += num_kept - num_new",
        "self.num_free += 0 * (num_kept - num_new)",
        "simulation/test_pages.py",
    ),
    Mutant(
        "the wait in a simulated prefill's queue is that of another discipline",
        "            submitted_at=now_s,\n            is_resumed",
        "            submitted_at=-now_s,\n            is_resumed",
        f"{_PARITY}::test_unlike_prompts_and_full_pools_are_alike_too",
    ),
    Mutant(
        "a simulated host that stalls reads in time",
        "until_s if stall.at_s <= at_s < until_s else at_s",
        "at_s",
        f"{_RUNS}::test_a_host_that_stalls_shows_as_slip_and_delivery_and_not_as_speed",
    ),
    Mutant(
        "a simulated engine that slows down does not",
        "self.speed = speed",
        "self.speed = 1.0",
        f"{_RUNS}::test_a_slower_engine_takes_longer_from_then_on",
    ),
    Mutant(
        "a request that comes back waits for pages behind those that are new",
        "not (self.attempts or self.is_resumed)",
        "False",
        "test_sequences.py::test_those_that_come_back_here_or_from_elsewhere_are_first_and_the_others_go_by_age",
    ),
    Mutant(
        "a stream that was moved waits for pages as a new request",
        "not (self.attempts or self.is_resumed)",
        "not self.attempts",
        "test_sequences.py::test_those_that_come_back_here_or_from_elsewhere_are_first_and_the_others_go_by_age",
    ),
    Mutant(
        "a request that was retracted waits for pages as a new one",
        "not (self.attempts or self.is_resumed)",
        "not self.is_resumed",
        "test_sequences.py::test_those_that_come_back_here_or_from_elsewhere_are_first_and_the_others_go_by_age",
    ),
    Mutant(
        "requests wait by number alone",
        "due_at(submitted_at, deadline_at), arrival",
        "0.0, arrival",
        "test_sequences.py::test_those_that_come_back_here_or_from_elsewhere_are_first_and_the_others_go_by_age",
    ),
    Mutant(
        "a simulated stream waits at prefill behind prompts that are new",
        "            is_resumed=job.num_output > 0,",
        "            is_resumed=False,",
        "planning/simulation/test_order.py::test_prompts_wait_at_prefill_by_age_behind_those_that_stream",
    ),
    Mutant(
        "a simulated request keeps the attempts that it had at another decode",
        "self.attempts, self.num_taken_over = 0, 0",
        "self.num_taken_over = 0",
        "planning/simulation/test_order.py::test_a_request_that_moves_to_another_decode_is_new_there_but_for_its_tokens",
    ),
    Mutant(
        "a deadline ends no simulated request",
        "overdue = self._expire()",
        "overdue: list[Job] = []",
        f"{_RUNS}::test_deadlines_end_requests_wherever_they_are_and_leave_nothing_behind",
    ),
    Mutant(
        "a simulated prefill that stops writing does not say so",
        "            self._stopped(prompt.job)\n",
        "",
        f"{_RUNS}::test_deadlines_end_requests_wherever_they_are_and_leave_nothing_behind",
    ),
    Mutant(
        "simulated drafts that were right are drawn again",
        "self._shift(job, num_accepted)",
        "self._shift(job, 0)",
        f"{_RUNS}::test_drafts_that_are_right_are_tokens_for_no_step[4000]",
    ),
]
