"""Bugs in the simulated device, which then finds less, and where torch is asked for streams and page-locked memory."""

from __future__ import annotations

from tests.planted.mutant import Mutant

T = "test_simulated.py::"

MUTANTS = [
    Mutant(
        "an event is behind nothing",
        "    module.current_stream(device).record_event(event)\n",
        "",
        T + "test_the_host_finds_what_it_waited_for",
    ),
    Mutant(
        "whoever waits for an event spins",
        "Event(blocking=True)",
        "Event()",
        T + "test_whoever_waits_for_an_event_sleeps",
    ),
    Mutant(
        "work on a stream runs on another",
        "torch.get_device_module(stream.device).stream(stream)",
        "contextlib.nullcontext()",
        T + "test_a_push_reads_behind_the_event_of_its_layer",
    ),
    Mutant(
        "memory for copies is pageable",
        'if device.type == "cpu" else _page_locked(num_bytes)',
        'if device.type != "cuda" else _page_locked(num_bytes)',
        T + "test_what_an_op_costs",
    ),
    Mutant(
        "tensors of host and device mix",
        "    if hosts:\n",
        "    if not hosts:\n        return\n    if len(hosts) > 9:\n",
        T + "test_tensors_of_host_and_device_do_not_mix",
        where="device.py",
    ),
    Mutant(
        "new memory was written by nobody",
        "return SharedMemory(stamp, len(tensor)) if tensor.dtype == torch.uint8 and tensor.dim() == 1 else Memory(stamp)",
        "return SharedMemory(stamp, len(tensor)) if tensor.dtype == torch.uint8 and tensor.dim() == 1 else Memory(0)",
        T + "test_tokens_of_another_stream_are_read_behind_its_event",
        where="order.py",
    ),
    Mutant(
        "readers are forgotten",
        "both = (self._written_N, self._read_N) if access.writes else (self._written_N,)",
        "both = (self._written_N,)",
        T + "test_pages_are_written_again_behind_who_reads_them",
        where="order.py",
    ),
    Mutant(
        "an op that names rows uses all",
        "key if x is self.args[0] else ...",
        "...",
        T + "test_pages_that_nobody_else_touches_need_no_event",
        where="device.py",
    ),
    Mutant(
        "what is copied to the host is there at once",
        '    to.fill_(float("nan") if to.is_floating_point() else POISON)\n',
        "    to.copy_(values)\n",
        T + "test_the_host_finds_what_it_waited_for",
        where="order.py",
    ),
    Mutant(
        "page-locked memory may change while it is copied",
        "if _bytes(source) != before:",
        "if not before:",
        T + "test_page_locked_memory_stays_until_it_was_copied",
        where="order.py",
    ),
    Mutant(
        "a device is where the host thinks when it is asked",
        "done = self.asked or all(",
        "done = True or all(",
        T + "test_an_event_is_asked_until_the_device_is_there",
        where="order.py",
    ),
    Mutant(
        "a replay makes new results",
        "                        before.inner.copy_(now)\n",
        "                        pass\n",
        T + "test_a_replay_is_the_step_on_what_its_inputs_hold_now",
        where="capture.py",
    ),
    Mutant(
        "garbage is collected in a capture",
        "with no_collection(), module.graph(",
        "with module.graph(",
        "test_graphs.py::test_the_garbage_of_an_engine_that_is_gone_breaks_no_capture",
    ),
    Mutant(
        "a recording may wait for the device",
        'sorted(self.counts["syncs"] + self.counts["pageable"] + ',
        'sorted(self.counts["pageable"] + ',
        T + "test_a_length_that_was_baked_in_shows",
        where="capture.py",
    ),
    Mutant(
        "a replay runs beside all streams",
        "                order.ran(call.name, [*call.accesses()",
        "                order.ran(call.name, [*[]",
        T + "test_a_replay_has_its_place_in_the_order_of_streams",
        where="capture.py",
    ),
    Mutant(
        "a watch counts what other threads do",
        "return self.everywhere or threading.get_ident() == self._thread",
        "return True",
        T + "test_each_thread_is_counted_where_it_is_watched",
        where="watch.py",
    ),
    Mutant(
        "waiting for a list counts as nothing",
        'note("syncs", direction)',
        "pass",
        T + "test_what_an_op_costs",
        where="device.py",
    ),
]
