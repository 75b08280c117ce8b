"""Pages to and from a device: what the copies cost, in which order they run beside steps, and what finds the faults."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import pdinfer as pd
from pdinfer.execution.drafting import Draft
from pdinfer.execution.runner import ModelRunner
from pdinfer.execution.sampling import Draw
from pdinfer.kernels.torch import attention as torch_attention
from pdinfer.kv import copies
from pdinfer.kv.layout import KVComponent, KVLayout, Spans
from pdinfer.kv.transports.loopback import LoopbackHub
from pdinfer.kv.view import PageMemory
from pdinfer.model.batch import Row
from pdinfer.testing import random_model, tiny_config
from tests.each_time import others_in_full
from tests.simulated import order
from tests.simulated.order import StreamOrder
from tests.simulated.watch import Watch
from tests.waiting import check_ends, started

NUM_PAGES = 12
LINES = ("kv/copies.py", "kv/view.py", "kv/transports")
PARTS = {"latent": (16, 656), "index_k": (16, 132), "mtp.latent": (1, 656)}


def layout_of(*names: str, page_size: int = 4) -> KVLayout:
    components = tuple(
        KVComponent(name=name, format="f", dtype="uint8", width=width, token_bytes=width, layers=tuple(range(layers)))
        for name, (layers, width) in PARTS.items()
        if name in names
    )
    return KVLayout(model_id=b"m", weights_id=b"w", page_size=page_size, components=components)


def pool_of(device: torch.device, *names: str, page_size: int = 4, seed: int = 0) -> PageMemory:
    """Return a pool of random bytes; the host waits for them."""
    memory = PageMemory(layout_of(*names, page_size=page_size), NUM_PAGES, device=device, ops=torch_attention)
    memory.buffer.copy_(torch.randint(256, (memory.num_bytes,), generator=torch.Generator().manual_seed(seed)).byte())
    order.synchronize()
    return memory


def spans_of(memory: PageMemory, tokens: range, layers: range, seed: int = 0) -> Spans:
    """Return where tokens lie in scattered pages."""
    pages = random.Random(seed).sample(range(NUM_PAGES), memory.layout.num_pages(tokens.stop))
    return memory.layout.spans(NUM_PAGES, layers=layers, tokens=tokens, pages=pages, first_token=0)


def contents(memory: PageMemory, spans: Spans) -> bytes:
    order.synchronize()
    whole = memory.buffer.cpu().numpy().tobytes()
    return b"".join(whole[start : start + length] for start, length in spans)


def in_transfers(counts: Any) -> list[str]:
    """Return the lines of transfers among what was counted."""
    return [line for line in counts if any(part in line for part in LINES)]


CASES = [
    pytest.param(("latent",), range(24), 1, id="whole pages of one component"),
    pytest.param(("latent", "index_k"), range(3, 23), 2, id="pages cut at both ends, two components"),
    pytest.param(("latent", "index_k", "mtp.latent"), range(3, 23), 3, id="three components"),
]


@pytest.mark.parametrize(("names", "tokens", "components"), CASES)
def test_reading_is_one_launch_for_each_component_and_one_copy(
    device: torch.device, names: tuple[str, ...], tokens: range, components: int
) -> None:
    memory = pool_of(device, *names)
    spans = spans_of(memory, tokens, range(3))
    with Watch() as watch:
        found = memory.read(spans)
    assert [len(view) for view in found] == [length for _, length in spans]
    assert b"".join(found) == contents(memory, spans)
    # besides the block's copy there is one of the rows' numbers; the thread of the transport waits once
    block_and_numbers = 2
    totals = watch.totals()
    assert totals == totals | {"launches": components, "pinned": block_and_numbers, "pageable": 0, "syncs": 1}


@pytest.mark.parametrize(("names", "tokens", "components"), CASES)
def test_landing_is_one_copy_and_one_launch_for_each_component(
    device: torch.device, names: tuple[str, ...], tokens: range, components: int
) -> None:
    memory = pool_of(device, *names)
    before = contents(memory, [(0, memory.num_bytes)])
    spans = spans_of(memory, tokens, range(3))
    data = random.Random(3).randbytes(sum(length for _, length in spans))
    with Watch() as watch:
        landing, left = memory.landing(spans), memoryview(data)
        for view in landing.views:
            view[:], left = left[: len(view)], left[len(view) :]
        landing.commit()
    totals = watch.totals()
    assert totals == totals | {"launches": components, "pinned": 2, "pageable": 0, "syncs": 0}
    assert contents(memory, spans) == data
    beside = set(range(memory.num_bytes)) - {byte for start, length in spans for byte in range(start, start + length)}
    after = contents(memory, [(0, memory.num_bytes)])
    assert all(before[byte] == after[byte] for byte in beside)


@pytest.mark.parametrize("page_size", [4, 2])
@pytest.mark.parametrize(("names", "tokens", "components"), CASES)
def test_a_copy_between_pools_waits_for_nothing(
    device: torch.device, names: tuple[str, ...], tokens: range, components: int, page_size: int
) -> None:
    source, target = pool_of(device, *names), pool_of(device, *names, page_size=page_size, seed=1)
    spans = spans_of(source, tokens, range(3))
    # pages of half the size hold half as much: as many as there are
    there = target.layout.spans(
        NUM_PAGES, layers=range(3), tokens=tokens, pages=list(range(NUM_PAGES))[::-1], first_token=0
    )
    with Watch() as watch:
        target.copy_from(there, source, spans)
    totals = watch.totals()
    assert totals == totals | {"launches": 2 * components, "pinned": 1, "pageable": 0, "syncs": 0}
    assert contents(target, there) == contents(source, spans)


def test_a_copy_between_a_device_and_the_host_goes_through_page_locked_memory(device: torch.device) -> None:
    ours, theirs = pool_of(device, "latent"), pool_of(torch.device("cpu"), "latent", seed=1)
    spans, there = spans_of(ours, range(9), range(3)), spans_of(theirs, range(9), range(3), seed=5)
    with Watch() as watch:
        ours.copy_from(spans, theirs, there)
        assert contents(ours, spans) == contents(theirs, there)
        ours.buffer.add_(1)
        order.synchronize()
        theirs.copy_from(there, ours, spans)
    assert contents(ours, spans) == contents(theirs, there)
    assert watch.totals()["pageable"] == 0


# ---- order ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def host_stream(memory: PageMemory) -> Iterator[None]:
    """Step as a host that uses a stream of its own."""
    with order.using(order.Stream()), memory.step():
        yield


def write(memory: PageMemory, value: int) -> None:
    memory.pages("latent", 0).fill_(value)


def arrive(memory: PageMemory, spans: Spans, value: int) -> None:
    landing = memory.landing(spans)
    for view in landing.views:
        view[:] = bytes([value]) * len(view)
    landing.commit()


def test_a_step_finds_what_was_committed_whatever_its_stream(device: torch.device) -> None:
    memory = pool_of(device, "latent")
    region = [(0, memory.pages("latent", 0).numel())]
    for value in (3, 4):
        arrive(memory, region, value)
        with host_stream(memory):
            assert memory.pages("latent", 0).add(0).unique().tolist() == [value]


def test_a_step_finds_what_the_step_before_has_written_on_another_stream(device: torch.device) -> None:
    memory = pool_of(device, "latent")
    for value in (3, 4):
        with host_stream(memory):
            write(memory, value)
    with host_stream(memory):
        assert memory.pages("latent", 0).add(0).unique().tolist() == [4]


def test_a_new_pool_is_cleared_before_anything_arrives(device: torch.device) -> None:
    memory = PageMemory(layout_of("latent"), NUM_PAGES, device=device, ops=torch_attention)
    arrive(memory, [(0, 8)], 4)
    assert contents(memory, [(0, 9)]) == b"\4" * 8 + b"\0"


STEPS: dict[str, Callable[[ModelRunner, Row], object]] = {
    "prefill": lambda runner, row: list(runner.prefill([row])),
    "decode": lambda runner, row: runner.decode(
        [row], [Draw(sampling=pd.SamplingParams(), prompt=(1,), output=())], [Draft()]
    ),
    "forward": lambda runner, row: runner.forward([row]),
}


@pytest.mark.parametrize("step", STEPS)
def test_every_step_of_a_model_reads_and_writes_behind_arrivals(device: torch.device, step: str) -> None:
    model = random_model(device=device)
    layout = model.kv_layout(pd.CacheConfig(page_size=8))
    memory = model.allocate_pages(layout, 4)
    runner = ModelRunner(model, memory)
    order.synchronize()
    context = layout.spans(4, layers=layout.layers, tokens=range(3), pages=[2], first_token=0)
    with order.using(order.Stream()):
        arrive(memory, context, 0)
        STEPS[step](runner, Row([5], 3, [2]))
        arrive(memory, context, 0)  # and is done before the pages are another's
    STEPS[step](runner, Row([5], 3, [2]))


def test_an_arrival_is_written_behind_the_last_step(device: torch.device) -> None:
    """Its pages may be those of a request that was cancelled while its step was queued."""
    memory = pool_of(device, "latent")
    with host_stream(memory):
        write(memory, 3)
    arrive(memory, [(0, 8)], 4)
    assert contents(memory, [(0, 10)]) == b"\4" * 8 + b"\3" * 2


def test_a_push_inside_a_step_reads_what_was_computed_for_it(device: torch.device) -> None:
    memory = pool_of(device, "latent")
    read: list[bytes] = []
    with host_stream(memory):
        write(memory, 7)
        ready = memory.computed()
        assert ready is not None
        memory.pages("latent", 1).fill_(8)  # the next layer, of which the push does not know

        def push() -> None:
            ready()
            read.extend(map(bytes, memory.read([(4, 4)])))

        check_ends(started(push))
    assert read == [b"\7" * 4]


def test_pages_that_a_copy_reads_are_written_behind_it(device: torch.device) -> None:
    """A loopback says at once that a push is done, and its pages may be used by the next step."""
    source, target = pool_of(device, "latent"), pool_of(device, "latent", seed=1)
    with host_stream(source):
        write(source, 5)
        ready = source.computed()
        assert ready is not None
        ready()
        target.copy_from([(8, 8)], source, [(0, 8)])
    with host_stream(source):
        write(source, 6)
    arrive(source, [(0, 8)], 9)
    with host_stream(target):
        assert target.buffer[8:16].add(0).tolist() == [5] * 8


# ---- faults ---------------------------------------------------------------------------------------------------------


def found_by_order(fault: Callable[[], object]) -> None:
    with pytest.raises(StreamOrder):
        fault()
    assert len(order.faults()) == 1


def test_a_push_whose_event_was_dropped_is_found(device: torch.device) -> None:
    memory = pool_of(device, "latent")
    with host_stream(memory):
        write(memory, 7)
        memory.computed()  # nobody calls what it returns
        found_by_order(lambda: memory.read([(4, 4)]))


def test_a_page_that_is_read_before_its_arrival_is_found(device: torch.device) -> None:
    memory = pool_of(device, "latent")
    arrive(memory, [(0, 8)], 4)
    with order.using(order.Stream()):
        found_by_order(lambda: memory.pages("latent", 0).add(0))


def test_a_page_that_is_written_while_it_leaves_is_found(device: torch.device) -> None:
    source, target = pool_of(device, "latent"), pool_of(device, "latent", seed=1)
    target.copy_from([(8, 8)], source, [(0, 8)])
    with order.using(order.Stream()):
        found_by_order(lambda: write(source, 1))


def test_a_pageable_copy_is_found(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = pool_of(device, "latent"), pool_of(device, "latent", seed=1)
    monkeypatch.setattr(copies, "pinned_empty", lambda num_bytes, _: torch.empty(num_bytes, dtype=torch.uint8))
    with Watch() as watch:
        target.copy_from([(8, 8)], source, [(0, 8)])
    assert in_transfers(watch.counts["pageable"])


# ---- whole engines --------------------------------------------------------------------------------------------------

PROMPTS = [tuple((7 * i + j) % 97 for j in range(length)) for i, length in enumerate((9, 33))]


def transports(name: str) -> list[pd.kv.Transport]:
    if name == "loopback":
        hub = LoopbackHub()
        return [pd.kv.LoopbackTransport(hub) for _ in range(2)]
    return [pd.kv.ShmTransport() if name == "shm" else pd.kv.SocketTransport() for _ in range(2)]


def serve(transport: str, device: torch.device | str) -> dict[str, list[int | None]]:
    """Return the tokens of requests that a prefill with its own pool hands to a decode with another, each of which
    steps on a stream of its own."""
    model = random_model(tiny_config("v32", num_hidden_layers=2), device=device)
    cache, config = pd.CacheConfig(page_size=8, num_pages=64), pd.EngineConfig(chunked_prefill_size=20)
    pools = [pd.PagePool(model, cache) for _ in range(2)]
    order.synchronize()
    ends = [pd.KVChannel(pool, end) for pool, end in zip(pools, transports(transport), strict=True)]
    tokens: dict[str, list[int | None]] = {}
    with pd.Pairing(pd.PrefillEngine(model, ends[0], config), pd.DecodeEngine(model, ends[1], config)) as pairing:
        for again in range(2):
            requests = [
                pd.Request(
                    request_id=f"{number}",
                    prompt=prompt,
                    sampling=pd.SamplingParams(max_new_tokens=3 + again, temperature=0.0, ignore_eos=True),
                )
                for number, prompt in enumerate(PROMPTS)
            ]
            for event in pairing.generate(requests):
                assert event.error is None, event.error
                tokens.setdefault(event.request_id, []).append(event.token)
    return tokens


@functools.cache
def of_the_host() -> dict[str, list[int | None]]:
    return serve("loopback", "cpu")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine steps on a stream of its own. What a model has in common, its weights, was made before."""
    own: dict[int, order.Stream] = {}

    def on_its_own(run: Any) -> Any:
        def step(engine: Any) -> Any:
            with order.using(own.setdefault(id(engine), order.Stream())):
                return run(engine)

        return step

    for kind in (pd.PrefillEngine, pd.DecodeEngine):
        monkeypatch.setattr(kind, "step", on_its_own(kind.step))


@pytest.mark.usefixtures("streams")
@pytest.mark.parametrize("transport", others_in_full(["loopback", "shm", "tcp"], ["loopback", "shm"]))
def test_tokens_are_the_hosts_and_the_engines_thread_waits_for_no_copy(transport: str, device: torch.device) -> None:
    with Watch() as watch:
        assert serve(transport, device) == of_the_host()
    assert in_transfers(watch.counts["launches"]) or transport != "loopback"
    assert in_transfers(watch.counts["syncs"]) == []
    assert in_transfers(watch.counts["pageable"]) == []
