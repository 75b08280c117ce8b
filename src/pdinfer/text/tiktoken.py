"""Tokenizers in the format of tiktoken, as Moonshot publishes them for Kimi-K2 and Moonlight: `tiktoken.model` has the
tokens of a byte-level BPE with their ranks. What else there is to know is in the maker's code, and stands here."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping

from pdinfer.checks import clip
from pdinfer.errors import CheckpointError

MAX_MODEL_BYTES = 16 << 20
MAX_DIGITS = 7
MAX_MERGES = 8
"""For each token, on average. Published ones have 2."""
MAX_TOKEN_BYTES = 512
"""More than published tokens have. Each is cut everywhere to find what it is made of."""

KIND = "TikTokenTokenizer"
"""The name of the maker's class in tokenizer_config.json."""
_CAPITALS = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_SMALL = r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]"
_CONTRACTED = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_CAPITALS}]*[{_SMALL}]+{_CONTRACTED}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_CAPITALS}]+[{_SMALL}]*{_CONTRACTED}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""The pattern by which a text is cut before its parts become tokens: `pat_str` of tokenization_kimi.py, see
docs/decisions/0060."""


def tokenizer_json(data: bytes, source: str) -> bytes:
    """Return what tokenizer.json says of the same tokenizer, without its special tokens. Raises CheckpointError for
    anything but such a file.

    tiktoken joins the two neighbours that make the token of the lowest rank, again and again. So each way to cut a
    token into two tokens is a merge, in the order of the ranks.
    """
    ranks = _ranks(data, source)
    merges = []
    for token in ranks:
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        pairs = [(left, right) for left, right in cuts if left in ranks and right in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        if len(merges) > MAX_MERGES * len(ranks):
            raise CheckpointError(f"{source}: its tokens can be cut in more ways than {MAX_MERGES} each, on average")
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    cut = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    spec = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [cut, bytes_only]},
        "decoder": bytes_only,
        "model": {"type": "BPE", "vocab": ranks, "merges": merges, "ignore_merges": True},
    }
    return json.dumps(spec).encode()


def _ranks(data: bytes, source: str) -> Mapping[str, int]:
    """Return the tokens, a character for each byte, with their ranks, and in their order."""
    names = byte_names()
    tokens: dict[int, str] = {}
    lines = [line for line in data.splitlines() if line]
    for line in lines:
        encoded, _, rank = line.partition(b" ")
        try:
            token = base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise CheckpointError(f"{source}: {clip(line[:80])} has no token in base64: {error}") from error
        if not rank.isdigit() or len(rank) > MAX_DIGITS or not 0 < len(token) <= MAX_TOKEN_BYTES:
            raise CheckpointError(
                f"{source}: a line is a token of 1 to {MAX_TOKEN_BYTES} bytes and its rank, got {clip(line[:80])}"
            )
        tokens[int(rank)] = "".join(map(names.__getitem__, token))
    ranks = {tokens[rank]: rank for rank in sorted(tokens)}
    if not len(lines) == len(tokens) == len(ranks) or max(tokens, default=0) >= len(lines):
        raise CheckpointError(f"{source}: each rank from 0 must have one token, and each token one rank")
    if missing := [byte for byte, name in enumerate(names) if name not in ranks]:
        raise CheckpointError(f"{source}: the byte {missing[0]} has no token, so that some text would have none")
    return ranks


def byte_names() -> list[str]:
    """Return how byte-level tokenizers write each byte: as the character of that number, where it is printed, else as
    one after the 256 (Radford et al. 2019, GPT-2)."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    names, following = [], 256
    for byte in range(256):
        names.append(chr(byte if byte in shown else following))
        following += byte not in shown
    return names
