"""Draws of DeepSeek-V3's tokens."""

from __future__ import annotations

import torch

from pdinfer.kernels.draws import Controls, DrawKind
from pdinfer.kernels.triton import draws
from tests.unit.kernels.aot import Specimen


def draw(kind: DrawKind, batch: int = 64, vocab: int = 129280, *, is_changed: bool = False) -> object:
    logits_BV = torch.empty(batch, vocab, dtype=torch.float32, device="meta")
    numbers_B = torch.empty(batch, dtype=torch.float64, device="meta")
    words_B = torch.empty(batch, dtype=torch.int64, device="meta")
    controls = Controls(
        temperature_B=numbers_B,
        top_p_B=numbers_B,
        min_logit_B=numbers_B,
        top_k_B=words_B,
        seed_B=words_B,
        position_B=words_B,
    )
    return draws.draw(logits_BV, torch.empty_like(logits_BV) if is_changed else logits_BV, controls, kind)


SPECIMENS = (
    Specimen("draw, greedy", lambda: draw(DrawKind.GREEDY), narrow=1),
    Specimen("draw from changed logits, greedy", lambda: draw(DrawKind.GREEDY, is_changed=True), narrow=1),
    Specimen("draw, random", lambda: draw(DrawKind.RANDOM), narrow=1),
    Specimen("draw, filtered", lambda: draw(DrawKind.FILTERED), narrow=2),
)
