"""Bugs in pages: what they say is no longer so. And in the search for planted bugs, and in their judge."""

from __future__ import annotations

from tests.planted.mutant import Mutant

DOCS = "test_docs.py::"
PROTOCOL = DOCS + "test_the_protocol_is_that_of_the_code"
NAMES = DOCS + "test_arguments_and_metrics_that_pages_name_exist"
READING = DOCS + "test_the_reading_path_is_short"
CLAIMS = "test_claims.py::test_claims_are_made_and_held_and_every_row_and_every_point_has_one"
WRONG = "test_planted.py::test_all_that_is_wrong_is_told_at_once"
GOES_ON = "test_planted.py::test_a_run_that_was_cut_off_goes_on"
JUDGED = "test_planted.py::test_bugs_are_judged_by_their_tests"

MUTANTS = [
    Mutant(
        "a page names a test that is gone",
        "`tests/test_docs.py::test_the_reading_path_is_short`",
        "`tests/test_docs.py::test_the_reading_path_is_long`",
        DOCS + "test_tests_that_pages_name_exist",
        where="docs/reading.md",
    ),
    Mutant(
        "a page names a test file that is gone",
        "`tests/test_docs.py::test_the_reading_path_is_short`",
        "`tests/test_doc.py::test_the_reading_path_is_short`",
        DOCS + "test_tests_that_pages_name_exist",
        where="docs/reading.md",
    ),
    Mutant(
        "the protocol gives a constant another value",
        "| `kv.transports.base.TICK_S` | 0.4 |",
        "| `kv.transports.base.TICK_S` | 0.5 |",
        PROTOCOL,
        where="docs/protocol.md",
    ),
    Mutant(
        "the protocol gives a constant no value",
        "| `kv.transports.base.TICK_S` | 0.4 |",
        "| `kv.transports.base.TICK_S` | short |",
        PROTOCOL,
        where="docs/protocol.md",
    ),
    Mutant(
        "the protocol gives a time another default",
        "| `return_s` | 60.0 |",
        "| `return_s` | 30.0 |",
        PROTOCOL,
        where="docs/protocol.md",
    ),
    Mutant(
        "the protocol gives the time of a step another rule",
        "| `hung_s` | max(60, 20 × warm-up) |",
        "| `hung_s` | max(60, 10 × warm-up) |",
        PROTOCOL,
        where="docs/protocol.md",
    ),
    Mutant(
        "the protocol leaves out a state of pages",
        "| CACHED | no request uses it, but",
        "| cached | no request uses it, but",
        PROTOCOL,
        where="docs/protocol.md",
    ),
    Mutant(
        "the protocol leaves out a frame",
        "| `finish` | a writer |",
        "| `finished` | a writer |",
        PROTOCOL,
        where="docs/protocol.md",
    ),
    Mutant(
        "a page names an argument that is unknown",
        "| `--gpu-memory-utilization` | `CacheConfig(mem_fraction_static=…)` |",
        "| `--gpu-memory-utilization` | `CacheConfig(mem_fraction=…)` |",
        NAMES,
        where="docs/howto/",
    ),
    Mutant(
        "a page names a metric that is unknown",
        "| `pdinfer_request_queue_seconds` |",
        "| `pdinfer_request_queued_seconds` |",
        NAMES,
        where="coming-from-other-servers.md",
    ),
    Mutant(
        "the reading path leads elsewhere",
        "(../src/pdinfer/engine/prefill.py)",
        "(../src/pdinfer/engine/decode.py)",
        READING,
        where="docs/reading.md",
    ),
    Mutant("the reading path names a file that is gone", "| `kv/layout.py` |", "| `kv/layouts.py` |", READING, "docs/"),
    Mutant(
        "a page does not make a claim that is listed",
        '"the lightning indexer and sparse attention" = [',
        '"the lightning indexer and dense attention" = [',
        CLAIMS,
        where="claims.toml",
    ),
    Mutant(
        "a claim is held by a file that is gone",
        '"benchmarks/results/2026-11-21-eplb.jsonl",',
        '"benchmarks/results/2026-11-20-eplb.jsonl",',
        CLAIMS,
        where="claims.toml",
    ),
    Mutant(
        "a row of the features has no claim",
        '"the same draws with any sampling parameters, fewer steps" = [',
        '"early refusal" = [',
        CLAIMS,
        where="claims.toml",
    ),
    Mutant(
        "a planted bug may be in two places",
        "    if sum(found.values()) != 1:\n",
        "    if not found:\n",
        WRONG,
        where="tests/places.py",
    ),
    Mutant(
        "a planted bug may name a test of two",
        "    if len(found) != 1:\n",
        "    if not found:\n",
        WRONG,
        where="tests/places.py",
    ),
    Mutant(
        "a test that is nowhere is found by its file",
        " if not test or test.partition",
        " if test.partition",
        WRONG,
        where="tests/places.py",
    ),
    Mutant(
        "what was judged at another commit is not judged",
        "options.unjudged or (verdict.commit == now and",
        "options.unjudged or (True and",
        GOES_ON,
        where="tests/mutants.py",
    ),
    Mutant(
        "what was judged with other changes is not judged",
        ' and "+" not in now)',
        ")",
        GOES_ON,
        where="tests/mutants.py",
    ),
    Mutant(
        "the record keeps the first verdict",
        "last = {verdict.digest: verdict for verdict in verdicts}",
        "last = {verdict.digest: verdict for verdict in reversed(verdicts)}",
        GOES_ON,
        where="tests/mutants.py",
    ),
    Mutant(
        "tests that do not end are seen",
        "return HANGS if code is None else",
        "return SEEN if code is None else",
        JUDGED,
        where="tests/mutants.py",
    ),
    Mutant(
        "bugs whose tests were skipped are not seen",
        ' and " passed" in last',
        "",
        JUDGED,
        where="tests/mutants.py",
    ),
    Mutant(
        "bugs stay planted after their verdict",
        '        self._path.write_text(self._text, "utf-8")\n',
        "",
        JUDGED,
        where="tests/mutants.py",
    ),
    Mutant(
        "tests that touch nothing are those of a change",
        "return not changed.isdisjoint({place(ROOT, mutant), *",
        "return not changed.isdisjoint({*",
        "test_planted.py::test_those_that_a_change_touches_are_chosen",
        where="tests/mutants.py",
    ),
]
