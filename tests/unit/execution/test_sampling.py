"""A token is a function of its row, its parameters, its seed and its position; over seeds it follows the softmax."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pdinfer.errors import PDInferError, RequestError
from pdinfer.execution.sampling import Draw, LogitsProcessor, sample, signed
from pdinfer.kernels.draws import gumbel_noise
from pdinfer.types import SamplingParams
from pdinfer.values import changed_fields
from tests.plain_sampling import changed_logits, kept, plain_draw, plain_noise
from tests.slices import examples

CPU = torch.device("cpu")
VOCAB = 97
DRAWS = 20_000
EULER = 0.5772156649015329

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0, 1.5])
CHI_SQUARE_7 = 24.3
"""A sum of 7 squared normals is larger once in a thousand times."""


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def at(position: int, param: SamplingParams) -> Draw:
    """Return the draw of the token at `position`."""
    return Draw(sampling=param, prompt=range(position), output=())


def tokens_of(logits_BV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    draws = [at(position, param) for position, param in zip(positions, params, strict=True)]
    return [drawn.token for drawn in sample(logits_BV, draws)]


def draw(logits_V: Tensor, param: SamplingParams, position: int = 0) -> int:
    return tokens_of(logits_V[None], [param], [position])[0]


def drawn_set(logits_V: Tensor, param: SamplingParams, draws: int = 2000) -> set[int]:
    """Return all tokens that come up over many positions."""
    return set(tokens_of(logits_V.expand(draws, -1), [param] * draws, range(draws)))


# Distribution


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_draws_follow_the_softmax(over: str, temperature: float) -> None:
    numbers = range(DRAWS)
    seeds, positions = ([11] * DRAWS, numbers) if over == "positions" else (numbers, [11] * DRAWS)
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in seeds]
    tokens = tokens_of(LOGITS.expand(DRAWS, -1), params, list(positions))
    expected = (LOGITS.double() / temperature).softmax(-1) * DRAWS
    counts = torch.bincount(torch.tensor(tokens), minlength=len(LOGITS))
    assert float(((counts - expected) ** 2 / expected).sum()) < CHI_SQUARE_7


@pytest.mark.parametrize("over", ["positions", "seeds"])
def test_neighbouring_draws_are_independent(over: str) -> None:
    """Pairs of tokens at neighbouring positions, or of neighbouring seeds, follow the product of two softmaxes."""
    logits = torch.tensor([0.5, 0.0, -0.5])
    numbers, same = range(DRAWS), [11] * DRAWS
    seeds, positions = (same, numbers) if over == "positions" else (numbers, same)
    tokens = tokens_of(logits.expand(DRAWS, -1), [SamplingParams(seed=seed) for seed in seeds], list(positions))
    first, second = torch.tensor(tokens).view(-1, 2).T
    expected = torch.outer(logits.double().softmax(-1), logits.double().softmax(-1)).flatten() * len(first)
    counts = torch.bincount(first * 3 + second, minlength=9)
    assert float(((counts - expected) ** 2 / expected).sum()) < 26.1  # once in a thousand, 8 degrees of freedom


def noise_of(seeds: Sequence[int], positions: Sequence[int], vocab_size: int = VOCAB) -> torch.Tensor:
    seed_B = torch.tensor([signed(seed) for seed in seeds], dtype=torch.int64)
    return gumbel_noise(seed_B, torch.tensor(positions, dtype=torch.int64), vocab_size)


def test_gumbel_noise_has_its_mean_and_variance() -> None:
    noise = noise_of(range(200), [5] * 200, 1000).double()
    assert noise.isfinite().all()
    deviation = math.pi / math.sqrt(6 * noise.numel())
    assert abs(float(noise.mean()) - EULER) < 4 * deviation
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
def test_gumbel_noise_is_the_documented_hash(seed: int, position: int) -> None:
    """So every device and every release draws the same tokens."""
    noise = noise_of([seed], [position])[0]
    expected = [plain_noise(seed, position, token) for token in range(VOCAB)]
    assert noise.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_gumbel_noise_is_float32_of_the_asked_shape() -> None:
    noise = noise_of([1, 2, 3], [0, 0, 9])
    assert (noise.dtype, noise.shape) == (torch.float32, (3, VOCAB))
    assert noise_of([], []).shape == (0, VOCAB)


def test_neighbouring_seeds_and_positions_share_no_noise() -> None:
    numbers = range(20)
    seeds, positions = [seed for seed in numbers for _ in numbers], [*numbers] * 20
    noise = noise_of(seeds, positions).view(20, 20, VOCAB)
    assert (noise[1:] != noise[:-1]).all()
    assert (noise[:, 1:] != noise[:, :-1]).all()
    assert (noise[1:, :-1] != noise[:-1, 1:]).all()
    related = torch.corrcoef(noise.flatten(0, 1)) - torch.eye(400)
    assert float(related.abs().max()) < 6 / math.sqrt(VOCAB)


@pytest.mark.parametrize("seed", [2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
def test_seeds_have_64_bits(seed: int) -> None:
    logits = torch.zeros(VOCAB)
    tokens = [draw(logits, SamplingParams(seed=seed), position) for position in range(8)]
    assert tokens == [draw(logits, SamplingParams(seed=seed), position) for position in range(8)]
    assert tokens != [draw(logits, SamplingParams(seed=seed - 1), position) for position in range(8)]
    assert tokens != [draw(logits, SamplingParams(seed=seed % 2**31), position) for position in range(8)]


# One row


def test_temperature_zero_takes_the_largest() -> None:
    logits = random_logits(5)
    tokens = tokens_of(logits, [SamplingParams(temperature=0, seed=3, top_k=2, top_p=0.1)] * 5, range(5))
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-2, 1e-6, 1e-30, 1e-45, 5e-324])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_a_tiny_temperature_takes_the_largest_too(temperature: float, filters: dict[str, Any]) -> None:
    logits = random_logits(50, seed=1)
    top = logits.topk(2).values
    logits = logits[top[:, 0] - top[:, 1] > 0.3]
    params = [SamplingParams(temperature=temperature, seed=seed, **filters) for seed in range(len(logits))]
    assert len(logits) > 30
    assert tokens_of(logits, params, range(len(logits))) == logits.argmax(-1).tolist()


def test_nothing_to_sample_is_nothing_sampled() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []


@pytest.mark.parametrize(
    "param",
    [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=1, temperature=0.3, top_k=4, top_p=0.9, min_p=0.1),
    ],
    ids=["greedy", "plain", "all-filters"],
)
def test_logprobs_are_of_the_raw_logits(param: SamplingParams) -> None:
    logits = random_logits(20, seed=2)
    drawn = sample(logits, [at(position, param) for position in range(20)])
    expected = logits.double().log_softmax(-1)[torch.arange(20), torch.tensor([one.token for one in drawn])]
    assert [one.logprob for one in drawn] == pytest.approx(expected.tolist(), abs=1e-5)


# Batches


def any_params(rng: random.Random, seed: int) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice([0.0, 0.5, 1.0, 1.7]),
        top_k=rng.choice([0, 1, 5, 1000]),
        top_p=rng.choice([1.0, 0.8, 0.2]),
        min_p=rng.choice([0.0, 0.05]),
        seed=seed,
    )


@given(st.integers(0, 10**6), st.integers(1, 12))
def test_the_batch_and_its_order_change_no_token(seed: int, rows: int) -> None:
    rng = random.Random(seed)
    logits = random_logits(rows, seed)
    params = [any_params(rng, rng.randrange(2**64)) for _ in range(rows)]
    positions = [rng.randrange(10**6) for _ in range(rows)]
    alone = [draw(logits[row], params[row], positions[row]) for row in range(rows)]
    order = rng.sample(range(rows), rng.randint(1, rows))
    together = tokens_of(logits[order], [params[row] for row in order], [positions[row] for row in order])
    assert together == [alone[row] for row in order]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_spoilt_row_is_an_error_and_leaves_the_others_alone(bad: float) -> None:
    logits = random_logits(3, seed=3)
    params = [SamplingParams(temperature=0), SamplingParams(seed=1), SamplingParams(seed=2, top_p=0.7, top_k=9)]
    draws = [at(position, param) for position, param in enumerate(params, 4)]
    expected = sample(logits, draws)
    for spoilt in range(3):
        batch = logits.clone()
        batch[spoilt, 7] = bad
        drawn = sample(batch, draws)
        assert "not finite" in str(drawn[spoilt].error)
        assert [drawn[row] == expected[row] for row in range(3)] == [row != spoilt for row in range(3)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_spoilt_logit_ends_its_request_whatever_else_is_asked(bad: float, temperature: float) -> None:
    """Also on a token that may not come: what is drawn in its place would have a log-probability of -inf."""
    logits = random_logits(1, seed=4)
    logits[0, EOS] = bad
    for draw in (
        ask(temperature=temperature, min_new_tokens=1),
        ask(temperature=temperature, min_new_tokens=1, logprobs=3),
        ask(temperature=temperature, logit_bias=((EOS, -100.0),), min_new_tokens=1),
        ask(only(7), temperature=temperature),
        ask(raises, temperature=temperature),
        ask(temperature=temperature, top_k=1),
        ask(temperature=temperature, top_p=0.1, min_p=0.5, repetition_penalty=1.5),
    ):
        (drawn,) = sample(logits, [draw])
        assert type(drawn.error) is PDInferError
        assert "the model's logits are not finite" in str(drawn.error)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_allows_nothing_has_no_finite_logits(temperature: float) -> None:
    (drawn,) = sample(torch.full((1, VOCAB), -math.inf), [ask(temperature=temperature)])
    assert type(drawn.error) is PDInferError


def test_a_processor_cannot_bring_back_what_the_model_rules_out() -> None:
    logits = random_logits(2, seed=4)
    logits[:, 7] = -math.inf
    drawn, other = sample(logits, [ask(lambda p, o, logits_V: logits_V.nan_to_num(neginf=1e4)), ask()])
    assert isinstance(drawn.error, RequestError)
    assert "token 7, whose logit is -inf" in str(drawn.error)
    assert other.error is None
    assert math.isfinite(other.logprob)


# Filters


FILTERS = [
    SamplingParams(top_k=1),
    SamplingParams(top_k=3),
    SamplingParams(top_k=8),
    SamplingParams(top_k=1000),
    SamplingParams(top_p=1e-9),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.93),
    SamplingParams(top_p=0.93, temperature=2.0),
    SamplingParams(min_p=0.3),
    SamplingParams(min_p=1.0),
    SamplingParams(min_p=0.3, temperature=0.5),
    SamplingParams(top_k=5, top_p=0.9),
    SamplingParams(top_k=5, top_p=0.9, min_p=0.2, temperature=1.5),
]


def described(param: SamplingParams) -> str:
    return f"k={param.top_k} p={param.top_p} min={param.min_p} t={param.temperature}"


@pytest.mark.parametrize("param", FILTERS, ids=described)
def test_filters_keep_what_a_plain_loop_keeps(param: SamplingParams) -> None:
    expected = kept(LOGITS.tolist(), param)
    assert drawn_set(LOGITS, param) == expected


@pytest.mark.parametrize("param", FILTERS, ids=described)
def test_filters_do_not_leave_their_row(param: SamplingParams) -> None:
    """A row without filters draws, beside a row with them, what it draws alone."""
    plain = SamplingParams(seed=9)
    batch = LOGITS.expand(2, -1)
    for position in range(15):
        both = tokens_of(batch, [plain, param], [position, position])
        assert both == [draw(LOGITS, plain, position), draw(LOGITS, param, position)]


def test_tokens_tied_with_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    assert drawn_set(logits, SamplingParams(top_k=2)) == {0, 1, 2, 3}


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.tensor([0.0, -math.inf, 0.0, -math.inf])
    for param in (SamplingParams(), SamplingParams(top_k=3), SamplingParams(top_p=0.999), SamplingParams(min_p=0.1)):
        assert drawn_set(logits, param) == {0, 2}


@pytest.mark.parametrize("best", range(3))
@pytest.mark.parametrize("param", [SamplingParams(top_k=1), SamplingParams(top_p=1e-9), SamplingParams(min_p=1.0)])
def test_the_strictest_filters_keep_the_best_wherever_it_stands(best: int, param: SamplingParams) -> None:
    logits = torch.zeros(3)
    logits[best] = 0.5
    assert drawn_set(logits, param, draws=200) == {best}


def test_min_p_keeps_what_is_exactly_on_its_border() -> None:
    logits = torch.tensor([0.25, 1.0, 0.5]).log()
    assert drawn_set(logits, SamplingParams(min_p=0.5)) == {1, 2}


# What changes the logits, and the log-probabilities of others

EOS = 1
STEP = 1 / 8
"""Logits, biases and penalties that are multiples of this, or powers of two, leave no rounding to differ in."""

steps = st.integers(-32, 32).map(lambda number: number * STEP)
tokens = st.integers(0, 11)
CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0, 4.0]),
    "presence_penalty": st.sampled_from([-2.0, 0.0, 0.5, 2.0]),
    "frequency_penalty": st.sampled_from([-1.0, 0.0, 0.25, 2.0]),
    "logit_bias": st.dictionaries(tokens, steps, max_size=4).map(lambda bias: tuple(bias.items())),
    "min_new_tokens": st.integers(0, 6),
    "stop_token_ids": st.lists(tokens, max_size=3).map(tuple),
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(0, 20),
}


def test_every_parameter_is_compared_with_plain_loops() -> None:
    """One that is new needs its rule in `tests.plain_sampling`, and a place in CHANGES or FILTERS."""
    filters = {name for param in FILTERS for name in changed_fields(param)}
    fields = {field.name for field in attrs.fields(SamplingParams)}
    elsewhere = {"seed", "max_new_tokens", "logits_processor", "logits_processor_argument"}
    missing = fields - {*CHANGES, *filters} - elsewhere
    assert not missing, f"give {missing} a rule in tests/plain_sampling.py, and values in CHANGES or FILTERS"


draws_of_12 = st.builds(
    lambda changes, temperature, seed, prompt, output: Draw(
        sampling=SamplingParams(temperature=temperature, seed=seed, **changes),
        prompt=prompt,
        output=output,
        eos_token_ids=(EOS,),
    ),
    st.fixed_dictionaries({}, optional=CHANGES),
    st.sampled_from([0.0, 1.0]),
    st.integers(0, 2**64 - 1),
    st.lists(tokens, min_size=1, max_size=8).map(tuple),
    st.lists(tokens, max_size=8),
)


@examples(60)
@given(st.lists(st.tuples(draws_of_12, st.lists(steps, min_size=12, max_size=12)), min_size=1, max_size=6))
def test_a_batch_of_any_requests_is_what_plain_loops_draw(rows: list[tuple[Draw, list[float]]]) -> None:
    logits = torch.tensor([row for _, row in rows])
    raw = logits.clone()
    drawn = sample(logits, [one for one, _ in rows])
    assert torch.equal(logits, raw)
    for one, (ask, row) in zip(drawn, rows, strict=True):
        expected = plain_draw(row, ask.sampling, ask.prompt, ask.output, ask.eos_token_ids)
        assert one.error is None
        assert one.token == expected.token or expected.margin < 1e-5
        assert one.logprob == pytest.approx(row[one.token] - row[expected.token] + expected.logprob, abs=1e-5)
        assert [token for token, _ in one.top_logprobs] == [token for token, _ in expected.top_logprobs]
        values = [value for _, value in one.top_logprobs]
        assert values == pytest.approx([value for _, value in expected.top_logprobs], abs=1e-5)


def test_penalties_of_a_large_batch_do_not_leave_their_rows() -> None:
    """With logits of any size and a packed prompt: the greedy tokens of a plain loop over each row."""
    logits, rng = random_logits(40, seed=5), random.Random(5)
    sampling = [
        SamplingParams(
            temperature=0, repetition_penalty=rng.choice([1.0, 1.3, 0.8]), frequency_penalty=rng.choice([0, 0.7])
        )
        for _ in range(40)
    ]
    prompts = [array("q", [rng.randrange(VOCAB) for _ in range(rng.randrange(60))]) for _ in range(40)]
    outputs = [[rng.randrange(VOCAB) for _ in range(rng.randrange(60))] for _ in range(40)]
    asked = [
        Draw(sampling=param, prompt=prompt, output=output)
        for param, prompt, output in zip(sampling, prompts, outputs, strict=True)
    ]
    changed = [
        changed_logits(row, param, prompt, output)
        for row, param, prompt, output in zip(logits.tolist(), sampling, prompts, outputs, strict=True)
    ]
    assert [one.token for one in sample(logits, asked)] == [row.index(max(row)) for row in changed]
    assert [row.index(max(row)) for row in changed] != logits.argmax(-1).tolist()


def ask(processor: LogitsProcessor | None = None, output: Sequence[int] = (), **more: Any) -> Draw:
    """Greedy behind two tokens of prompt."""
    sampling = SamplingParams(**{"temperature": 0, **more})
    return Draw(sampling=sampling, prompt=(3, 4), output=output, eos_token_ids=(EOS,), processor=processor)


def test_the_order_is_bias_then_penalties_then_forbidden_then_processor() -> None:
    seen: list[Any] = []

    def processor(prompt: tuple[int, ...], output: tuple[int, ...], logits_V: Tensor) -> Tensor:
        seen.append((prompt, output, logits_V.tolist()))
        return logits_V.neg_()  # in place: it is its own

    logits = torch.tensor([[0.0, 9.0, -1.0, 2.0, 1.0]])
    draw = ask(
        processor,
        output=[4, 4],
        logit_bias=((3, 2.0), (4, -3.0)),
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        min_new_tokens=3,
    )
    (drawn,) = sample(logits, [draw])
    assert seen == [((3, 4), (4, 4), [0.0, -math.inf, -1.0, 2.0, -6.0])]
    assert drawn.error is not None  # +inf, where -inf was, cannot be drawn
    assert logits.tolist() == [[0.0, 9.0, -1.0, 2.0, 1.0]]


def only(*allowed: int) -> LogitsProcessor:
    """Return a processor that allows only these tokens."""

    def processor(prompt: tuple[int, ...], output: tuple[int, ...], logits_V: Tensor) -> Tensor:
        masked = torch.full_like(logits_V, -math.inf)
        masked[list(allowed)] = logits_V[list(allowed)]
        return masked

    return processor


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_decides_what_may_come_and_the_logprob_is_of_the_raw_logits(temperature: float) -> None:
    logits = random_logits(1, seed=8)
    (drawn,) = sample(logits, [ask(only(7), temperature=temperature, logprobs=2)])
    raw = logits[0].log_softmax(-1)
    assert (drawn.token, drawn.error) == (7, None)
    assert drawn.logprob == pytest.approx(float(raw[7]), abs=1e-5)
    assert [token for token, _ in drawn.top_logprobs] == raw.topk(2).indices.tolist()


def raises(prompt: tuple[int, ...], output: tuple[int, ...], logits_V: Tensor) -> Tensor:
    raise KeyError("no such state")


BROKEN: dict[str, tuple[Draw, str]] = {
    "raises": (ask(raises, logits_processor="json"), "logits processor 'json' failed: KeyError"),
    "no tensor": (ask(lambda *_: None), "failed: TypeError"),  # type: ignore[arg-type]
    "another shape": (ask(lambda p, o, logits_V: logits_V[:-1]), "failed: TypeError"),
    "another device": (ask(lambda p, o, logits_V: logits_V.to("meta")), "failed: "),
    "nothing allowed": (ask(only()), "no token is left to draw"),
    "nothing allowed, drawn": (ask(only(), temperature=1.0, top_k=3, top_p=0.9), "no token is left to draw"),
    "nan": (ask(lambda p, o, logits_V: logits_V * math.nan), "no token is left to draw"),
    "inf": (ask(lambda p, o, logits_V: logits_V + math.inf), "no token is left to draw"),
    "all are stop tokens": (ask(min_new_tokens=1, stop_token_ids=tuple(range(VOCAB))), "after min_new_tokens"),
    "raises where nothing is left": (
        ask(raises, min_new_tokens=1, stop_token_ids=tuple(range(VOCAB)), logits_processor="json"),
        "logits processor 'json' failed: KeyError",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("at", range(3))
def test_a_row_without_a_token_fails_alone(name: str, at: int) -> None:
    broken, message = BROKEN[name]
    logits = random_logits(3, seed=6)
    draws = [ask(repetition_penalty=1.2), ask(temperature=1.0, seed=3), ask(only(5, 6), logprobs=3)]
    expected = sample(logits, draws)
    draws[at] = broken
    drawn = sample(logits, draws)
    assert isinstance(drawn[at].error, RequestError)
    assert message in str(drawn[at].error)
    assert [drawn[row] == expected[row] for row in range(3)] == [row != at for row in range(3)]


def test_logits_that_are_not_finite_are_not_the_processors_fault() -> None:
    (drawn,) = sample(torch.full((1, VOCAB), math.nan), [ask(raises)])
    assert type(drawn.error) is PDInferError


def test_equal_logits_have_the_smaller_id_first_and_zero_has_no_sign() -> None:
    logits = torch.tensor([[0.0, 3.0, -0.0, 3.0, 0.0, -5.0]])
    (drawn,) = sample(logits, [ask(logprobs=6)])
    assert [token for token, _ in drawn.top_logprobs] == [1, 3, 0, 2, 4, 5]
    assert drawn.token == 1


def test_more_logprobs_than_tokens_are_all_there_are() -> None:
    (drawn,) = sample(torch.zeros(1, 4), [ask(logprobs=20)])
    assert len(drawn.top_logprobs) == 4


def test_tokens_that_cannot_come_are_not_among_the_best() -> None:
    """A hand-off takes no log-probability of -inf."""
    logits = torch.tensor([[1.0, -math.inf, 2.0, -math.inf]])
    (drawn,) = sample(logits, [ask(logprobs=4)])
    assert [token for token, _ in drawn.top_logprobs] == [2, 0]


def test_no_logprobs_are_asked_for_and_none_come() -> None:
    first, second = sample(random_logits(2), [ask(logprobs=0), ask()])
    assert first.top_logprobs == second.top_logprobs == ()


def test_where_a_processor_lets_an_answer_end_it_may_end_by_each_of_its_ends() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 9.0]])
    ends = {"stop_token_ids": (2,)}
    asked = attrs.evolve(ask(only(1), **ends), eos_token_ids=(1, 3))
    assert sample(logits, [asked])[0].token == 3  # another eos, which the processor does not know
    assert sample(logits, [ask(only(EOS), **ends)])[0].token == 2  # the request's own
    assert sample(logits, [ask(only(2, 0), **ends)])[0].token == 2  # it may be text as well
    assert sample(logits, [ask(only(0), **ends)])[0].token == 0  # where no eos may come, no end does
    kept = torch.full((5,), -math.inf)
    kept[EOS] = 1.0
    sample(logits, [ask(lambda prompt, output, logits_V: kept, **ends)])
    assert kept.tolist() == [-math.inf, 1.0, *[-math.inf] * 3]
