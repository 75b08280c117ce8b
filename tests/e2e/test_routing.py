"""What policies see of real engines, here and in other processes, and where requests go because of it."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.stats import DecodeLoad, PrefillLoad
from pdinfer.types import Choice, PeerAddress, RequestShape
from tests.e2e.setups import Setup, collect, greedy, join, model_of, pool_of, prompt_of, several
from tests.e2e.worker import Workers
from tests.waiting import TIMEOUT_S, wait_until

PAGE = 4


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with closing(Workers(3)) as pool:
        yield pool


class Watching:
    """A policy that notes what it is shown, and takes a pair that a test names."""

    def __init__(self, prefill: int = 0, decode: int = 0) -> None:
        self.pair = prefill, decode
        self.found: Mapping[PeerAddress, int] = {}
        self.prefills: Sequence[PrefillLoad] = ()
        self.decodes: Sequence[DecodeLoad] = ()

    def __call__(self, shape: RequestShape, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]) -> Choice:
        self.found, self.prefills, self.decodes = dict(shape.found_tokens), prefills, decodes
        return Choice(prefill=prefills[self.pair[0]].address, decode=decodes[self.pair[1]].address)

    @property
    def found_tokens(self) -> tuple[list[int], list[int]]:
        """What each prefill and each decode held of the last prompt."""
        return tuple([self.found.get(load.address, 0) for load in side] for side in (self.prefills, self.decodes))  # type: ignore[return-value]


def ask(pairing: pd.Pairing, prompt: tuple[int, ...], **more: Any) -> list[pd.TokenEvent]:
    pairing.submit(pd.Request(prompt=prompt, sampling=greedy(2, ignore_eos=True), **more))
    return collect(pairing)


def mixed(policy: pd.policy.Policy, **decode: Any) -> Setup:
    """Two prefills with pages of 4 and 8 tokens, two decodes with pages of 4."""
    model = model_of()
    prefills = [pool_of(model, page_size=size, num_pages=64) for size in (4, 8)]
    decodes = [pool_of(model, page_size=PAGE, num_pages=64, **decode) for _ in range(2)]
    return join(model, "loopback", prefill_pools=prefills, decode_pools=decodes, policy=policy)


def test_found_tokens_are_those_that_engines_then_find() -> None:
    watching, prompt = Watching(prefill=1), prompt_of(50)
    with mixed(watching) as setup:
        ask(setup.pairing, prompt)
        assert watching.found_tokens == ([0, 0], [0, 0])
        usage = ask(setup.pairing, prompt)[-1].usage
        assert watching.found_tokens == ([0, 48], [48, 0])
        assert usage is not None
        assert usage.cached_tokens == 48
        ask(setup.pairing, (*prompt[:20], 1, 2, 3))
        assert watching.found_tokens == ([0, 16], [20, 0])
        ask(setup.pairing, prompt, cache_salt=b"another tenant")
        assert watching.found_tokens == ([0, 0], [0, 0])


def test_a_decode_finds_what_the_prefill_with_the_longest_match_wrote_unless_it_trusts_all() -> None:
    for trust, then in (("writer", [20, 48]), ("all", [48, 48])):
        watching, prompt = Watching(prefill=0, decode=0), prompt_of(50)
        with mixed(watching, trust_domain=trust) as setup:
            ask(setup.pairing, prompt[:21])
            watching.pair = 1, 0
            ask(setup.pairing, prompt)  # the prefill with the longest match from now on
            watching.pair = 0, 1
            ask(setup.pairing, prompt)
            watching.pair = 0, 1
            setup.prefills[1].pool.rebuild()
            ask(setup.pairing, prompt)
            assert watching.found_tokens == ([48, 0], then)


def test_engines_in_other_processes_tell_which_pages_they_hold(workers: Workers) -> None:
    watching, prompt = Watching(), prompt_of(50)
    taken = workers.take(3)
    ports = [worker.serve(role) for worker, role in zip(taken, ("prefill", "prefill", "decode"), strict=True)]
    with pd.Pairing(ports[:2], ports[2], policy=watching) as pairing:
        ask(pairing, prompt)
        chain = ports[0].key_scheme.chain(b"")
        chain.extend(prompt)
        wait_until(lambda: ports[0].count_known(chain.keys) == 12)  # once its last bytes have left
        ask(pairing, (*prompt[:30], 5, 6))
        end = time.monotonic() + TIMEOUT_S
        # a step that took much longer than those after it is forgotten, with all before it
        while not (watching.prefills[0].cost.seconds(30) and watching.decodes[0].cost.seconds(1, 30)):
            assert time.monotonic() < end, "the costs of steps are not told"
            ask(pairing, (*prompt[:30], 5, 6))
        (first, second), (decode,) = watching.found_tokens
        assert (first, second, decode) == (28, 0, 28)


def test_policies_are_told_briefly_and_dashboards_everything() -> None:
    watching = Watching()
    with mixed(watching) as setup:
        ask(setup.pairing, prompt_of(20))
        ask(setup.pairing, prompt_of(20))
        for brief, engine in zip(
            (*watching.prefills, *watching.decodes), (*setup.prefills, *setup.decodes), strict=True
        ):
            assert (brief.kv.peers, brief.providers, brief.transport) == ((), (), "")
            full = engine.load()
            assert full.kv.peers
            assert full.providers
            assert full.token_bytes == brief.token_bytes == engine.pool.layout.token_bytes


@pytest.mark.parametrize("chosen_by", [pd.policy.least_tokens, pd.policy.traffic_aware, pd.policy.cache_aware])
def test_requests_that_come_one_after_another_go_to_all_ports(chosen_by: pd.policy.Policy) -> None:
    with several(2, 2, policy=chosen_by, clock=itertools.count(0.0, 0.001).__next__) as setup:  # 1 ms a look
        choices = []
        for number in range(20):
            usage = ask(setup.pairing, prompt_of(8, seed=number))[-1].usage
            assert usage is not None
            choices.append(usage.choice)
        for side in ("prefill", "decode"):
            assert all(8 <= count <= 12 for count in Counter(getattr(choice, side) for choice in choices).values())
        setup.check_idle()


def test_a_conversation_stays_where_its_pages_are() -> None:
    with mixed(pd.policy.TrafficAware(prefill_slack_s=0.0)) as setup:
        prompt, taken = prompt_of(80), []
        for turn in range(4):
            usage = ask(setup.pairing, prompt[: 20 * (turn + 1)])[-1].usage
            assert usage is not None
            assert usage.choice is not None
            taken.append(usage.choice.prefill)
            assert all(name.endswith("_s") for name, _ in usage.choice.score)
        assert len(set(taken[1:])) == 1


def test_a_policy_that_raises_is_told_so_and_loses_nothing() -> None:
    angry = [True]

    def chosen(*shown: Any) -> Choice | None:
        if angry:
            raise ZeroDivisionError("no port is any good")
        return pd.policy.traffic_aware(*shown)

    with several(2, 1, policy=chosen) as setup:
        for number in range(3):
            setup.pairing.submit(pd.Request(request_id=str(number), prompt=prompt_of(9), sampling=greedy(2)))
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="no port is any good"):
                setup.pairing.step()
        assert setup.pairing.stats.num_queued_requests == 3
        angry.clear()
        assert {event.request_id for event in collect(setup.pairing) if event.finish_reason} == {"0", "1", "2"}
        setup.check_idle()
