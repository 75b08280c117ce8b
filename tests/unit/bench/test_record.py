"""Records from events: stages that sum to TTFT, and clocks that do not flatter."""

from __future__ import annotations

import pytest

import pdinfer as pd
from pdinfer.bench import STAGES, Record, Recorder
from pdinfer.testing import VirtualClock
from pdinfer.types import Choice, Timeline, Usage


def address(name: bytes) -> pd.PeerAddress:
    return pd.PeerAddress(name, 0, 0)


def usage(timeline: Timeline | None, **changes: object) -> Usage:
    fields = {"prompt_tokens": 4, "output_tokens": 2, "cached_tokens": 1, "queue_s": 0.0, "ttft_s": 1.0, **changes}
    return Usage(timeline=timeline, **fields)  # type: ignore[arg-type]


TIMELINE = Timeline(
    queued_s=0.25,
    granted_s=0.5,
    prefill_began_s=0.75,
    prefill_ended_s=1.5,
    first_byte_s=1.0,
    last_byte_s=1.625,
    committed_s=1.75,
    first_token_s=1.875,
)


def recorded(timeline: Timeline | None, *, at_s: tuple[float | None, ...] = (1.875, 2.5)) -> Record:
    clock = VirtualClock(100.0)
    recorder = Recorder(clock=clock)
    clock.advance(1.5)
    recorder.sent("a", prompt_tokens=4, intended_s=1.0)
    clock.advance(2.0)
    recorder.read([pd.TokenEvent(request_id="a", token=7, index=0, at_s=at_s[0])])
    clock.advance(1.0)
    choice = Choice(prefill=address(b"pppp"), decode=address(b"dddd"), score=(("wait", 2.0), ("bad", float("inf"))))
    last = pd.TokenEvent(
        request_id="a",
        token=8,
        index=1,
        at_s=at_s[1],
        finish_reason=pd.FinishReason.LENGTH,
        usage=usage(timeline, choice=choice, num_retries=1),
    )
    assert recorder.read([last, pd.TokenEvent(request_id="other", token=1, index=0)]) == ["a"]
    (record,) = recorder.records()
    return record


def test_a_record_has_the_time_of_every_stage_from_the_intended_send() -> None:
    record = recorded(TIMELINE)
    assert record.is_completed
    assert (record.intended_s, record.sent_s, record.ended_s) == (1.0, 1.5, 4.5)
    assert (record.token_s, record.read_s) == ((3.375, 4.0), (3.5, 4.5))
    assert (record.ttft_s, record.e2e_s, record.tpot_s, record.step_s) == (2.5, 3.5, 1.0, 0.625)
    assert (record.prefill, record.decode) == (b"pppp".hex(), b"dddd".hex())
    assert record.score == (("wait", 2.0),)  # JSON has no infinity
    assert (record.cached_tokens, record.num_retries) == (1, 1)
    stages = record.stages()
    assert tuple(stages) == STAGES
    assert list(stages.values()) == [0.5, 0.25, 0.25, 0.25, 0.75, 0.125, 0.125, 0.125, 0.125]
    assert sum(stages.values()) == record.ttft_s


@pytest.mark.parametrize(
    "timeline",
    [
        None,
        Timeline(),
        Timeline(queued_s=0.25, granted_s=0.5),
        Timeline(queued_s=0.25, granted_s=9.0, committed_s=9.5, first_token_s=1.875),  # granted again afterwards
        Timeline(queued_s=1.0, granted_s=0.5, prefill_began_s=0.25, committed_s=1.75),  # clocks that disagree
    ],
)
def test_stages_sum_to_ttft_whatever_is_known(timeline: Timeline | None) -> None:
    record = recorded(timeline)
    stages = record.stages()
    assert min(stages.values()) >= 0
    assert sum(stages.values()) == pytest.approx(record.ttft_s, abs=1e-9)


def test_a_token_without_a_time_counts_as_made_when_it_was_read() -> None:
    record = recorded(TIMELINE, at_s=(None, None))
    assert record.token_s == record.read_s
    assert record.stages()["delivery"] == 0.0


def test_requests_that_did_not_complete_have_no_e2e() -> None:
    clock = VirtualClock()
    recorder = Recorder(clock=clock)
    recorder.sent("refused", prompt_tokens=3, refused="OVERLOADED: full")
    recorder.sent("open", prompt_tokens=4)
    recorder.sent("failed", prompt_tokens=5)
    error = pd.TransferError("gone")
    recorder.read([pd.TokenEvent(request_id="open", token=1, index=0, at_s=0.0)])
    recorder.read(
        [pd.TokenEvent(request_id="failed", token=None, index=0, finish_reason=pd.FinishReason.FAILED, error=error)]
    )
    refused, still_open, failed = recorder.records()
    assert [record.outcome for record in (refused, still_open, failed)] == ["refused", "unfinished", "failed"]
    assert failed.error == "TRANSFER: gone"
    assert [record.e2e_s for record in (refused, still_open, failed)] == [None] * 3
    assert refused.stages() == {}
    assert [record.is_first_of_shape for record in (refused, still_open, failed)] == [True, False, True]
