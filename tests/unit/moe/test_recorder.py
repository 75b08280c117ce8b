"""How many tokens chose each expert is counted, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer.moe import ExpertLoadRecorder

LAYERS, EXPERTS, TOP_K = 2, 5, 2


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(0, 4), max_size=8),
    st.integers(1, 4),
    st.sampled_from(["window", "stat"]),
)
def test_counts_are_those_of_the_steps_that_count(seed: int, tokens: list[int], window: int, mode: str) -> None:
    """Steps may have any number of tokens, even none."""
    rng = np.random.default_rng(seed)
    recorder = ExpertLoadRecorder(LAYERS, EXPERTS, device="cpu", mode=mode, window=window)
    steps = []
    for num_tokens in tokens:
        step = np.zeros((LAYERS, EXPERTS), np.int64)
        for layer in range(LAYERS):
            ids = rng.integers(-1, EXPERTS, (num_tokens, TOP_K))  # -1 is none
            step[layer] = np.bincount(ids[ids >= 0], minlength=EXPERTS)
            recorder.record(layer, torch.from_numpy(ids))
        steps.append(step)
        recorder.end_step()
        kept = steps[-window:] if mode == "window" else steps
        assert (recorder.counts() == np.sum(kept, axis=0)).all()
    recorder.reset()
    recorder.end_step()
    assert not recorder.counts().any()


def test_an_open_step_does_not_count_and_addresses_stay() -> None:
    recorder = ExpertLoadRecorder(1, 3, device="cpu", window=2)
    address = recorder.step_LE.data_ptr()
    recorder.record(0, torch.tensor([[0, 2]]))
    assert not recorder.counts().any()
    for _ in range(3):
        recorder.end_step()
    assert not recorder.counts().any()
    assert recorder.step_LE.data_ptr() == address


def test_a_reset_forgets_the_open_step_too() -> None:
    recorder = ExpertLoadRecorder(1, 2, device="cpu")
    recorder.record(0, torch.tensor([[0, 1, 1]]))
    recorder.reset()
    recorder.end_step()
    assert not recorder.counts().any()


def test_ranks_sum_into_a_copy() -> None:
    recorder = ExpertLoadRecorder(1, 2, device="cpu")
    recorder.record(0, torch.tensor([[0, 1, 1]]))
    recorder.end_step()
    recorder.device_counts().mul_(2)
    recorder.counts()[:] = 0
    assert recorder.counts().tolist() == [[1, 2]]


def test_what_is_recorded_can_be_solved() -> None:
    recorder = ExpertLoadRecorder(1, 4, device="cpu", mode="stat")
    recorder.record(0, torch.tensor([[0, 1], [0, 2], [0, 3]]))
    recorder.end_step()
    placement = pd.moe.solve_placement(recorder.counts(), num_ranks=2, num_redundant=2)
    assert placement.logical_replica_counts[0, 0] == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"num_layers": 0}, "num_layers must be an int of at least 1, got 0"),
        ({"num_experts": True}, "num_experts must be an int of at least 1, got True"),
        ({"window": 0}, "window must be an int of at least 1, got 0"),
        ({"mode": "per_token"}, "mode must be one of window, stat, got 'per_token'"),
    ],
)
def test_bad_sizes_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(pd.ConfigError, match=says):
        ExpertLoadRecorder(**{"num_layers": 1, "num_experts": 1, "device": "cpu"} | arguments)
