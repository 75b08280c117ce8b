"""Bugs in the handling of forks and Ctrl-C."""

from __future__ import annotations

from tests.planted.mutant import Mutant

FORK, INTERRUPTS, POOL = "test_fork.py::", "test_interrupts.py::", "test_pool.py::"
REFUSED = FORK + "test_children_refuse_and_the_parent_goes_on[shared-2]"
CALLS = INTERRUPTS + "test_the_first_call_of_every_method"
REBUILT = POOL + "test_accounts_are_made_anew_from_what_engines_hold"

MUTANTS = [
    # -- forks
    Mutant(
        "a forked child uses objects of its parent",
        "[each for each in inherited if each._is_shared_by_fork]",
        "[]",
        REFUSED,
    ),
    Mutant(
        "closing a copy in a child is refused",
        "ends = dict.fromkeys(thing._ends, _nothing)",
        "ends = {}",
        REFUSED,
    ),
    Mutant(
        "a child waits for threads that a fork does not copy",
        "    if num_threads > 1 and _PROCESS.parent_computed:\n",
        "    if False:\n",
        FORK + "test_threads_that_would_never_come_are_not_waited_for",
    ),
    # -- interrupts
    Mutant(
        "a step does not ask whether the last one ended",
        "        if self._unfinished_call or self.channel.in_doubt:\n",
        "        if self.channel.in_doubt:\n",
        CALLS,
    ),
    Mutant(
        "the page accounts stay as an interrupt left them",
        "        self.pool.rebuild()\n",
        "",
        CALLS,
    ),
    Mutant(
        "a loopback link that broke stays down",
        "                self.channel.redial()\n",
        "",
        INTERRUPTS + "test_a_loopback_link_is_dialled_again_after_an_exception_in_a_delivery",
    ),
    Mutant(
        "prefill writes pages that have changed hands",
        "            if pool.generations(prompt.grant.pages) != prompt.grant.generations:\n",
        "            if False:\n",
        INTERRUPTS + "test_pages_that_have_changed_hands_since_their_grant_are_not_written",
    ),
    Mutant(
        "pages that an interrupt freed keep their generation",
        "            if self._state(page) is PageState.FREE:\n                self._to_free(page)\n",
        "            if self._state(page) is PageState.FREE:\n                self._free.append(page)\n",
        f"{REBUILT} {INTERRUPTS}test_a_grant_that_an_interrupt_took_back_is_not_computed",
    ),
    Mutant(
        "a page that two requests use is used once after an interrupt",
        "        self._users = [users[page] for page in",
        "        self._users = [min(users[page], 1) for page in",
        REBUILT,
    ),
    Mutant(
        "an interrupted call keeps its locks",
        "            owner.let_go()\n",
        "",
        INTERRUPTS + "test_no_thread_waits_for_a_lock_of_an_interrupted_one",
    ),
    Mutant(
        "a request whose submit was interrupted keeps its id",
        "                self._broker.requests.pop(tracked.request_id, None)\n",
        "",
        INTERRUPTS + "test_an_id_whose_submit_was_interrupted_is_free",
    ),
    Mutant(
        "an interrupt empties the queue",
        "        for tracked in requests:\n            self.heed(tracked)\n",
        "",
        INTERRUPTS + "test_requests_that_wait_in_the_queue_wait_on",
    ),
    Mutant(
        "requests about a peer are handled in any order",
        "                before.join()\n",
        "                pass\n",
        "test_remote.py::test_a_link_is_closed_after_it_was_opened_if_it_was_asked_for_in_that_order",
    ),
]
