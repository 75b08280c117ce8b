"""What may enter: every hostile request has a row here, named by its id in the threat list."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

import attrs
import pytest

import pdinfer as pd
from pdinfer.errors import RequestError
from pdinfer.remote.messages import PackedRequest
from pdinfer.scheduling import admission
from pdinfer.scheduling.admission import (
    MAX_BIASED_TOKENS,
    MAX_DEADLINE_S,
    MAX_ID_CHARACTERS,
    MAX_LOGPROBS,
    MAX_SALT_BYTES,
    MAX_STOP_TOKENS,
    CheckedTokens,
    check_request,
)
from pdinfer.testing import random_model, tiny_config
from pdinfer.types import Request, RequestLimits, SamplingParams

PREFILL = RequestLimits(name="prefill", vocab_size=100, max_tokens=64)
DECODE = RequestLimits(name="decode", vocab_size=90, max_tokens=48)
NAN, INF = float("nan"), float("inf")
SAMPLING_FIELDS = {field.name for field in attrs.fields(SamplingParams)}
LARGEST_MESSAGE = 400


def request(**values: Any) -> Request:
    """Return a good request of 3 + 8 tokens, with `values` put where they belong. Token ids go past the constructor,
    which would refuse them, as those of a message from another process do."""
    sampling = {name: value for name, value in values.items() if name in SAMPLING_FIELDS}
    others = {name: value for name, value in values.items() if name not in SAMPLING_FIELDS}
    good = {"prompt": (1, 2, 3), "sampling": SamplingParams(**{"max_new_tokens": 8, **sampling})}
    tokens = {name: others.pop(name) for name in ("prompt", "output") if name in others}
    made = Request(**{**good, **others})
    for name, value in tokens.items():
        object.__setattr__(made, name, value)
    return made


def rows(row: str, field: str, limit: str, *values: object) -> list[Any]:
    """Return one parameter set per value. `limit` is what the message says about the rule."""
    return [pytest.param(field, value, limit, id=f"{row}-{field}-{index}") for index, value in enumerate(values)]


TOKEN_RULE = "token ids are ints from 0 to 89"
HOSTILE = [
    *rows("H30", "prompt", "at least one token", ()),
    *rows("H30", "max_new_tokens", "from 1 to 2147483647", 0, -1, -(2**63)),
    *rows("H31", "max_new_tokens", "an int from 1 to 2147483647", 2**63, 2**31, 1.0, True, "8", None, NAN, (8,)),
    *rows("H32", "max_new_tokens", "prefill holds 64, decode holds 48", 46, 62, 10**6, 2**31 - 1),
    *rows("H32", "prompt", "prefill holds 64, decode holds 48", (1,) * 41, (1,) * 57, (1,) * 10_000),
    *rows("H33", "temperature", "a number from 0 to 100", NAN, INF, -INF, -0.1, 1e9, 10**400, "1", None, True, (1.0,)),
    *rows("H33", "top_p", "a number from 0 to 1", NAN, -0.1, 1.1, "1", True, None),
    *rows("H33", "top_p", "keeps no token", 0, 0.0, -0.0),
    *rows("H33", "top_k", "an int from 0 (off) to 2147483647", -5, 2**31, 1.5, True, "5", NAN, None),
    *rows("H33", "min_p", "a number from 0 to 1", NAN, -0.1, 2, INF, "0", False),
    *rows("H34", "seed", "from 0 to 2**64 - 1", -1, 2**64, 2**200, 2**20_000, 1.0, "7", True, NAN, b"seed"),
    *rows("H38", "prompt", TOKEN_RULE, (1, -1), (1, 90), (1, 2**31), (1, 2**63), (1, 2**20_000)),
    *rows("H38", "prompt", TOKEN_RULE, (1, 1.0), (1, True), (1, "2"), (1, None), (1, (2,))),
    *rows("H38", "prompt", "must be a tuple of token ids", [1, 2], "12", b"12", None, 5, {1: 2}, range(3)),
    *rows("H38", "output", TOKEN_RULE, (1, -1), (1, 90), (1, 2**31), (1, False)),
    *rows("H38", "output", "must be a tuple of token ids", [1], None, "1"),
    *rows("H39", "stop_token_ids", TOKEN_RULE, (-1,), (90,), (2**31,), (0.5,), (True,), ("1",)),
    *rows("H39", "stop_token_ids", "must be a tuple of token ids", [1], {1}, 5, None),
    *rows("H39", "stop_token_ids", f"at most {MAX_STOP_TOKENS}", (1,) * (MAX_STOP_TOKENS + 1), (1,) * 100_000),
    *rows("H39", "logit_bias", "must be a tuple of (token id, bias) pairs", [], None, {5: 1.0}, "5", 5),
    *rows(
        "H39", "logit_bias", "must be a (token id, bias) pair", (5,), ([5, 1.0],), ((5,),), ((5, 1.0, 2.0),), ("51",)
    ),
    *rows("H39", "logit_bias", TOKEN_RULE, ((-1, 1.0),), ((90, 1.0),), ((2**31, 1.0),), ((5.0, 1.0),), ((True, 1.0),)),
    *rows("H39", "logit_bias", "from -100 to 100", ((5, NAN),), ((5, INF),), ((5, -INF),), ((5, 101),), ((5, "1"),)),
    *rows("H39", "logit_bias", "from -100 to 100", ((5, 10**400),), ((5, None),), ((5, True),), ((5, (1.0,)),)),
    *rows("H39", "logit_bias", "two pairs of one token id", ((5, 1.0), (6, 1.0), (5, 1.0))),
    *rows("H39", "logit_bias", f"at most {MAX_BIASED_TOKENS}", ((5, 1.0),) * (MAX_BIASED_TOKENS + 1), (None,) * 10**5),
    *rows("H40", "min_new_tokens", "from 0 to max_new_tokens, which is 8", 9, -1, 2**63, 1.0, "0", NAN, None, True),
    *rows("H36", "logprobs", f"from 0 to {MAX_LOGPROBS}", MAX_LOGPROBS + 1, -1, 2**63, 1.0, "all", True, NAN),
    *rows(
        "H37", "repetition_penalty", "from 0.01 to 100", 0, -1.0, NAN, INF, -INF, 101, 1e-9, 10**400, "1", None, True
    ),
    *rows("H37", "presence_penalty", "from -2 to 2", 2.1, -2.1, NAN, INF, -INF, 10**400, "1", None, False),
    *rows("H37", "frequency_penalty", "from -2 to 2", 2.1, -2.1, NAN, INF, -INF, 10**400, "1", None, False),
    *rows(
        "H45",
        "logits_processor",
        "engine was given: none",
        "json",
        "",
        5,
        b"json",
        ("json",),
        NAN,
        {"json"},
        "j" * 10**6,
    ),
    *rows(
        "H45", "logits_processor_argument", "65536 bytes of UTF-8", 5, None, b"x", "x" * 65537, "ä" * 32769, "\ud800"
    ),
    *rows("H45", "logits_processor_argument", "logits_processor is None", "{}"),
    *rows("H40", "output", "nothing is left to generate", (1,) * 8, (1,) * 9),
    *rows("H40", "ignore_eos", "a bool", 1, None, "no", 0.0),
    *rows("H41", "deadline_s", f"a number from 0 to {MAX_DEADLINE_S:g}", -1, -0.001, NAN, INF, 1e9, 2**80, "5", True),
    *rows("H42", "cache_salt", f"at most {MAX_SALT_BYTES} bytes", b"x" * 257, b"\0" * (1 << 20), "salt", None, 5),
    *rows(
        "H44", "request_id", f"1 to {MAX_ID_CHARACTERS} printable characters", "", "a\nb", "a\0b", "\x1b[2J", "a\u202eb"
    ),
    *rows("H44", "request_id", f"1 to {MAX_ID_CHARACTERS} printable characters", "x" * 257, "x" * (1 << 20), 5, b"id"),
    *rows("H44", "request_id", f"1 to {MAX_ID_CHARACTERS} printable characters", "\ud800", ("x",), NAN),
    *rows("H44", "sampling", "must be SamplingParams", None, {"temperature": 1.0}, "greedy"),
    *rows("H44", "alone", "True or False", 1, None, "no"),
    *rows("H44", "expected_new_tokens", "an int from 0 to 2147483647 or None", -1, 2**31, 1.0, True, "8", NAN),
    *rows("H44", "priority", "an int of 32 bits", 2**31, -(2**31), 2**500, 1.0, True, "high", None, NAN),
]


def refusal(bad: Request) -> str:
    with pytest.raises(RequestError) as info:
        check_request(bad, [PREFILL, DECODE])
    return str(info.value)


def test_every_field_has_values_that_are_refused() -> None:
    """A field that nothing checks would reach an engine with any value. One that is new needs a line in HOSTILE."""
    fields = SAMPLING_FIELDS | {field.name for field in attrs.fields(Request)}
    unchecked = fields - {case.values[0] for case in HOSTILE} - {"stop"}  # which has tests of its own
    assert not unchecked, f"check {unchecked} in scheduling/admission.py, and give HOSTILE values that it refuses"


@pytest.mark.parametrize(("field", "value", "limit"), HOSTILE)
def test_a_hostile_value_is_refused_by_name_value_and_limit(field: str, value: object, limit: str) -> None:
    message = refusal(request(**{field: value}))
    assert field in message
    assert limit in message
    assert len(message) <= LARGEST_MESSAGE


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("temperature", -0.5, "got -0.5"),
        ("top_p", NAN, "got nan"),
        ("top_k", -5, "got -5"),
        ("seed", 2**200, "got an int of 201 bits"),
        ("prompt", (1, 2, 90), "prompt[2] is 90;"),
        ("output", (5, -7), "output[1] is -7;"),
        ("stop_token_ids", (1, 2**31), "sampling.stop_token_ids[1] is 2147483648;"),
        ("stop_token_ids", (1,) * 2000, "has 2000 ids"),
        ("max_new_tokens", "eight", "got 'eight'"),
        ("max_new_tokens", 60, "prompt of 3 tokens plus max_new_tokens 60 makes 63"),
        ("deadline_s", -2.5, "got -2.5"),
        ("request_id", "two\nlines", r"got 'two\nlines'"),
        ("cache_salt", "text", "got 'text'"),
        ("priority", 1.5, "got 1.5"),
        ("logprobs", 21, "got 21"),
        ("logit_bias", ((5, 1.0), (6, 200)), "logit_bias[1] must be a number from -100 to 100, got 200"),
        ("logit_bias", ((5, 1.0), (95, 1.0)), "sampling.logit_bias[1] is 95;"),
        ("logits_processor", "json", "sampling.logits_processor is 'json'; the prefill engine was given: none"),
    ],
)
def test_the_message_shows_the_value(field: str, value: object, shown: str) -> None:
    assert shown in refusal(request(**{field: value}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", "x" * (8 << 20)),
        ("cache_salt", b"x" * (8 << 20)),
        ("temperature", "9" * (8 << 20)),
        ("temperature", 1 << (8 << 20)),
        ("deadline_s", 1 << (8 << 20)),
        ("seed", 1 << (8 << 20)),
        ("top_k", (1 << (8 << 20),)),
        ("prompt", "1" * (8 << 20)),
        ("logit_bias", "1" * (8 << 20)),
        ("logit_bias", ((1 << (8 << 20), 1.0),)),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else type(value).__name__,
)
def test_a_huge_value_makes_a_small_message_and_no_copy(field: str, value: object) -> None:
    bad = request(**{field: value})
    tracemalloc.start()
    try:
        assert len(refusal(bad)) <= LARGEST_MESSAGE
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"prompt": (0, 89), "output": (0, 89)},
        {"prompt": (1,) * 40},
        {"max_new_tokens": 45},
        {"max_new_tokens": 1},
        {"output": (1,) * 7},
        {"temperature": 0, "top_k": 1, "top_p": 1, "min_p": 0},
        {"temperature": 100.0, "top_k": 2**31 - 1, "top_p": 1e-9, "min_p": 1.0},
        {"seed": 0},
        {"seed": 2**64 - 1},
        {"stop_token_ids": (0, 89) * (MAX_STOP_TOKENS // 2), "ignore_eos": True},
        {"logit_bias": tuple((token, -100.0) for token in range(90)), "min_new_tokens": 8, "logprobs": MAX_LOGPROBS},
        {"logit_bias": ((0, 100), (89, -100)), "min_new_tokens": 0, "logprobs": 0},
        {"repetition_penalty": 0.01, "presence_penalty": -2, "frequency_penalty": 2.0},
        {"priority": 2**31 - 1, "deadline_s": 0},
        {"priority": 1 - 2**31, "deadline_s": MAX_DEADLINE_S},
        {"cache_salt": b"\0" * MAX_SALT_BYTES},
        {"request_id": "x" * MAX_ID_CHARACTERS},
        {"request_id": "Anfrage №7 – für später"},
    ],
)
def test_a_good_request_passes(values: dict[str, Any]) -> None:
    check_request(request(**values), [PREFILL, DECODE])


def test_without_limits_any_length_passes() -> None:
    check_request(request(prompt=(2**31 - 1,) * 1000, max_new_tokens=2**31 - 1), [])


@pytest.mark.parametrize("limit", [PREFILL, DECODE])
def test_each_engine_alone_refuses_what_it_cannot_hold(limit: RequestLimits) -> None:
    check_request(request(max_new_tokens=limit.max_tokens - 3), [limit])
    with pytest.raises(RequestError, match=f"{limit.name} holds {limit.max_tokens}"):
        check_request(request(max_new_tokens=limit.max_tokens - 2), [limit])


def test_a_default_may_be_written_as_an_int() -> None:
    """JSON has no 0.0, so clients send `presence_penalty: 0`."""
    sampling = SamplingParams(presence_penalty=0, frequency_penalty=0, repetition_penalty=1, temperature=1, top_p=1)
    check_request(Request(prompt=(1,), sampling=sampling), [])


def test_a_logits_processor_has_to_be_known_to_both_engines() -> None:
    named = request(logits_processor="json", logits_processor_argument="ä" * 32768)
    limits = {"name": "prefill", "vocab_size": 100, "max_tokens": 64}
    knows = RequestLimits(**limits, logits_processors=("grammar", "json"))  # type: ignore[arg-type]
    check_request(named, [knows, knows])
    with pytest.raises(RequestError, match="'json'; the decode engine was given: none"):
        check_request(named, [knows, DECODE])


# -- how often a prompt is scanned -------------------------------------------------------------------------------------


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Record what was scanned, and how many ids it had."""
    seen: list[tuple[str, int]] = []
    scan = admission._scan

    def counted(name: str, tokens: tuple[object, ...], vocab_size: int) -> None:
        seen.append((name, len(tokens)))
        scan(name, tokens, vocab_size)

    monkeypatch.setattr(admission, "_scan", counted)
    return seen


def test_a_prompt_that_this_process_has_scanned_is_not_scanned_again(scans: list[tuple[str, int]]) -> None:
    checked = check_request(request(), [PREFILL])
    assert checked == request()
    assert type(checked.prompt) is CheckedTokens
    again = check_request(attrs.evolve(checked, output=(4,)), [PREFILL, DECODE])
    assert again.prompt is checked.prompt
    assert [seen for seen in scans if seen[0] == "prompt"] == [("prompt", 3)]


def test_a_mark_is_no_pass_to_a_smaller_vocabulary() -> None:
    checked = check_request(request(prompt=(95, 3)), [PREFILL])
    with pytest.raises(RequestError, match=r"prompt\[0\] is 95; token ids are ints from 0 to 89"):
        check_request(checked, [DECODE])


def test_a_mark_does_not_travel() -> None:
    checked = check_request(request(), [PREFILL])
    parts: list[object] = [checked.prompt[1:], checked.prompt + checked.prompt]
    for copy in (pickle.loads(pickle.dumps(checked)), PackedRequest.of(checked).unpack()):
        assert copy == checked
        parts.append(copy.prompt)
    assert {type(part) for part in parts} == {tuple}


def test_a_long_prompt_is_scanned_once_by_a_pairing_and_its_engines(scans: list[tuple[str, int]]) -> None:
    """Three doors in one process: the Pairing's, and those of decode and of prefill."""
    long = 100_000
    model = random_model(tiny_config("v3", max_position_embeddings=2 * long))
    cache, engine = pd.CacheConfig(page_size=64, num_pages=2000), pd.EngineConfig(chunked_prefill_size=16)
    with pd.Pairing.local(model, cache=cache, engine=engine) as pairing:
        pairing.submit(request(request_id="a", prompt=(7,) * long))
        pairing.step()
        pairing.step()
        assert pairing.num_unfinished
    assert [name for name, length in scans if length == long] == ["prompt"]
