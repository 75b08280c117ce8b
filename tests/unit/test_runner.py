"""What a step leaves behind beside its tokens."""

from __future__ import annotations

from pathlib import Path

import torch

from pdinfer.batch import Row
from pdinfer.config import CacheConfig, ExpertConfig
from pdinfer.runner import ModelRunner
from pdinfer.sampling import Draw
from pdinfer.speculation import Draft
from pdinfer.testing import tiny_config_dict, write_checkpoint
from pdinfer.types import SamplingParams
from pdinfer.weights import load_model


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
