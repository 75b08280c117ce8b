"""Bugs that flatter: in records, in loads, in summaries and in the checks."""

from __future__ import annotations

from tests.planted.mutant import Mutant

_RUN = "test_run.py"
_CHECKS = "test_checks.py"
_SUMMARY = "test_summary.py"
_PLOTS = "test_plots.py"

MUTANTS = [
    Mutant(
        "the wait before a send is dropped",
        "intended_s=due_s,",
        "intended_s=sent_s,",
        f"{_RUN}::test_waiting_before_a_send_is_part_of_latency",
    ),
    Mutant(
        "a closed loop does not wait for its clients",
        "return most is None or len(self._unfinished) < most",
        "return True",
        f"{_RUN}::test_a_closed_loop_keeps_its_clients_busy_and_no_more",
    ),
    Mutant(
        "tokens count as made when they were read",
        "read_s if made is None else min(read_s, base_s + made)",
        "read_s",
        f"{_RUN}::test_tokens_that_a_sleeping_host_reads_late_are_delivered_late",
    ),
    Mutant(
        "times of a later attempt are stages of the first token",
        "known = mark is not None and (mark <= made_s or mark == end_s)",
        "known = mark is not None",
        "test_record.py::test_stages_sum_to_ttft_whatever_is_known",
    ),
    Mutant(
        "requests that failed are no misses",
        "attainment=len(good) / len(records) if slo and records else None,",
        "attainment=len(good) / len(done) if slo and done else None,",
        f"{_SUMMARY}::test_the_figures_are_those_that_a_person_computes",
    ),
    Mutant(
        "a trace is replayed slower instead of faster",
        "(arrival.at_s - first_s) / speed",
        "(arrival.at_s - first_s) * speed",
        "test_traces.py::test_bins_are_spread_by_seed_or_kept_and_the_trace_says_which",
    ),
    Mutant(
        "prompts of different blocks begin alike",
        "first = self._first[block] = child % self._vocab_size",
        "first = self._first[block] = 0",
        f"{_RUN}::test_prompts_share_exactly_the_blocks_whose_hashes_they_share",
    ),
    Mutant(
        "a decode step may be as short as it likes",
        "if seen_ms < floor_ms:",
        "if seen_ms > 1e9 * floor_ms:",
        f"{_CHECKS}::test_the_checks_flag_the_rows_of_the_study_that_are_none",
    ),
    Mutant(
        "a burst is compared with shorter ones",
        "if longer >= 2 * tokens and",
        "if longer <= tokens / 2 and",
        f"{_CHECKS}::test_the_checks_flag_the_rows_of_the_study_that_are_none",
    ),
    Mutant(
        "the wider of two intervals decides",
        "one.high < other.low or other.high < one.low",
        "one.mean != other.mean",
        f"{_CHECKS}::test_figures_whose_intervals_overlap_are_not_ranked",
    ),
    Mutant(
        "seeds are not repeated while the interval holds the target",
        "if len(attained) >= MIN_SEEDS and (found.low > target or found.high < target):",
        "if len(attained) >= MIN_SEEDS:",
        f"{_RUN}::test_seeds_are_added_while_the_interval_holds_the_target",
    ),
    Mutant(
        "seconds of genai-bench are taken for ms",
        'return _summary(found, GENAI_BENCH, "genai_bench", scale=1e3)',
        'return _summary(found, GENAI_BENCH, "genai_bench")',
        f"{_SUMMARY}::test_a_file_of_another_tool_is_read",
    ),
    Mutant(
        "a trace may go back in time",
        "if arrivals and arrival.at_s < arrivals[-1].at_s:",
        "if arrival.at_s < 0:",
        "test_traces.py::test_what_is_wrong_is_told_with_file_line_and_field",
    ),
    Mutant(
        "decode's times are not counted from the Pairing's submit",
        "event.at_s + self.queued_s)",
        "event.at_s)",
        "test_pairing.py::test_the_last_event_tells_when_the_request_reached_each_stage",
    ),
    Mutant(
        "prefill ends before it computes",
        "ended = [granted_s + handoff.queue_s + handoff.compute_s for handoff in handoffs]",
        "ended = [granted_s + handoff.queue_s for handoff in handoffs]",
        "test_bench.py::test_the_recorder_works_in_a_loop_of_the_hosts_own",
    ),
    Mutant(
        "a curve of latencies is of completed requests",
        "measure(record) if record.is_completed else np.inf for record in records]",
        "measure(record) for record in records if record.is_completed]",
        f"{_PLOTS}::test_requests_that_did_not_complete_keep_the_curve_below_1",
    ),
    Mutant(
        "a request that failed has the latency of its tokens",
        "measure(record) if record.is_completed else np.inf",
        "measure(record) if record.read_s else np.inf",
        f"{_PLOTS}::test_requests_that_did_not_complete_keep_the_curve_below_1",
    ),
    Mutant(
        "load is counted at edges instead of over the time between them",
        "area: np.ndarray = until_s * height[past] - moment[past]",
        "area: np.ndarray = until_s * height[past]",
        f"{_PLOTS}::test_load_over_time_has_all_the_time_that_requests_spent",
    ),
    Mutant(
        "an engine that served nothing is not shown",
        "sorted({span[0] for span in spans} | idle)",
        "sorted({span[0] for span in spans})",
        f"{_PLOTS}::test_load_is_what_each_engine_held_on_average",
    ),
    Mutant(
        "prefill holds a request until the last token",
        "ended_s = record.prefill_ended_s if record.prefill_ended_s is not None else",
        "ended_s = ended_s if ended_s is not None else",
        f"{_PLOTS}::test_load_is_what_each_engine_held_on_average",
    ),
    Mutant(
        "concurrency is what was asked for",
        "return summary.max_concurrency if summary.concurrency is None else summary.concurrency",
        "return summary.concurrency if summary.max_concurrency is None else summary.max_concurrency",
        f"{_PLOTS}::test_throughput_over_concurrency_is_sorted_by_what_was_held",
    ),
    Mutant(
        "the frontier is of the worst",
        "return other[1] >= point[1] and other[2] >= point[2] and other[1:] != point[1:]",
        "return other[1] <= point[1] and other[2] <= point[2] and other[1:] != point[1:]",
        f"{_PLOTS}::test_the_frontier_is_what_no_other_run_beats",
    ),
    Mutant(
        "every stage begins when the request was due",
        "began_ms += stage.mean_ms",
        "began_ms = 0.0",
        f"{_PLOTS}::test_stages_follow_each_other_and_end_at_ttft",
    ),
    Mutant(
        "predicted and observed change places",
        "compare(simulated, measured).rows",
        "compare(measured, simulated).rows",
        f"{_PLOTS}::test_a_prediction_stands_beside_what_was_observed",
    ),
    Mutant(
        "files of plots have random ids",
        '    "svg.hashsalt": "pdinfer",  # ids in the file are else random\n',
        "",
        f"{_PLOTS}::test_equal_columns_give_equal_files",
    ),
    Mutant(
        "the tail of requests that did not complete looks whole",
        "is_censored = shares[-1] < 1",
        "is_censored = False",
        f"{_PLOTS}::test_the_drawing_shows_the_limit_and_the_censored_tail",
    ),
]
