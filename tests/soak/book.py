"""The promises for requests and pages, and the cases where they did not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import attrs

import pdinfer as pd
from pdinfer.stats import PrefillLoad
from tests.e2e.setups import NEAR_TIE, plain_reference
from tests.soak.timetable import Case

LOGPROB = 1e-4
"""As in `setups.Tally`: rounding of float32 logits of a tiny model stays far below."""
SETTLED_S = 5.0
"""Beside ports of both roles that have lived for so long no request is lost without a token."""
WAITS_S = 60.0
"""Nor does one wait for so long there."""
MAX_BROKEN = 50
"""The number of sentences that are kept; the rest is counted."""


@attrs.define
class Book:
    """Every request from its submission to its one final event. Ended requests are compared with `model` in one piece
    and forgotten, so that a long run does not grow by its own notes."""

    model: pd.Model
    open: dict[str, tuple[Case, list[pd.TokenEvent]]] = attrs.field(factory=dict)
    waited_s: Counter[str] = attrs.field(factory=Counter)
    longest_s: float = 0.0
    counts: Counter[str] = attrs.field(factory=Counter)
    ends: Counter[str] = attrs.field(factory=Counter)
    failures: Counter[str] = attrs.field(factory=Counter)
    settled_s: float = 0.0
    broken: list[str] = attrs.field(factory=list)

    def say(self, kind: str, sentence: str) -> None:
        """Record that a promise did not hold."""
        self.counts[kind] += 1
        if len(self.broken) < MAX_BROKEN:
            self.broken.append(f"{kind}: {sentence}")

    def submitted(self, case: Case) -> None:
        self.counts["requests"] += 1
        self.open[str(case.request.request_id)] = (case, [])

    def passed(self, seconds: float, settled_s: float) -> None:
        """Note that time has passed, and for how long ports of both roles have lived by now."""
        self.settled_s = settled_s
        if settled_s < SETTLED_S:
            return
        for request_id in self.open:
            self.waited_s[request_id] += seconds
            self.longest_s = max(self.longest_s, self.waited_s[request_id])
            if self.waited_s[request_id] > WAITS_S:
                self.say("long_waits", f"{request_id} has waited for {WAITS_S:g} s beside ports that live")
                self.waited_s[request_id] = 0.0

    def heard(self, events: Iterable[pd.TokenEvent]) -> None:
        for event in events:
            self.waited_s.pop(event.request_id, None)
            if event.request_id not in self.open:
                self.say("events_after_the_end", f"{event} is of no request under way")
                continue
            case, stream = self.open[event.request_id]
            if stream and event.index != stream[-1].index + 1:
                self.say("events_out_of_order", f"{event} came after index {stream[-1].index}")
            stream.append(event)
            if event.finish_reason is not None:
                del self.open[event.request_id]
                self._ended(case.request, stream)

    def _ended(self, request: pd.Request, stream: list[pd.TokenEvent]) -> None:
        last = stream[-1]
        reason = last.finish_reason
        assert reason is not None
        self.ends[reason.value] += 1
        if reason is pd.FinishReason.FAILED:
            self.failures[type(last.error).__name__] += 1
            if len(stream) == 1 and self.settled_s >= SETTLED_S:
                self.say("lost_beside_ports", f"{request.request_id} had no token: {last.error}")
            if not isinstance(last.error, pd.PDInferError) or not str(last.error):
                self.say("nameless_failures", f"{request.request_id} failed with {last.error!r}")
        told = [event for event in stream if event.token is not None]
        self.counts["tokens"] += len(told)
        if told:
            self._compare(request, told)
        self._check_length(request, told, reason)

    def _compare(self, request: pd.Request, told: list[pd.TokenEvent]) -> None:
        expected = plain_reference(self.model, request, [event.token or 0 for event in told])
        for position, event in enumerate(told):
            if event.token != expected.tokens[position]:
                if expected.margins[position] < NEAR_TIE:
                    self.counts["near_ties"] += 1
                else:
                    where = f"{request.request_id}, token {position} of {len(told)}"
                    what = f"{event.token} in place of {expected.tokens[position]}"
                    self.say("wrong_tokens", f"{where}: {what} (margin {expected.margins[position]:.1e})")
                return
            if event.logprob is None or abs(event.logprob - expected.logprobs[position]) > LOGPROB:
                self.say("wrong_logprobs", f"{request.request_id}, token {position}: {event.logprob}")
                return

    def _check_length(self, request: pd.Request, told: list[pd.TokenEvent], reason: pd.FinishReason) -> None:
        sampling, name = request.sampling, request.request_id
        stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.model.config.eos_token_ids)}
        count = len(request.output) + len(told)
        tokens = [event.token for event in told]
        if reason is pd.FinishReason.LENGTH and count != sampling.max_new_tokens:
            self.say("wrong_lengths", f"{name} has {count} of {sampling.max_new_tokens} tokens")
        if reason is pd.FinishReason.STOP and (not tokens or tokens[-1] not in stops):
            self.say("wrong_lengths", f"{name} stopped at {tokens[-1:]}, its stop tokens are {stops}")
        if stops.intersection(tokens[:-1]):
            self.say("wrong_lengths", f"{name} went on behind a stop token")


def not_whole(load: Any) -> str:
    """Return what an engine still holds though it has no work; empty when every page is available again."""
    complaints = []
    if load.num_free_pages + load.num_cached_pages != load.num_total_pages:
        complaints.append(
            f"{load.num_free_pages} free and {load.num_cached_pages} cached pages of {load.num_total_pages}"
        )
    if isinstance(load, PrefillLoad):
        left = {"queued": load.num_queued_requests, "unsent_bytes": load.unsent_bytes}
    else:
        left = {
            "waiting": load.num_waiting_requests,
            "granted": load.num_granted_requests,
            "running": load.num_running_requests,
        }
    complaints += [f"{count} {name}" for name, count in left.items() if count]
    return ", ".join(complaints)
