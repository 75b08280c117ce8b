"""The door of a running Pairing. Engines are real, and what they say of their speed is made up."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.config import SLO
from pdinfer.stats import DecodeCost, PrefillCost, changed
from pdinfer.testing import VirtualClock
from tests.e2e.setups import Setup, collect, join, model_of, pool_of, prompt_of, request

TENTH = PrefillCost(token_s=0.025)
"""A prompt of four tokens takes a tenth of a second."""


def says(pairing: pd.Pairing, port: Any, **values: Any) -> None:
    """Let a port say these values in its load, whatever is so."""
    members = pairing._ports._members
    brief_load = members[port.address].brief_load
    members[port.address] = attrs.evolve(members[port.address], brief_load=lambda: changed(brief_load(), **values))


def guarded(slo: SLO | None, **more: Any) -> Setup:
    """Return a prefill and a decode whose steps are said to take no time but for TENTH."""
    pools = [pool_of(model_of(), num_pages=64) for _ in range(2)]
    config = pd.PairingConfig(slo=slo, **more)
    setup = join(
        model_of(), "loopback", prefill_pools=pools[:1], decode_pools=pools[1:], config=config, clock=VirtualClock()
    )
    says(setup.pairing, setup.prefills[0], cost=TENTH)
    says(setup.pairing, setup.decodes[0], cost=DecodeCost())
    setup.pairing.step()
    return setup


def ask(setup: Setup, name: str, **more: Any) -> str:
    return setup.pairing.submit(attrs.evolve(request(name, 2, prompt=prompt_of(4)), **more))


def taken(setup: Setup, count: int, **more: Any) -> int:
    """Return how many of so many requests are taken before the first that is not."""
    for number in range(count):
        try:
            ask(setup, f"behind {setup.pairing.num_unfinished}", **more)
        except pd.Overloaded:
            return number
    return count


def test_a_request_that_would_miss_is_refused_and_leaves_nothing_behind() -> None:
    with guarded(SLO(ttft_s=0.45)) as setup:
        assert taken(setup, 9) == 4
        with pytest.raises(pd.Overloaded, match=r"would come after about 0.5 s, and may take 0.45 s; try again in"):
            ask(setup, "late")
        assert setup.pairing.num_unfinished == 4
        events = collect(setup.pairing)
        assert len({event.request_id for event in events if event.finish_reason}) == 4
        ask(setup, "late")
        assert collect(setup.pairing)[-1].finish_reason is pd.FinishReason.LENGTH


def test_without_a_promise_nobody_asks() -> None:
    with guarded(None) as setup:
        assert taken(setup, 9) == 9
        collect(setup.pairing)


def test_generate_waits_instead() -> None:
    with guarded(SLO(ttft_s=0.15)) as setup:
        asked = [request(str(number), 2, prompt=prompt_of(4)) for number in range(7)]
        events = list(setup.pairing.generate(asked))
        assert sum(event.finish_reason is pd.FinishReason.LENGTH for event in events) == 7


@pytest.mark.parametrize("most", [256, 1])
def test_those_who_wait_are_still_counted_after_a_step(most: int) -> None:
    """They are known to the Pairing, to the decode or to the prefill, and are counted once wherever they are."""
    with guarded(SLO(ttft_s=0.45), max_queued_per_decode=most) as setup:
        setup.decodes[0].step = list  # type: ignore[method-assign]
        setup.prefills[0].step = list  # it computes nothing  # type: ignore[method-assign]
        assert taken(setup, 3) == 3
        setup.pairing.step()
        ask(setup, "the last")
        for _ in range(4):
            with pytest.raises(pd.Overloaded):
                ask(setup, "one too many")
            setup.pairing.step()


def test_a_higher_priority_comes_in() -> None:
    with guarded(SLO(ttft_s=0.45)) as setup:
        setup.prefills[0].step = list  # type: ignore[method-assign]
        assert taken(setup, 9) == 4
        assert taken(setup, 9, priority=1) == 4
        setup.pairing.step()
        setup.pairing.step()
        assert taken(setup, 9, priority=1) == 0
        assert taken(setup, 9, priority=2) == 4


def test_answers_are_learned_from_those_that_ended_by_themselves() -> None:
    with guarded(SLO(ttft_s=9.0), fair_share=True) as setup:
        door = setup.pairing._broker.door
        assert door is not None
        for number in range(8):
            ask(setup, str(number), cache_salt=b"short")
        setup.pairing.submit(request("long", 9, cache_salt=b"long"))
        cancelled = setup.pairing.submit(request("never", 50))
        setup.pairing.step()
        setup.pairing.cancel(cancelled)
        collect(setup.pairing)
        assert door.answers.expect((0, b"short")) == 2
        assert len(door.answers) == 2
        assert door.answers.expect() == pytest.approx((8 * 2 + 9) / 9)
