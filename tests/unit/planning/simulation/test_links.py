"""Transfers share the ends of links max-min, and bytes are neither lost nor made."""

from __future__ import annotations

import pytest

from pdinfer.planning.simulation.deployment import Network
from pdinfer.planning.simulation.links import SimLinks, shares
from pdinfer.planning.simulation.world import World


def test_every_pair_gets_what_its_fullest_end_leaves() -> None:
    assert shares([(0, 0)], 10.0) == {(0, 0): 10.0}
    assert shares([(0, 0), (0, 1)], 10.0) == {(0, 0): 5.0, (0, 1): 5.0}
    # decode 0 hears three prefills; the third of them has nobody else to send to but decode 1
    rates = shares([(0, 0), (1, 0), (2, 0), (2, 1)], 9.0)
    assert rates == pytest.approx({(0, 0): 3.0, (1, 0): 3.0, (2, 0): 3.0, (2, 1): 6.0})


def landings(*sent: tuple[float, tuple[int, int], int]) -> dict[int, float]:
    """Push tokens of a byte each at these times over links of 100 bytes/s, and return when each push had landed."""
    world, landed_s = World(), dict[int, float]()
    links = SimLinks(Network(bytes_per_s=100.0, token_bytes=1), world, lambda: None)

    def push(at: int, pair: tuple[int, int], num_tokens: int) -> None:
        links.land(links.push(pair, num_tokens), 0, lambda: landed_s.update({at: world.now_s}))

    for at, (at_s, pair, num_tokens) in enumerate(sent):
        world.at(at_s, push, at, pair, num_tokens)
    world.run()
    assert not any(links.backlog.values())
    assert links.pushed_tokens == sum(num_tokens for _, _, num_tokens in sent)
    return landed_s


def test_a_transfer_alone_takes_its_bytes_over_the_rate() -> None:
    assert landings((0.0, (0, 0), 50)) == {0: pytest.approx(0.5)}


def test_two_prefills_halve_a_decode_until_one_is_done() -> None:
    assert landings((0.0, (0, 0), 50), (0.0, (1, 0), 100)) == {0: pytest.approx(1.0), 1: pytest.approx(1.5)}


def test_transfers_of_one_pair_follow_each_other() -> None:
    assert landings((0.0, (0, 0), 50), (0.0, (0, 0), 50)) == {0: pytest.approx(0.5), 1: pytest.approx(1.0)}
