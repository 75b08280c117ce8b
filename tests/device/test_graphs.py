"""Captured decode steps give the tokens of others, whatever joins and leaves, and wait for the device once."""

from __future__ import annotations

import functools
import gc
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pdinfer as pd
from pdinfer.execution.drafting import Draft
from pdinfer.execution.graphs import DecodeGraphs, Output
from pdinfer.execution.resident import why_not_captured
from pdinfer.execution.runner import ModelRunner
from pdinfer.execution.sampling import Draw
from pdinfer.kernels.draws import DrawKind
from pdinfer.kernels.resolve import OpChoice
from pdinfer.model.batch import Row
from pdinfer.model.decode_rows import DecodeRows
from pdinfer.process.streams import capture, new_stream
from pdinfer.testing import FAMILIES
from tests.device.models import PACKED, WIDE, ModelKind, model_of
from tests.device.test_tokens import CPU, NUM_PAGES, PAGE_SIZE, WAYS
from tests.e2e.drafts import Streams, check_equal
from tests.e2e.setups import arrive, by_request, join, prompt_of, step_until
from tests.each_time import others_in_full
from tests.simulated.capture import Graph
from tests.simulated.device import DEVICE
from tests.simulated.watch import Watch

FEATURES = {
    "plain": ModelKind(),
    "sparse": ModelKind("v32"),
    "packed": ModelKind(sizes=PACKED, kv_format="fp8"),
    "fp8": ModelKind(sizes=WIDE, scheme="fp8", own_products=True),
    "int8": ModelKind(sizes=WIDE, scheme="w8a8_dynamic", own_products=True),
    "int4": ModelKind(sizes=WIDE, scheme="int4", own_products=True),
    "drafts": ModelKind(num_drafts=2),
    "sparse packed drafts": ModelKind("v32", sizes=PACKED, kv_format="fp8", num_drafts=3),
}
EACH_TIME = ("plain",)


def requests() -> list[pd.Request]:
    """Return requests of every kind whose numbers of tokens differ, so that the batch grows and shrinks."""
    return [
        pd.Request(
            request_id=str(index),
            prompt=prompt_of(length, seed=index),
            sampling=pd.SamplingParams(**{"max_new_tokens": count, "seed": index, "ignore_eos": True, **WAYS[way]}),
        )
        for index, (length, count, way) in enumerate(
            [(3, 9, 0), (14, 4, 1), (14, 7, 0), (37, 3, 1), (5, 12, 0), (21, 6, 2), (9, 8, 1)]
        )
    ]


def served(kind: ModelKind, device: torch.device, **config: Any) -> tuple[Streams, str]:
    """Return the events of the requests, which come one after another, and what is said of captured steps."""
    model = model_of(kind, device)
    cache = pd.CacheConfig(page_size=PAGE_SIZE, num_pages=NUM_PAGES, kv_format=kind.kv_format)
    pools = [pd.PagePool(model, cache) for _ in range(2)]
    engine = pd.EngineConfig(max_running_requests=4, num_draft_tokens=kind.num_drafts, **config)
    with join(model, "loopback", prefill_pools=pools[:1], decode_pools=pools[1:], engine=engine) as setup:
        (decode,) = setup.decodes
        told_steps: list[tuple[int, int]] = []
        ran = decode.warm_up(progress=lambda done, total: told_steps.append((done, total)))
        assert told_steps == [(done, len(ran.steps)) for done in range(1, len(ran.steps) + 1)]
        events = arrive(setup, requests(), random.Random(3), 0.5)
        told = str(decode.graphs)
    return by_request(events), told


@functools.cache
def eager(kind: ModelKind) -> tuple[Streams, str]:
    """Steps that are not captured."""
    return served(kind, DEVICE, graph_batch_sizes=())


def check(kind: ModelKind, **config: Any) -> str:
    """Compare with steps that are not captured, and return what is said of captured ones."""
    streams, told = served(kind, DEVICE, **config)
    check_equal(model_of(kind, CPU), requests(), streams, eager(kind)[0])
    return told


def check_all_captured(told: str) -> None:
    """Every step ran captured, but for those with drafts in which a request has penalties."""
    others = [line for line in told.splitlines() if line.startswith("steps that did not")]
    assert all("the host draws, and drafts follow" in line for line in others), told
    assert int(told.partition("steps that ran captured: ")[2].split()[0]) > 10


@pytest.mark.parametrize("name", others_in_full(FEATURES, EACH_TIME))
def test_captured_steps_give_the_tokens_of_others(name: str) -> None:
    told = check(FEATURES[name])
    assert "captured numbers of sequences: 1, 2, 4" in told
    check_all_captured(told)


@pytest.mark.full
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_of_every_family_give_the_tokens_of_others(family: str, num_drafts: int) -> None:
    check_all_captured(check(ModelKind(family, num_drafts=num_drafts)))


def test_steps_larger_than_any_captured_one_run_all_the_same_and_it_is_told() -> None:
    told = check(ModelKind(), graph_batch_sizes=(2,))
    assert "captured numbers of sequences: 2\n" in told
    assert "the largest captured number of sequences is 2" in told


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_captured_steps_keep_the_logits_that_a_plan_counts(num_drafts: int) -> None:
    model, sizes = model_of(ModelKind(num_drafts=num_drafts), DEVICE), (4, 2)
    pool = pd.PagePool(model, pd.CacheConfig(page_size=PAGE_SIZE, num_pages=NUM_PAGES))
    engine = pd.EngineConfig(max_running_requests=4, graph_batch_sizes=sizes, num_draft_tokens=num_drafts)
    with join(model, "shared", decode_pools=[pool], engine=engine) as setup:
        (decode,) = setup.decodes
        decode.warm_up()
        kept = sum(each.output.logits_TV.nbytes for each in decode.graphs._captured.values())
    planned = pd.planning.EnginePlan(
        name="D", config=model.config, topology=pd.Topology(), engine=engine, mtp=num_drafts > 0
    )
    largest = 4 * (1 + num_drafts) * model.config.vocab_size
    assert planned.graph_bytes == kept + largest * (2 if model.config.dtype == "bfloat16" else 4)


def test_nothing_is_captured_where_nothing_is_asked_for() -> None:
    assert "captured numbers of sequences: none" in eager(ModelKind())[1]


@pytest.mark.parametrize(
    ("way", "num_drafts"),
    [(0, 0), (1, 2), *(pytest.param(*case, marks=pytest.mark.full) for case in ((0, 2), (1, 0)))],
)
def test_a_captured_step_is_one_launch_and_one_wait(way: int, num_drafts: int) -> None:
    model = model_of(ModelKind(num_drafts=num_drafts), DEVICE)
    pool = pd.PagePool(model, pd.CacheConfig(page_size=32, num_pages=64))  # one for each sequence, so none grows
    engine = pd.EngineConfig(max_running_requests=4, graph_batch_sizes=(4,), num_draft_tokens=num_drafts)
    with join(model, "shared", decode_pools=[pool], engine=engine) as setup:
        (decode,) = setup.decodes
        decode.warm_up()
        for seed in range(3):
            sampling = pd.SamplingParams(
                **{"max_new_tokens": 30, "ignore_eos": True, "seed": seed, **WAYS[way], "logprobs": 0}
            )
            setup.pairing.submit(pd.Request(prompt=prompt_of(18, seed=seed), sampling=sampling))
        step_until(setup.pairing, lambda _: decode.load().num_running_requests == 3)
        decode.step()  # the last one that joined is on the device behind it
        for _ in range(4):
            with Watch() as watch:
                decode.step()
            totals = watch.totals()
            assert totals["launches"] == 1, watch.counts["launches"]
            assert totals["syncs"] == 1, watch.counts["syncs"]
            assert totals["pageable"] == totals["allocations"] == 0, watch.counts


@pytest.mark.parametrize("graph_batch_sizes", [(), (2,)], ids=["eager", "captured"])
def test_what_comes_while_a_step_runs_is_scheduled_meanwhile(graph_batch_sizes: tuple[int, ...]) -> None:
    """A request that is cancelled then gets no token of the step, and another one is granted its pages in the same."""
    model = model_of(ModelKind(), DEVICE)
    pool = pd.PagePool(model, pd.CacheConfig(page_size=16, num_pages=64))
    engine = pd.EngineConfig(max_running_requests=4, graph_batch_sizes=graph_batch_sizes)
    with join(model, "shared", decode_pools=[pool], engine=engine) as setup:
        (decode,) = setup.decodes
        decode.warm_up()
        sampling = pd.SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=0.0)
        for name in ("ends", "stays"):
            setup.pairing.submit(pd.Request(request_id=name, prompt=prompt_of(9), sampling=sampling))
        step_until(setup.pairing, lambda _: decode.load().num_running_requests == 2)
        resident: Any = decode._model_runner.resident
        schedule, writers = resident.while_waiting, (setup.prefills[0].address,)

        def meanwhile() -> None:
            decode.cancel("ends")
            decode.submit(pd.Request(request_id="new", prompt=prompt_of(5), sampling=sampling), writers=writers)
            schedule()

        resident.while_waiting = meanwhile
        told = [(event.request_id, event) for event in decode.step() if isinstance(event, pd.TokenEvent)]
        resident.while_waiting = schedule
        assert decode.load().num_granted_requests == 1
        ends = [event.finish_reason for name, event in told if name == "ends"]
        assert ends == [pd.FinishReason.CANCELLED]
        assert [event.finish_reason for name, event in told if name == "stays"] == [None]
        more = [event for _ in range(3) for event in decode.step()]
        assert not [event for event in more if getattr(event, "request_id", "") == "ends"]
        decode.cancel("new")


def test_rows_that_have_moved_are_not_run_as_captured() -> None:
    """An engine reserves what it will ever need; a runner by itself may be asked for more."""
    model = model_of(ModelKind(), DEVICE)
    runner = ModelRunner(model, pd.PagePool(model, pd.CacheConfig(page_size=PAGE_SIZE, num_pages=32)).memory)
    assert list(runner.resident.capture([2], 2)) == [2]
    rows = [Row((7,), 0, [page]) for page in range(5)]
    draws = [Draw(sampling=pd.SamplingParams(temperature=0.0), prompt=(7,), output=())] * 5
    together = runner.decode(rows, draws, [Draft()] * 5)
    alone = [runner.decode(rows[at : at + 1], draws[:1], [Draft()])[0] for at in range(5)]
    assert [new[0].token for new in alone] == [new[0].token for new in together]
    assert "have moved" in str(runner.resident.graphs)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, None),
        ({"world": 8}, None),  # data parallel attention beside experts that are shared
        ({"device": "cpu"}, None),
        ({"device": "cpu", "native": False}, "kernels in C alone"),
        ({"device": "cpu", "mtp": True}, "steps that draft"),
        ({"world": 8, "mtp": True}, None),
        ({"attention": False}, "share a batch"),
        ({"graph_safe": False}, "waits for the device"),
    ],
    ids=str,
)
def test_what_cannot_be_captured_is_told(changed: dict[str, Any], told: str | None) -> None:
    facts = {
        "device": "cuda",
        "world": 1,
        "attention": True,
        "mtp": None,
        "graph_safe": True,
        "native": True,
        **changed,
    }
    attention = SimpleNamespace(graph_safe=lambda device: facts["attention"])
    groups = SimpleNamespace(world=SimpleNamespace(size=facts["world"]), attention=attention)
    experts = SimpleNamespace(dispatcher=SimpleNamespace(graph_safe=facts["graph_safe"]))
    resolved = SimpleNamespace(choices=[OpChoice("mla_decode", "native" if facts["native"] else "torch")])
    model: Any = SimpleNamespace(
        device=torch.device(facts["device"]), groups=groups, mtp=facts["mtp"], experts=experts, resolved=resolved
    )
    refusal = why_not_captured(model)
    assert refusal is told is None or (refusal is not None and told is not None and told in refusal)


def test_a_step_that_waits_for_the_device_cannot_be_captured() -> None:
    logits_BV = torch.zeros(4, 7, device=DEVICE)

    def run(num_rows: int, kind: DrawKind) -> Output:
        assert float(logits_BV.sum()) == 0
        return Output(torch.zeros(3, num_rows, dtype=torch.int32, device=DEVICE), logits_BV)

    with pytest.raises(RuntimeError, match="not permitted"):
        DecodeGraphs(DEVICE, run, lambda _: logits_BV).capture(4, 0)


def test_words_on_their_way_are_not_written_over() -> None:
    """Two steps are placed before anybody waits, as when the first is broken off. The device copies late."""
    rows = DecodeRows({}, lambda _: (), page_size=4, device=DEVICE, scratch_page=9)
    rows.reserve(2, 4)
    first, second = [Row([token], 0, [page]) for token, page in ((5, 1), (6, 2))], []
    rows.place(first, [None, None])
    second = [Row([token], 1, row.pages) for token, row in ((7, first[0]), (8, first[1]))]
    rows.place(second, [None, None])
    assert rows.column("token", 2).cpu().tolist() == [7, 8]
    assert rows.column("position", 2).cpu().tolist() == [1, 1]
    assert rows.batch(2).page_table_BM.cpu()[:, 0].tolist() == [1, 2]


def test_the_garbage_of_an_engine_that_is_gone_breaks_no_capture() -> None:
    """CUDA breaks a capture off in which a graph is destroyed, and a closed engine is a circle that holds some."""

    class Circle:
        def __init__(self) -> None:
            self.graph = capture(lambda: None, stream)
            self.itself = self

    stream: Any = new_stream(DEVICE)
    limits = gc.get_threshold()
    gc.set_threshold(50, 2, 2)
    try:
        Circle()
        assert isinstance(capture(collectable, stream), Graph)
    finally:
        gc.set_threshold(*limits)
    assert gc.isenabled()


def collectable() -> None:
    """Make so much garbage that it would be collected."""
    for _ in range(1000):
        circle: list[Any] = []
        circle.append(circle)
