"""Bugs in the simulated device, which then finds less, and where torch is asked for streams and page-locked memory."""

from __future__ import annotations

from tests.planted.mutant import Mutant

S = "src/pdinfer/process/streams.py"
DEVICE, ORDER = "tests/simulated/device.py", "tests/simulated/order.py"
CAPTURE, WATCH = "tests/simulated/capture.py", "tests/simulated/watch.py"
T = "tests/device/test_simulated.py::"

MUTANTS = [
    Mutant(
        "an event is behind nothing",
        S,
        "    module.current_stream(device).record_event(event)\n",
        "",
        T + "test_the_host_finds_what_it_waited_for",
    ),
    Mutant(
        "whoever waits for an event spins",
        S,
        "Event(blocking=True)",
        "Event()",
        T + "test_whoever_waits_for_an_event_sleeps",
    ),
    Mutant(
        "work on a stream runs on another",
        S,
        "torch.get_device_module(device).stream(stream)",
        "contextlib.nullcontext()",
        T + "test_a_push_reads_behind_the_event_of_its_layer",
    ),
    Mutant(
        "memory for copies is pageable",
        "src/pdinfer/process/memory.py",
        'if device.type == "cpu" else _page_locked(num_bytes)',
        'if device.type != "cuda" else _page_locked(num_bytes)',
        T + "test_what_an_op_costs",
    ),
    Mutant(
        "tensors of host and device mix",
        DEVICE,
        "    if hosts:\n",
        "    if not hosts:\n        return\n    if len(hosts) > 9:\n",
        T + "test_tensors_of_host_and_device_do_not_mix",
    ),
    Mutant(
        "new memory was written by nobody",
        ORDER,
        "return SharedMemory(stamp, len(tensor)) if tensor.dtype == torch.uint8 and tensor.dim() == 1 else Memory(stamp)",
        "return SharedMemory(stamp, len(tensor)) if tensor.dtype == torch.uint8 and tensor.dim() == 1 else Memory(0)",
        T + "test_tokens_of_another_stream_are_read_behind_its_event",
    ),
    Mutant(
        "readers are forgotten",
        ORDER,
        "both = (self._written_N, self._read_N) if access.writes else (self._written_N,)",
        "both = (self._written_N,)",
        T + "test_pages_are_written_again_behind_who_reads_them",
    ),
    Mutant(
        "an op that names rows uses all",
        DEVICE,
        "key if x is self.args[0] else ...",
        "...",
        T + "test_pages_that_nobody_else_touches_need_no_event",
    ),
    Mutant(
        "what is copied to the host is there at once",
        ORDER,
        '    to.fill_(float("nan") if to.is_floating_point() else POISON)\n',
        "    to.copy_(values)\n",
        T + "test_the_host_finds_what_it_waited_for",
    ),
    Mutant(
        "page-locked memory may change while it is copied",
        ORDER,
        "if _bytes(source) != before:",
        "if not before:",
        T + "test_page_locked_memory_stays_until_it_was_copied",
    ),
    Mutant(
        "a device is where the host thinks when it is asked",
        ORDER,
        "done = self.asked or all(",
        "done = True or all(",
        T + "test_an_event_is_asked_until_the_device_is_there",
    ),
    Mutant(
        "a replay makes new results",
        CAPTURE,
        "                        before.inner.copy_(now)\n",
        "                        pass\n",
        T + "test_a_replay_is_the_step_on_what_its_inputs_hold_now",
    ),
    Mutant(
        "a recording may wait for the device",
        CAPTURE,
        'return sorted(self.counts["syncs"] + self.counts["pageable"])',
        'return sorted(self.counts["pageable"])',
        T + "test_a_length_that_was_baked_in_shows",
    ),
    Mutant(
        "a replay runs beside all streams",
        CAPTURE,
        "                order.ran(call.name, [*call.accesses()",
        "                order.ran(call.name, [*[]",
        T + "test_a_replay_has_its_place_in_the_order_of_streams",
    ),
    Mutant(
        "a watch counts what other threads do",
        WATCH,
        "return self.everywhere or threading.get_ident() == self._thread",
        "return True",
        T + "test_each_thread_is_counted_where_it_is_watched",
    ),
    Mutant(
        "waiting for a list counts as nothing",
        DEVICE,
        'note("syncs", direction)',
        "pass",
        T + "test_what_an_op_costs",
    ),
]
