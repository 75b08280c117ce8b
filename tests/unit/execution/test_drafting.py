"""The MTP layer runs equally often on every rank, whatever each has to draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pdinfer.config import CacheConfig
from pdinfer.execution.drafting import Draft, Drafter, Sampler, num_passes
from pdinfer.execution.runner import ModelRunner
from pdinfer.execution.sampling import Draw, Drawn, sample
from pdinfer.model.batch import Row
from pdinfer.model.model import Model
from pdinfer.model.mtp import MTP
from pdinfer.testing import random_model, tiny_config
from pdinfer.types import SamplingParams

STATE = torch.zeros(1, 4)


@pytest.mark.parametrize(
    ("drafts", "passes"),
    [
        ([], 0),
        ([Draft()], 0),
        ([Draft(num_tokens=3)], 0),
        ([Draft.of(STATE)], 1),  # nothing may be drafted, but an entry of the layer's cache is due
        ([Draft(num_tokens=1, state=STATE, num_newest=1), Draft(num_tokens=3, state=STATE, num_newest=1), Draft()], 3),
    ],
)
def test_a_step_needs_as_many_passes_as_its_longest_draft(drafts: list[Draft], passes: int) -> None:
    assert num_passes(drafts) == passes


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(tiny_config("v3", num_nextn_predict_layers=1), mtp=True)


@pytest.mark.parametrize(("wanted", "sizes"), [(0, [1, 1]), (2, [1, 1]), (4, [1, 1, 0, 0])])
def test_passes_that_others_need_run_without_rows(
    model: Model, monkeypatch: pytest.MonkeyPatch, wanted: int, sizes: list[int]
) -> None:
    """At last, so that rows of all ranks meet in the same passes."""
    seen: list[int] = []
    run: Any = MTP.__call__

    def counted(mtp: MTP, state_TD: torch.Tensor, *more: Any) -> torch.Tensor:
        seen.append(len(state_TD))
        return run(mtp, state_TD, *more)

    layout = model.kv_layout(CacheConfig(page_size=4))
    runner = ModelRunner(model, model.allocate_pages(layout, 4))
    tokens = (3, 4, 5)
    for _ in runner.prefill([Row(tokens, 0, (0, 1))]):
        pass
    (states,) = runner.states([0])
    monkeypatch.setattr(MTP, "__call__", counted)
    assert runner.decode([], [], [], num_passes=wanted) == []
    assert seen == [0] * wanted
    seen.clear()
    draft = runner.draft(states)
    draft.num_tokens = 2
    draw = Draw(sampling=SamplingParams(temperature=0.0), prompt=tokens, output=(7,))
    runner.decode([Row((7,), 3, (0, 1))], [draw], [draft], num_passes=wanted)
    assert seen == sizes


def test_each_draft_is_drawn_behind_those_before_it(model: Model) -> None:
    """With their positions, and so with the noise that the model's own token will have."""
    layout = model.kv_layout(CacheConfig(page_size=4))
    runner = ModelRunner(model, model.allocate_pages(layout, 4))
    tokens = (3, 4, 5)
    for _ in runner.prefill([Row(tokens, 0, (0, 1))]):
        pass
    draft = runner.draft(runner.states([0])[0])
    draft.num_tokens = 3
    outputs: list[list[tuple[int, ...]]] = []
    drawn: list[int] = []

    def watched(logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        outputs.append([tuple(draw.output) for draw in draws])
        new = sample(logits_BV, draws)
        drawn.append(new[0].token)
        return new

    runner.sample_with(watched)
    runner.decode([Row((7,), 3, (0, 1))], [Draw(sampling=SamplingParams(seed=1), prompt=tokens, output=(7,))], [draft])
    behind = [(7, *drawn[:count]) for count in range(4)]
    assert outputs == [behind[:1], behind[1:2], behind[2:3], behind]


class Told:
    """A sampler that is not `sample`, so that it draws on the host. It may be broken off in the middle of a step."""

    def __init__(self) -> None:
        self.left: int | None = None

    def __call__(self, logits_BV: torch.Tensor, draws: Sequence[Draw]) -> list[Drawn]:
        if self.left == 0:
            self.left = None
            raise KeyboardInterrupt
        self.left = None if self.left is None else self.left - 1
        return sample(logits_BV, draws)


class Drafted:
    """A sequence with a runner, and what is drafted for it, step by step."""

    def __init__(self, seed: int, pages: tuple[int, ...], runner: ModelRunner, state: Any) -> None:
        self.output, self.pages, self.seed = [7 + seed], pages, seed
        self.runner, self.draft = runner, runner.draft(state)

    def row(self) -> Row:
        return Row(self.output[-1:], 3 + len(self.output) - 1, self.pages)

    def draw(self) -> Draw:
        return Draw(sampling=SAMPLING[self.seed], prompt=PROMPTS[self.seed], output=self.output)


PROMPTS = ((3, 4, 5), (6, 7, 8))
SAMPLING = (SamplingParams(seed=5, temperature=0.7), SamplingParams(temperature=0.0))


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """What the layer proposed in each step, by slot."""
    seen: list[list[list[int]]] = []
    propose = Drafter.propose

    def watched(*arguments: Any, **named: Any) -> torch.Tensor:
        tokens_BK = propose(*arguments, **named)
        seen.append(tokens_BK.tolist())
        return tokens_BK

    monkeypatch.setattr(Drafter, "propose", watched)
    return seen


def two(model: Model, sampler: Sampler | None = None) -> list[Drafted]:
    """Two sequences of one runner, behind their prefill."""
    runner = ModelRunner(model, model.allocate_pages(model.kv_layout(CacheConfig(page_size=4)), 16))
    if sampler is not None:
        runner.sample_with(sampler)
    tables = (tuple(range(8)), tuple(range(8, 16)))
    for _ in runner.prefill([Row(prompt, 0, table) for prompt, table in zip(PROMPTS, tables, strict=True)]):
        pass
    states = runner.states([0, 1])
    return [Drafted(seed, tables[seed], runner, states[seed]) for seed in (0, 1)]


def step(sequences: Sequence[Drafted], num_tokens: int = 3) -> None:
    """Run one step of these sequences."""
    for one in sequences:
        one.draft.num_tokens = num_tokens
    runner = sequences[0].runner
    rows, draws = [one.row() for one in sequences], [one.draw() for one in sequences]
    for one, new in zip(sequences, runner.decode(rows, draws, [one.draft for one in sequences]), strict=True):
        one.output += [drawn.token for drawn in new]


def test_a_device_drafts_what_a_host_would(model: Model, proposed: list[list[list[int]]]) -> None:
    """`draw_tokens` with the positions of the drafts, and `sample` behind each of them."""
    for sampler in (None, Told()):
        sequences = two(model, sampler)
        for _ in range(4):
            step(sequences)
    assert proposed[:4] == proposed[4:]


def test_a_sequence_that_pauses_drafts_on_where_it_was(model: Model, proposed: list[list[list[int]]]) -> None:
    one, other = two(model)
    for _ in range(4):
        step([other])
    alone = [tokens for (tokens,) in proposed]
    one, other = two(model)
    proposed.clear()
    step([other, one])
    step([one])  # in the slot of the other one, which found no page
    step([other, one])
    step([other])
    step([one, other])
    steps = [0, 2, 3, 4]
    assert all(tokens in proposed[at] for at, tokens in zip(steps, alone, strict=True))


def test_nothing_is_drafted_behind_a_step_that_was_broken_off(model: Model, proposed: list[list[list[int]]]) -> None:
    """Which of its work the device has done is not known. The tokens are those of a step that was not."""
    sequences = two(model)
    for _ in range(3):
        step(sequences, 0)
    expected = [one.output for one in sequences]
    told = Told()
    sequences = two(model, told)
    step(sequences)
    told.left = 3  # drafts are drawn, the tokens that check them are not
    with pytest.raises(KeyboardInterrupt):
        step(sequences)
    proposed.clear()
    for _ in range(3):
        step(sequences)
    assert proposed == [[[], []]] * 3
    assert all(one.draft.num_newest == one.draft.num_tokens == 0 for one in sequences)
    for one, tokens in zip(sequences, expected, strict=True):
        assert one.output[: len(tokens)] == tokens[: len(one.output)]
