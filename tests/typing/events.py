"""What comes out is of a precise type: events narrow, and what may be None has to be looked at."""

from __future__ import annotations

from typing import assert_never, assert_type

import pdinfer as pd


def told(event: pd.remote.Event) -> str:
    """Tell an engine's event; `assert_never` is reached by none."""
    match event:
        case pd.Granted(grant=grant, request=request):
            assert_type(grant, pd.PageGrant)
            assert_type(request.prompt, tuple[int, ...])
            return grant.request_id
        case pd.Refused():
            assert_type(event.error, pd.PDInferError)
            return event.error.code
        case pd.TokenEvent():
            return str(event.token)
        case _:
            assert_never(event)


def forgotten(event: pd.remote.Event) -> str:
    """Forget one kind of event, which is an error."""
    if isinstance(event, pd.Granted):
        return event.request.request_id or ""
    if isinstance(event, pd.TokenEvent):
        return event.request_id
    assert_never(event)  # type: ignore[arg-type]


def ended(reason: pd.FinishReason) -> bool:
    """Tell good ends from bad ones; every reason is named."""
    match reason:
        case pd.FinishReason.STOP | pd.FinishReason.LENGTH:
            return True
        case pd.FinishReason.CANCELLED | pd.FinishReason.DEADLINE | pd.FinishReason.FAILED:
            return False
        case _:
            assert_never(reason)


def unnamed(reason: pd.FinishReason) -> bool:
    """Leave a reason out, which is an error."""
    match reason:
        case pd.FinishReason.STOP | pd.FinishReason.LENGTH | pd.FinishReason.FAILED:
            return True
        case _:
            assert_never(reason)  # type: ignore[arg-type]


def received(handoff: pd.Handoff) -> bool:
    """Tell whether a hand-off has landed."""
    match handoff.status:
        case pd.kv.HandoffStatus.LANDED:
            return True
        case pd.kv.HandoffStatus.ABORTED:
            return False
        case _:
            assert_never(handoff.status)


def served(pairing: pd.Pairing, request: pd.Request) -> list[int]:
    tokens: list[int] = []
    for event in pairing.generate(request):
        assert_type(event, pd.TokenEvent)
        tokens.append(event.token)  # type: ignore[arg-type]
        if event.token is not None:
            tokens.append(event.token)
        assert_type(event.finish_reason, pd.FinishReason | None)
        assert_type(event.error, pd.PDInferError | None)
        event.usage.output_tokens  # type: ignore[union-attr]  # noqa: B018
        if event.usage is not None:
            assert_type(event.usage, pd.metrics.Usage)
            assert_type(event.usage.timeline, pd.metrics.Timeline | None)
            assert_type(event.usage.ttft_s, float | None)
    return tokens


def stepped(pairing: pd.Pairing, prefill: pd.PrefillEngine, decode: pd.DecodeEngine) -> None:
    assert_type(pairing.step(), list[pd.TokenEvent])
    assert_type(prefill.step(), list[pd.remote.Event])
    assert_type(decode.step(), list[pd.remote.Event])
    assert_type(prefill.load(), pd.policy.PrefillLoad)
    assert_type(decode.load(), pd.policy.DecodeLoad)
    assert_type(decode.load().tokens_per_s, float)
    assert_type(pairing.stats, pd.metrics.PairingStats)
    decode.load().num_queued_tokens  # type: ignore[attr-defined]  # noqa: B018
    pd.metrics.asdict(pairing.stats)["num_retries"] += 1


def overloaded(error: pd.PDInferError) -> float | None:
    """Return when to try again."""
    assert_type(error.code, str)
    error.retry_after_s  # type: ignore[attr-defined]  # noqa: B018
    return error.retry_after_s if isinstance(error, pd.Overloaded) else None


def changed(event: pd.TokenEvent, config: pd.EngineConfig) -> None:
    """Change what is frozen."""
    event.token = 5  # type: ignore[misc]
    config.num_draft_tokens = 1  # type: ignore[misc]
