"""tiktoken.model gives the tokens that tiktoken gives: byte-level BPE by rank, cut as Moonshot's code cuts."""

from __future__ import annotations

import base64
import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
import regex

import pdinfer as pd
from pdinfer.text import Tokenizer
from pdinfer.text.tiktoken import PATTERN

WORDS = [
    "the",
    "other",
    " an",
    "and",
    "ing",
    " hello",
    "world",
    "don't",
    "汉字",
    "漢字",
    "한국",
    "ABC",
    "  ",
    "\n\n",
    "123",
    "½",
    "é",
    "مرحبا",
    "!?",
    "...\r\n",
]
ALPHABET = "aAbBhHeEtT  \n\r\t'sSlL19½汉字ʰǅé\u0301!?-_한हिﬁ\u3000\u200b€\U0001f600\u00a0"


def some_ranks() -> dict[bytes, int]:
    """All bytes, and what joining neighbours again and again makes of words, as training does it."""
    rng = random.Random(0)
    tokens = [bytes([byte]) for byte in rng.sample(range(256), 256)]
    for word in rng.sample([word.encode() for word in WORDS] * 3, 3 * len(WORDS)):
        parts = [bytes([byte]) for byte in word]
        while len(parts) > 1:
            at = rng.randrange(len(parts) - 1)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
            tokens += [] if parts[at] in tokens else [parts[at]]
    return {token: rank for rank, token in enumerate([*tokens, b"qzx"])}  # the last of which no merges make


RANKS = some_ranks()


def by_rank(text: str) -> list[int]:
    """What tiktoken does, in the fewest words."""
    tokens = []
    for cut in regex.findall(PATTERN, text, flags=regex.V1):
        parts = [cut.encode()] if cut.encode() in RANKS else [bytes([byte]) for byte in cut.encode()]
        while joined := [rank for pair in pairwise(parts) if (rank := RANKS.get(b"".join(pair))) is not None]:
            at = next(at for at, pair in enumerate(pairwise(parts)) if RANKS.get(b"".join(pair)) == min(joined))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        tokens += [RANKS[part] for part in parts]
    return tokens


def folder_of(path: Path, lines: list[bytes] | None = None, **config: object) -> Path:
    if lines is None:
        lines = [base64.b64encode(token) + b" %d" % rank for token, rank in RANKS.items()]
    (path / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    size = len(RANKS)
    added = {
        size: ("[BOS]", True),
        size + 1: ("[EOS]", True),
        size + 4: ("<|im_user|>", True),
        size + 5: ("<t>", False),
    }
    entries = {str(index): {"content": text, "special": special} for index, (text, special) in added.items()}
    stated = {"tokenizer_class": "TikTokenTokenizer", "eos_token": "[EOS]", "added_tokens_decoder": entries}
    (path / "tokenizer_config.json").write_text(json.dumps(stated | config))
    return path


def test_tokens_are_those_of_tiktoken(tmp_path: Path) -> None:
    """docs/decisions/0060 says how it was compared with tiktoken itself."""
    made = Tokenizer.load(folder_of(tmp_path))
    rng = random.Random(1)
    texts = ["".join(rng.choices(WORDS, k=30)) for _ in range(30)]
    texts += ["".join(rng.choices(ALPHABET, k=rng.randint(0, 30))) for _ in range(300)]
    for text in [*texts, "qzx", "a" * 300, "ab" * 100, " " * 200 + "x"]:
        assert list(made.encode(text)) == by_rank(text), text
        assert made.decode(made.encode(text)) == text


def test_texts_are_cut_as_the_maker_cuts_them(tmp_path: Path) -> None:
    """These are the cuts that tiktoken 0.14 makes with his pattern."""
    text = "Hello汉字漢 DON'T camelCase  1234567!?\r\n\r\n \t x\u00a0y ½ʰǅé\u0301 한국  "
    cuts = ["Hello", "汉字漢", " DON'T", " camel", "Case", " ", " ", "123", "456", "7", "!?\r\n\r\n", " \t", " x"]
    cuts += ["\u00a0y", " ", "½", "ʰǅé\u0301", " 한국", "  "]
    made = Tokenizer.load(folder_of(tmp_path)).library.pre_tokenizer
    assert [text[slice(*where)] for _, where in made.pre_tokenize_str(text)] == cuts


def test_special_tokens_are_those_of_tokenizer_config(tmp_path: Path) -> None:
    made = Tokenizer.load(folder_of(tmp_path, chat_template="<|im_user|>{{ messages[0].content }}[EOS]"))
    size = len(RANKS)
    user, middle = made.encode("<|im_user|>a<t>", add_special_tokens=False)[0], RANKS[b"a"]
    assert (user, made.eos_token_ids) == (size + 4, {size + 1})
    assert made.encode(f"<|reserved_token_{size + 2}|>") == (size + 2,)
    assert made.decode((user, middle, size + 5, size + 2)) == "a<t>"
    assert made.chat([{"role": "user", "content": "a[EOS]"}]) == (user, *by_rank("a[EOS]"), size + 1)


LINES = [base64.b64encode(bytes([byte])) + b" %d" % byte for byte in range(256)]
RUNS = [base64.b64encode(b"a" * length) + b" %d" % (254 + length) for length in range(2, 80)]


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "each rank from 0 must have one token"),
        ([b"%%%% 0"], "has no token in base64"),
        (LINES[:-1], "the byte 255 has no token"),
        ([*LINES, b"YWI= 255"], "each rank from 0 must have one token"),
        ([*LINES, b"YQ== 256"], "each token one rank"),
        ([*LINES, b"YWI= 257"], "each rank from 0"),
        ([*LINES, b"YWI= -1"], "a line is a token of 1 to 512 bytes and its rank"),
        ([*LINES, b"YWI= " + b"9" * 5000], "a line is a token of 1 to 512 bytes and its rank"),
        ([*LINES, b"YWI="], "a line is a token of 1 to 512 bytes and its rank"),
        ([*LINES, b" 256"], "a line is a token of 1 to 512 bytes and its rank"),
        ([*LINES, base64.b64encode(b"a" * 513) + b" 256"], "a line is a token of 1 to 512 bytes and its rank"),
        ([*LINES, *RUNS], "more ways than 8 each"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, lines: list[bytes], says: str) -> None:
    with pytest.raises(pd.CheckpointError, match=rf"tiktoken\.model: .*{says}"):
        Tokenizer.load(folder_of(tmp_path, lines))


def test_another_makers_class_cuts_texts_otherwise(tmp_path: Path) -> None:
    with pytest.raises(pd.CheckpointError, match=r"no tiktoken\.model of a TikTokenTokenizer"):
        Tokenizer.load(folder_of(tmp_path, tokenizer_class="OtherTokenizer"))
    with pytest.raises(pd.CheckpointError, match="added_tokens_decoder has 'x' as 3"):
        Tokenizer.load(folder_of(tmp_path, added_tokens_decoder={"3": {"content": "x"}}))
