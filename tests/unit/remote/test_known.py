"""What a client believes of its engine, report by report."""

from __future__ import annotations

import time

import attrs
import pytest

from pdinfer.errors import TransferError
from pdinfer.remote import messages
from pdinfer.remote.line import KnownEngine
from pdinfer.types import RequestLimits
from tests.golden.samples import DECODE_LOAD, PREFILL_LOAD


def ready(role: str) -> messages.Ready:
    load = messages.LoadMessage(prefill=PREFILL_LOAD) if role == "prefill" else messages.LoadMessage(decode=DECODE_LOAD)
    address = (PREFILL_LOAD if role == "prefill" else DECODE_LOAD).address
    limits = RequestLimits(name=role, vocab_size=512, max_tokens=64)
    return messages.Ready(address, limits, load, version=messages.VERSION, minor=messages.MINOR)


def test_a_client_that_follows_another_begins_with_the_ready_of_its_role() -> None:
    engine: KnownEngine = KnownEngine("decode", follows=True)
    stepped = messages.Stepped(3, messages.LoadMessage(prefill=PREFILL_LOAD))
    for report in (stepped, messages.Computing(("a",)), ready("prefill"), stepped):
        assert not engine.take(report)
    assert engine.ready is None
    assert engine.computing == frozenset()
    assert engine.take(ready("decode"))
    assert engine.is_live
    with pytest.raises(TransferError, match="tells of no load of a decode engine"):
        engine.take(messages.Stepped(0, messages.LoadMessage(prefill=attrs.evolve(PREFILL_LOAD))))


def test_a_client_that_follows_none_refuses_a_report_before_a_ready() -> None:
    with pytest.raises(TransferError, match="another engine than the one it said it is"):
        KnownEngine("prefill").take(messages.Stepped(3, messages.LoadMessage(prefill=PREFILL_LOAD)))


def test_a_door_is_shown_how_old_a_load_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the engine may have done a step of the work that it tells of."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    engine: KnownEngine = KnownEngine("prefill")
    for heard, age_s in ((engine.take, 0.0), (lambda _: engine.beat(0.5), 0.5), (engine.take, 0.0)):
        heard(messages.Stepped(0, messages.LoadMessage(prefill=PREFILL_LOAD)) if engine.ready else ready("prefill"))
        for waited_s in (0.0, 2.0):
            now += waited_s
            assert engine.brief_load().step_age_s == engine.step_age_s == age_s + waited_s
