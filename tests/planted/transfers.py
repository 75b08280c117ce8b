"""Bugs in the copies of a device's pages: what they cost, in which order they run, and where bytes land."""

from __future__ import annotations

from tests.planted.mutant import Mutant

TRANSFERS, RINGS = "test_transfers.py::", "test_rings.py::"
CUTS = "test_view.py"
PLACED = "test_transport_conformance.py"

MUTANTS = [
    Mutant(
        "a step begins before what arrived is there",
        "_wait(current_stream(self._device), self._stepped, self._arrived)",
        "_wait(current_stream(self._device), self._stepped)",
        TRANSFERS + "test_a_step_finds_what_was_committed_whatever_its_stream",
    ),
    Mutant(
        "a step begins beside the step before",
        "_wait(current_stream(self._device), self._stepped, self._arrived)",
        "_wait(current_stream(self._device), self._arrived)",
        TRANSFERS + "test_a_step_finds_what_the_step_before_has_written_on_another_stream",
    ),
    Mutant(
        "the event of a push is dropped",
        "return lambda: _wait(self._stream, event)",
        "return lambda: None",
        TRANSFERS + "test_a_push_inside_a_step_reads_what_was_computed_for_it",
    ),
    Mutant(
        "a push stops the thread of the engine",
        "return lambda: _wait(self._stream, event)",
        "return lambda: _sleep_until(event)",
        TRANSFERS + "test_tokens_are_the_hosts_and_the_engines_thread_waits_for_no_copy",
    ),
    Mutant(
        "an arrival is written beside the last step",
        "    def _scatter(self, starts: Ints, lengths: Ints, block_N: Tensor) -> None:\n"
        "        _wait(self._stream, self._stepped)\n",
        "    def _scatter(self, starts: Ints, lengths: Ints, block_N: Tensor) -> None:\n",
        TRANSFERS + "test_an_arrival_is_written_behind_the_last_step",
    ),
    Mutant(
        "an arrival is written before its pool is cleared",
        "        _wait(self._stream, record_event(self._device))  # the zeros of the pool\n",
        "",
        TRANSFERS + "test_a_new_pool_is_cleared_before_anything_arrives",
    ),
    Mutant(
        "a step writes what a copy still reads",
        "            source._note_arrival()  # a step there must not write what is still read\n",
        "",
        TRANSFERS + "test_pages_that_a_copy_reads_are_written_behind_it",
    ),
    Mutant(
        "bytes leave before they have come from the device",
        "        with self._waited_for():\n            block_N",
        "        with on_stream(self._stream):\n            block_N",
        TRANSFERS + "test_reading_is_one_launch_for_each_component_and_one_copy",
    ),
    Mutant(
        "bytes leave by a copy that blocks",
        "host_N.copy_(block_N, non_blocking=True)",
        "host_N.copy_(block_N)",
        TRANSFERS + "test_reading_is_one_launch_for_each_component_and_one_copy",
    ),
    Mutant(
        "rows are counted from the start of the pool",
        "bases = there[:, 0] % width",
        "bases = 0 * there[:, 0]",
        CUTS,
    ),
    Mutant(
        "decode steps beside arrivals",
        "        with self._memory.step():\n            return self.resident",
        "        if True:\n            return self.resident",
        TRANSFERS + "test_every_step_of_a_model_reads_and_writes_behind_arrivals",
    ),
    Mutant(
        "prefill steps beside arrivals",
        "        with self._memory.step():\n            for layer",
        "        if True:\n            for layer",
        TRANSFERS + "test_every_step_of_a_model_reads_and_writes_behind_arrivals",
    ),
    Mutant(
        "of a payload through shared memory only the last block is committed",
        "            self._landing.commit()\n            self._landing, self._next",
        "            self._landing, self._next",
        PLACED + "::TestShmInTwoPasses::test_writes_are_placed_byte_for_byte",
    ),
    Mutant(
        "every slot of a ring on a device is the first",
        "self._bytes_N[start:]",
        "self._bytes_N",
        RINGS + "test_pages_travel_from_one_device_to_the_other_without_the_host",
    ),
    Mutant(
        "long layers wait for the last one",
        "GROUP_BYTES // (1 if num_missing > 1 else 4)",
        "GROUP_BYTES",
        "test_sender.py::test_the_last_layer_keeps_no_long_ones_waiting",
    ),
]
