"""The decode batch on the device, and captured steps."""

from __future__ import annotations

from tests.planted.mutant import Mutant

UROWS = "test_decode_rows.py"
GRAPHS = "test_graphs.py"
RECORDED = "test_recorded_steps.py"
URECORDING = "test_recording.py"

MUTANTS = [
    Mutant(
        "the first recorded step imports torch's compiler",
        "        return False\n\n    def __torch_dispatch__",
        "        return True\n\n    def __torch_dispatch__",
        f"{RECORDED}::test_torchs_compiler_is_not_imported_for_them",
    ),
    Mutant(
        "a page that was given back and taken again is not sent",
        "if first != seat.first or tail != seat.tail:",
        "if first != seat.first or len(tail) != len(seat.tail):",
        f"{UROWS}::test_a_step_reads_its_rows_whatever_became_of_the_others",
    ),
    Mutant(
        "the first slot of the next page is not sent",
        "if moved or seat.cache_slot != cache_slot:",
        "if moved:",
        f"{UROWS}::test_a_step_reads_its_rows_whatever_became_of_the_others",
    ),
    Mutant(
        "behind a step that was broken off its slots are believed to have stayed",
        "if moved or seat.cache_slot != cache_slot:",
        "if seat.cache_slot != cache_slot:",
        f"{UROWS}::test_a_step_reads_its_rows_whatever_became_of_the_others",
    ),
    Mutant(
        "a step that was broken off is believed to have ended",
        "        if self._is_running:\n            self._forget()\n",
        "",
        f"{UROWS}::test_a_step_reads_its_rows_whatever_became_of_the_others",
    ),
    Mutant(
        "room for rows is believed in before it is made",
        "        self._capacity = self._width = 0  # there",
        "        self._capacity, self._width = capacity, width  # there",
        f"{UROWS}::test_an_interrupt_in_any_line_while_room_is_made_leaves_it_to_the_next_step",
    ),
    Mutant(
        "padding rows write where they stand",
        "slots_A=slots_T if live_T is None else slots_T.where(live_T, self._scratch_slot),",
        "slots_A=slots_T,",
        f"{UROWS}::test_padding_rows_are_not_live_and_write_to_the_scratch_page",
    ),
    Mutant(
        "random tokens are drawn by a greedy captured step",
        "min(each for each in KINDS if each >= kind)",
        "KINDS[0]",
        f"{GRAPHS}::test_captured_steps_give_the_tokens_of_others[plain]",
    ),
    Mutant(
        "words on their way to the device are overwritten",
        "            self._sent.synchronize()\n",
        "            pass\n",
        f"{GRAPHS}::test_words_on_their_way_are_not_written_over",
    ),
    Mutant(
        "known pages take the place of ours behind the runner's back",
        "sequence.pages = [*kept, *sequence.pages[full:]]",
        "sequence.pages[:full] = kept",
        "test_page_tables.py::test_known_pages_that_take_the_place_of_ours_make_a_new_table",
    ),
    Mutant(
        "captured steps read where the rows were before",
        "        if self._captured and address != self._address:\n",
        "        if False:\n",
        f"{GRAPHS}::test_rows_that_have_moved_are_not_run_as_captured",
    ),
    Mutant(
        "recorded steps read where the rows were before",
        "        if address != self._address:  # recordings hold",
        "        if False:  # recordings hold",
        f"{RECORDED}::test_rows_that_have_moved_are_recorded_anew",
    ),
    Mutant(
        "a recording runs with the threads of another one",
        "key = num_rows, torch.get_num_threads()",
        "key = num_rows, 1",
        f"{RECORDED}::test_another_number_of_threads_is_another_recording",
    ),
    Mutant(
        "a step that looked at values is replayed with them",
        "        if recording.refusal is not None:\n",
        "        if False:\n",
        f"{RECORDED}::test_a_step_that_looks_at_values_is_not_kept",
    ),
    Mutant(
        "recordings keep any amount of memory",
        "            del self._recorded[oldest], self._seen[oldest]",
        "            break",
        f"{RECORDED}::test_what_takes_too_much_memory_is_not_kept",
    ),
    Mutant(
        "what is changed in place does not change in a replay",
        "            self._calls.append(partial(op, *arguments, **options))  # in place",
        "            pass  # in place",
        f"{URECORDING}::test_what_is_moved_on_moves_on_with_every_replay",
    ),
    Mutant(
        "a replay leaves results as they were",
        "    result.copy_(again())\n",
        "    again()\n",
        f"{URECORDING}::test_a_replay_gives_what_new_values_give[dtype]",
    ),
    Mutant(
        "an op that looks at values is recorded",
        "elif not (name in _PLAIN or _is_pointwise(op)):",
        "elif False:",
        f"{URECORDING}::test_what_is_not_known_to_follow_shapes_alone_refuses[item]",
    ),
    Mutant(
        "a tag is believed of an op that looks at values",
        "torch.Tag.pointwise in op.tags and torch.Tag.data_dependent_output not in op.tags",
        "torch.Tag.pointwise in op.tags",
        f"{URECORDING}::test_what_is_not_known_to_follow_shapes_alone_refuses[equal]",
    ),
    Mutant(
        "a list of values goes unseen",
        '_LOOKS = frozenset({"tolist", "numpy", "__array__"})',
        '_LOOKS = frozenset({"numpy", "__array__"})',
        f"{URECORDING}::test_what_is_not_known_to_follow_shapes_alone_refuses[list]",
    ),
    Mutant(
        "a kernel that failed in a replay is not heard",
        "    if result:\n",
        "    if False:\n",
        f"{URECORDING}::test_kernels_are_called_again_and_a_failure_is_told",
    ),
]
