"""Text that comes token by token is the text decoded whole, however its bytes are split, and never half a character."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pdinfer.text import Detokenizer, Tokenizer
from tests.unit.text.tokenizers_of import FALLBACK, METASPACE, byte_level, pieces_of

ALPHABET = "ab \n€ß汉字e\u0301👨\u200d👩\u200d👧🇪🇺"
REPLACEMENT = "\ufffd"


def text_of(rng: random.Random, *, alphabet: str = ALPHABET) -> str:
    return "".join(rng.choices(alphabet, k=rng.randrange(1, 40)))


def chunks_of(rng: random.Random, data: bytes) -> list[bytes]:
    """The bytes in tokens, most of which are shorter than a character."""
    chunks = []
    while data:
        length = rng.choice((1, 1, 1, 2, 2, 3, 4, 7))
        chunks.append(data[:length])
        data = data[length:]
    return chunks


def pieces(tokenizer: Tokenizer, tokens: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    """What a Detokenizer says to each token and at the end."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_any_split_of_multi_byte_text_gives_the_text(count: int) -> None:
    rng = random.Random(count)
    for _ in range(count):
        text = text_of(rng)
        tokenizer, tokens = byte_level(chunks_of(rng, text.encode()))
        came = pieces(tokenizer, tokens)
        assert "".join(came) == text == tokenizer.decode(tokens)
        assert not any(REPLACEMENT in piece for piece in came)
        assert came[-1] == ""  # what is whole was not held back


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_any_bytes_give_what_the_library_makes_of_all_of_them(count: int) -> None:
    """Among them characters that never come whole, and U+FFFD itself."""
    rng = random.Random(count)
    for _ in range(count):
        data = bytearray(text_of(rng, alphabet=ALPHABET + REPLACEMENT).encode())
        for _ in range(rng.randrange(8)):
            data[rng.randrange(len(data))] = rng.choice((rng.randrange(256), 0xFF, 0xF0, 0x80))
        tokenizer, tokens = byte_level(chunks_of(rng, bytes(data)))
        assert "".join(pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


@pytest.mark.parametrize("decoder", [FALLBACK, METASPACE], ids=["fallback", "metaspace"])
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.full)])
def test_pieces_of_sentencepiece_keep_their_spaces_and_bytes(decoder: dict[str, object], count: int) -> None:
    rng = random.Random(count)
    for _ in range(count):
        names = []
        for character in text_of(rng):
            if decoder is FALLBACK and rng.random() < 0.5 and character != " ":
                names += [f"<0x{byte:02X}>" for byte in character.encode()]
            else:
                names.append(rng.choice(("", "▁")) + character.replace(" ", "▁"))
        tokenizer, tokens = pieces_of(names, decoder)
        came = pieces(tokenizer, tokens)
        assert "".join(came) == tokenizer.decode(tokens)
        assert not any(REPLACEMENT in piece for piece in came)


def test_the_output_is_what_it_adds_to_the_text_of_the_prompt() -> None:
    rng = random.Random(1)
    for _ in range(100):
        names = [rng.choice(("", "▁")) + rng.choice("abc") for _ in range(20)]
        tokenizer, tokens = pieces_of(names, FALLBACK)
        cut = rng.randrange(1, 20)
        came = pieces(tokenizer, tokens[cut:], prompt=tokens[:cut])
        assert tokenizer.decode(tokens[:cut]) + "".join(came) == tokenizer.decode(tokens)


def test_a_special_token_begins_a_text_in_the_prompt_and_none_in_the_output() -> None:
    tokenizer, (hello, you) = pieces_of(["▁hello", "▁you"], FALLBACK)
    special = 2
    assert pieces(tokenizer, [hello], prompt=[you, special]) == ["hello", ""]
    assert pieces(tokenizer, [hello], prompt=[you]) == [" hello", ""]
    assert pieces(tokenizer, [hello, special, you]) == ["hello", "", " you", ""]
    assert tokenizer.decode([hello, special, you]) == "hello you"
    assert pieces(tokenizer, [hello, 99, you]) == ["hello", "", " you", ""]  # a spare id of the model


def test_a_character_that_never_comes_whole_is_shown_at_the_end() -> None:
    tokenizer, tokens = byte_level([b"a", b"\xf0", b"\x9f"])
    assert pieces(tokenizer, tokens) == ["a", "", "", REPLACEMENT]


@pytest.mark.parametrize("chunk", [b"\xff", b"\xac\xe2\x82", b"a", b"\xf0\x9f\x98"], ids=["bad", "split", "a", "cut"])
def test_a_token_costs_the_same_however_many_came(chunk: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where every token ends inside a character, or none is ever whole."""
    tokenizer, tokens = byte_level([chunk] * 2000)
    num_decoded = []
    joined = Tokenizer.joined
    monkeypatch.setattr(Tokenizer, "joined", lambda self, ids: num_decoded.append(len(ids)) or joined(self, ids))
    came = pieces(tokenizer, tokens)
    assert sum(num_decoded) <= 50 * len(tokens)
    assert max(map(len, came)) <= 20  # nothing is held back for long
    assert "".join(came) == tokenizer.decode(tokens)
