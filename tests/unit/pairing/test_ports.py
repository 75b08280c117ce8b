"""Which pairs may be chosen when some have lost each other: for every policy, one that reaches, if there is one."""

from __future__ import annotations

from itertools import product
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer.pairing import policy
from pdinfer.pairing.ports import PendingLoad, Ports
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
    """A port that says what the test wants of its links; `links` holds what its channel would tell."""

    address: PeerAddress
    links: dict[PeerAddress, bool]

    limits = RequestLimits(name="", vocab_size=97, max_tokens=32)

    def load(self) -> EngineLoad:
        kv = ChannelStats(peers=tuple(PeerStats(address=at, connected=on) for at, on in self.links.items()))
        if self.address in PREFILLS:
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


def linked_fakes() -> dict[PeerAddress, FakePort]:
    """Three of each, all connected."""
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
    for prefill, decode in down:  # one side knows first
        if told_by_prefill:
            fakes[prefill].links[decode] = False
        else:
            fakes[decode].links[prefill] = False
    ports.look()
    assert ports.links_down == down
    choice = ports.choose(chosen_by, shape(ordinal), PendingLoad(), max_queued_per_decode=1)
    if len(down) == len(PAIRS):
        assert choice is None
    else:
        assert choice is not None
        assert (choice.prefill, choice.decode) in set(PAIRS) - down
    for decode in DECODES:
        near = [prefill for prefill in PREFILLS if (prefill, decode) not in down]
        choice = ports.choose(chosen_by, shape(ordinal), PendingLoad(), decode=decode)
        assert (choice.prefill in near) if choice is not None else not near


def test_what_was_never_told_of_is_not_down_and_what_comes_back_is_up() -> None:
    """A load from before the link was opened, a channel that tells of no links, and one that forgets a lost peer."""
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
        ports.choose(stubborn, shape(), PendingLoad(), max_queued_per_decode=1)
