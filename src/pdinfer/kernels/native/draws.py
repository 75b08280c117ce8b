"""Draws of tokens (`draws.c`): the largest logit and the normalizer, which every draw needs. Torch draws the others."""

from __future__ import annotations

import torch
from torch import Tensor

from pdinfer.kernels import draws
from pdinfer.kernels.draws import Controls, DrawKind
from pdinfer.kernels.native import build
from pdinfer.kernels.native.calls import are


def draw(logits_BV: Tensor, changed_BV: Tensor, controls: Controls, kind: DrawKind) -> Tensor:
    dense = logits_BV.is_contiguous() and changed_BV.is_contiguous()
    if not logits_BV.shape[1] or not dense or not are(torch.float32, logits_BV, changed_BV):
        return draws.draw(logits_BV, changed_BV, controls, kind)
    words_3B = torch.empty(3, len(logits_BV), dtype=torch.int32, device="cpu")
    build.library().draw_greedy(
        logits_BV.data_ptr(), changed_BV.data_ptr(), *logits_BV.shape, words_3B.data_ptr(), torch.get_num_threads()
    )
    if kind is not DrawKind.GREEDY:
        tokens_B = draws.drawn_tokens(changed_BV, words_3B[0].long(), controls, kind)
        words_3B[0] = tokens_B
        words_3B[1] = draws.logprobs(logits_BV, tokens_B, words_3B[2].view(torch.float32)).view(torch.int32)
    return words_3B
