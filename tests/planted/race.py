"""Bugs in the race on CPUs, in the tables that are made of it, and in the chunks that adapt to what decodes beside."""

from __future__ import annotations

from tests.planted.mutant import Mutant

_RESULTS = "test_results.py"
_RACE = "test_cpu_race.py"
_TURNS = "pairing/test_turns.py"
_SCHEDULE = "test_rules.py"

MUTANTS = [
    Mutant(
        "the oldest line of a race counts",
        'newest[key] = {**line, "cpu": cpu, "date": path.name[:10]}',
        'newest.setdefault(key, {**line, "cpu": cpu, "date": path.name[:10]})',
        f"{_RESULTS}::test_each_make_of_cpu_has_its_table_and_the_newest_line_of_a_peer_counts",
        where="report.py",
    ),
    Mutant(
        "a table shows the peer that is easiest to beat",
        "best[key] = min(",
        "best[key] = max(",
        f"{_RESULTS}::test_each_make_of_cpu_has_its_table_and_the_newest_line_of_a_peer_counts",
        where="report.py",
    ),
    Mutant(
        "a table leaves out what pdinfer is behind in",
        'or line["ratio"] < 1)',
        'or line["ratio"] < 0)',
        f"{_RESULTS}::test_where_we_are_behind_is_in_the_table_of_the_closest_peers",
        where="report.py",
    ),
    Mutant(
        "CPUs of one vendor share a table",
        '(re.findall(r"\\w+", cpu["name"].lower())[0], *cpu["flags"])',
        '(re.findall(r"\\w+", cpu["name"].lower())[0],)',
        f"{_RESULTS}::test_each_make_of_cpu_has_its_table_and_the_newest_line_of_a_peer_counts",
        where="report.py",
    ),
    Mutant(
        "a run that did not take place has no CPU",
        '    print(json.dumps({**line, "cpu": cpu_here()}), flush=True)',
        "    print(json.dumps(line), flush=True)",
        f"{_RACE}::test_a_line_names_the_cpu_and_the_flags_that_matter",
        where="cpu_race.py",
    ),
    Mutant(
        "a chunk leaves no time to decode",
        "seconds = max(target_itl_s - decoding_s, decoding_s) - step_s",
        "seconds = target_itl_s - step_s",
        f"{_SCHEDULE}::test_a_chunk_beside_decode_fits_its_time",
    ),
    Mutant(
        "tokens that seem free make a chunk whole",
        "token_s = max(token_s, 1 / tokens_per_s)",
        "token_s = token_s or 1e-9",
        f"{_SCHEDULE}::test_a_chunk_beside_decode_is_no_larger_than_the_best_speed_allows",
    ),
    Mutant(
        "a burst is cut into steps that are all cost",
        "int(max(seconds, WORTH_A_STEP * step_s) / token_s)",
        "int(seconds / token_s)",
        f"{_TURNS}::test_an_impossible_target_leaves_steps_that_are_worth_their_cost",
    ),
    Mutant(
        "chunks are cut while nothing decodes",
        "sum(one.num_tokens for one in running)) if running else None",
        "sum(one.num_tokens for one in running))",
        f"{_TURNS}::test_chunks_are_whole_while_nothing_decodes",
    ),
    Mutant(
        "a pairing does not tell its prefill what decodes",
        "port.take_turns(self._decoding_s)",
        "port.take_turns(lambda: None)",
        f"{_TURNS}::test_a_running_sequence_is_held_up_no_longer_than_the_target",
    ),
]
