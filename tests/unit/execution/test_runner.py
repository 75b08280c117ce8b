"""What a step leaves behind beside its tokens, and which drafts count as accepted."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
import torch

from pdinfer.config import CacheConfig, ExpertConfig
from pdinfer.errors import PDInferError
from pdinfer.execution.drafting import Draft, HostDraws, accepted
from pdinfer.execution.runner import ModelRunner
from pdinfer.execution.sampling import Draw, Drawn
from pdinfer.model.batch import Row
from pdinfer.model.load import load_model
from pdinfer.testing import random_model, tiny_config, tiny_config_dict, write_checkpoint
from pdinfer.types import SamplingParams

SPOILT = 99


def drawn(tokens: list[int]) -> list[Drawn]:
    """`SPOILT` is what was drawn from logits that are not finite: a token that means nothing, here 7."""
    error = PDInferError("the model's logits are not finite")
    return [
        Drawn(token=7, logprob=0.0, error=error) if token == SPOILT else Drawn(token=token, logprob=0.0)
        for token in tokens
    ]


@pytest.mark.parametrize(
    ("tokens", "proposed", "num_kept"),
    [
        ([3], [], 1),
        ([3, 4, 5], [3, 4], 3),
        ([3, 4, 5], [3, 9], 2),
        ([3, 4, 5], [9, 4], 1),
        ([SPOILT], [], 1),
        ([3, SPOILT, 5], [3, 4], 2),
        ([3, SPOILT, 5], [9, 4], 1),
        ([SPOILT, 4], [7], 1),
        ([3, SPOILT, 5, 6], [3, 7, 5], 2),
    ],
)
def test_drafts_count_up_to_the_first_that_is_wrong_or_an_error(
    tokens: list[int], proposed: list[int], num_kept: int
) -> None:
    """An error is the request's only where it was drawn behind tokens of its own; what stands behind one is nothing,
    also where the spoilt token happens to be the draft. On the device and on the host."""
    ours = drawn(tokens)
    is_right_BQ = torch.tensor([[one.error is None for one in ours]])
    tokens_BQ = torch.tensor([[one.token for one in ours]])
    drafted_BK = torch.tensor([proposed], dtype=torch.int64).view(1, -1)
    count_B = torch.tensor([len(proposed)])
    assert accepted(tokens_BQ, is_right_BQ, drafted_BK, count_B).tolist() == [num_kept]
    assert accepted(tokens_BQ, is_right_BQ, drafted_BK, count_B - 1).tolist() == [min(num_kept, max(1, len(proposed)))]
    queue = [*drawn(proposed), *ours]
    draw = Draw(sampling=SamplingParams(), prompt=(1,), output=(2,))
    host = HostDraws(lambda logits_BV, _: [queue.pop(0) for _ in logits_BV], [draw], [len(proposed)])
    drafted = [host.draft(torch.zeros(1, 9), step).tolist() for step in range(len(proposed))]
    assert drafted == [[token] for token in proposed]
    host_tokens_BQ, host_count_B = host.draw(torch.zeros(len(tokens), 9), len(tokens))
    assert host.kept == [ours[:num_kept]]
    assert (host_tokens_BQ * is_right_BQ).tolist() == (tokens_BQ * is_right_BQ).tolist()
    assert host_count_B.tolist() == [num_kept]


def test_a_row_with_few_drafts_beside_one_with_many_writes_its_own_slots_alone() -> None:
    """The second row has no page for what the first may draft. Its drafts beyond its own are written to the last page
    of the memory, where nobody reads."""
    experts = ExpertConfig(expert_distribution_recorder_mode="stat")
    model = random_model(tiny_config("v3", num_nextn_predict_layers=1), mtp=True, experts=experts)
    recorder = model.experts.recorder
    assert recorder is not None
    memory = model.allocate_pages(model.kv_layout(CacheConfig(page_size=4)), 6)
    runner = ModelRunner(model, memory)
    tokens, tables = ((3, 4, 5), (6, 7, 8)), ((1, 2), (4,))
    for _ in runner.prefill([Row(prompt, 0, table) for prompt, table in zip(tokens, tables, strict=True)]):
        pass
    drafts = [runner.draft(state) for state in runner.states([0, 1])]
    drafts[0].num_tokens = 3
    draws = [Draw(sampling=SamplingParams(temperature=0.0), prompt=prompt, output=(7,)) for prompt in tokens]
    before = memory.buffer.clone()
    recorder.reset()
    runner.decode([Row((7,), 3, table) for table in tables], draws, drafts)
    changed = torch.zeros(6 * 4, dtype=torch.bool)
    for layer in range(model.config.num_hidden_layers):
        start = memory.layout.region_offset("latent", layer, 6)
        region = slice(start, start + memory.pages("latent", layer).nbytes)
        changed |= (before[region] != memory.buffer[region]).view(6 * 4, -1).any(-1)
    assert changed.nonzero()[:, 0].tolist() == [1 * 4 + 3, 2 * 4, 2 * 4 + 1, 2 * 4 + 2, 4 * 4 + 3, 5 * 4]
    # the model ran 4 + 1 tokens; the layer that drafts 1 + 1, and then 1 of the first row twice
    num_layers = len(model.moe_layers()) - 1
    assert recorder.counts().sum() == (5 * num_layers + 4) * model.config.num_experts_per_tok
    recorder.reset()
    # as after a step in which one draft of the first row was right: two entries of it are due and one of the second
    drafts = [Draft.of(torch.zeros(states, model.config.hidden_size)) for states in (2, 1)]
    draws[0] = attrs.evolve(draws[0], output=(7, 9))
    runner.decode([Row((9,), 4, tables[0]), Row((7,), 3, tables[1])], draws, drafts)
    assert recorder.counts().sum() == (2 * num_layers + 3) * model.config.num_experts_per_tok


def test_every_kind_of_step_is_one_step_of_what_is_recorded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config_dict("v3"))
    options = ExpertConfig(expert_distribution_recorder_mode="stat")
    model = load_model(tmp_path, dtype=torch.float32, experts=options)
    recorder = model.experts.recorder
    assert recorder is not None
    runner = ModelRunner(model, model.allocate_pages(model.kv_layout(CacheConfig(page_size=4)), 4))
    per_token = model.config.num_experts_per_tok * len(model.moe_layers())
    rows = [Row((7,), 3, (0, 1))]
    draws = [Draw(sampling=SamplingParams(), prompt=(3, 4, 5), output=(7,))]
    for num_tokens, step in (
        (3, lambda: [*runner.prefill([Row((3, 4, 5), 0, (0, 1))])]),
        (1, lambda: runner.decode(rows, draws, [Draft()])),
        (1, lambda: runner.forward(rows)),
    ):
        recorder.reset()
        step()
        assert recorder.counts().sum() == num_tokens * per_token
