"""The trained model through two processes, which also draft: recall, log-probabilities and text are those of the model
in one piece.

The answers can be checked, so a wrong page shows as a wrong word. Prompts are drawn from fixed seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

import pdinfer as pd

CHECKPOINT = Path(__file__).parents[2] / "examples" / "tiny"
sys.path.insert(0, str(CHECKPOINT.parent))

from tiny_tasks import calc_prompt, copy_prompt, recall_everywhere, recall_prompt, text_prompt  # noqa: E402

from tests.e2e.drafts import ACCEPTANCE_FLOOR, Streams, check_equal, drafted  # noqa: E402
from tests.e2e.setups import by_request  # noqa: E402
from tests.forks import context  # noqa: E402
from tests.waiting import TIMEOUT_S, wait_until  # noqa: E402

RECALL_FLOOR = 0.95
NEAR_TIE = 1e-4


def host(role: str, num_draft_tokens: int, connection: Connection) -> None:
    """One engine in a process of its own, in float32."""
    torch.set_num_threads(1)
    model = pd.load_model(CHECKPOINT, dtype=torch.float32, mtp=True)
    channel = pd.KVChannel(pd.PagePool(model, pd.CacheConfig(page_size=16, num_pages=600)), pd.kv.SocketTransport())
    engine = pd.PrefillEngine if role == "prefill" else pd.DecodeEngine
    config = pd.EngineConfig(chunked_prefill_size=500, num_draft_tokens=num_draft_tokens)
    pd.remote.serve(engine(model, channel, config), connection)


@pytest.fixture(scope="module")
def model() -> pd.Model:
    return pd.load_model(CHECKPOINT, dtype=torch.float32, mtp=True)


@pytest.fixture(scope="module")
def pairing() -> Iterator[pd.Pairing]:
    with two_processes(num_draft_tokens=2) as made:
        yield made


@contextmanager
def two_processes(num_draft_tokens: int) -> Iterator[pd.Pairing]:
    ends, processes = [], []
    for role in ("prefill", "decode"):
        ours, theirs = context().Pipe()
        processes.append(context().Process(target=host, args=(role, num_draft_tokens, theirs), daemon=True))
        processes[-1].start()
        ends.append(ours)
    with pd.Pairing(pd.remote.PrefillClient(ends[0]), pd.remote.DecodeClient(ends[1])) as made:
        yield made
    for process in processes:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0


@attrs.frozen
class Asked:
    """A prompt, the answer it should get, and what came."""

    prompt: tuple[int, ...]
    answer: list[int]
    tokens: list[int]
    logprobs: list[float]

    @property
    def right(self) -> bool:
        return self.tokens == self.answer


def ask(pairing: pd.Pairing, problems: Sequence[tuple[list[int], list[int]]]) -> list[Asked]:
    """Every problem as a greedy request, all together; each gets as many tokens as its answer has."""
    requests = [
        pd.Request(
            request_id=str(number),
            prompt=tuple(prompt),
            sampling=pd.SamplingParams(temperature=0.0, max_new_tokens=len(answer), ignore_eos=True),
        )
        for number, (prompt, answer) in enumerate(problems)
    ]
    asked = [Asked(request.prompt, answer, [], []) for request, (_, answer) in zip(requests, problems, strict=True)]
    for event in pairing.generate(requests):
        assert event.error is None
        assert event.token is not None
        assert event.logprob is not None
        asked[int(event.request_id)].tokens.append(event.token)
        asked[int(event.request_id)].logprobs.append(event.logprob)
    return asked


def check_one_piece(model: pd.Model, asked: Sequence[Asked]) -> None:
    """Tokens are the best of the whole model's logits (near ties counted), log-probabilities its own."""
    near_ties = 0
    for one in asked:
        logits = model.logits([*one.prompt, *one.tokens])[len(one.prompt) - 1 : -1]
        best = logits.topk(2, -1)
        for step, token in enumerate(one.tokens):
            if token != best.indices[step, 0]:
                assert float(best.values[step, 0] - best.values[step, 1]) < NEAR_TIE
                near_ties += 1
        expected = logits.log_softmax(-1)[range(len(one.tokens)), one.tokens]
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-4)
    assert near_ties * 10_000 <= sum(len(one.tokens) for one in asked)


def recall_problems(count: int) -> list[tuple[list[int], list[int]]]:
    rng = np.random.default_rng(2026)
    return [recall_prompt(rng, int(rng.integers(1000, 1201))) for _ in range(count)]


@pytest.mark.full
def test_recall_over_a_thousand_tokens(pairing: pd.Pairing, model: pd.Model) -> None:
    asked = ask(pairing, recall_problems(16))
    check_one_piece(model, asked)
    assert sum(one.right for one in asked) >= RECALL_FLOOR * len(asked)


@pytest.mark.full
def test_recall_of_two_hundred_rows(
    pairing: pd.Pairing, model: pd.Model, record_property: pytest.RecordProperty
) -> None:
    asked = ask(pairing, recall_problems(200))
    check_one_piece(model, asked)
    right = sum(one.right for one in asked)
    record_property("information", f"recall at 1000 to 1200 tokens through two processes: {right} of {len(asked)}")
    assert right >= RECALL_FLOOR * len(asked)


@pytest.mark.full
def test_a_fact_in_every_page(pairing: pd.Pairing, model: pd.Model) -> None:
    """Each page of the prompt is asked for, so no page can be wrong in its last layer."""
    context, questions = recall_everywhere(np.random.default_rng(7), num_facts=24)
    asked = ask(pairing, [(context + query, answer) for query, answer in questions])
    check_one_piece(model, asked)
    assert sum(one.right for one in asked) >= RECALL_FLOOR * len(asked)


def test_copies_sums_and_stories(pairing: pd.Pairing, model: pd.Model) -> None:
    rng = np.random.default_rng(3)
    short = [make(rng) for make in (copy_prompt, calc_prompt) for _ in range(10)]
    asked = ask(pairing, [*short, *(text_prompt(rng) for _ in range(4))])
    check_one_piece(model, asked)
    assert sum(one.right for one in asked[:20]) >= RECALL_FLOOR * 20


# -- drafts -----------------------------------------------------------------------------------------------------------


def drafting_problems(count: int) -> list[tuple[list[int], list[int]]]:
    """Recall, copies and text in turn; as many tokens are asked for as the answers have."""
    rng = np.random.default_rng(77)
    kinds = (lambda rng: recall_prompt(rng, 200), copy_prompt, text_prompt, calc_prompt)
    return [kinds[number % len(kinds)](rng) for number in range(count)]


SAMPLED = pd.SamplingParams(
    max_new_tokens=24, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1, logprobs=3, ignore_eos=True
)


def sampled(problems: Sequence[tuple[list[int], list[int]]]) -> list[pd.Request]:
    """Every problem at temperature 1 with penalties and the best log-probabilities."""
    return [
        pd.Request(request_id=str(number), prompt=tuple(prompt), sampling=attrs.evolve(SAMPLED, seed=number))
        for number, (prompt, _) in enumerate(problems)
    ]


def check_sampled(pairing: pd.Pairing, without: pd.Pairing, model: pd.Model, count: int) -> Streams:
    requests = sampled(drafting_problems(count))
    streams = by_request(pairing.generate(requests))
    check_equal(model, requests, streams, by_request(without.generate(requests)))
    num_drafted, num_accepted = drafted(streams)
    assert 0 < num_accepted <= num_drafted
    return streams


@pytest.fixture(scope="module")
def without(model: pd.Model) -> Iterator[pd.Pairing]:
    """Both engines here, and no drafts."""
    with pd.Pairing.local(model, cache=pd.CacheConfig(page_size=16, num_pages=2000)) as made:
        yield made


def test_sampled_tokens_with_drafts(pairing: pd.Pairing, without: pd.Pairing, model: pd.Model) -> None:
    check_sampled(pairing, without, model, 6)
    (decode,) = (port for port in pairing.ports if port.role == "decode")
    wait_until(lambda: 0 < decode.load().num_accepted_tokens <= decode.load().num_draft_tokens)


@pytest.mark.full
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 3])
def test_two_hundred_prompts_with_drafts(
    without: pd.Pairing, model: pd.Model, num_draft_tokens: int, record_property: pytest.RecordProperty
) -> None:
    with two_processes(num_draft_tokens) as pairing:
        streams = check_sampled(pairing, without, model, 200)
        shares = {"sampled": drafted(streams)}
        greedy = [
            attrs.evolve(one, sampling=attrs.evolve(SAMPLED, temperature=0.0, **NO_PENALTY, max_new_tokens=len(answer)))
            for one, (_, answer) in zip(sampled(drafting_problems(200)), drafting_problems(200), strict=True)
        ]
        streams = by_request(pairing.generate(greedy))
        check_equal(model, greedy, streams, by_request(without.generate(greedy)))
    for number, kind in enumerate(("recall", "copy", "text", "calc")):
        shares[kind] = drafted({name: stream for name, stream in streams.items() if int(name) % 4 == number})
    for kind, (num_drafted, num_accepted) in shares.items():
        share = num_accepted / num_drafted
        record_property("information", f"{num_draft_tokens} drafts, {kind}: {share:.3f} of {num_drafted} accepted")
        assert num_draft_tokens > 1 or kind not in ("recall", "copy") or share >= ACCEPTANCE_FLOOR


NO_PENALTY = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
