"""Which pairs may be chosen when some links are down, and what a policy is shown of the links that are up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer.pairing import policy
from pdinfer.pairing.choosing import Board, choose
from pdinfer.pairing.ports import Ports
from pdinfer.stats import ChannelStats, DecodeLoad, EngineLoad, PeerStats, PrefillLoad
from pdinfer.types import Choice, PeerAddress, RequestLimits, RequestShape

PREFILLS = [PeerAddress(b"p" * 16, 1, rank) for rank in range(3)]
DECODES = [PeerAddress(b"d" * 16, 1, rank) for rank in range(3)]
PAIRS = list(product(PREFILLS, DECODES))
COMMON: dict[str, Any] = {
    "num_free_pages": 8,
    "num_total_pages": 8,
    "page_size": 4,
    "num_tokens": 0,
    "busy_s": 0.0,
    "transport": "",
    "providers": (),
}


@attrs.define(eq=False)
class FakePort:
    """A port whose channel reports the links that a test puts into `links`, with the speeds in `mb_per_s`."""

    address: PeerAddress
    links: dict[PeerAddress, bool]

    limits = RequestLimits(name="", vocab_size=97, max_tokens=32)
    mb_per_s: dict[PeerAddress, float] = attrs.field(factory=dict)
    num_loads: int = 0

    @property
    def role(self) -> str:
        return "prefill" if self.address in PREFILLS else "decode"

    @property
    def addresses(self) -> tuple[PeerAddress, ...]:
        return (self.address,)

    def load(self) -> EngineLoad:
        self.num_loads += 1
        speeds = self.mb_per_s
        peers = [PeerStats(address=at, connected=on, mb_per_s=speeds.get(at, 0.0)) for at, on in self.links.items()]
        kv = ChannelStats(peers=tuple(peers))
        if self.role == "prefill":
            return PrefillLoad(
                address=self.address, kv=kv, num_queued_requests=0, num_queued_tokens=0, unsent_bytes=0, **COMMON
            )
        zeros = dict.fromkeys(
            ["num_waiting_requests", "num_waiting_tokens", "num_granted_requests", "num_running_requests"], 0
        )
        return DecodeLoad(address=self.address, kv=kv, num_running_tokens=0, **zeros, **COMMON)


def ports_of(fakes: dict[PeerAddress, FakePort]) -> Ports:
    ports = Ports()
    for port in fakes.values():
        ports.add(port)  # type: ignore[arg-type]
    ports.look()
    return ports


@attrs.define(eq=False)
class LinkedFake(FakePort):
    """A port that tells of its links alone."""

    brief_load = FakePort.load

    def peers(self) -> tuple[PeerStats, ...]:
        return tuple(PeerStats(address=at, connected=on) for at, on in self.links.items())


def test_a_look_asks_a_port_for_its_links_alone() -> None:
    fakes: dict[PeerAddress, FakePort] = {
        PREFILLS[0]: LinkedFake(PREFILLS[0], {DECODES[0]: True}),
        DECODES[0]: LinkedFake(DECODES[0], {PREFILLS[0]: True}),
    }
    ports = ports_of(fakes)
    assert ports.linked(PREFILLS[0], DECODES[0])
    fakes[DECODES[0]].links[PREFILLS[0]] = False
    ports.look()
    assert not ports.linked(PREFILLS[0], DECODES[0])
    assert [*ports.links()] == []
    assert [port.num_loads for port in fakes.values()] == [0, 0]


@attrs.define(eq=False)
class SizedFake(FakePort):
    """A port with limits of its own."""

    limits: RequestLimits = attrs.field(kw_only=True)


def test_limits_are_those_of_the_roomiest_port_of_each_side() -> None:
    small, large = (
        SizedFake(address, {}, limits=attrs.evolve(FakePort.limits, max_tokens=tokens, logits_processors=(name,)))
        for address, tokens, name in zip(PREFILLS, (32, 64), "ba", strict=False)
    )
    ports = ports_of({})
    assert ports.roomiest_limits == []
    for port in (FakePort(DECODES[0], {}), small, large):
        ports.add(port)  # type: ignore[arg-type]
    assert ports.roomiest_limits == [attrs.evolve(large.limits, logits_processors=("a", "b")), FakePort.limits]
    ports.drop(large.address)
    assert ports.roomiest_limits == [small.limits, FakePort.limits]


def linked_fakes() -> dict[PeerAddress, FakePort]:
    """Return three ports of each side, all connected."""
    prefills = {address: FakePort(address, dict.fromkeys(DECODES, True)) for address in PREFILLS}
    return prefills | {address: FakePort(address, dict.fromkeys(PREFILLS, True)) for address in DECODES}


def shape(ordinal: int = 0) -> RequestShape:
    return RequestShape(ordinal=ordinal, num_prompt_tokens=9, num_output_tokens=0, max_new_tokens=5)


@pytest.mark.parametrize("chosen_by", [policy.round_robin, policy.least_tokens])
@given(st.sets(st.sampled_from(PAIRS)), st.integers(0, 20), st.booleans())
def test_a_pair_that_reaches_each_other_is_chosen_if_there_is_one(
    chosen_by: policy.Policy, down: set[tuple[PeerAddress, PeerAddress]], ordinal: int, told_by_prefill: bool
) -> None:
    fakes = linked_fakes()
    ports = ports_of(fakes)
    assert ports.links_down == frozenset()
    for prefill, decode in down:  # one side notices first
        if told_by_prefill:
            fakes[prefill].links[decode] = False
        else:
            fakes[decode].links[prefill] = False
    ports.look()
    assert ports.links_down == down
    choice = choose(Board(ports, max_queued_per_decode=1), chosen_by, shape(ordinal))
    if len(down) == len(PAIRS):
        assert choice is None
    else:
        assert choice is not None
        assert (choice.prefill, choice.decode) in set(PAIRS) - down
    for decode in DECODES:
        near = [prefill for prefill in PREFILLS if (prefill, decode) not in down]
        choice = choose(Board(ports), chosen_by, shape(ordinal), decode=decode)
        assert (choice.prefill in near) if choice is not None else not near


def test_what_was_never_told_of_is_not_down_and_what_comes_back_is_up() -> None:
    """Cover a load from before the link was opened, a channel that reports no links, and one that forgets a lost
    peer."""
    fakes = linked_fakes()
    for port in fakes.values():
        port.links = {}
    ports = ports_of(fakes)
    assert (ports.links_down, ports.has_links) == (frozenset(), False)
    fakes[DECODES[0]].links = {PREFILLS[0]: True}
    ports.look()
    assert (ports.links_down, ports.has_links) == (frozenset(), True)
    for gone in ({}, {PREFILLS[0]: False}):
        changes = ports.num_changes
        fakes[DECODES[0]].links = gone
        for _ in range(2):
            ports.look()
            assert ports.links_down == {(PREFILLS[0], DECODES[0])}
            assert ports.num_changes == changes + 1
        fakes[DECODES[0]].links = {PREFILLS[0]: True}
        ports.look()
        assert ports.links_down == frozenset()
        assert ports.num_changes == changes + 2


def test_a_port_that_leaves_takes_its_links_along() -> None:
    fakes = linked_fakes()
    ports = ports_of(fakes)
    fakes[DECODES[0]].links[PREFILLS[0]] = False
    ports.look()
    ports.drop(DECODES[0])
    assert ports.links_down == frozenset()
    ports.look()
    assert ports.links_down == frozenset()
    assert not ports.linked(PREFILLS[0], DECODES[0])


def test_a_policy_that_insists_on_a_pair_without_a_link_is_told_so() -> None:
    fakes = linked_fakes()
    ports = ports_of(fakes)
    fakes[DECODES[0]].links[PREFILLS[0]] = False
    ports.look()

    def stubborn(*_: object) -> Choice:
        return Choice(prefill=PREFILLS[0], decode=DECODES[0])

    with pytest.raises(pd.ConfigError, match="out of the other's reach"):
        choose(Board(ports, max_queued_per_decode=1), stubborn, shape())


def fastest_link(shape: RequestShape, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]) -> Choice | None:
    """Score pairs jointly, as no policy can that chooses each side by itself."""
    link = max(shape.links, key=lambda link: link.bytes_per_s or 0.0, default=None)
    return None if link is None else Choice(prefill=link.prefill, decode=link.decode)


@given(st.dictionaries(st.sampled_from(PAIRS), st.integers(1, 1000), min_size=1), st.sets(st.sampled_from(PAIRS)))
def test_a_policy_gets_every_link_with_its_speed_and_is_asked_once(
    speeds: dict[tuple[PeerAddress, PeerAddress], int], down: set[tuple[PeerAddress, PeerAddress]]
) -> None:
    fakes = linked_fakes()
    for (prefill, decode), speed in speeds.items():
        fakes[decode].mb_per_s[prefill] = speed
    ports = ports_of(fakes)
    for prefill, decode in down:
        fakes[prefill].links[decode] = False
    ports.look()
    asked: list[RequestShape] = []

    def watched(shape: RequestShape, *loads: Any) -> Choice | None:
        asked.append(shape)
        return fastest_link(shape, *loads)

    choice = choose(Board(ports, max_queued_per_decode=1), watched, shape())
    up = set(PAIRS) - down
    (seen,) = asked
    assert {(link.prefill, link.decode) for link in seen.links} == up
    for link in seen.links:
        speed_known = speeds.get((link.prefill, link.decode))
        assert link.bytes_per_s == (None if speed_known is None else speed_known * 1e6)
    if not up:
        assert choice is None
        return
    assert choice is not None
    assert speeds.get((choice.prefill, choice.decode), 0) == max(speeds.get(pair, 0) for pair in up)


def test_links_are_told_anew_when_a_port_joins_or_leaves_and_only_between_ports_that_are_shown() -> None:
    fakes = linked_fakes()
    ports = ports_of(fakes)
    assert len(ports.links()) == len(PAIRS)
    ports.drop(DECODES[2])
    assert {link.decode for link in ports.links()} == set(DECODES[:2])
    ports.add(fakes[DECODES[2]])  # type: ignore[arg-type]
    ports.leaving.add(PREFILLS[0])
    seen: list[RequestShape] = []
    choose(Board(ports), lambda shape, *_: seen.append(shape), shape(), decode=DECODES[2])
    assert {(link.prefill, link.decode) for link in seen[0].links} == {(one, DECODES[2]) for one in PREFILLS[1:]}


def test_a_port_is_asked_once_per_look() -> None:
    fakes = linked_fakes()
    ports = ports_of(fakes)
    assert ports.links()
    ports.leaving.add(PREFILLS[0])
    assert ports.links()
    assert {port.num_loads for port in fakes.values()} == {1}


def test_a_link_of_a_port_with_several_ranks_has_the_speed_of_all_of_them_together() -> None:
    fakes = linked_fakes()
    ports = Ports()
    fakes[DECODES[0]].mb_per_s = {PREFILLS[0]: 2.0, PREFILLS[1]: 3.0}

    class Group(FakePort):
        addresses = tuple(PREFILLS[:2])

    ports.add(Group(PREFILLS[0], {}))  # type: ignore[arg-type]
    ports.add(fakes[DECODES[0]])  # type: ignore[arg-type]
    (link,) = ports.links()
    assert link.bytes_per_s == 5e6
