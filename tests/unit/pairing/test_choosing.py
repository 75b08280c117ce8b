"""What a policy is shown of requests that the engines do not know of yet."""

from __future__ import annotations

from collections import Counter

import attrs
import pytest

import pdinfer as pd
from pdinfer.pairing import policy
from pdinfer.pairing.choosing import Board, Chooser, FoundTokens, OfPolicy
from pdinfer.pairing.ports import Ports
from pdinfer.pairing.request import TrackedRequest
from pdinfer.stats import DecodeLoad, PeerStats, PrefillLoad
from pdinfer.types import Choice, RequestShape
from tests.unit.pairing.test_found import Cache, scheme
from tests.unit.pairing.test_ports import DECODES, PREFILLS, FakePort, linked_fakes, ports_of

TOKEN_BYTES = 100


@attrs.define(eq=False)
class CachingFake(FakePort):
    """A port that also holds pages, has room for many tokens, and counts how often it is asked for all of its load."""

    cache: Cache = attrs.field(factory=lambda: Cache(PREFILLS[0], scheme()))
    key_scheme = property(lambda self: self.cache.key_scheme)
    limits = attrs.evolve(FakePort.limits, max_tokens=10_000)

    def count_known(self, keys: list[bytes]) -> int:
        return self.cache.count_known(keys)

    def peers(self) -> tuple[PeerStats, ...]:
        return self.load().kv.peers

    def brief_load(self) -> PrefillLoad | DecodeLoad:
        self.num_loads -= 1  # this one is brief
        return attrs.evolve(self.load(), num_total_pages=1000, token_bytes=TOKEN_BYTES)  # type: ignore[return-value]


def caching_ports(held: int = 0) -> Ports:
    """Return three ports of each side, of which the first prefill holds this many tokens of `PROMPT`."""
    fakes = {
        address: CachingFake(address, fake.links, cache=Cache(address, scheme()))
        for address, fake in linked_fakes().items()
    }
    fakes[PREFILLS[0]].cache.hold(PROMPT[:held])
    return ports_of(fakes)


PROMPT = tuple(range(100))


def tracked(name: str, prompt: tuple[int, ...] = PROMPT) -> TrackedRequest:
    request = pd.Request(request_id=name, prompt=prompt, sampling=pd.SamplingParams(max_new_tokens=1, seed=0))
    return TrackedRequest.of(request, 0.0, None, bytes)


def test_a_port_that_left_is_not_asked_what_it_holds() -> None:
    ports = caching_ports()
    assert set(FoundTokens(tracked("a").keys, *ports.caching)) == {*PREFILLS, *DECODES}
    ports.drop(PREFILLS[1])
    ports.drop(DECODES[0])
    assert set(FoundTokens(tracked("a").keys, *ports.caching)) == {PREFILLS[0], PREFILLS[2], *DECODES[1:]}


class Watching:
    """The policy `least_tokens`, or one that takes the first pair; it keeps what it is shown."""

    def __init__(self, *, first: bool = False) -> None:
        self.first = first
        self.shape = RequestShape(ordinal=0, num_prompt_tokens=0, num_output_tokens=0, max_new_tokens=0)
        self.prefills: dict[int, PrefillLoad] = {}
        self.decodes: dict[int, DecodeLoad] = {}

    def __call__(self, shape: RequestShape, prefills: list[PrefillLoad], decodes: list[DecodeLoad]) -> Choice | None:
        self.shape = shape
        self.prefills = {load.address.rank: load for load in prefills}
        self.decodes = {load.address.rank: load for load in decodes}
        if self.first:
            return Choice(prefill=PREFILLS[0], decode=DECODES[0])
        return policy.least_tokens(shape, prefills, decodes)

    def backlog(self) -> int:
        return sum(link.backlog_bytes for link in self.shape.links)


def send(chooser: Chooser, one: TrackedRequest, board: Board) -> Choice:
    choice = chooser.choose(one, board)
    assert choice is not None
    one.chosen(choice, 0.0)
    return choice


def test_a_burst_is_spread_over_both_sides() -> None:
    requests = {str(number): tracked(str(number)) for number in range(12)}
    chooser = Chooser(caching_ports(), Watching(), 100)
    board = chooser.board(requests)
    choices = [send(chooser, one, board) for one in requests.values()]
    for address in ("prefill", "decode"):
        assert set(Counter(getattr(choice, address) for choice in choices).values()) == {4}


def test_what_was_chosen_is_in_the_next_loads_until_the_engines_know_it() -> None:
    """A prompt of 100 tokens, of which the prefill holds 40: 60 to compute, and all of it crosses the link."""
    watching = Watching(first=True)
    requests = {name: tracked(name) for name in "ab"}
    chooser = Chooser(caching_ports(held=40), watching, 100)
    board = chooser.board(requests)
    send(chooser, requests["a"], board)
    assert watching.shape.found_tokens.get(PREFILLS[0], 0) == 40
    assert (watching.prefills[0].num_queued_requests, watching.backlog()) == (0, 0)
    chooser.choose(requests["b"], board)
    assert watching.decodes[0].num_waiting_requests == 1  # on the same board; later the decode itself tells of it
    for _ in range(2):  # on the same board, and on one that was made later
        shown = watching.prefills[0]
        assert (shown.num_queued_requests, shown.num_queued_tokens) == (1, 100)
        assert sum(shown.queued.num_tokens) == 60
        assert watching.backlog() == 100 * TOKEN_BYTES
        del chooser._coming[requests["b"]]
        chooser.choose(requests["b"], chooser.board(requests))
    del chooser._coming[requests["b"]]
    requests["a"].attempt.forwarded = True  # prefill knows it, and the link still has its bytes to carry
    chooser.choose(requests["b"], chooser.board(requests))
    assert (watching.prefills[0].num_queued_requests, watching.backlog()) == (0, 100 * TOKEN_BYTES)
    del chooser._coming[requests["b"]]
    requests["a"].attempt.landed = True
    chooser.choose(requests["b"], chooser.board(requests))
    assert (watching.prefills[0].num_queued_requests, watching.backlog()) == (0, 0)


def test_requests_that_ended_are_forgotten() -> None:
    watching = Watching(first=True)
    requests = {name: tracked(name) for name in "ab"}
    chooser = Chooser(caching_ports(), watching, 100)
    send(chooser, requests["a"], chooser.board(requests))
    del requests["a"]
    chooser.choose(requests["b"], chooser.board(requests))
    assert (watching.prefills[0].num_queued_requests, watching.backlog()) == (0, 0)


def test_a_decode_is_not_shown_once_its_line_is_full() -> None:
    watching = Watching(first=True)
    requests = {name: tracked(name) for name in "abc"}
    chooser = Chooser(caching_ports(), watching, 2)
    board = chooser.board(requests)
    for name in "ab":
        send(chooser, requests[name], board)
    with pytest.raises(OfPolicy, match="is full"):
        chooser.choose(requests["c"], board)
    assert set(watching.decodes) == {1, 2}
    assert {link.decode for link in watching.shape.links} == set(DECODES[1:])


def test_no_decision_asks_for_all_of_a_load() -> None:
    ports = caching_ports()
    ports.links()
    before = [port.num_loads for port in ports.all]  # type: ignore[attr-defined]
    chooser = Chooser(ports, policy.traffic_aware, 100)
    requests = {str(number): tracked(str(number)) for number in range(5)}
    for one in requests.values():
        send(chooser, one, chooser.board(requests))
    assert [port.num_loads for port in ports.all] == before  # type: ignore[attr-defined]
