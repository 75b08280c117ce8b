"""Engines whose host or channel does what it should not: nothing is lost, nothing is returned twice."""

from __future__ import annotations

import pytest

import pdinfer as pd
from pdinfer.kv.transports.base import Transfer
from tests.e2e.setups import PROMPT, by_request, collect, join, local, model_of, pool_of, reference, request, tokens_of


def test_a_request_without_writers_is_refused_and_holds_no_page() -> None:
    """Nobody would ever say the last word on its room."""
    with local() as setup:
        decode = setup.decodes[0]
        decode.submit(request(), writers=())
        (event,) = decode.step()
        assert isinstance(event, pd.Refused)
        assert "writers is empty" in str(event.error)
        setup.check_idle()


@pytest.mark.parametrize("transport", ["shared", "loopback", "tcp"])
def test_a_hand_off_that_raises_spares_the_others_of_its_chunk(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    with join(model, transport, prefill_pools=[pool_of(model)], decode_pools=[pool_of(model)]) as setup:
        channel = setup.prefills[0].channel
        finish, calls = channel.finish, []

        def second_raises(grant: pd.PageGrant, handoff: pd.Handoff) -> Transfer:
            calls.append(grant)
            if len(calls) == 2:
                raise RuntimeError("no more frames")
            return finish(grant, handoff)

        monkeypatch.setattr(channel, "finish", second_raises)
        for name in "abc":
            setup.pairing.submit(request(name))
        streams = by_request(collect(setup.pairing))
        assert tokens_of(streams["a"]) == list(reference("v3", PROMPT, 5).tokens)
        assert [streams[name][-1].finish_reason for name in "bc"] == [pd.FinishReason.FAILED] * 2
        setup.check_idle()
