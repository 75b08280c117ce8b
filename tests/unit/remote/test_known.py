"""What a client believes of its engine, report by report."""

from __future__ import annotations

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
