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
        "found.num_own = -(-reserved // self.page_size) - found.num_known",
        "found.num_own = reserved // self.page_size - found.num_known",
        f"{_RUNS}::test_tokens_bytes_and_slots_are_neither_lost_nor_made",
    ),
    Mutant(
        "simulated engines begin before everything has happened that happens at that time",
        "while self._soon and (not heap or heap[0][0] > now_s):",
        "while self._soon:",
        f"{_RUNS}::test_what_lands_together_joins_one_step",
    ),
    Mutant(
        "simulated grants reach the prefill in the middle of decode's step",
        "self._world.tell(told_s, granted, ended)",
        "self._world.tell(now_s, granted, ended)",
        f"{_PARITY}::test_unlike_prompts_and_full_pools_are_alike_too",
    ),
    Mutant(
        "a policy is not shown what was promised to simulated prefills",
        "self._promised[job.prefill][job] = job.num_tokens - known",
        "self._promised[job.prefill].pop(job, known)",
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
        "ready_s = now_s + prompt.pushes * network.token_bytes / network.num_pushes / network.bytes_per_s",
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
        "order=(0, not job.num_output, due_at(now_s, None), self._num_arrivals),",
        "order=(0, not job.num_output, -now_s, self._num_arrivals),",
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
        where="decode.py",
    ),
    Mutant(
        "a simulated request that comes back waits behind those that are new",
        "not (self.attempts or self.num_output)",
        "False",
        "planning/simulation/test_order.py::test_requests_wait_for_pages_in_the_order_of_an_engine",
    ),
    Mutant(
        "a simulated stream that was moved waits as a new request",
        "not (self.attempts or self.num_output)",
        "not self.attempts",
        "planning/simulation/test_order.py::test_requests_wait_for_pages_in_the_order_of_an_engine",
    ),
    Mutant(
        "a simulated request that was retracted waits as a new one",
        "not (self.attempts or self.num_output)",
        "not self.num_output",
        "planning/simulation/test_order.py::test_requests_wait_for_pages_in_the_order_of_an_engine",
    ),
    Mutant(
        "simulated requests wait by number alone",
        "due_at(self.submitted_at, None), self.arrival_number",
        "0.0, self.arrival_number",
        "planning/simulation/test_order.py::test_requests_wait_for_pages_in_the_order_of_an_engine",
    ),
    Mutant(
        "a simulated stream waits at prefill behind prompts that are new",
        "order=(0, not job.num_output, due_at",
        "order=(0, False, due_at",
        "planning/simulation/test_order.py::test_prompts_wait_at_prefill_in_the_order_of_an_engine",
    ),
    Mutant(
        "a simulated request keeps the attempts that it had at another decode",
        "job.submitted_at, job.attempts, job.num_taken_over = now_s, 0, 0",
        "job.submitted_at, job.num_taken_over = now_s, 0",
        "planning/simulation/test_order.py::test_a_request_that_moves_to_another_decode_is_new_there",
    ),
]
