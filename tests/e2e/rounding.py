"""Which tokens rounding may change: a model in float32 with the same weights says how close the two best were."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

import pdinfer as pd
from pdinfer.execution.sampling import Draw, sample
from tests.e2e.setups import tokens_of


def moved_by_rounding(model: pd.Model, exact: pd.Model, texts: Iterable[Sequence[int]]) -> float:
    """Return how far a logit behind any token of the texts is from that of `exact`."""
    return max(float((model.logits(text) - exact.logits(text)).abs().max()) for text in texts)


def check_draws(exact: pd.Model, request: pd.Request, stream: Sequence[pd.TokenEvent], within: float) -> int:
    """See that each token is the one that `exact` draws behind those before it, or would draw if its logit were larger
    by `within`, and that log-probabilities are as close. Return how many are not drawn as the logits are."""
    tokens = tokens_of(stream)
    logits_TV = exact.logits([*request.tokens, *tokens[:-1]])[len(request.tokens) - 1 :]
    draws = [
        Draw(
            sampling=request.sampling,
            prompt=request.prompt,
            output=(*request.output, *tokens[:count]),
            eos_token_ids=exact.config.eos_token_ids,
        )
        for count in range(len(tokens))
    ]
    drawn = [one.token for one in sample(logits_TV, draws)]
    rows = torch.arange(len(tokens))
    leaning_TV = logits_TV.index_put((rows, torch.tensor(tokens)), logits_TV.new_tensor(within), accumulate=True)
    assert [one.token for one in sample(leaning_TV, draws)] == tokens, (request.request_id, drawn)
    exact_T = logits_TV.log_softmax(-1)[rows, tokens]
    torch.testing.assert_close(
        torch.tensor([event.logprob for event in stream if event.token is not None]), exact_T, rtol=0, atol=within
    )
    return sum(one != token for one, token in zip(drawn, tokens, strict=True))
