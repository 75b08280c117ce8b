"""Log-probabilities name tokens: two of one text stay two, and the bytes of all are those of the text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pdinfer as pd
from pdinfer.text.openai.logprobs import TokenNames
from tests.unit.text.tokenizers_of import FALLBACK, byte_level, pieces_of

pytest.importorskip("tokenizers", reason="text needs the package tokenizers")


def event(token: int, logprob: float, *best: tuple[int, float]) -> pd.TokenEvent:
    return pd.TokenEvent(request_id="a", token=token, index=0, logprob=logprob, top_logprobs=best)


@given(chunks=st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=12))
def test_the_bytes_of_tokens_are_those_of_the_text(chunks: list[bytes]) -> None:
    tokenizer, ids = byte_level(chunks)
    names = TokenNames(tokenizer)
    assert b"".join(map(names.bytes_of, ids)) == b"".join(chunks)


def test_spaces_stay_and_bytes_are_bytes_where_a_tokenizer_writes_them_out() -> None:
    pieces = ["▁Hello", "▁world", "!", "<0xE2>", "<0x82>", "<0xAC>"]
    tokenizer, ids = pieces_of(pieces, FALLBACK)
    names = TokenNames(tokenizer)
    assert b"".join(map(names.bytes_of, ids)).decode() == " Hello world!€"
    assert [names.name(token) for token in ids] == [
        " Hello",
        " world",
        "!",
        "bytes:\\xe2",
        "bytes:\\x82",
        "bytes:\\xac",
    ]


def test_each_of_several_tokens_of_one_text_is_told_and_the_drawn_one_under_its_text() -> None:
    tokenizer, ids = pieces_of(["a", "<0x61>", "b"], FALLBACK)
    names, (a, other, b) = TokenNames(tokenizer), ids
    told = names.for_completion([event(other, -0.4, (a, -0.1), (other, -0.4), (b, -3.0))])
    assert (told["tokens"], told["token_logprobs"]) == (["a"], [-0.4])
    assert told["top_logprobs"] == [{"a": -0.4, f"token_id:{a}": -0.1, "b": -3.0}]
    (content,) = names.for_chat([event(b, -5.0, (a, -0.1), (other, -0.4))])["content"]
    assert (content["token"], content["bytes"], content["logprob"]) == ("b", [98], -5.0)
    assert [(best["token"], best["logprob"]) for best in content["top_logprobs"]] == [("a", -0.1), ("a", -0.4)]
    json.dumps(told)
