"""Comparing runs with drafts and without."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import pdinfer as pd
from pdinfer.execution.sampling import Draw, sample
from tests.e2e.setups import NEAR_TIE

ACCEPTANCE_FLOOR = 0.9
"""Of first drafts, greedy, on recall and copy prompts."""

Streams = dict[str, list[pd.TokenEvent]]
Best = Sequence[tuple[int, float]]
"""(token, log-probability), the best one first."""


def near_tie(model: pd.Model, request: pd.Request, before: list[int], one: int, other: int, within: float) -> bool:
    """Whether a change of a logit `within` rounding can give either token."""
    draw = Draw(
        sampling=request.sampling, prompt=request.prompt, output=before, eos_token_ids=model.config.eos_token_ids
    )
    logits = model.logits([*request.prompt, *before])[-1:]
    for token in (one, other):
        leaning = logits.clone()
        leaning[0, token] += within
        if sample(leaning, [draw])[0].token != token:
            return False
    return True


def check_best(ours: Best, theirs: Best, within: float) -> None:
    """The same tokens are the best; near ties, `within` rounding, may change ranks, the last with a token outside."""
    assert len(ours) == len(theirs)
    for token in dict(ours) | dict(theirs):
        one, other = (dict(best).get(token, best[-1][1]) for best in (ours, theirs))
        assert one == pytest.approx(other, abs=within), (token, ours, theirs)


def check_equal(
    model: pd.Model,
    asked: Sequence[pd.Request],
    with_drafts: Streams,
    without: Streams,
    *,
    within: float = NEAR_TIE,
) -> None:
    """Tokens, log-probabilities and ends. Logits differ `within` this much by rounding; near ties are counted and end
    the comparison of their stream."""
    near_ties = num_tokens = 0
    for request in asked:
        ours, theirs = (streams[request.request_id or ""] for streams in (with_drafts, without))
        for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
            num_tokens += 1
            if a.token != b.token:
                assert a.token is not None
                assert b.token is not None
                before = [event.token for event in ours[:index] if event.token is not None]
                assert near_tie(model, request, before, a.token, b.token, within), (request.request_id, index, a, b)
                near_ties += 1
                break
            assert a.finish_reason == b.finish_reason
            assert a.logprob == pytest.approx(b.logprob, abs=within)
            check_best(a.top_logprobs, b.top_logprobs, within)
        else:
            assert len(ours) == len(theirs)
    assert near_ties * 10_000 <= max(10_000, num_tokens)


def drafted(streams: Streams) -> tuple[int, int]:
    """(drafted, accepted) of all requests, as their last events tell."""
    usages = [stream[-1].usage for stream in streams.values()]
    return (
        sum(usage.num_draft_tokens for usage in usages if usage),
        sum(usage.num_accepted_tokens for usage in usages if usage),
    )
