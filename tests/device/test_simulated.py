"""The simulated device itself: what it counts, what it refuses, and the faults that it was made to find."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pdinfer.process import streams
from pdinfer.process.memory import pinned_empty
from tests.simulated import order
from tests.simulated.capture import Capture
from tests.simulated.device import HostAndDevice, why_not
from tests.simulated.order import StreamOrder
from tests.simulated.watch import Watch
from tests.waiting import check_ends

# ---- what is counted ------------------------------------------------------------------------------------------------

COUNTED: dict[str, tuple[Callable[[Tensor], object], dict[str, int]]] = {
    "kernel": (lambda x: x + 1, {"launches": 1, "allocations": 1}),
    "in place": (lambda x: x.add_(1), {"launches": 1}),
    "view": (lambda x: x.view(2, 3).T[1:].unsqueeze(0), {}),
    "view that has to copy": (lambda x: x.view(2, 3).T.reshape(-1), {"launches": 1, "allocations": 1}),
    "empty": (torch.empty_like, {"allocations": 1}),
    "zeros": (lambda x: torch.zeros(3, device=x.device), {"launches": 1, "allocations": 1}),
    "item": (lambda x: x[0].item(), {"syncs": 1}),
    "float": (lambda x: float(x[0]), {"syncs": 1}),
    "if": (lambda x: bool(x[0]), {"syncs": 1}),
    "tolist": (lambda x: x.tolist(), {"syncs": 1}),
    "cpu": (lambda x: x.cpu(), {"syncs": 1}),
    "nonzero": (lambda x: x.nonzero(), {"syncs": 1, "allocations": 1}),
    "mask": (lambda x: x[x > 2], {"launches": 1, "syncs": 1, "allocations": 2}),
    "write by mask": (lambda x: x.__setitem__(x > 2, x[:1]), {"launches": 1, "syncs": 1, "allocations": 1}),
    "indices": (lambda x: x[x], {"launches": 1, "allocations": 1}),
    "list of indices": (lambda x: x[[0, 2]], {"launches": 1, "allocations": 2, "pageable": 1}),
    "list": (lambda x: torch.tensor([1, 2], device=x.device), {"allocations": 1, "pageable": 1}),
    "list, later": (lambda x: torch.tensor([1]).to(x.device, non_blocking=True), {"allocations": 1, "pageable": 1}),
    "page-locked": (lambda x: pinned_empty(4, x.device).to(x.device), {"allocations": 1, "syncs": 1}),
    "page-locked, later": (
        lambda x: pinned_empty(4, x.device).to(x.device, non_blocking=True),
        {"allocations": 1, "pinned": 1},
    ),
    "to page-locked": (lambda x: x.to("cpu", non_blocking=True), {"pinned": 1}),
    "to pageable": (lambda x: torch.empty_like(x, device="cpu").copy_(x, non_blocking=True), {"syncs": 1}),
    "other dtype": (lambda x: x.float(), {"launches": 1, "allocations": 1}),
    "same dtype": (lambda x: x.long(), {}),
}


@pytest.mark.parametrize("name", COUNTED)
def test_what_an_op_costs(device: torch.device, name: str) -> None:
    run, expected = COUNTED[name]
    x = torch.arange(6, device=device)
    with Watch() as watch:
        run(x)
    assert {kind: count for kind, count in watch.totals().items() if count} == expected, watch.counts


def test_a_count_names_the_op_and_the_line(device: torch.device) -> None:
    with Watch() as watch:
        torch.zeros(3, device=device).sum().item()
    ((line, count),) = watch.counts["syncs"].items()
    assert line.startswith("_local_scalar_dense @ tests/device/test_simulated.py:")
    assert count == 1


def test_each_thread_is_counted_where_it_is_watched(device: torch.device) -> None:
    """Threads run ops at the same time, and none is lost."""
    x = torch.zeros(4, device=device)
    own: list[int] = []

    def work(times: int) -> None:
        with Watch() as watch:
            for _ in range(times):
                torch.tensor([1.0], device=device).add_(x[:1])
        own.append(watch.totals()["launches"])

    threads = [threading.Thread(target=work, args=(times,)) for times in (50, 100, 150)]
    with Watch(everywhere=True) as everywhere, Watch() as here:
        for thread in threads:
            thread.start()
        check_ends(*threads)
    assert sorted(own) == [50, 100, 150]
    assert everywhere.totals() == {
        "launches": 300,
        "allocations": 300,
        "syncs": 0,
        "pageable": 300,
        "pinned": 0,
        "destroyed": 0,
        "elsewhere": 0,
    }
    assert sum(here.totals().values()) == 0


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(3) + x,
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: x.index_copy_(0, torch.tensor([1]), x[:1]),
        lambda x: x.index_put_((torch.tensor([0, 1]),), torch.ones(2)),
        lambda x: torch.ones(3)[x.long()],
        lambda x: torch.where(x > 0, x, torch.ones(3)),
    ],
)
def test_tensors_of_host_and_device_do_not_mix(device: torch.device, run: Callable[[Tensor], object]) -> None:
    with pytest.raises(HostAndDevice, match=r"tensors of host and device at tests/device/test_simulated.py:\d+"):
        run(torch.zeros(3, device=device))


def test_a_host_number_is_no_host_tensor(device: torch.device) -> None:
    x = torch.zeros(3, device=device)
    assert (x + torch.tensor(2.0)).tolist() == [2, 2, 2]
    assert (x + 1).tolist() == [1, 1, 1]


def test_products_that_cuda_lacks_are_refused(device: torch.device) -> None:
    whole = torch.ones(32, 16, dtype=torch.int64, device=device)
    with pytest.raises(NotImplementedError, match=r"multiplies no torch\.int64"):
        whole @ whole.T
    small = whole.to(torch.int8)
    assert torch._int_mm(small, small.T[:, :16]).tolist() == [[16] * 16] * 32
    with pytest.raises(RuntimeError, match="more than 16 rows"):
        torch._int_mm(small[:16], small.T)


# ---- what a graph holds ---------------------------------------------------------------------------------------------

Step = Callable[[Tensor, Tensor], Tensor]


def replayed(step: Step, device: torch.device, *, move: bool = False) -> tuple[Capture, list[float], list[float]]:
    """Record a step of values [4] and a length, change both, and run it again. Return the recording, the result of the
    replay, and what the step gives by itself."""
    x, length = torch.arange(4.0, device=device), torch.tensor(3, device=device)
    with streams.no_collection(), Capture() as capture:
        result = step(x, length)
    length.fill_(2)
    if move:
        x = torch.full((4,), 5.0, device=device)
    else:
        x.fill_(5.0)
    capture.replay()
    return capture, result.tolist(), step(x, length).tolist()


def masked(x: Tensor, length: Tensor) -> Tensor:
    return x * (torch.arange(len(x), device=x.device) < length)


def with_item(x: Tensor, length: Tensor) -> Tensor:
    return x * (torch.arange(len(x), device=x.device) < length.item())


def with_host_list(x: Tensor, length: Tensor) -> Tensor:
    return masked(x, length) + torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)


def test_a_replay_is_the_step_on_what_its_inputs_hold_now(device: torch.device) -> None:
    capture, ours, expected = replayed(masked, device)
    assert ours == expected == [5, 5, 0, 0]
    assert capture.illegal == []


def test_a_replay_is_one_launch_and_allocates_nothing(device: torch.device) -> None:
    x, length = torch.arange(4.0, device=device), torch.tensor(3, device=device)
    with streams.no_collection(), Capture() as capture:
        masked(x, length)
    with Watch() as watch:
        capture.replay()
    assert {kind: count for kind, count in watch.totals().items() if count} == {"launches": 1}


def test_a_length_that_was_baked_in_shows(device: torch.device) -> None:
    capture, ours, expected = replayed(with_item, device)
    assert (ours, expected) == ([5, 5, 5, 0], [5, 5, 0, 0])
    assert len(capture.illegal) == 1
    assert "_local_scalar_dense" in capture.illegal[0]


def test_a_host_tensor_in_a_recording_shows(device: torch.device) -> None:
    capture, _, _ = replayed(with_host_list, device)
    assert len(capture.illegal) == 1
    assert "to the device" in capture.illegal[0]


def test_an_input_that_has_moved_shows(device: torch.device) -> None:
    _, ours, expected = replayed(masked, device, move=True)
    assert (ours, expected) == ([0, 1, 0, 0], [5, 5, 0, 0])


def test_a_recording_may_read_page_locked_memory(device: torch.device) -> None:
    """A graph keeps the address, so a replay sees what is there by then."""
    block, x = pinned_empty(4, device), torch.zeros(4, dtype=torch.uint8, device=device)
    block.fill_(1)
    with streams.no_collection(), Capture() as capture:
        x.copy_(block, non_blocking=True)
        y = x + 1
    streams.current_stream(device).synchronize()
    block.fill_(7)
    capture.replay()
    assert capture.illegal == []
    assert y.tolist() == [8] * 4


def test_a_replay_has_its_place_in_the_order_of_streams(device: torch.device) -> None:
    """It reads pages that another stream writes, and what it copies to the host comes later."""
    pool, block = torch.zeros(8, dtype=torch.uint8, device=device), pinned_empty(4, device)
    with streams.no_collection(), Capture() as capture:
        block.copy_(pool[4:] + 1, non_blocking=True)
    beside = streams.new_stream(device)
    beside.wait_event(streams.record_event(device))
    with streams.on_stream(beside):
        pool[4:].fill_(6)
        landed = streams.record_event(device)
    with pytest.raises(StreamOrder, match=r"add @ .* follows no event behind fill_ @"):
        capture.replay()
    assert len(order.faults()) == 1
    streams.current_stream(device).wait_event(landed)
    capture.replay()
    assert block.tolist() == [order.POISON] * 4
    streams.record_event(device).synchronize()
    assert block.tolist() == [7] * 4


# ---- order ----------------------------------------------------------------------------------------------------------


def copied_out(device: torch.device, *, waits: bool) -> list[int]:
    """Return what the host finds in page-locked memory after a copy to it."""
    block = pinned_empty(3, device)
    block.copy_(torch.tensor([1, 2, 3], dtype=torch.uint8, device=device), non_blocking=True)
    event = streams.record_event(device)
    if waits:
        event.synchronize()
    return block.tolist()


def test_the_host_finds_what_it_waited_for(device: torch.device) -> None:
    assert copied_out(device, waits=True) == [1, 2, 3]
    assert copied_out(device, waits=False) == [order.POISON] * 3


def test_page_locked_memory_is_known_while_other_memory_is_collected() -> None:
    threshold = gc.get_threshold()
    kept = [order.page_locked(8) for _ in range(3000)]  # more pairs than Python keeps for reuse without collecting
    try:
        for later in range(1, 1000, 50):
            gc.collect()
            gc.disable()
            ring: list[object] = [order.page_locked(8)]
            ring.append(ring)
            del ring
            gc.set_threshold(gc.get_count()[0] + later)
            gc.enable()
            assert order.is_page_locked(kept[0])
    finally:
        gc.set_threshold(*threshold)


def test_an_event_is_asked_until_the_device_is_there(device: torch.device) -> None:
    block = pinned_empty(1, device)
    block.copy_(torch.ones(1, dtype=torch.uint8, device=device), non_blocking=True)
    event = streams.record_event(device)
    assert not event.query()
    assert block.item() == order.POISON
    assert event.query()
    assert block.item() == 1


def test_whoever_waits_for_an_event_sleeps(device: torch.device) -> None:
    event = streams.record_event(device)
    assert isinstance(event, order.Event)
    assert event.blocking


def arrival(device: torch.device, *, waits: bool) -> list[int]:
    """A page arrives on a stream of its own; return it, read on the stream of the step."""
    pool, block = torch.zeros(8, dtype=torch.uint8, device=device), pinned_empty(4, device)
    block.fill_(9)
    beside, step = streams.new_stream(device), streams.current_stream(device)
    beside.wait_event(streams.record_event(device))
    with streams.on_stream(beside):
        pool[4:].copy_(block.to(device, non_blocking=True))
        landed = streams.record_event(device)
    if waits:
        step.wait_event(landed)
    return pool[4:].add(0).tolist()


def test_a_page_is_read_behind_the_event_of_its_arrival(device: torch.device) -> None:
    assert arrival(device, waits=True) == [9] * 4
    with pytest.raises(StreamOrder, match=r"add @ .* follows no event behind copy_ @"):
        arrival(device, waits=False)
    assert len(order.faults()) == 1


def test_pages_that_nobody_else_touches_need_no_event(device: torch.device) -> None:
    """Of one pool, one stream reads pages while another writes others: by slices, by indices and by rows."""
    pool = torch.zeros(16, dtype=torch.uint8, device=device)
    pages_P4, ids = pool.view(4, 4), torch.tensor([0, 2], device=device)
    beside = streams.new_stream(device)
    beside.wait_event(streams.record_event(device))
    with streams.on_stream(beside):
        pages_P4[ids] += 1
        pages_P4.index_copy_(0, ids, pages_P4[ids] + 1)
    mine = torch.tensor([1, 3], device=device)
    pages_P4.index_copy_(0, mine, pages_P4.index_select(0, mine) + 3)
    assert pool[4:8].tolist() == [3] * 4
    with pytest.raises(StreamOrder):
        pages_P4[mine - 1]
    assert len(order.faults()) == 1
    beside.synchronize()
    assert pool.tolist() == [2] * 4 + [3] * 4 + [2] * 4 + [3] * 4


def push(device: torch.device, *, waits: bool) -> list[int]:
    """A layer is computed into a pool, and pushed by a stream of its own; return what leaves."""
    pool, block = torch.zeros(8, dtype=torch.uint8, device=device), pinned_empty(4, device)
    pool[:4].add_(7)
    computed = streams.record_event(device)
    beside = streams.new_stream(device)
    if waits:
        beside.wait_event(computed)
    with streams.on_stream(beside):
        block.copy_(pool[:4], non_blocking=True)
        streams.record_event(device).synchronize()
    return block.tolist()


def test_a_push_reads_behind_the_event_of_its_layer(device: torch.device) -> None:
    assert push(device, waits=True) == [7] * 4
    with pytest.raises(StreamOrder, match=r"copy_ @ .* follows no event behind add_ @"):
        push(device, waits=False)
    assert len(order.faults()) == 1


def test_pages_are_written_again_behind_who_reads_them(device: torch.device) -> None:
    pool = torch.zeros(8, dtype=torch.uint8, device=device)
    beside = streams.new_stream(device)
    beside.wait_event(streams.record_event(device))
    with streams.on_stream(beside):
        pool[:4].clone()
    pool[4:].fill_(1)
    with pytest.raises(StreamOrder, match=r"fill_ @ .* follows no event behind clone @"):
        pool.fill_(1)
    assert len(order.faults()) == 1


def test_tokens_of_another_stream_are_read_behind_its_event(device: torch.device) -> None:
    """Memory that is not bytes is one piece."""
    beside = streams.new_stream(device)
    with streams.on_stream(beside):
        tokens_B = torch.arange(4, device=device)
    with pytest.raises(StreamOrder):
        tokens_B.add(1)
    assert len(order.faults()) == 1
    beside.synchronize()
    assert tokens_B.add(1).tolist() == [1, 2, 3, 4]


def test_page_locked_memory_stays_until_it_was_copied(device: torch.device) -> None:
    block = pinned_empty(4, device)
    block.fill_(1)
    block.to(device, non_blocking=True)
    streams.record_event(device).synchronize()
    block.fill_(2)
    block.to(device, non_blocking=True)
    event = streams.record_event(device)
    block.fill_(3)
    with pytest.raises(StreamOrder, match="changed before its copy to the device was done"):
        event.synchronize()
    assert len(order.faults()) == 1


# ---- where there is none --------------------------------------------------------------------------------------------


def test_a_torch_without_such_devices_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.utils.backend_registration._setup_privateuseone_for_python_backend")
    assert "makes no device from Python" in (why_not() or "")
