"""Write the tokenizer of the tiny model in the form of a release: tokenizer.json and tokenizer_config.json.

    python examples/tiny_tokenizer.py FOLDER

It encodes as `tiny_tasks.encode` does, with BOS before a text: byte-level BPE without merges, so a token is a byte.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

from tiny_tasks import BOS, EOS, PAD

SPECIAL: Final = {BOS: "<|bos|>", EOS: "<|eos|>", PAD: "<|pad|>"}

# What a user wrote is the beginning of what the model writes; a space stands between segments, as in training rows.
CHAT_TEMPLATE: Final = """\
{{- bos_token -}}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- message.content -}}
    {%- elif message.role in ('system', 'assistant') -%}
        {{- message.content + ' ' -}}
    {%- else -%}
        {{- raise_exception('a message is by the system, the user or the assistant, not by ' + message.role) -}}
    {%- endif -%}
{%- endfor -%}
"""


def byte_characters() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary, as GPT-2 has them: a printable one
    for itself, and those from U+0100 on for the others, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def tokenizer_json() -> dict[str, Any]:
    """Return tokenizer.json."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    bos = {"SpecialToken": {"id": SPECIAL[BOS], "type_id": 0}}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": token, "content": text} | plain for token, text in SPECIAL.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [bos, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {SPECIAL[BOS]: {"id": SPECIAL[BOS], "ids": [BOS], "tokens": [SPECIAL[BOS]]}},
        },
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(byte_characters())},
            "merges": [],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    """Return tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[BOS],
        "eos_token": SPECIAL[EOS],
        "pad_token": SPECIAL[PAD],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }


def write_tokenizer(folder: Path) -> None:
    """Write both files into `folder`."""
    for name, content in (("tokenizer.json", tokenizer_json()), ("tokenizer_config.json", tokenizer_config())):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    write_tokenizer(Path(sys.argv[1]))
