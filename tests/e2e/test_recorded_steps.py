"""On a CPU decode steps of the kernels in C are recorded when their size comes again, and give the tokens of others."""

from __future__ import annotations

import functools
import random
import sys
from typing import Any

import pytest
import torch

import pdinfer as pd
from pdinfer.execution import graphs
from pdinfer.execution.drafting import Draft
from pdinfer.execution.runner import ModelRunner
from pdinfer.execution.sampling import Draw
from pdinfer.kernels.native import build
from pdinfer.model.batch import Row
from pdinfer.process.recording import Recording
from pdinfer.testing import random_model, tiny_config
from tests.conformance.native_builds import BODIES, as_native, built_with
from tests.e2e.setups import arrive, by_request, join, pool_of, prompt_of
from tests.forks import apart

SIZES = {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.7, "logprobs": 3},
)


@pytest.fixture(autouse=True)
def kernels() -> None:
    reason = build.library_or_reason()
    if isinstance(reason, str):
        pytest.skip(f"the library {reason}")


@functools.cache
def model_of(family: str = "v3", dtype: torch.dtype = torch.bfloat16, *, mtp: bool = False) -> pd.Model:
    return random_model(tiny_config(family, **SIZES), dtype=dtype, mtp=mtp)


def requests(seed: int) -> list[pd.Request]:
    chance = random.Random(seed)
    return [
        pd.Request(
            request_id=str(index),
            prompt=prompt_of(chance.randrange(3, 40), seed=index),
            sampling=pd.SamplingParams(
                max_new_tokens=chance.randrange(3, 40), seed=index, ignore_eos=True, **chance.choice(WAYS)
            ),
        )
        for index in range(14)
    ]


def served(model: pd.Model, seed: int, *, max_running: int = 6, **config: Any) -> tuple[dict[str, Any], str]:
    """Return what comes of requests that arrive one after another, and what is said of recorded steps."""
    pools = [pool_of(model, page_size=4, num_pages=300) for _ in range(2)]
    engine = pd.EngineConfig(max_running_requests=max_running, **config)
    with join(model, "loopback", prefill_pools=pools[:1], decode_pools=pools[1:], engine=engine) as setup:
        events = arrive(setup, requests(seed), random.Random(seed), 0.3)
        told = str(setup.decodes[0].graphs)
    streams = {
        name: [(event.token, event.logprob, event.top_logprobs) for event in stream]
        for name, stream in by_request(events).items()
    }
    return streams, told


def num_recorded(told: str) -> int:
    return int(told.partition("steps that ran captured: ")[2].split()[0])


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
@pytest.mark.parametrize("family", ["v2", "v3"])
def test_they_give_the_tokens_of_steps_that_are_not(family: str, seed: int) -> None:
    model = model_of(family)
    others, none = served(model, seed, graph_batch_sizes=())
    streams, told = served(model, seed)
    assert streams == others
    assert num_recorded(none) == 0
    assert num_recorded(told) > 20, told


@pytest.mark.full
@pytest.mark.parametrize("body", ["AVX-512 BF16 in C", "x86-64"])
def test_they_are_recorded_on_cpus_of_every_kind(body: str) -> None:
    """With AVX-512 BF16 and no tiles experts of many rows are torch's, but in steps as small as these."""
    with as_native(built_with(*BODIES[body])):
        test_they_give_the_tokens_of_steps_that_are_not("v3", 5)


def compilers_imported() -> list[str]:
    """Record steps; return which parts of a compiler this process has imported by then."""
    assert num_recorded(served(model_of(), 0)[1]) > 20
    return sorted({"torch._dynamo", "torch._inductor", "sympy"} & {*sys.modules})


def test_torchs_compiler_is_not_imported_for_them() -> None:
    """It would take seconds of a step, in which a peer gives this engine up, and 120 MB."""
    assert apart(compilers_imported) == []


def test_only_the_sizes_that_are_asked_for() -> None:
    _, told = served(model_of(), 1, graph_batch_sizes=(2, 5))
    assert "captured numbers of sequences: 2, 5\n" in told
    assert "steps of as many sequences are not recorded" in told


class Steps:
    """A runner with sequences of one token each, whose steps are compared with those of a fresh one."""

    def __init__(self, model: pd.Model) -> None:
        self.runner = self._new(model)
        self.fresh = self._new(model)
        self.fresh.resident.graphs.refusal = "not here"
        self.rows: list[list[int]] = [[page] for page in range(40)]
        self.tokens = [7 * at % 50 for at in range(40)]
        self.starts = [0] * 40

    @staticmethod
    def _new(model: pd.Model) -> ModelRunner:
        return ModelRunner(model, pd.PagePool(model, pd.CacheConfig(page_size=64, num_pages=64)).memory)

    def step(self, count: int) -> None:
        """Run the first sequences; the others stand still."""
        draw = Draw(sampling=pd.SamplingParams(temperature=0.0), prompt=(7,), output=())
        rows = [Row((self.tokens[at],), self.starts[at], self.rows[at]) for at in range(count)]
        found, expected = (
            [(new.token, new.logprob) for (new,) in runner.decode(rows, [draw] * count, [Draft()] * count)]
            for runner in (self.runner, self.fresh)
        )
        assert found == expected
        for at in range(count):
            self.tokens[at] = found[at][0]
            self.starts[at] += 1

    @property
    def told(self) -> str:
        return str(self.runner.resident.graphs)


def test_rows_that_have_moved_are_recorded_anew() -> None:
    steps = Steps(model_of())
    for count in (2, 2, 2, 2, 33, 2, 2, 2):  # room for 33 rows is elsewhere
        steps.step(count)
    assert num_recorded(steps.told) == 4, steps.told


def test_another_number_of_threads_is_another_recording() -> None:
    steps, before = Steps(model_of()), torch.get_num_threads()
    try:
        for threads in (1, 1, 1, 2, 2, 2, 1, 2):
            torch.set_num_threads(threads)
            steps.step(3)
    finally:
        torch.set_num_threads(before)
    assert num_recorded(steps.told) == 4, steps.told


def test_what_takes_too_much_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(model_of())
    graph = steps.runner.resident.graphs
    for count in (20, 1, 1):  # room for all first
        steps.step(count)
    monkeypatch.setattr(graphs, "MAX_RECORDED_BYTES", 8 * graph.num_bytes)
    for count in (2, 2, 4, 4, 1, 2, 4):
        steps.step(count)
    assert graph.sizes == [1, 2, 4]
    for count in (3, 3):
        steps.step(count)
    assert graph.sizes == [3, 4]  # 1 ran before 2, and 2 before 4
    assert 0 < graph.num_bytes <= graphs.MAX_RECORDED_BYTES
    steps.step(2)
    assert graph.sizes == [3, 4]  # one that went must come twice again
    for count in (20, 20):
        steps.step(count)
    assert graph.sizes == [3, 4]
    assert "its recording would keep" in steps.told


def test_a_step_that_looks_at_values_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    looking = pd.Model.head

    def head(self: pd.Model, state_TD: torch.Tensor) -> torch.Tensor:
        assert state_TD.tolist()
        return looking(self, state_TD)

    steps = Steps(model)
    monkeypatch.setattr(pd.Model, "head", head)
    for _ in range(4):
        steps.step(2)
    assert num_recorded(steps.told) == 0
    assert "Python looks at values on the host: tolist" in steps.told


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (lambda: model_of(dtype=torch.float32), "kernels in C alone"),
        (lambda: model_of(mtp=True), "steps that draft"),
    ],
    ids=["float32", "drafts"],
)
def test_what_is_not_recorded_is_told(model: Any, told: str) -> None:
    steps = Steps(model())
    assert told in steps.told


def test_a_timeline_has_the_parts_of_every_step(tmp_path: Any) -> None:
    _, told = served(model_of(), 1, trace=tmp_path)
    assert "timeline" in told


def test_a_broken_step_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is raised in a step that is being recorded fails that step, and the next one is right."""
    steps = Steps(model_of())
    steps.step(2)
    head = pd.Model.head

    def fails(self: pd.Model, state_TD: torch.Tensor) -> torch.Tensor:
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(pd.Model, "head", fails)
        with pytest.raises(MemoryError):
            steps.step(2)
    assert pd.Model.head is head
    for _ in range(3):
        steps.step(2)
    assert num_recorded(steps.told) == 2


def test_a_recording_reads_the_pages_that_are_there_now() -> None:
    """Its pages may be other sequences' by the next step."""
    steps = Steps(model_of())
    for _ in range(3):
        steps.step(4)
    steps.rows[:4] = [[page + 50] for page in range(4)]
    steps.starts[:4] = [0] * 4
    for _ in range(3):
        steps.step(4)
    assert num_recorded(steps.told) == 4
    assert all(isinstance(each.recording, Recording) for each in steps.runner.resident.graphs._recorded.values())
