"""A prefill that writes wrong KV under its own grants, every byte of it digested: it costs what it serves, and no
request of another prefill finds what it wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

import pdinfer as pd
from tests.e2e.setups import (
    Setup,
    by_request,
    collect,
    greedy,
    join,
    model_of,
    pool_of,
    prompt_of,
    reference,
    step_until,
    tokens_of,
    watch,
)

COMMON = prompt_of(37, seed=1)
COUNT = 6


def poison(prefill: pd.PrefillEngine) -> None:
    """From now on every latent that it sends is another one."""
    push, memory = prefill.channel.push, prefill.channel.pool.memory

    def lie(grant: pd.PageGrant, *, layers: range, pages: Sequence[int], **more: Any) -> Any:
        for component in prefill.channel.pool.layout.components:
            for layer in component.layers[slice(component.part_of(layers).start, component.part_of(layers).stop)]:
                memory.pages(component.name, layer)[[*pages]] = 7.0  # type: ignore[attr-defined]
        return push(grant, layers=layers, pages=pages, **more)

    prefill.channel.push = lie  # type: ignore[method-assign]


def two_prefills(transport: str, trust_domain: str = "writer", num_pages: int = 256) -> Setup:
    """Two prefills in turn, of which the first lies, and a decode with that many pages."""
    model = model_of()
    pools = [pool_of(model, num_pages=count, trust_domain=trust_domain) for count in (256, 256, num_pages)]
    setup = join(model, transport, prefill_pools=pools[:2], decode_pools=pools[2:], policy=pd.policy.round_robin)
    poison(setup.prefills[0])
    return setup


def ask(setup: Setup, prompt: tuple[int, ...], count: int = COUNT) -> list[int]:
    """What one request says, run alone."""
    return tokens_of(setup.pairing.generate([pd.Request(prompt=prompt, sampling=greedy(count, ignore_eos=True))]))


def hits(setup: Setup) -> int:
    """Tokens that decode found so far."""
    return setup.decodes[0].load().prefix_hit_tokens


@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_what_a_lying_prefill_wrote_is_found_by_no_request_of_another(transport: str) -> None:
    with two_prefills(transport) as setup:
        expected = list(reference("v3", COMMON, COUNT).tokens)
        lies = ask(setup, COMMON)
        assert lies != expected
        assert ask(setup, COMMON) == expected
        assert hits(setup) == 0
        assert ask(setup, COMMON) != expected, "of its own pages the first prefill may make what it likes"
        assert hits(setup) == 36
        assert ask(setup, COMMON) == expected
        assert hits(setup) == 72
        setup.check_idle()


def test_what_decode_computed_on_top_of_lies_is_found_by_no_request_of_another() -> None:
    """A conversation goes on at the other prefill: decode's own pages, all after the first turn's, are no better."""
    with two_prefills("loopback") as setup:
        prompt = (*COMMON, *ask(setup, COMMON, 19), 5)
        assert ask(setup, prompt) == list(reference("v3", prompt, COUNT).tokens)
        assert hits(setup) == 0


def test_a_request_that_changes_its_prefill_leaves_what_the_first_wrote() -> None:
    """It runs, is told another prefill, is retracted for want of pages and resumed: what it had is not found again."""
    with two_prefills("loopback", num_pages=24) as setup:
        decode = setup.decodes[0]
        seen = watch(decode)
        sampling = greedy(30, ignore_eos=True)
        setup.pairing.submit(pd.Request(request_id="a", prompt=COMMON, sampling=sampling, priority=-1))
        events = step_until(setup.pairing, lambda _: decode.load().num_running_requests)
        setup.pairing.remove(setup.prefills[0], drain_s=0.0)
        assert decode.snapshot().running[0].writers == (setup.prefills[1].address,)
        setup.pairing.submit(pd.Request(request_id="b", prompt=prompt_of(20), sampling=sampling))
        stream = by_request(events + collect(setup.pairing))["a"]
        first, again = (one.request for one in seen if isinstance(one, pd.Granted) and one.request.request_id == "a")
        assert len(first.output) < len(again.output) < 30
        assert hits(setup) == 0
        rest = 30 - len(again.output)
        assert tokens_of(stream)[-rest:] == list(reference("v3", again.tokens, rest).tokens)
        setup.check_idle()


def test_prefills_of_one_trust_domain_share() -> None:
    """The host says so, and gets what it asks for."""
    with two_prefills("loopback", "all") as setup:
        ask(setup, COMMON)
        assert ask(setup, COMMON) != list(reference("v3", COMMON, COUNT).tokens)
        assert hits(setup) == 36


def test_prefills_that_use_decodes_own_pool_share_and_find_nothing_that_came_from_elsewhere() -> None:
    """Three prefills in turn, the first with a pool of its own: what it sent is not for those that compute into the
    pool themselves, in whose eyes all pages are their own."""
    model = model_of()
    own, shared = pool_of(model), pool_of(model)
    channels = pd.KVChannel.loopback(own, shared, shared, shared)
    prefills = [pd.PrefillEngine(model, channel) for channel in channels[:3]]
    decode = pd.DecodeEngine(model, channels[3])
    poison(prefills[0])
    with pd.Pairing(prefills, decode, policy=pd.policy.round_robin) as pairing:
        setup = Setup(pairing=pairing, prefills=prefills, decodes=[decode])
        expected = list(reference("v3", COMMON, COUNT).tokens)
        assert ask(setup, COMMON) != expected
        for found in (0, 36):
            assert ask(setup, COMMON) == expected
            assert hits(setup) == found
        setup.check_idle()


def test_the_setting_is_checked() -> None:
    with pytest.raises(pd.ConfigError, match="trust_domain must be one of writer, all"):
        pd.CacheConfig(trust_domain="everyone")
