"""Stop strings end a request wherever tokens begin, and nothing of them is shown."""

from __future__ import annotations

import random

import pytest

import pdinfer as pd
from pdinfer.text import Detokenizer, StopStrings, TextStream
from tests.unit.text.test_detokenizer import chunks_of
from tests.unit.text.tokenizers_of import FALLBACK, SPECIAL, byte_level, pieces_of

ALPHABET = "ab€汉"
UNKNOWN = 99
"""A token without text, so that the output begins one."""


def event(token: int | None, index: int, reason: pd.FinishReason | None = None) -> pd.TokenEvent:
    return pd.TokenEvent(request_id="r", token=token, index=index, finish_reason=reason)


def served(request: pd.Request, tokens: list[int]) -> list[pd.TokenEvent]:
    """The events of a Pairing whose model gives these tokens, until the request's stop."""
    assert isinstance(request.stop, StopStrings)
    stops, events = request.stop.begin(request.prompt), []
    for index, token in enumerate(tokens):
        ends = stops(token) and index + 1 >= request.sampling.min_new_tokens
        reason = pd.FinishReason.STOP if ends else None
        if reason is None and index + 1 == len(tokens):
            reason = pd.FinishReason.LENGTH
        events.append(event(token, index, reason))
        if reason is not None:
            break
    return events


def first_stop(text: str, strings: list[str]) -> tuple[str, str | None]:
    """The text before the stop string that is whole first, the longest of these, and that string."""
    for end in range(len(text) + 1):
        if whole := [string for string in strings if text[:end].endswith(string)]:
            longest = max(whole, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_no_beginning_of_a_stop_string_is_shown_before_it_is_known_to_be_none(count: int) -> None:
    rng = random.Random(count)
    num_stopped = 0
    for _ in range(count):
        text = "".join(rng.choices(ALPHABET, k=rng.randrange(1, 30)))
        strings = ["".join(rng.choices(ALPHABET, k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        tokenizer, tokens = byte_level(chunks_of(rng, text.encode()))
        request = pd.Request(prompt=(UNKNOWN,), stop=StopStrings(tokenizer, strings))
        stream, shown = TextStream(tokenizer, request), ""
        whole, came = Detokenizer(tokenizer, request.prompt), ""
        for each in served(request, tokens):
            shown += stream.push(each)
            came += "" if each.token is None else whole.push(each.token)
            if each.finish_reason is None:  # nothing that was shown is in a stop string that may still come
                assert not any(string.startswith(came[at:]) for string in strings for at in range(len(shown)))
                assert came.startswith(shown)
        assert (shown, stream.stop_string) == first_stop(text, strings)
        num_stopped += stream.stop_string is not None
    assert count / 10 < num_stopped < count


def stream_of(text: str, strings: list[str], **more: object) -> tuple[list[str], TextStream]:
    """What is shown for each byte of a text, as a token, and the stream."""
    tokenizer, tokens = byte_level([bytes([byte]) for byte in text.encode()])
    sampling = pd.SamplingParams(**more)  # type: ignore[arg-type]
    request = pd.Request(prompt=(UNKNOWN,), sampling=sampling, stop=StopStrings(tokenizer, strings))
    stream = TextStream(tokenizer, request)
    return [stream.push(each) for each in served(request, tokens)], stream


def test_what_was_held_back_comes_when_it_is_no_stop() -> None:
    assert stream_of("xENabc", ["END"])[0] == ["x", "", "", "ENa", "b", "c"]
    assert stream_of("xEN", ["END"])[0] == ["x", "", "EN"]


def test_a_stop_string_before_min_new_tokens_is_text() -> None:
    shown, stream = stream_of("aENDbENDc", ["END"], min_new_tokens=6)
    assert ("".join(shown), stream.stop_string) == ("aENDb", "END")
    shown, stream = stream_of("aaaa", ["aa"], min_new_tokens=3)
    assert ("".join(shown), stream.stop_string) == ("a", "aa")


def test_an_end_for_another_reason_shows_everything() -> None:
    tokenizer, (a, e, n) = byte_level([b"a", b"E", b"N"])
    for last in (event(None, 2, pd.FinishReason.CANCELLED), event(3, 2, pd.FinishReason.STOP)):  # 3 is special
        stream = TextStream(tokenizer, pd.Request(prompt=(a,), stop=StopStrings(tokenizer, ["END"])))
        assert [stream.push(event(e, 0)), stream.push(event(n, 1)), stream.push(last)] == ["", "", "EN"]
        assert stream.stop_string is None


def test_a_request_that_is_resumed_goes_on_in_its_text() -> None:
    """Half of the stop string came before, and so did half of a character."""
    tokenizer, tokens = byte_level([b"x", b"EN", b"D", b"\xe2\x82", b"\xac"])
    x, en, d, half, rest = tokens
    request = pd.Request(prompt=(x,), output=(x, en), stop=StopStrings(tokenizer, ["END"]))
    stream = TextStream(tokenizer, request)
    assert stream.push(event(d, 2, pd.FinishReason.STOP)) == ""
    assert stream.stop_string == "END"
    stream = TextStream(tokenizer, pd.Request(prompt=(x,), output=(half,)))
    assert stream.push(event(rest, 1)) == "€"


def test_the_space_that_leads_the_output_counts() -> None:
    tokenizer, (a, b) = pieces_of(["▁a", "▁b"], FALLBACK)
    stops = StopStrings(tokenizer, [" b"])
    assert stops.begin((a,))(b)
    assert not stops.begin((2,))(b)  # behind a special token a text begins, and has no space before it


@pytest.mark.parametrize(
    ("strings", "says"),
    [
        ("END", "must be a list of texts, got 'END'"),
        ([1], "must be a list of texts"),
        ([""], "1 to 256 characters, got ''"),
        (["x" * 257], "1 to 256 characters"),
        (["x"] * 65, "there are 65 stop strings, at most 64"),
    ],
)
def test_strings_that_cannot_be_stops_are_refused(strings: list[str], says: str) -> None:
    tokenizer, _ = byte_level([b"a"])
    with pytest.raises(pd.RequestError, match=says):
        StopStrings(tokenizer, strings)


def test_a_special_token_is_a_stop_string_and_shows_nothing() -> None:
    tokenizer, (a, b, s, _) = byte_level([b"a", b"b", b"s", b"t"])
    special = tokenizer.special_texts[SPECIAL]
    request = pd.Request(prompt=(UNKNOWN,), stop=StopStrings(tokenizer, [SPECIAL, "st"]))
    events = served(request, [a, special, b])
    assert [each.finish_reason for each in events] == [None, pd.FinishReason.STOP]
    stream = TextStream(tokenizer, request)
    assert ("".join(map(stream.push, events)), stream.stop_string) == ("a", SPECIAL)
    stream = TextStream(tokenizer, request)
    assert (
        "".join(map(stream.push, served(request, [s, special]))) == "s"
    )  # which might have been the other's beginning
    with pytest.raises(pd.RequestError, match="give it alone"):
        StopStrings(tokenizer, [f"a{SPECIAL}"])


def test_a_special_token_that_is_shown_has_its_text() -> None:
    tokenizer, (a, b) = byte_level([b"a", b"b"])
    special = tokenizer.special_texts[SPECIAL]
    for shown, text in (((), "ab"), ((special,), f"a{SPECIAL}b")):
        stream = TextStream(tokenizer, pd.Request(prompt=(UNKNOWN,)), shown=shown)
        events = [event(a, 0), event(special, 1), event(b, 2, pd.FinishReason.LENGTH)]
        assert "".join(map(stream.push, events)) == text
