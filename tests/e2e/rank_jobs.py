"""What ranks do in tests: functions that run on every rank of a world, by name (see tests/ranks.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch

import pdinfer as pd
from pdinfer.groups import Group, Groups


def noted(groups: Groups) -> list[str]:
    """The collectives that this rank takes part in from now on, those of all groups in one list."""
    calls: list[str] = []
    for group in attrs.astuple(groups, recurse=False):
        if isinstance(group, Group):
            object.__setattr__(group, "calls", calls)
    return calls


def logits(
    folder: str,
    topology: dict[str, int],
    prompts: Sequence[Sequence[int]],
    *,
    next_token: int | None = None,
    dtype: str = "float32",
    **options: Any,
) -> dict[str, Any]:
    """Logits of each prompt, with `next_token` of the MTP layer too; what this rank holds, and what it called."""
    options |= {"dtype": getattr(torch, dtype), "mtp": next_token is not None}
    model = pd.load_model(folder, topology=pd.Topology.from_env(**topology), **options)
    calls = noted(model.groups)
    return {
        "logits": [model.logits(prompt).tolist() for prompt in prompts],
        "mtp": [] if next_token is None else [model.mtp_logits(prompt, next_token).tolist() for prompt in prompts],
        "weights_id": model.weights_id.hex(),
        "page_bytes": model.kv_layout(pd.CacheConfig(page_size=4)).page_bytes,
        "calls": calls,
    }
