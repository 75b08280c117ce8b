"""The promises of docs/howto/same-tokens.md, whichever provider serves: equal steps give equal bits, and steps that are
cut otherwise change a token only where rounding decides between two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path

import attrs
import pytest
import torch

import pdinfer as pd
from pdinfer.execution.sampling import Draw, sample
from pdinfer.kv.view import PageMemory
from pdinfer.testing import tiny_config_dict, write_checkpoint
from tests.e2e.setups import NEAR_TIE, tokens_of
from tests.e2e.test_speculation import CHECKPOINT, Split, ask, drafted, requests, serve

READ_IN_C = {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "v_head_dim": 64}
DENSE = {"num_hidden_layers": 3, "first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "vocab_size": 264}
WHOLE = Split(page_size=4)
SCARCE = Split("loopback", page_size=4, num_pages=32, chunk=7, max_attempts=9)
WAYS = {
    "a batch": (WHOLE, 0),
    "chunks": (attrs.evolve(WHOLE, chunk=7), 0),
    "drafts": (attrs.evolve(WHOLE, transport="loopback"), 3),
    "all, and lost pages": (SCARCE, 2),
}
"""How steps are cut: the engines, and how many tokens are drafted."""
RARELY = 10
"""At most one token in so many is decided by what is rounded to less than float32."""
CHOSEN = "chosen"
"""Each op by the provider that this machine takes."""


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in bfloat16. The dense one has random weights, so that every mistake moves its logits, and no router,
    which would move them far where it nearly ties. The trained one is as it is stored, or quantized by a scheme."""
    if request.param == "trained":
        return CHECKPOINT
    made = tmp_path_factory.mktemp(request.param)
    if request.param == "dense":
        write_checkpoint(made, tiny_config_dict(torch_dtype="bfloat16", **READ_IN_C, **DENSE), mtp=True)
    else:
        pd.quantize_checkpoint(CHECKPOINT, made, scheme=request.param)
    return made


def load(folder: Path, provider: str, dtype: torch.dtype) -> pd.Model:
    providers = None if provider == CHOSEN else provider
    return pd.load_model(folder, dtype=dtype, mtp=True, weights="stored", providers=providers)


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


def check_way(way: str, model: pd.Model, exact: pd.Model, within: float | None = None) -> None:
    """Serve requests twice, the second time over known pages, and compare each draw with that of `exact`, the model in
    one piece. Without `within`, logits may be as far as rounding moves them, each way."""
    asked, (split, num_drafts) = {str(request.request_id): request for request in requests(5)}, WAYS[way]
    with serve(model, split, num_drafts) as setup:
        turns = [ask(setup, list(asked.values())) for _ in range(2)]
        setup.check_idle()
        assert (setup.pairing.stats.num_retries > 0) == (split is SCARCE)
        assert (drafted(turns[0])[0] > 0) == (num_drafts > 0)
    num_tokens = num_decided = 0
    for streams in turns:
        texts = [(*asked[name].prompt, *tokens_of(stream)) for name, stream in streams.items()]
        moved = within or 2 * moved_by_rounding(model, exact, texts)
        num_decided += sum(check_draws(exact, asked[name], stream, moved) for name, stream in streams.items())
        num_tokens += sum(len(tokens_of(stream)) for stream in streams.values())
    assert num_tokens > 100
    assert num_decided <= (1 if within else num_tokens // RARELY)


@pytest.mark.parametrize("folder", ["dense"], indirect=True)
@pytest.mark.parametrize("provider", [CHOSEN, "torch"])
def test_in_bfloat16_rounding_decides(folder: Path, provider: str) -> None:
    exact = load(folder, "reference", torch.float32)
    check_way("all, and lost pages", load(folder, provider, torch.bfloat16), exact)


@pytest.mark.full
@pytest.mark.parametrize(
    ("folder", "provider", "dtype"),
    [
        *product(("dense", "trained", "fp8", "w8a8_dynamic"), (CHOSEN, "torch", "reference"), [torch.bfloat16]),
        ("dense", "torch", torch.float16),
        ("int4", CHOSEN, torch.bfloat16),
    ],
    indirect=["folder"],
)
def test_whatever_is_rounded_decides_rarely(folder: Path, provider: str, dtype: torch.dtype) -> None:
    exact, model = load(folder, "reference", torch.float32), load(folder, provider, dtype)
    for way in WAYS:
        check_way(way, model, exact)


@pytest.mark.full
@pytest.mark.parametrize("folder", ["dense", "trained"], indirect=True)
@pytest.mark.parametrize("provider", ["torch", "reference"])
def test_in_float32_only_near_ties_are_decided(folder: Path, provider: str) -> None:
    exact, model = (load(folder, name, torch.float32) for name in ("reference", provider))
    for way in WAYS:
        check_way(way, model, exact, NEAR_TIE)


@pytest.mark.parametrize("folder", ["dense"], indirect=True)
@pytest.mark.parametrize("provider", [CHOSEN, pytest.param("torch", marks=pytest.mark.full)])
def test_equal_steps_give_equal_bits(folder: Path, provider: str) -> None:
    """In engines of their own, whatever their memory held before."""
    model, asked, runs = load(folder, provider, torch.bfloat16), requests(5), []
    for num_drafts, byte in product((0, 2), (0x00, 0x40)):
        with serve(model, SCARCE, num_drafts) as setup:
            for pool in setup.pools:
                assert isinstance(pool.memory, PageMemory)
                pool.memory.buffer.fill_(byte)
            streams = ask(setup, asked)
        runs.append({name: [(each.token, each.logprob) for each in stream] for name, stream in streams.items()})
    assert runs[0::2] == runs[1::2]
