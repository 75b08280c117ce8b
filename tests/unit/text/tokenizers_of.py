"""Small tokenizers of the kinds that checkpoints have, made of given tokens."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pdinfer.text import Tokenizer
from pdinfer.text.files import TextFiles

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

from tiny_tokenizer import byte_characters  # noqa: E402

CHARACTERS = byte_characters()
SPECIAL = "<|special|>"


def _made(vocab: dict[str, int], decoder: dict[str, Any], **model: Any) -> Tokenizer:
    """A tokenizer with these tokens and one special token, whose id is the last."""
    special = {"id": len(vocab), "content": SPECIAL, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec = {
        "version": "1.0",
        "added_tokens": [special | flags],
        "decoder": decoder,
        "model": {"type": "BPE", "vocab": vocab, "merges": [], **model},
    }
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(spec)), TextFiles())


def byte_level(chunks: Sequence[bytes]) -> tuple[Tokenizer, list[int]]:
    """A tokenizer as GPT-2's, with a token for each of these chunks, and the tokens of all of them in order."""
    names = ["".join(CHARACTERS[byte] for byte in chunk) for chunk in chunks]
    vocab = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return _made(vocab, {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}), [
        vocab[name] for name in names
    ]


FALLBACK = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
"""The decoder of Llama 2."""
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}


def pieces_of(names: Sequence[str], decoder: dict[str, Any]) -> tuple[Tokenizer, list[int]]:
    """A tokenizer as SentencePiece's with these tokens, such as "▁a" and "<0xE2>", and the tokens in order."""
    vocab = {name: index for index, name in enumerate(dict.fromkeys(names))}
    return _made(vocab, decoder, byte_fallback=True), [vocab[name] for name in names]


def tiny_folder(path: Path, template: str | None = None, added: Sequence[str] = (), **generation: Any) -> Path:
    """A copy of the tiny model's folder with these added tokens, whose ids are 259 and so on, and with the template and
    the generation_config.json that are given."""
    shutil.copytree(EXAMPLES / "tiny", path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"] += [{"id": 259 + at, "content": text, **flags} for at, text in enumerate(added)]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    (path / "generation_config.json").write_text(json.dumps(generation))
    return path
