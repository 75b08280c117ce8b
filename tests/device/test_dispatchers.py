"""DeepEP's dispatchers on simulated devices, with the stand-in of the library: they launch where their rows are, or say
that they would not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.errors import ConfigError
from pdinfer.moe.dispatchers import deep_ep_elastic
from pdinfer.moe.dispatchers.base import Masked
from pdinfer.moe.dispatchers.deep_ep import DeepEPLowLatency, DeepEPNormal
from pdinfer.moe.dispatchers.deep_ep_elastic import DeepEPElastic
from pdinfer.moe.dispatchers.deep_ep_limits import ExpertSizes
from pdinfer.parallel.groups import Group
from pdinfer.process import streams
from tests.conformance import fake_deep_ep
from tests.conformance.dispatch_suite import OPS, summed
from tests.simulated import order
from tests.simulated.device import DEVICE, OTHER

WIDTH, EXPERTS, TOP_K, ROOM = 2048, 4, 2, 8
SIZES = ExpertSizes(num_ranks=1, num_experts=EXPERTS, hidden_size=WIDTH, top_k=TOP_K, dtype=torch.bfloat16)
MODES: dict[str, Callable[..., Any]] = {
    "normal": lambda device, group: DeepEPNormal.connect(group, SIZES, OPS, device=device),
    "low_latency": lambda device, group: DeepEPLowLatency.connect(group, SIZES, ROOM, device=device),
    "elastic": lambda device, group: DeepEPElastic.connect(group, SIZES, ROOM, device=device),
}


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deep_ep", fake_deep_ep)
    monkeypatch.setattr(fake_deep_ep, "here", lambda: order.DEVICES[order.number_of(None)])
    monkeypatch.setattr(deep_ep_elastic, "timeout_of", lambda *_: timedelta(seconds=7.5))  # a rank alone has none


def routed(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x_TD = torch.arange(3.0)[:, None].expand(3, WIDTH).to(torch.bfloat16).contiguous()
    ids_TK, weights_TK = torch.tensor([[0, 3], [2, 1], [3, 2]]), torch.tensor([[0.5, 0.25], [1.0, 0.5], [0.25, 0.5]])
    return x_TD.to(device), ids_TK.to(device), weights_TK.to(device)


@pytest.mark.parametrize("mode", MODES)
def test_rows_go_to_experts_and_back_on_the_device_of_the_rank(mode: str) -> None:
    """Every expert returns its rows as they are."""
    order.set_device(OTHER)
    dispatcher = MODES[mode](OTHER, Group("ep"))
    x_TD, ids_TK, weights_TK = routed(OTHER)
    dispatched = dispatcher.dispatch_end(dispatcher.dispatch_begin(x_TD, ids_TK, weights_TK))
    y = dispatched.x_END if isinstance(dispatched, Masked) else dispatched.x_SD
    if not isinstance(dispatched, Masked) and dispatched.weights_S is not None:
        y = (y * dispatched.weights_S[:, None]).to(torch.bfloat16)
    returned = dispatcher.combine_end(dispatcher.combine_begin(y, dispatched))
    assert returned.y_SD.device == OTHER
    torch.testing.assert_close(summed(returned).cpu()[:, 0], torch.tensor([0.0, 1.5, 1.5]))


def forth_and_back(dispatcher: Any, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> Any:
    """Experts return their rows, weighted."""
    dispatched = dispatcher.dispatch_end(dispatcher.dispatch_begin(x_TD, ids_TK, weights_TK))
    y = (dispatched.x_SD * dispatched.weights_S[:, None]).to(torch.bfloat16)
    return dispatched, dispatcher.combine_end(dispatcher.combine_begin(y, dispatched)).y_SD


def test_a_captured_step_of_the_second_api_waits_for_nothing() -> None:
    """Its room is that of the worst case, which other steps need not have: they wait for the counts."""
    dispatcher = MODES["elastic"](DEVICE, Group("ep"))
    x_TD, ids_TK, weights_TK = routed(DEVICE)
    ids_TK[2, 1] = -1
    eager, y_TD = forth_and_back(dispatcher, x_TD, ids_TK, weights_TK)
    assert y_TD.cpu()[:, 0].tolist() == [0, 1.5, 0.5]
    assert len(eager.x_SD) == 5
    steps: list[Any] = []
    stream: Any = streams.new_stream(DEVICE)
    graph = streams.capture(lambda: steps.append(forth_and_back(dispatcher, x_TD, ids_TK, weights_TK)), stream)
    ((captured, y_TD),) = steps
    assert len(captured.x_SD) == ROOM * TOP_K
    x_TD.mul_(2)
    ids_TK[0].fill_(-1)
    graph.replay()
    assert y_TD.cpu()[:, 0].tolist() == [0, 3, 1]


def test_a_host_whose_torch_fills_new_memory_keeps_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library refuses it, as the fill may run beside its kernels."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    dispatcher = MODES["elastic"](DEVICE, Group("ep"))
    _, y_TD = forth_and_back(dispatcher, *routed(DEVICE))
    assert y_TD.cpu()[:, 0].tolist() == [0, 1.5, 1.5]
    assert torch.utils.deterministic.fill_uninitialized_memory


@pytest.mark.parametrize(("asked", "given"), [(None, 0), (24, 24)])
def test_the_second_api_takes_the_multiprocessors_that_are_asked_for(asked: int | None, given: int) -> None:
    """0 leaves them to the library."""
    dispatcher = DeepEPElastic.connect(Group("ep"), SIZES, ROOM, asked, device=DEVICE)
    dispatched = dispatcher.dispatch_end(dispatcher.dispatch_begin(*routed(DEVICE)))
    assert dispatched.handle.num_sms == given


def test_the_second_api_waits_for_a_rank_as_long_as_a_collective_does() -> None:
    assert MODES["elastic"](DEVICE, Group("ep")).buffer.timeouts == (8, 8)


@pytest.mark.parametrize("mode", MODES)
def test_buffers_end_with_the_groups_on_their_device(mode: str) -> None:
    """In whatever thread the groups are closed, and once."""
    order.set_device(OTHER)
    groups = pd.Topology().apart()
    dispatcher = MODES[mode](OTHER, groups.ep)
    order.set_device(DEVICE)
    assert len(groups.ep.ends) == 1
    attrs.evolve(groups, world=groups.ep).close()
    assert dispatcher.buffer.is_destroyed
    assert not groups.ep.ends


@pytest.mark.parametrize("mode", MODES)
def test_another_current_device_is_refused(mode: str) -> None:
    told = r"rows are on gpusim:1, and another device is the current one .*: call torch.cuda.set_device\(1\) first"
    with pytest.raises(ConfigError, match=told):
        MODES[mode](OTHER, Group("ep"))
    order.set_device(OTHER)
    dispatcher = MODES[mode](OTHER, Group("ep"))
    order.set_device(DEVICE)
    with pytest.raises(ConfigError, match=told):
        dispatcher.dispatch_begin(*routed(OTHER))
