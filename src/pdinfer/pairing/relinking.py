"""Other prefills for requests whose decode has lost the one it had."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import attrs

from pdinfer.errors import PDInferError, TransferError
from pdinfer.pairing.choosing import Chooser
from pdinfer.pairing.ports import LostPorts, Ports
from pdinfer.pairing.request import TrackedRequest

STRANDED_S = 3.0
"""How long a request waits for a prefill at a decode that none reaches, while another pair could serve it. Links that
broke are back sooner, or one of their ports is known to be lost."""


@attrs.define(eq=False, repr=False)
class Relinking:
    """Names other prefills to decodes. It has to when ports or links have changed, since `num_changes_seen`, and while
    `some_are_stranded`: requests for which there was no prefill. `take_away` takes a request from its decode, for
    another pair, and `ask_to_end` asks its decode to end it. `num_reroutes` counts the prefills that were named."""

    _ports: Ports
    _lost_ports: LostPorts
    _chooser: Chooser
    _take_away: Callable[[TrackedRequest, TransferError], None]
    _ask_to_end: Callable[[TrackedRequest, PDInferError], None]
    num_reroutes: int = 0
    num_changes_seen: int = 0
    some_are_stranded: bool = False

    def act(self, requests: Mapping[str, TrackedRequest], now: float) -> None:
        """Find another prefill for every request whose decode has lost the one it had. Running requests get one too,
        since they need it when they are retracted."""
        self.num_changes_seen, self.some_are_stranded = self._ports.num_changes, True  # until it has ended
        board, num_stranded = self._chooser.board(requests), 0
        for tracked in list(requests.values()):
            attempt = tracked.attempt
            decode = attempt.decode
            if decode is None or tracked.failure is not None:
                continue
            if self._ports.linked(attempt.prefill, decode):
                attempt.give_up_at = attempt.stranded_at = math.inf
                continue
            choice = self._chooser.choose(tracked, board, decode)
            if choice is None:
                num_stranded += 1
                self._strand(tracked, now)
                continue
            if attempt.num_grants and not attempt.landed and attempt.prefill in self._ports.prefills:
                tracked.losses.links.append(attempt.prefill)
                if tracked.losses.are_too_many:
                    self._take_away(tracked, TransferError(f"its attempts failed{tracked.losses}"))
                    continue
            self.num_reroutes += 1
            attempt.prefill, attempt.forwarded = choice.prefill, attempt.landed
            attempt.give_up_at = attempt.stranded_at = math.inf
            self._ports.decodes[decode].change_writers(
                tracked.request_id, writers=self._ports.prefills[choice.prefill].addresses
            )
        self.some_are_stranded = num_stranded > 0

    def _strand(self, tracked: TrackedRequest, now: float) -> None:
        """Let a request wait for a prefill. A link may come back: decode itself waits WRITER_GRACE_S for that. If it
        does not, another pair may serve the request. Where there is no prefill at all, only a port that joins can help.
        """
        attempt = tracked.attempt
        prefills, _ = self._ports.fitting(tracked.max_tokens)
        attempt.stranded_at = min(attempt.stranded_at, now)
        if attempt.landed or prefills:
            attempt.give_up_at = math.inf
            is_late = not attempt.landed and now >= attempt.stranded_at + STRANDED_S
            if is_late and not tracked.cancelled and self._ports.has_linked_pair(tracked.max_tokens):
                self._take_away(tracked, TransferError(f"no prefill has reached its decode for {STRANDED_S:g} s"))
        elif attempt.gives_up(now, self._lost_ports.waits_s("prefill")):
            last = self._lost_ports.last("prefill")
            self._ask_to_end(tracked, TransferError(f"no prefill port is left for it{last}{tracked.losses}"))
