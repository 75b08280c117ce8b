"""Whoever waits for other ranks looks meanwhile whether they live."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pdinfer.errors import RankLost
from pdinfer.parallel.groups import Group, Lookout
from tests.forks import FAR_S


class Work:
    """A collective that ends in its wait of number `ends`, with an `error` or without; its waits take no time."""

    def __init__(self, ends: int, error: str = "") -> None:
        self.left = ends
        self.error = error
        self.slices: list[timedelta | None] = []

    def is_completed(self) -> bool:
        return self.left <= 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self.slices.append(timeout)
        self.left -= 1
        if self.left <= 0 and self.error:
            raise RuntimeError(self.error)
        if self.left > 0 and timeout is not None:
            raise RuntimeError("Operation timed out!")


class Look:
    """Counts looks, and raises RankLost at number `lost`."""

    def __init__(self, lost: int = -1) -> None:
        self.lost = lost
        self.count = 0

    def __call__(self) -> None:
        self.count += 1
        if self.count == self.lost:
            raise RankLost("rank 1 is silent")


def waited(work: Work, look: Look | None) -> Work:
    Lookout(look).wait(work)  # type: ignore[arg-type]
    return work


def test_a_wait_is_in_slices_until_the_collective_has_ended() -> None:
    look = Look()
    work = waited(Work(ends=5), look)
    assert look.count == 4
    assert work.slices[:5] == [timedelta(seconds=0.3)] * 5
    assert waited(Work(ends=5), None).slices == [None]


def test_a_rank_that_is_lost_ends_the_wait() -> None:
    work = Work(ends=5)
    with pytest.raises(RankLost, match="rank 1 is silent"):
        waited(work, Look(lost=2))
    assert len(work.slices) == 2


def test_a_collective_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="Connection closed"):
        waited(Work(ends=3, error="Connection closed by peer"), Look())


def test_a_device_waits_by_itself() -> None:
    host, device = torch.zeros(1, device="cpu"), torch.zeros(1, device="meta")
    assert not Lookout().watches(host)
    assert [Lookout(Look()).watches(x) for x in (host, device)] == [True, False]


class Transfers:
    """Sends and receives that end when they are let go."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.go = threading.Event()

    def wait(self) -> None:
        assert self.go.wait(FAR_S)
        if self.error:
            raise RuntimeError(self.error)


def test_an_exchange_is_waited_for_whole_and_left_when_a_rank_is_lost() -> None:
    works: Any = Transfers(), Transfers("Connection closed by peer")
    with pytest.raises(RankLost, match="rank 1 is silent"):
        Lookout(Look(lost=1)).wait_apart(works)
    for one in works:
        one.go.set()
    Lookout(Look()).wait_apart(works[:1])
    with pytest.raises(RuntimeError, match="Connection closed"):
        Lookout(Look()).wait_apart(works)


def test_a_groups_calls_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group("world", (0, 1), 0, process_group=object(), lookout=Lookout(Look()))  # type: ignore[arg-type]
    x, begun = torch.zeros(2, 2, device="cpu"), []

    def begin(name: str) -> Any:
        def call(*_: Any, async_op: bool, **__: Any) -> Work:
            begun.append((name, async_op))
            return Work(ends=2)

        return call

    for name in ("all_reduce", "all_gather", "broadcast", "all_to_all_single"):
        monkeypatch.setattr(f"pdinfer.parallel.groups.dist.{name}", begin(name))
    group.all_reduce(x)
    group.largest(x)
    group.all_gather(x)
    group.broadcast(x)
    group.all_to_all(x, [1, 1], [1, 1])
    names = ("all_reduce", "all_reduce", "all_gather", "broadcast", "all_to_all_single")
    assert begun == [(name, True) for name in names]
    assert group.lookout.look.count == 5  # type: ignore[union-attr]


def test_an_exchange_on_a_device_is_waited_for_in_the_thread_whose_stream_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: dict[str, list[threading.Thread]] = {"cpu": [], "meta": []}

    class Sent:
        def __init__(self, x: torch.Tensor) -> None:
            self.device = x.device.type

        def wait(self) -> None:
            threads[self.device].append(threading.current_thread())

    batches: list[list[tuple[Any, int]]] = []

    def begin(ops: list[Any]) -> list[Sent]:
        batches.append([(op.op, op.group_peer) for op in ops])
        return [Sent(op.tensor) for op in ops]

    dist = "pdinfer.parallel.groups.dist"
    monkeypatch.setattr(f"{dist}.P2POp", lambda op, tensor, **more: SimpleNamespace(op=op, tensor=tensor, **more))
    monkeypatch.setattr(f"{dist}.batch_isend_irecv", begin)
    group = Group("ep", (0, 1), 0, process_group=object(), lookout=Lookout(Look()))  # type: ignore[arg-type]
    for device in threads:
        x = torch.zeros(1, device=device)
        group.exchange([(1, x)], [(1, x)])
    # NCCL runs transfers of one pair one after the other, unless they come in one batch
    assert batches == [[(torch.distributed.irecv, 1), (torch.distributed.isend, 1)]] * 2
    assert threads["meta"] == [threading.current_thread()] * 2
    assert len(threads["cpu"]) == 2
    assert threading.current_thread() not in threads["cpu"]
