"""The MTP layer runs equally often on every rank, whatever each has to draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pdinfer.config import CacheConfig
from pdinfer.execution.drafting import Draft, num_passes
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
