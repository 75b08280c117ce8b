"""What ranks on simulated devices do in tests (see tests/ranks.py): a rank is a process, on one of its two devices.

Groups of these ranks queue their collectives on the device, as NCCL does: a captured step has them, and meets the other
ranks in each replay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import Tensor

import pdinfer as pd
from pdinfer.execution.runner import ModelRunner
from pdinfer.kernels.formats.activations import Rounded
from pdinfer.kernels.ops import Ops
from pdinfer.model import load
from pdinfer.moe import parallel
from pdinfer.moe.dispatchers.base import Contiguous, LocalDispatcher, Returned
from pdinfer.moe.dispatchers.choose import choose_dispatcher
from pdinfer.parallel.groups import Begun, Group, Groups
from pdinfer.process import memory
from tests.e2e import rank_worlds, rebalance_jobs
from tests.simulated import order
from tests.simulated.device import set_up
from tests.simulated.watch import Watch

ROOM = 48
"""Tokens that a rank may bring to one step."""

LIBRARY = torch.library.Library("simulated", "DEF")
LIBRARY.define("gather_ranks(Tensor x, int group) -> Tensor")
LIBRARY.define("send_rows(Tensor x, int[] sent, int[] received, int group) -> Tensor")
LIBRARY.define("trade(Tensor[] sent, int[] to, Tensor[] wanted, int[] sources, int group) -> Tensor[]")
GROUPS: list[Group] = []
"""The groups of this process over gloo, by the number that the ops take."""


def gather_ranks(x: Tensor, group: int) -> Tensor:
    return GROUPS[group].all_gather(x.contiguous())


def send_rows(x: Tensor, sent: list[int], received: list[int], group: int) -> Tensor:
    return GROUPS[group].all_to_all(x, sent, received)


def trade(sent: list[Tensor], to: list[int], wanted: list[Tensor], sources: list[int], group: int) -> list[Tensor]:
    came = [torch.empty_like(x) for x in wanted]
    GROUPS[group].exchange([*zip(to, sent, strict=True)], [*zip(sources, came, strict=True)])
    return came


for op in (gather_ranks, send_rows, trade):
    LIBRARY.impl(op.__name__, op, "CPU")


@attrs.frozen(eq=False)
class QueuedGroup(Group):
    """A group whose collectives of device tensors are ops on the stream. Those of host tensors go over gloo."""

    number: int = attrs.field(kw_only=True)

    @classmethod
    def of(cls, group: Group) -> Group:
        """Return the same group; itself where a rank is alone."""
        if group.process_group is None:
            return group
        GROUPS.append(group)
        fields = {field.name: getattr(group, field.name) for field in attrs.fields(Group)}
        return cls(**fields, number=len(GROUPS) - 1)

    def graph_safe(self, device: torch.device) -> bool:
        return device.type != "cpu"

    def all_gather(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            return super().all_gather(x)
        gathered: Tensor = torch.ops.simulated.gather_ranks(x, self.number)
        return gathered

    def all_reduce(self, x: Tensor) -> Tensor:
        return super().all_reduce(x) if x.device.type == "cpu" else x.copy_(self.all_gather(x[None]).sum(0))

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        return super().broadcast(x, source) if x.device.type == "cpu" else x.copy_(self.all_gather(x[None])[source])

    def all_to_all_begin(self, x: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Begun:
        if x.device.type == "cpu":
            return super().all_to_all_begin(x, send_counts, receive_counts)
        received = torch.ops.simulated.send_rows(x, send_counts, receive_counts, self.number)
        return Begun(self, "all_to_all", None, x, received)

    def exchange(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        if not (sends or receives):
            return
        to, sent = [[each[at] for each in sends] for at in range(2)]
        sources, wanted = [[each[at] for each in receives] for at in range(2)]
        for x, came in zip(wanted, torch.ops.simulated.trade(sent, to, wanted, sources, self.number), strict=True):
            x.copy_(came)


@attrs.frozen(kw_only=True)
class _Everybodys(Contiguous):
    row_AK: Tensor
    weights_AK: Tensor
    num_tokens: int


@attrs.frozen
class RoomDispatcher:
    """A dispatcher with room for as many tokens of each rank, so that it never waits for the device: every rank gets
    the tokens of all, and runs those that have experts here."""

    group: Group
    experts_per_rank: int
    ops: Ops
    max_live: ClassVar[int | None] = None
    max_tokens: ClassVar[int | None] = ROOM
    graph_safe: ClassVar[bool] = True

    def dispatch_begin(self, x_TD: Tensor | Rounded, ids_TK: Tensor, weights_TK: Tensor) -> _Everybodys:
        x_TD = x_TD.floats_TI if isinstance(x_TD, Rounded) else x_TD
        x_AD, ids_AK, weights_AK = (self._gathered(x, fill) for x, fill in ((x_TD, 0), (ids_TK, -1), (weights_TK, 0)))
        here_AK = ids_AK - self.group.rank * self.experts_per_rank
        here_AK = here_AK.where((here_AK >= 0) & (here_AK < self.experts_per_rank), -1)
        x_SD, counts_E, row_AK = self.ops.sort_rows(x_AD, here_AK, self.experts_per_rank)
        return _Everybodys(x_SD=x_SD, counts_E=counts_E, row_AK=row_AK, weights_AK=weights_AK, num_tokens=len(x_TD))

    def _gathered(self, x: Tensor, fill: int) -> Tensor:
        room = x.new_full((ROOM, *x.shape[1:]), fill)
        room[: len(x)].copy_(x)
        return self.group.all_gather(room)

    def dispatch_end(self, pending: _Everybodys) -> _Everybodys:
        return pending

    def combine_begin(self, y: Tensor, dispatched: _Everybodys) -> Returned:
        sum_AD = self.ops.combine_rows(y, dispatched.row_AK, dispatched.weights_AK)
        first = self.group.rank * ROOM
        return Returned(self.group.all_reduce(sum_AD)[first : first + dispatched.num_tokens].to(y.dtype))

    def combine_end(self, pending: Returned) -> Returned:
        return pending


def choose(group: Group, sizes: Any, options: Any, ops: Ops, device: torch.device) -> Any:
    """Stands in for `choose_dispatcher`, unless that of the collectives is asked for."""
    if group.size == 1:
        return LocalDispatcher(sizes.num_experts, ops)
    if options.moe_a2a_backend == "all_to_all":
        return choose_dispatcher(group, sizes, options, ops, device)
    return RoomDispatcher(group, sizes.experts_per_rank, ops)


class QueuedTopology(rank_worlds.NotedTopology):
    """Its groups queue their collectives, which gloo carries."""

    def connect(self, device: Any, **named: Any) -> Groups:
        groups = super().connect("cpu", **named)
        return attrs.evolve(groups, **{name: QueuedGroup.of(getattr(groups, name)) for name in rank_worlds.NAMES})


@attrs.define
class Seen:
    """The steps of decode on this rank: of how many rows, and how many launches each took; and the tokens that rows
    got in those that drew any here, without their order."""

    steps: list[tuple[int, int]] = attrs.field(factory=list)
    tokens: list[list[list[int]]] = attrs.field(factory=list)

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        """Note the steps of all runners."""
        for name in ("decode", "forward"):
            run = getattr(ModelRunner, name)

            def watched(runner: ModelRunner, rows: Any, *more: Any, run: Any = run, **named: Any) -> Any:
                with Watch() as watch:
                    result = run(runner, rows, *more, **named)
                self.steps.append((len(rows), watch.totals()["launches"]))
                if result is not None:
                    self.tokens.append(sorted([new.token for new in drawn] for drawn in result))
                return result

            patch.setattr(ModelRunner, name, watched)

    def make(self, checkpoint: str, topology: pd.Topology, channel_at: Path, role: str, **config: Any) -> Any:
        """Make an engine on a device of its own, and warm up decode's."""
        device = str(order.DEVICES[topology.rank % len(order.DEVICES)])
        engine = make_engine(checkpoint, topology, channel_at, role, **config, device=device, warm_up=True)
        self.steps.clear()
        self.tokens.clear()
        return engine


make_engine = rank_worlds.make_engine


def serve_rank(*arguments: Any) -> dict[str, Any]:
    """Serve as `rank_worlds.serve_rank` does. Return also the steps, and what was out of order."""
    seen = Seen()
    with on_devices(seen):
        told = rank_worlds.serve_rank(*arguments)
    return told | {"steps": seen.steps, "tokens": seen.tokens, "faults": [*order.faults()]}


def rebalance(*arguments: Any) -> dict[str, Any]:
    """Serve as `rebalance_jobs.serve_rank` does. Return also what was out of order."""
    with on_devices(Seen()):
        told = rebalance_jobs.serve_rank(*arguments)
    return told | {"faults": [*order.faults()]}


def logits_after_moves(*arguments: Any, **named: Any) -> list[list[float]]:
    """Do what `rebalance_jobs.logits_after_moves` does, and fail for what was out of order."""
    with on_devices(Seen()):
        logits = rebalance_jobs.logits_after_moves(*arguments, **named)
    assert not order.faults()
    return logits


@contextmanager
def on_devices(seen: Seen) -> Iterator[None]:
    """Let engines run on simulated devices, one for each rank, until the context ends."""
    set_up()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_page_locked", order.page_locked)
        patch.setattr(load, "_checked_device", torch.device)
        patch.setattr(parallel, "choose_dispatcher", choose)
        patch.setattr(rank_worlds, "NotedTopology", QueuedTopology)
        patch.setattr(rank_worlds, "make_engine", seen.make)
        seen.watch(patch)
        yield


def graph_safe() -> list[bool]:
    """Return what is said of the collectives of two ranks that share a batch, over gloo, by kind of device; and of
    their expert groups, in which each is alone."""
    groups = pd.Topology.from_env(tp_size=2, ep_size=1).connect()
    return [group.graph_safe(torch.device(kind)) for group in (groups.attention, groups.ep) for kind in ("cpu", "cuda")]
