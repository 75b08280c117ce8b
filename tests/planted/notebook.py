"""Bugs in how long work tells how far it is, and in where the model of a first day lies."""

from __future__ import annotations

from tests.planted.mutant import Mutant

TESTS = "test_progress.py::"
BAR = TESTS + "test_a_bar_is_drawn_again_at_most_ten_times_a_second"
WORK = TESTS + "test_long_work_tells_each_part_and_all_of_it"

MUTANTS = [
    Mutant(
        "a bar is drawn as often as it is called",
        "        is_due = self._percent // self._step != self._written // self._step and self._clock() >= self._due_s\n",
        "        is_due = True\n",
        f"{BAR}[Terminal]",
    ),
    Mutant(
        "a notebook gets a line under the other",
        'return type(stream).__module__.startswith("ipykernel.") or stream.isatty()',
        "return stream.isatty()",
        f"{BAR}[OutStream]",
    ),
    Mutant(
        "a log is flooded",
        "(LINE_S, TENTH)\n",
        "(0.0, 1)\n",
        TESTS + "test_a_log_has_one_line_of_short_work_and_ten_of_long_work",
    ),
    Mutant(
        "what comes after an error begins on the line of a bar",
        '            self._put("\\n")\n',
        "            pass\n",
        f"{TESTS}test_work_that_stops_leaves_a_whole_line[Terminal]",
    ),
    Mutant(
        "a log does not tell how far work came that stopped",
        '''as far as the work came."""\n        self._write()\n''',
        '''as far as the work came."""\n''',
        f"{TESTS}test_work_that_stops_leaves_a_whole_line[StringIO]",
    ),
    Mutant(
        "a stderr that is closed stops the work",
        "with contextlib.suppress(OSError, ValueError):  # ValueError: it was closed",
        "with contextlib.suppress(OSError):",
        TESTS + "test_bytes_are_megabytes_and_a_stderr_that_is_gone_stops_nothing",
    ),
    Mutant(
        "a warm-up counts no steps with drafts",
        "len(sizes) * (2 if num_drafts else 1)",
        "len(sizes)",
        f"{WORK}[warm-up-of-decode]",
    ),
    Mutant(
        "a warm-up counts no steps that it captures",
        "total = len(captured) + len(sizes)",
        "total = len(sizes)",
        "test_graphs.py::test_captured_steps_give_the_tokens_of_others[plain]",
    ),
    Mutant(
        "a Pairing of one process loads in silence",
        "                trusted_roots=trusted_roots,\n                progress=progress,\n",
        "                trusted_roots=trusted_roots,\n",
        f"{WORK}[local]",
    ),
    Mutant(
        "requests that are refused are never over",
        "(now_over := self._num_sent - len(self._unfinished)) > num_over:",
        "(now_over := self._num_sent - len(self._unfinished)) > num_over and ended:",
        TESTS + "test_refused_requests_are_over_and_silent_ones_leave_a_line",
    ),
    Mutant(
        "the tiny model is in a checkout alone",
        '/ "examples" / "tiny", *map(Path, packages)):',
        '/ "examples" / "tiny",):',
        "test_install.py::test_the_tiny_model_is_found_in_a_checkout_and_in_its_package",
    ),
]
