"""Channels over a simulated network: the outcomes that depend on which end sees a link first."""

from __future__ import annotations

import pytest

from pdinfer.config import CacheConfig
from pdinfer.errors import TransferError
from pdinfer.kv.pool import PagePool
from pdinfer.testing import SimChannel, SimNetwork, Simulation
from pdinfer.types import HandoffStatus
from tests.sim.fakes import FakeModel
from tests.unit.kv.channel.channels import granted


def test_a_request_that_comes_before_its_link_is_answered_when_the_link_is_there():
    simulation = Simulation()
    network = SimNetwork(simulation)
    prefill, decode = (
        SimChannel(PagePool(FakeModel(), CacheConfig(page_size=4, num_pages=4)), network, node)
        for node in ("prefill", "decode")
    )
    prefill.connect(decode.address, timeout_s=0)
    assert simulation.run(lambda: decode.connected(prefill.address), timeout_s=1)
    assert not prefill.connected(decode.address)
    grant = granted(decode, prefill.address, tokens=range(8))
    with pytest.raises(TransferError, match="not connected"):
        prefill.accept(grant)
    assert simulation.run(lambda: decode.has_news, timeout_s=1)
    (word,) = decode.poll()
    assert word.status is HandoffStatus.ABORTED
    assert "turned its request away" in str(word.error)
