"""What decode attention in Triton refuses, and into how many parts it cuts contexts."""

from __future__ import annotations

import attrs
import pytest
import torch

from pdinfer.kernels import OpSpec
from pdinfer.kernels.triton import configs

mla_decode = pytest.importorskip("pdinfer.kernels.triton.mla_decode")

V3 = OpSpec(device="H200", num_heads=16, kv_lora_rank=512, qk_rope_head_dim=64, page_size=64, kv_format="bfloat16")


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({}, None),
        ({"kv_format": "fp8"}, None),
        ({"page_size": 48}, None),
        ({"page_size": None}, None),
        ({"page_size": 8}, "reads pages of a multiple of 16 tokens, these have 8"),
        ({"kv_lora_rank": 1024}, "reads up to 512 + 128 elements of a row, these have 1024 + 64"),
        ({"qk_rope_head_dim": 4}, "reads latents and rotary keys of a multiple of 16 bytes, these have 1024 and 8"),
        ({"qk_rope_head_dim": 4, "dtype": torch.float32, "kv_format": "float32"}, None),
        (
            {"kv_lora_rank": 256, "kv_format": "fp8"},
            "reads latents and rotary keys of a multiple of 16 bytes, these have 264 and 128",
        ),
        (
            {"kv_lora_rank": 448, "kv_format": "fp8"},
            "reads packed latents of a multiple of 128 elements, these have 448",
        ),
    ],
)
def test_what_the_kernel_was_not_made_for_is_refused(changes: dict[str, object], refusal: str | None) -> None:
    assert mla_decode.refuses("mla_decode", attrs.evolve(V3, **changes)) == refusal  # type: ignore[arg-type]


def test_contexts_are_cut_so_that_a_card_is_full() -> None:
    """Numbers of sequences, and the rounds of blocks that follow, on a card with room for 132."""
    cut = {count: configs.parts_of(count, 1024, 132) for count in (1, 2, 64, 100, 128, 132, 256)}
    assert cut == {1: 132, 2: 66, 64: 2, 100: 5, 128: 1, 132: 1, 256: 1}
    assert configs.parts_of(1, 3, 132) == 1  # short contexts are not worth it
    assert configs.parts_of(1, 8, 132) == 3
