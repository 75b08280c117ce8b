"""Bugs in what a service shows of itself: metrics, spans and timelines."""

from __future__ import annotations

from tests.planted.mutant import Mutant

METRICS, TRACES = "test_recorder.py::", "test_joined_traces.py::"
SPANS = "test_spans.py::"

MUTANTS = [
    # -- metrics
    Mutant(
        "a counter falls when its engine begins anew",
        "total + (value - before if value >= before else value)",
        "value",
        METRICS + "test_counters_never_fall",
    ),
    Mutant(
        "a quote ends the value of a label",
        r""".replace('"', r"\"")""",
        "",
        METRICS + "test_labels_of_any_text_are_read_back",
    ),
    Mutant(
        "a value counts above its own bound",
        "bisect_left(BUCKETS_S, value)",
        "bisect_left(BUCKETS_S, value + 1e-12)",
        METRICS + "test_a_histogram_counts_what_is_at_most_a_bound",
    ),
    Mutant(
        "an id that is used again goes on where it ended",
        "        self._token_s.pop(event.request_id, None)\n",
        "",
        METRICS + "test_what_an_ended_request_knew_is_forgotten",
    ),
    # -- spans
    Mutant(
        "a stage ends after its request",
        "            began_ns = min(began_ns, end_ns)\n",
        "",
        SPANS + "test_stages_that_were_not_reached_have_no_span",
    ),
    # -- timelines
    Mutant(
        "no arrow leaves prefill",
        "        trace.depart(_arrow(prompt.grant))\n",
        "        pass\n",
        TRACES + "test_an_arrow_leads_from_the_step_that_handed_off_to_the_step_that_took_over",
    ),
    Mutant(
        "a short step in which a hand-off landed is left out",
        "            if model_ns or has_arrow or end - start >= IDLE_NS:\n",
        "            if model_ns or end - start >= IDLE_NS:\n",
        TRACES + "test_a_short_step_with_an_arrow_is_kept",
    ),
    Mutant(
        "requests that overlap share a track",
        "if end <= whole.start_ns), len(lanes))",
        "if True), len(lanes))",
        TRACES + "test_slices_that_overlap_lie_on_tracks_of_their_own",
    ),
    Mutant(
        "times of another machine stay as they are",
        '                event["ts"] += shift_us\n',
        "                pass\n",
        TRACES + "test_files_of_other_machines_are_shifted_to_the_first_ones_clock",
    ),
    Mutant(
        "processes of two containers are one",
        'process = (theirs.machine, theirs.host, event["pid"])',
        'process = ("", "", event["pid"])',
        TRACES + "test_files_of_other_machines_are_shifted_to_the_first_ones_clock",
    ),
]
