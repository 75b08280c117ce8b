"""OpenTelemetry spans of requests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.metrics import STAGES, Spans
from pdinfer.testing import random_model
from pdinfer.types import Timeline, Usage
from tests.e2e.setups import greedy

S = 1_000_000_000


@pytest.fixture
def exporter() -> Any:
    pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: Any) -> Iterator[Any]:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider.get_tracer("test")
    provider.shutdown()


def edges(exporter: Any, began_ns: int) -> dict[str, tuple[float, float]]:
    """When each span began and ended, in seconds since `began_ns`."""
    spans = exporter.get_finished_spans()
    return {span.name: ((span.start_time - began_ns) / S, (span.end_time - began_ns) / S) for span in spans}


def final(timeline: Timeline | None, at_s: float | None = 4.0, **more: Any) -> pd.TokenEvent:
    usage = Usage(prompt_tokens=4, output_tokens=2, cached_tokens=1, queue_s=0.0, ttft_s=2.0, timeline=timeline)
    given = {"token": 7, "finish_reason": pd.FinishReason.LENGTH, "usage": usage, **more}
    return pd.TokenEvent(request_id="a", index=1, at_s=at_s, **given)


def test_a_request_is_a_span_with_its_stages(exporter: Any, tracer: Any) -> None:
    now = iter((100 * S, 105 * S))
    spans = Spans(tracer, clock_ns=now.__next__)
    with tracer.start_as_current_span("the server's call") as call:
        spans.sent("a")
    timeline = Timeline(queued_s=0.5, granted_s=1.0, prefill_began_s=1.5, prefill_ended_s=2.5, committed_s=3.0)
    spans.read([pd.TokenEvent(request_id="a", token=5, index=0, at_s=2.0), final(timeline)])
    spans.read([final(timeline)])  # it ended once
    found = edges(exporter, 100 * S)
    found.pop("the server's call")
    assert found == {
        "pdinfer.request": (0.0, 4.0),
        "pdinfer.queue": (0.0, 1.5),
        "pdinfer.prefill": (1.5, 2.5),
        "pdinfer.hand-off": (2.5, 3.0),
        "pdinfer.decode": (3.0, 4.0),
    }
    by_name = {span.name: span for span in exporter.get_finished_spans()}
    whole = by_name["pdinfer.request"]
    assert whole.parent.span_id == call.get_span_context().span_id
    assert {by_name[f"pdinfer.{stage}"].parent.span_id for stage in STAGES} == {whole.context.span_id}
    assert whole.attributes["pdinfer.request.id"] == "a"
    assert whole.attributes["gen_ai.usage.output_tokens"] == 2
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert whole.attributes["pdinfer.time_to_first_token_s"] == 2.0
    assert whole.status.is_unset


@pytest.mark.parametrize(
    ("timeline", "at_s", "expected"),
    [
        (None, 4.0, {"queue": (0.0, 4.0)}),
        (Timeline(prefill_began_s=1.0), None, {"queue": (0.0, 1.0), "prefill": (1.0, 5.0)}),
        (Timeline(prefill_began_s=9.0), 4.0, {"queue": (0.0, 4.0), "prefill": (4.0, 4.0)}),
    ],
)
def test_stages_that_were_not_reached_have_no_span(
    exporter: Any, tracer: Any, timeline: Timeline | None, at_s: float | None, expected: dict[str, Any]
) -> None:
    spans = Spans(tracer, clock_ns=iter((100 * S, 105 * S)).__next__)
    spans.sent("a")
    error = pd.TransferError("its decode is lost")
    spans.read([final(timeline, at_s, token=None, finish_reason=pd.FinishReason.FAILED, error=error)])
    found = edges(exporter, 100 * S)
    assert found.pop("pdinfer.request") == (0.0, 5.0 if at_s is None else at_s)
    assert {name.removeprefix("pdinfer."): at for name, at in found.items()} == expected
    (whole,) = [span for span in exporter.get_finished_spans() if span.name == "pdinfer.request"]
    assert whole.status.description == "TRANSFER: its decode is lost"


def test_spans_of_real_engines(exporter: Any, tracer: Any) -> None:
    spans = Spans(tracer)
    with pd.Pairing.local(random_model(), cache=pd.CacheConfig(page_size=4, num_pages=64)) as pairing:
        spans.sent(pairing.submit(pd.Request(prompt=(3, 5, 7), sampling=greedy(4))))
        other = pairing.submit(pd.Request(prompt=(3, 5, 7), sampling=greedy(4)))
        while pairing.num_unfinished:
            spans.read(pairing.step())
    found = edges(exporter, 0)
    assert sorted(found) == sorted(["pdinfer.request", *(f"pdinfer.{stage}" for stage in STAGES)])
    order = [found[f"pdinfer.{stage}"] for stage in STAGES]
    assert (order[0][0], order[-1][1]) == found["pdinfer.request"]
    assert all(before[1] == after[0] for before, after in pairwise(order))
    assert other not in [span.attributes.get("pdinfer.request.id") for span in exporter.get_finished_spans()]


def test_without_the_package_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(pd.BackendUnavailable, match=r"pip install 'pdinfer\[otel\]'"):
        Spans()
