"""Bugs in the race on CPUs, in the tables that are made of it, and in the chunks that adapt to what decodes beside."""

from __future__ import annotations

from tests.planted.mutant import Mutant

_RESULTS = "tests/test_results.py"
_RACE = "tests/test_cpu_race.py"

MUTANTS = [
    Mutant(
        "the oldest line of a race counts",
        "benchmarks/report.py",
        'newest[key] = {**line, "cpu": cpu, "date": path.name[:10]}',
        'newest.setdefault(key, {**line, "cpu": cpu, "date": path.name[:10]})',
        f"{_RESULTS}::test_each_make_of_cpu_has_its_table_and_the_newest_line_of_a_peer_counts",
    ),
    Mutant(
        "the front page shows the peer that is easiest to beat",
        "benchmarks/report.py",
        "best[key] = min(",
        "best[key] = max(",
        f"{_RESULTS}::test_each_make_of_cpu_has_its_table_and_the_newest_line_of_a_peer_counts",
    ),
    Mutant(
        "the front page leaves out what it is behind in",
        "benchmarks/report.py",
        'or line["ratio"] < 1)',
        'or line["ratio"] < 0)',
        f"{_RESULTS}::test_where_we_are_behind_is_in_the_table_of_the_front_page",
    ),
    Mutant(
        "CPUs of one vendor share a table",
        "benchmarks/report.py",
        '(re.findall(r"\\w+", cpu["name"].lower())[0], *cpu["flags"])',
        '(re.findall(r"\\w+", cpu["name"].lower())[0],)',
        f"{_RESULTS}::test_each_make_of_cpu_has_its_table_and_the_newest_line_of_a_peer_counts",
    ),
    Mutant(
        "a run that did not take place has no CPU",
        "benchmarks/cpu_race.py",
        '    print(json.dumps({**line, "cpu": cpu_here()}), flush=True)',
        "    print(json.dumps(line), flush=True)",
        f"{_RACE}::test_a_line_names_the_cpu_and_the_flags_that_matter",
    ),
]
