"""Which drafts count as the model's own."""

from __future__ import annotations

import pytest

from pdinfer.errors import PDInferError
from pdinfer.runner import _accepted
from pdinfer.sampling import Drawn

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
    also where the spoilt token happens to be the draft."""
    ours = drawn(tokens)
    assert _accepted(ours, proposed) == ours[:num_kept]
