"""OpenTelemetry spans of requests, made from their last events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from pdinfer.checks import typed
from pdinfer.errors import BackendUnavailable
from pdinfer.stats import name_of
from pdinfer.types import FinishReason, Timeline, TokenEvent, Usage

STAGES = ("queue", "prefill", "hand-off", "decode")
"""The spans inside that of a request, in order: until prefill began, until it ended, until decode had taken over the
pages, and until the end."""


class Spans:
    """A span for every request, with a span for each stage that it reached (STAGES). Those of a request that was tried
    again are the stages of its last attempt.

        spans = Spans()
        spans.sent(pairing.submit(request))
        spans.read(pairing.step())

    `tracer` is OpenTelemetry's; by default, that of its global provider. `clock_ns` is the wall clock. Any thread may
    call any method. Raises BackendUnavailable without opentelemetry-api."""

    def __init__(self, tracer: Any = None, *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._telemetry = _telemetry()
        self._tracer = tracer or self._telemetry.trace.get_tracer("pdinfer")
        self._clock_ns = clock_ns
        self._sent: dict[str, tuple[int, Any]] = {}

    @typed
    def sent(self, request_id: str) -> None:
        """Note a request that was sent now. Its span will be in the one that is current here, as that of a server's
        call is. Where another thread steps, give the request an id and call this before `submit`."""
        self._sent[request_id] = self._clock_ns(), self._telemetry.context.get_current()

    @typed
    def read(self, events: Iterable[TokenEvent]) -> None:
        """Make the spans of requests that end with these events. Requests that were not `sent` have none."""
        for event in events:
            if event.finish_reason is not None and (sent := self._sent.pop(event.request_id, None)) is not None:
                self._end(event, event.finish_reason, *sent)

    def _end(self, event: TokenEvent, reason: FinishReason, sent_ns: int, context: Any) -> None:
        trace, usage = self._telemetry.trace, event.usage
        now_ns = self._clock_ns()
        end_ns = now_ns if event.at_s is None else min(now_ns, sent_ns + _ns(event.at_s))
        span = self._tracer.start_span("pdinfer.request", context, start_time=sent_ns)
        span.set_attribute("pdinfer.request.id", event.request_id)
        span.set_attribute("gen_ai.response.finish_reasons", (reason.value,))
        if usage is not None:
            span.set_attributes(_attributes(usage))
        if event.error is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, f"{event.error.code}: {event.error}"))
        inside = trace.set_span_in_context(span, context)
        timeline = Timeline() if usage is None or usage.timeline is None else usage.timeline
        at_s = (0.0, timeline.prefill_began_s, timeline.prefill_ended_s, timeline.committed_s)
        marks = [(name, sent_ns + _ns(at)) for name, at in zip(STAGES, at_s, strict=True) if at is not None]
        for (name, began_ns), (_, ended_ns) in pairwise([*marks, ("", end_ns)]):
            began_ns = min(began_ns, end_ns)
            stage = self._tracer.start_span(f"pdinfer.{name}", inside, start_time=began_ns)
            stage.end(min(max(began_ns, ended_ns), end_ns))
        span.end(end_ns)


def _attributes(usage: Usage) -> dict[str, str | int | float]:
    """Return what is known of a request. Names that begin with gen_ai are OpenTelemetry's own."""
    choice = usage.choice
    known = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.output_tokens,
        "pdinfer.cached_tokens": usage.cached_tokens,
        "pdinfer.draft_tokens": usage.num_draft_tokens,
        "pdinfer.accepted_tokens": usage.num_accepted_tokens,
        "pdinfer.retries": usage.num_retries,
        "pdinfer.time_to_first_token_s": usage.ttft_s,
        "pdinfer.prefill": None if choice is None else name_of(choice.prefill),
        "pdinfer.decode": None if choice is None else name_of(choice.decode),
    }
    return {name: value for name, value in known.items() if value is not None}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _telemetry() -> Any:
    """Return the package `opentelemetry` with its modules `context` and `trace`."""
    try:
        import opentelemetry.context
        import opentelemetry.trace
    except ImportError as error:
        raise BackendUnavailable(
            f"spans are made by OpenTelemetry, which cannot be imported ({error}): pip install 'pdinfer[otel]'"
        ) from error
    return opentelemetry
