"""Bugs with hosts and engines that pause, break off or hang."""

from __future__ import annotations

from tests.planted.mutant import Mutant

_PAUSES = "test_pauses.py::"
_BREAKS = _PAUSES + "test_a_client_whose_connection_breaks_makes_another_and_nothing_of_before_is_left"
_HANGS = _PAUSES + "test_a_step_that_hangs_costs_the_port_until_it_ends"
_FROZEN = _PAUSES + "test_an_engine_that_pauses_comes_back_and_is_used_again"

MUTANTS = [
    Mutant(
        "a long message is sent in one piece",
        "                for piece in messages.pieces(data):",
        "                for piece in (data,):",
        "test_session.py::test_a_message_that_takes_longer_than_the_silence_is_none",
    ),
    Mutant(
        "a served engine gives up a client that is silent at once",
        "            return_s=self.config.return_s,",
        "            return_s=0.0,",
        _PAUSES + "test_a_served_engine_goes_on_while_its_client_is_silent",
    ),
    Mutant(
        "the requests of an ended session are not cancelled",
        "                engine.cancel(request_id)\n        if self.session",
        "                pass\n        if self.session",
        _BREAKS,
    ),
    Mutant(
        "a new session begins before the last one's rooms have settled",
        "(self.has_begun and engine.num_unfinished)",
        "False",
        _BREAKS,
    ),
    Mutant(
        "submits are numbered on in a new session",
        "frozenset()\n            self._num_submitted = self._num_seen = 0\n",
        "frozenset()\n",
        _BREAKS,
    ),
    Mutant(
        "what is submitted while the session is not live is sent",
        "        if not self.is_live:\n            return False\n",
        "",
        _BREAKS,
    ),
    Mutant(
        "a client that hears its engine again does not ask for a new session",
        "            self._renew()\n\n    def _check_step",
        "            pass\n\n    def _check_step",
        _FROZEN,
    ),
    Mutant(
        "a lost port is never taken back",
        "                if not port.recover():",
        "                if True:",
        _HANGS,
    ),
    Mutant(
        "nobody looks at how long a step takes",
        "if limit_s is None or age_s <= limit_s:",
        "if True:",
        _HANGS,
    ),
    Mutant(
        "links to a port that hangs stay open",
        "                other.disconnect(rank)",
        "                pass",
        _HANGS,
    ),
    Mutant(
        "the reason of a loss is reported unescaped",
        "reason = escaped(str(error) or type(error).__name__)",
        "reason = str(error)",
        "test_ports.py::test_lost_ports_are_named_and_the_list_is_bounded",
    ),
    Mutant(
        "a process that was stopped takes the pause for silence",
        "min(now - self._looked_at, self._max_look_s)",
        "now - self._looked_at",
        "test_silence.py::test_a_process_that_was_stopped_blames_nobody",
    ),
    Mutant(
        "the watchdog forgets a step that hangs",
        "heard_ago_s=math.inf if is_stuck else 0.0",
        "heard_ago_s=SESSIONS.look_s if is_stuck else 0.0",
        _PAUSES + "test_a_process_whose_step_hangs_ends_when_its_client_is_gone",
    ),
    Mutant(
        "the limit of a step does not follow the warm-up",
        "return max(HUNG_S, HUNG_FACTOR * longest_warm_up_s)",
        "return HUNG_S",
        _PAUSES + "test_how_long_a_step_may_take_follows_from_the_warm_up",
    ),
]
