"""A host gets the dispatcher that it asks for, or a sentence why not."""

from __future__ import annotations

import sys

import pytest
import torch

from pdinfer.config import ExpertConfig
from pdinfer.errors import BackendUnavailable, ConfigError
from pdinfer.moe.dispatchers.all_to_all import AllToAllDispatcher, Int8AllToAllDispatcher
from pdinfer.moe.dispatchers.base import LocalDispatcher, TokenDispatcher
from pdinfer.moe.dispatchers.choose import choose_dispatcher
from pdinfer.moe.dispatchers.deep_ep_limits import ExpertSizes
from pdinfer.parallel.groups import Group
from tests.conformance.dispatch_suite import OPS

ONE, TWO = Group("ep"), Group("ep", (0, 1), 1)


def chosen(group: Group, device: str = "cpu", **options: object) -> TokenDispatcher:
    sizes = ExpertSizes(num_ranks=group.size, num_experts=8, hidden_size=2048, top_k=2, dtype=torch.bfloat16)
    return choose_dispatcher(group, sizes, ExpertConfig(**options), OPS, torch.device(device))


@pytest.mark.parametrize(
    ("group", "backend", "expected"),
    [
        (ONE, "auto", LocalDispatcher),
        (ONE, "local", LocalDispatcher),
        (ONE, "all_to_all", AllToAllDispatcher),
        (ONE, "all_to_all_int8", Int8AllToAllDispatcher),
        (TWO, "auto", AllToAllDispatcher),
        (TWO, "all_to_all_int8", Int8AllToAllDispatcher),
    ],
)
def test_it_is_the_one_asked_for(group: Group, backend: str, expected: type) -> None:
    dispatcher = chosen(group, moe_a2a_backend=backend)
    assert isinstance(dispatcher, expected)
    carrier = dispatcher.carrier if isinstance(dispatcher, Int8AllToAllDispatcher) else dispatcher
    if isinstance(carrier, AllToAllDispatcher):
        assert carrier.experts_per_rank == 8 // group.size


@pytest.mark.parametrize("mode", ["normal", "low_latency", "elastic"])
def test_what_cannot_be_had_is_a_sentence(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", None)
    with pytest.raises(ConfigError, match='"local" is for one rank and experts are spread over 2; leave it "auto"'):
        chosen(TWO, moe_a2a_backend="local")
    with pytest.raises(BackendUnavailable, match='"deep_ep" carries rows between GPUs, the device is cpu; use'):
        chosen(TWO, moe_a2a_backend="deep_ep", deepep_mode=mode)
    with pytest.raises(BackendUnavailable, match=r'deep_ep cannot be imported .*moe_a2a_backend="all_to_all"'):
        chosen(TWO, "cuda", moe_a2a_backend="deep_ep", deepep_mode=mode)
