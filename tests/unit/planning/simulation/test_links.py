"""Transfers share the ends of links max-min, and bytes are neither lost nor made."""

from __future__ import annotations

import math

import pytest

from pdinfer.planning.simulation.links import SimLinks, shares


def test_every_pair_gets_what_its_fullest_end_leaves() -> None:
    assert shares([(0, 0)], 10.0) == {(0, 0): 10.0}
    assert shares([(0, 0), (0, 1)], 10.0) == {(0, 0): 5.0, (0, 1): 5.0}
    # decode 0 hears three prefills; the third of them has nobody else to send to but decode 1
    rates = shares([(0, 0), (1, 0), (2, 0), (2, 1)], 9.0)
    assert rates == pytest.approx({(0, 0): 3.0, (1, 0): 3.0, (2, 0): 3.0, (2, 1): 6.0})


def test_a_transfer_alone_takes_its_bytes_over_the_rate() -> None:
    links = SimLinks(100.0)
    transfer = links.send(0.0, (0, 0), 50.0)
    assert links.next_s() == pytest.approx(0.5)
    assert links.advance(links.next_s()) == [transfer]
    assert transfer.done_s == pytest.approx(0.5)
    assert links.next_s() == math.inf


def test_two_prefills_halve_a_decode_until_one_is_done() -> None:
    links = SimLinks(100.0)
    short, long = links.send(0.0, (0, 0), 50.0), links.send(0.0, (1, 0), 100.0)
    assert links.advance(links.next_s()) == [short]
    assert short.done_s == pytest.approx(1.0)
    assert links.advance(links.next_s()) == [long]
    assert long.done_s == pytest.approx(1.5)


def test_transfers_of_one_pair_follow_each_other() -> None:
    links = SimLinks(100.0)
    first, second = links.send(0.0, (0, 0), 50.0), links.send(0.0, (0, 0), 50.0)
    assert links.backlog[0, 0] == 100.0
    assert links.advance(0.5) == [first]
    assert links.backlog[0, 0] == pytest.approx(50.0)
    assert links.advance(1.0) == [second]
    assert links.sent_bytes == pytest.approx(100.0)
