"""Bugs with the asyncio host and its readers."""

from __future__ import annotations

from tests.planted.mutant import Mutant

_TESTS = "test_aio.py::"

MUTANTS = [
    Mutant(
        "a reader that leaves does not cancel its request",
        "            if stream.leave():\n                self.pairing.cancel(stream.request_id)\n",
        "            stream.leave()\n",
        _TESTS + "test_a_reader_that_leaves_takes_its_request_along",
    ),
    Mutant(
        "a reader that left while its request was submitted is forgotten",
        "                if not stream.has_reader():  # it left",
        "                if False:  # it left",
        _TESTS + "test_a_reader_that_leaves_before_its_request_is_submitted_is_not_forgotten",
    ),
    Mutant(
        "a stream that is closed behind its last event cancels the next one of its id",
        "        return not self._has_ended\n",
        "        return True\n",
        _TESTS + "test_an_id_is_in_use_until_its_last_event_and_then_of_another",
    ),
    Mutant(
        "events that nobody reads are kept without a bound",
        "if event.finish_reason is None and len(self._unread) >= self._max_unread:",
        "if False:",
        _TESTS + "test_a_reader_that_stops_reading_costs_bounded_memory_and_its_request",
    ),
    Mutant(
        "a request whose stream was full goes on",
        "            if not stream.put(event):\n                self.pairing.cancel(event.request_id)\n",
        "            stream.put(event)\n",
        _TESTS + "test_a_reader_that_stops_reading_costs_bounded_memory_and_its_request",
    ),
    Mutant(
        "the loop is told of every step",
        "        if events and not self._is_told:",
        "        if events:",
        _TESTS + "test_a_loop_that_stands_still_is_told_once",
    ),
    Mutant(
        "a reader with a backlog keeps the loop to itself",
        "            await asyncio.sleep(0)\n",
        "            pass\n",
        _TESTS + "test_a_reader_with_a_backlog_lets_others_run",
    ),
    Mutant(
        "streams of a step that raised end as if they had been cancelled",
        "                if self._failure is not None and event.finish_reason is FinishReason.CANCELLED:",
        "                if False:",
        _TESTS + "test_a_step_that_raises_ends_every_stream_once_and_says_why",
    ),
    Mutant(
        "the loop waits while a request is submitted",
        "            submitted = loop.run_in_executor(self._submitting, self._submit, request, stream)\n",
        "            submitted = loop.create_future()\n"
        "            submitted.set_result(self._submit(request, stream))\n",
        _TESTS + "test_the_loop_goes_on_while_the_pairing_is_busy",
    ),
    Mutant(
        "events wait while a port leaves",
        "                next(removal)\n",
        "                for _left_s in removal:\n                    self.pairing.wait(WAIT_S)\n"
        "                raise StopIteration\n",
        _TESTS + "test_events_come_while_a_port_leaves",
    ),
]
