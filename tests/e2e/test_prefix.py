"""What a request finds of earlier ones is not sent again, not computed again, and changes no token."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.kv.prefix import PrefixIndex
from tests.e2e.setups import (
    Sequence,
    Setup,
    Tally,
    by_request,
    collect,
    greedy,
    hang,
    join,
    judged,
    local,
    model_of,
    plain_reference,
    pool_of,
    prompt_of,
    recover,
    request,
    tokens_of,
    watch,
)

NUM_NEW = 6
COMMON = prompt_of(37, seed=1)
CHUNK = pd.EngineConfig(chunked_prefill_size=16)
SETUPS = (("shared", 4, 4), ("loopback", 4, 4), ("loopback", 16, 5), ("tcp", 5, 16))
MORE_SETUPS = (("loopback", 3, 16), ("tcp", 8, 8))
"""Transport, page size of prefill, page size of decode."""
in_setups = pytest.mark.parametrize(
    ("transport", "ours", "theirs"), [*SETUPS, *(pytest.param(*setup, marks=pytest.mark.full) for setup in MORE_SETUPS)]
)


def split(
    transport: str,
    *page_sizes: int,
    num_prefills: int = 1,
    num_tokens: int = 1024,
    switch: bool = True,
    trust_domain: str = "writer",
    **more: object,
) -> Setup:
    """Engines with pools of these page sizes: prefills first, then decodes."""
    model = model_of()
    cache = {"prefix_cache": switch, "trust_domain": trust_domain}
    pools = [pool_of(model, page_size=size, num_pages=num_tokens // size, **cache) for size in page_sizes]
    return join(
        model,
        transport,
        prefill_pools=pools[:num_prefills],
        decode_pools=pools[num_prefills:],
        **{"engine": CHUNK, "policy": pd.policy.round_robin, **more},  # type: ignore[arg-type]
    )


@attrs.frozen
class Cost:
    """What one request took: tokens sent and computed by prefill, and its events."""

    num_sent: int
    num_computed: int
    events: list[pd.TokenEvent]

    @property
    def num_cached(self) -> int:
        usage = self.events[-1].usage
        assert usage is not None
        return usage.cached_tokens


def cost(setup: Setup, prompt: tuple[int, ...], count: int = NUM_NEW, **more: object) -> Cost:
    def so_far() -> tuple[int, int]:
        sent = sum(prefill.channel.stats.bytes_sent for prefill in setup.prefills)
        return sent // setup.pools[0].layout.token_bytes, sum(prefill.load().num_tokens for prefill in setup.prefills)

    before = so_far()
    sampling = greedy(count, ignore_eos=True)
    events = list(setup.pairing.generate([pd.Request(prompt=prompt, sampling=sampling, **more)]))  # type: ignore[arg-type]
    setup.check_idle()
    after = so_far()
    return Cost(after[0] - before[0], after[1] - before[1], events)


def whole_pages(num_tokens: int, page_size: int) -> int:
    """Tokens in the full pages of so many."""
    return num_tokens // page_size * page_size


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    """One count for the whole file: near ties are rare over all its tokens."""
    whole = Tally()
    yield whole
    whole.check()


def compare(
    tally: Tally, name: str, events: Sequence[pd.TokenEvent], prompt: tuple[int, ...], count: int = NUM_NEW
) -> None:
    """So many greedy tokens came."""
    tokens = tokens_of(events)
    assert len(tokens) == count
    tally.compare(name, events, judged("v3", prompt, tokens))


def check_tokens(tally: Tally, seen: Cost, prompt: tuple[int, ...], count: int = NUM_NEW) -> None:
    compare(tally, f"after {len(prompt)} tokens", seen.events, prompt, count)


# -- what is sent and what is computed ------------------------------------------------------------------------------


@in_setups
def test_only_what_decode_lacks_is_sent_and_only_what_prefill_lacks_is_computed(
    tally: Tally, transport: str, ours: int, theirs: int
) -> None:
    with split(transport, ours, theirs) as setup:
        for number, known in enumerate((0, len(COMMON), len(COMMON))):
            prompt = (*COMMON, 90 + number, *prompt_of(11, seed=number))
            seen = cost(setup, prompt)
            check_tokens(tally, seen, prompt)
            assert seen.num_sent == len(prompt) - whole_pages(known, theirs)
            assert seen.num_computed == len(prompt) - whole_pages(known, ours)
            assert seen.num_cached == whole_pages(known, ours)


@in_setups
def test_the_next_turn_of_a_conversation_sends_what_is_new(
    tally: Tally, transport: str, ours: int, theirs: int
) -> None:
    """Decode has the pages that it filled itself; prefill, with a pool of its own, only those of the prompts."""
    with split(transport, ours, theirs) as setup:
        prompt, sent, computed = prompt_of(21), 0, 0
        for turn in range(3):
            seen = cost(setup, prompt, 19)
            check_tokens(tally, seen, prompt, 19)
            assert seen.num_sent == len(prompt) - whole_pages(sent, theirs)
            assert seen.num_computed == len(prompt) - whole_pages(computed, ours)
            sent = len(prompt) + 18  # the last token was never run
            computed = sent if transport == "shared" else len(prompt)
            prompt = (*prompt, *tokens_of(seen.events), *prompt_of(5, seed=turn))


@in_setups
def test_a_prompt_known_to_its_end_has_its_last_page_run_and_sent_again(
    tally: Tally, transport: str, ours: int, theirs: int
) -> None:
    with split(transport, ours, theirs) as setup:
        for length in (1, 16, 40, 41):
            prompt = prompt_of(length)
            cost(setup, prompt, 1)
            seen = cost(setup, prompt)
            check_tokens(tally, seen, prompt)
            assert seen.num_sent == length - whole_pages(length - 1, theirs)
            assert seen.num_computed == length - whole_pages(length - 1, ours)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 16, 3)])
@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_what_only_prefill_has_is_sent_and_not_computed(
    tally: Tally, transport: str, sizes: tuple[int, int, int]
) -> None:
    with split(transport, *sizes) as setup:
        for turn in range(2):  # each decode's first
            prompt = (*COMMON, 90 + turn)
            seen = cost(setup, prompt)
            check_tokens(tally, seen, prompt)
            assert seen.num_sent == len(prompt)
            assert seen.num_computed == len(prompt) - turn * whole_pages(len(COMMON), sizes[0])


@pytest.mark.parametrize("sizes", [(4, 4, 4), (5, 3, 16)])
@pytest.mark.parametrize("transport", ["loopback", "tcp"])
def test_what_only_decode_has_is_computed_and_not_sent(
    tally: Tally, transport: str, sizes: tuple[int, int, int]
) -> None:
    with split(transport, *sizes, num_prefills=2, trust_domain="all") as setup:
        for turn in range(2):  # each prefill's first
            prompt = (*COMMON, 90 + turn)
            seen = cost(setup, prompt)
            check_tokens(tally, seen, prompt)
            assert seen.num_sent == len(prompt) - turn * whole_pages(len(COMMON), sizes[2])
            assert (seen.num_computed, seen.num_cached) == (len(prompt), 0)


def test_without_the_switch_all_is_computed_and_sent_and_every_page_free() -> None:
    with split("loopback", 4, 4, switch=False) as setup:
        for _ in range(2):
            seen = cost(setup, COMMON)
            assert (seen.num_sent, seen.num_computed) == (len(COMMON), len(COMMON))
        assert all(pool.num_free == pool.num_pages for pool in setup.pools)


# -- who shares -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["shared", "loopback", "tcp"])
def test_tenants_with_different_salts_never_share(transport: str) -> None:
    """The same salt hits, another never does: both show in the counters."""
    with split(transport, 4, 4) as setup:

        def hits() -> list[tuple[int, int]]:
            loads = [engine.load() for engine in setup.engines]
            return [(load.prefix_query_tokens, load.prefix_hit_tokens) for load in loads]

        found = whole_pages(len(COMMON) - 1, 4)
        expected = 0
        for number, (salt, hit) in enumerate([(b"a", 0), (b"b", 0), (b"", 0), (b"a", 1), (b"b", 1), (b"aa", 0)], 1):
            seen = cost(setup, COMMON, cache_salt=salt)
            expected += hit * found
            assert hits() == [(number * len(COMMON), expected)] * 2
            assert seen.num_sent == len(COMMON) - hit * found


def test_requests_that_run_together_own_their_common_pages_once() -> None:
    with local() as setup:
        prompt = prompt_of(24)
        for name in "ab":
            setup.pairing.submit(request(name, prompt=prompt, sampling=greedy(100, ignore_eos=True)))
        for _ in range(4):
            setup.pairing.step()
        first, second = setup.decodes[0].snapshot().running
        assert first.pages[:6] == second.pages[:6]
        assert setup.pools[0].num_owned == 8
        setup.check_pools()
        assert setup.decodes[0].load().num_available_pages == 64 - 8


def test_pages_in_use_anyway_are_no_reason_to_wait() -> None:
    with local(num_pages=16) as setup:
        for name, prompt in {"a": COMMON, "b": (*COMMON, 3)}.items():
            setup.pairing.submit(request(name, prompt=prompt, sampling=greedy(10, ignore_eos=True)))
            setup.pairing.step()
            setup.pairing.step()
        load = setup.decodes[0].load()
        assert (load.num_running_requests, load.num_waiting_requests) == (2, 0)


def test_a_prompt_waits_while_what_it_would_share_is_all_there_is() -> None:
    """Of ten pages to be had at prefill nine hold its own beginning, and it needs three more."""
    pools = [pool_of(model_of(), num_pages=count) for count in (20, 64)]
    with join(model_of(), "loopback", prefill_pools=pools[:1], decode_pools=pools[1:], engine=CHUNK) as setup:
        cost(setup, COMMON)
        setup.pairing.submit(request("long", prompt=prompt_of(40)))
        setup.pairing.submit(request("a", prompt=(*COMMON, *prompt_of(8))))
        setup.pairing.step()
        assert (pools[0].num_available, len(setup.prefills[0].snapshot().queued)) == (10, 1)
        ends = [event.finish_reason for event in collect(setup.pairing) if event.finish_reason is not None]
        assert ends == [pd.FinishReason.LENGTH] * 2
        setup.check_idle()


def test_what_became_known_after_the_grant_is_computed_where_it_was_granted(tally: Tally) -> None:
    """In one pool: prefill begins where the grant does, though it could find more."""
    with local() as setup:
        seen = watch(setup.decodes[0])
        setup.prefills[0].config = attrs.evolve(setup.prefills[0].config, max_running_requests=1)
        for name in "ab":
            setup.pairing.submit(request(name, NUM_NEW, prompt=COMMON))
        streams = by_request(collect(setup.pairing))
        for name in "ab":
            compare(tally, name, streams[name], COMMON)
        assert sum(isinstance(event, pd.Granted) for event in seen) == 2
        setup.check_idle()


def test_who_grows_takes_cached_pages_before_anyone_is_retracted() -> None:
    with local(num_pages=16) as setup:
        seen = watch(setup.decodes[0])
        cost(setup, COMMON)
        assert setup.pools[0].num_cached == 10
        cost(setup, prompt_of(9), 45)
        assert sum(isinstance(event, pd.Granted) for event in seen) == 2


def test_a_retracted_request_finds_its_own_pages_again(tally: Tally) -> None:
    with local(num_pages=36) as setup:
        seen = watch(setup.decodes[0])
        prompts = {name: prompt_of(9, seed=number) for number, name in enumerate("abc")}
        for name, prompt in prompts.items():
            setup.pairing.submit(request(name, 50, prompt=prompt))
        streams = by_request(collect(setup.pairing))
        setup.check_idle()
    resumed = [event.grant.tokens for event in seen if isinstance(event, pd.Granted)][3:]
    assert any(tokens.start > 9 for tokens in resumed), "not one found what it had decoded itself"
    for name, prompt in prompts.items():
        compare(tally, name, streams[name], prompt, 50)
        usage = streams[name][-1].usage
        assert usage is not None
        assert usage.cached_tokens == 0, "its own pages are not what it found when it came"


# -- what may not be found --------------------------------------------------------------------------------------------


def head_with_nan(at_call: int) -> Callable[..., torch.Tensor]:
    """`Model.head`, whose n-th call from now on gives NaN in its first row."""
    head, calls = pd.Model.head, Counter[str]()

    def damaged(model: pd.Model, state_TD: torch.Tensor) -> torch.Tensor:
        logits_BV = head(model, state_TD)
        calls["head"] += 1
        if calls["head"] == at_call:
            logits_BV[0, 3] = torch.nan
        return logits_BV

    return damaged


@pytest.mark.parametrize("transport", ["shared", "loopback"])
@pytest.mark.parametrize("at_call", [1, 2, 4])
def test_a_request_with_logits_that_are_not_finite_leaves_nothing_to_find(
    monkeypatch: pytest.MonkeyPatch, transport: str, at_call: int
) -> None:
    """The first call is prefill's. Neither what it computed nor what it had found is used again."""
    with split(transport, 4, 4) as setup:
        cost(setup, COMMON)
        with monkeypatch.context() as patch:
            patch.setattr(pd.Model, "head", head_with_nan(at_call))
            seen = cost(setup, (*COMMON, 5))
        assert seen.events[-1].finish_reason is pd.FinishReason.FAILED
        assert "not finite" in str(seen.events[-1].error)
        decode = setup.decodes[0].channel.pool
        assert (decode.num_free, decode.num_cached) == (decode.num_pages, 0)
        before = cost(setup, (*COMMON, 5))
        assert before.num_sent == len(COMMON) + 1
        if at_call == 1:
            assert before.num_computed == len(COMMON) + 1


def test_a_step_that_fails_leaves_nothing_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    with split("loopback", 4, 4) as setup:
        cost(setup, COMMON)
        with monkeypatch.context() as patch:
            patch.setattr(pd.Model, "head", lambda *_: 1 / 0)
            assert cost(setup, COMMON).events[-1].finish_reason is pd.FinishReason.FAILED
        assert all(pool.num_free == pool.num_pages for pool in setup.pools)


@pytest.mark.parametrize("transport", ["shared", "loopback"])
def test_a_prompt_that_was_cancelled_on_its_way_leaves_what_it_found_and_no_more(transport: str) -> None:
    with split(transport, 4, 4) as setup:
        cost(setup, COMMON)
        long = (*COMMON, *prompt_of(40))
        for _ in range(2):
            setup.pairing.submit(request("a", prompt=long))
            for _ in range(2):
                setup.pairing.step()
            assert setup.prefills[0].load().num_queued_tokens in range(1, len(long) - len(COMMON))
            setup.pairing.cancel("a")
            collect(setup.pairing)
            setup.check_idle()
        seen = cost(setup, long)
        assert seen.num_sent == seen.num_computed == len(long) - whole_pages(len(COMMON), 4)


@pytest.mark.parametrize("transport", ["shared", "loopback", "tcp"])
@pytest.mark.parametrize("num_steps", range(7))
def test_a_cancel_at_any_time_lets_go_of_every_page_once(transport: str, num_steps: int) -> None:
    with split(transport, 4, 4) as setup:
        cost(setup, COMMON)
        for name in "ab":
            setup.pairing.submit(request(name, 30, prompt=(*COMMON, *prompt_of(30))))
        for _ in range(num_steps):
            setup.pairing.step()
            setup.check_pools()
        for name in "ab":
            setup.pairing.cancel(name)
            setup.pairing.step()
            setup.check_pools()
        collect(setup.pairing)
        setup.check_idle()
        assert cost(setup, (*COMMON, 3)).num_sent == len(COMMON) + 1 - whole_pages(len(COMMON), 4)


@pytest.mark.parametrize("num_steps", range(1, 5))
def test_a_prefill_lost_on_the_way_costs_another_attempt_and_no_page(tally: Tally, num_steps: int) -> None:
    with split("loopback", 4, 4, 4, num_prefills=2) as setup:
        for _ in range(2):
            cost(setup, COMMON)
        prompt = (*COMMON, *prompt_of(30))
        setup.pairing.submit(request("a", NUM_NEW, prompt=prompt))
        events = [event for _ in range(num_steps) for event in setup.pairing.step()]
        setup.prefills[0].close()
        setup.check_pools()
        setup.pairing.remove(setup.prefills[0], drain_s=0.0)
        events += collect(setup.pairing)
        compare(tally, "a", events, prompt)
        setup.check_idle()


def test_a_prefix_that_is_gone_when_prefill_begins_is_another_attempt(tally: Tally) -> None:
    """In one pool prefill reads the pages that decode did not grant; another of their users may have failed."""
    with local() as setup:
        prompt = (*COMMON, 3)
        cost(setup, COMMON)
        seen = watch(setup.decodes[0])
        hang(setup.prefills[0], takes=False)
        setup.pairing.submit(request("a", NUM_NEW, prompt=prompt))
        assert setup.pairing.step() == []
        (sequence,) = setup.decodes[0].snapshot().granted
        setup.pools[0].forget(sequence.pages)
        recover(setup.prefills[0])
        events = collect(setup.pairing)
        compare(tally, "a", events, prompt)
        starts = [event.grant.tokens.start for event in seen if isinstance(event, pd.Granted)]
        assert starts == [whole_pages(len(COMMON), 4), 0]
        setup.check_idle()


# -- everything at once -----------------------------------------------------------------------------------------------


def make_request(number: int, rng: random.Random) -> pd.Request:
    """One of a few beginnings, often a known one to its end, and any sampling."""
    sampling = pd.SamplingParams(
        temperature=rng.choice([0.0, 0.8]), seed=number, max_new_tokens=rng.choice([1, 3, 12, 30])
    )
    beginning = prompt_of(rng.choice([8, 21, 33, 60]), seed=rng.randrange(3))
    prompt = beginning + prompt_of(rng.choice([0, 0, 1, 6, 20]), seed=rng.randrange(4))
    return pd.Request(
        request_id=str(number), prompt=prompt, sampling=sampling, cache_salt=rng.choice([b"", b"", b"tenant"])
    )


@pytest.fixture(scope="module", params=[40, pytest.param(80, marks=pytest.mark.full)])
def requests(request: pytest.FixtureRequest) -> list[pd.Request]:
    rng = random.Random(3)
    return [make_request(number, rng) for number in range(request.param)]


@pytest.mark.parametrize(
    ("transport", "sizes"),
    [
        ("loopback", (8, 3)),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [("shared", (4, 4)), ("loopback", (4, 4, 4, 4)), ("tcp", (4, 4))]
        ),
    ],
)
def test_under_load_with_pools_too_small_tokens_are_those_without_a_cache(
    requests: list[pd.Request],
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    sizes: tuple[int, ...],
) -> None:
    evicted = Counter[str]()
    evict = PrefixIndex.evict

    def counted(index: PrefixIndex) -> int:
        evicted["pages"] += 1
        return evict(index)

    monkeypatch.setattr(PrefixIndex, "evict", counted)
    rng = random.Random(5)
    waiting, events = list(reversed(requests)), []
    with split(transport, *sizes, num_prefills=len(sizes) // 2, num_tokens=160, policy=pd.policy.least_tokens) as setup:
        while waiting or setup.pairing.num_unfinished:
            for _ in range(min(len(waiting), rng.choice([0, 0, 1, 3]))):
                setup.pairing.submit(waiting.pop())
            if rng.random() < 0.05:
                setup.pairing.cancel(str(rng.randrange(len(requests))))
            events += setup.pairing.step()
            setup.check_pools()
        setup.check_idle()
        found = [engine.load().prefix_hit_tokens for engine in setup.engines]
    streams = by_request(events)
    assert len(streams) == len(requests)
    tally = Tally()
    for asked in requests:
        name = str(asked.request_id)
        last, tokens = streams[name][-1], tokens_of(streams[name])
        assert last.finish_reason is not pd.FinishReason.FAILED, last.error
        if last.finish_reason is not pd.FinishReason.CANCELLED:
            is_end = tokens[-1] in model_of().config.eos_token_ids
            assert is_end or len(tokens) == asked.sampling.max_new_tokens
        if tokens:
            tally.compare(name, streams[name], plain_reference(model_of(), asked, tokens))
    assert evicted["pages"] > len(requests), "the pools were not too small"
    assert min(found) > len(requests), "hardly anything was found"
