"""The tokenizer of a checkpoint's files: the tiny model's, those that are missing or broken, and what they ask for."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import pdinfer as pd
from pdinfer.text import Tokenizer
from tests.unit.text.tokenizers_of import EXAMPLES

TINY = EXAMPLES / "tiny"

from tiny_tasks import BOS, EOS, decode, encode  # noqa: E402
from tiny_tokenizer import write_tokenizer  # noqa: E402

TEXTS = ("", "set kqz=48213; get kqz=", "Grüße, 汉字 👩\u200d👧", " two  spaces\r\n\t", "\x00\x7f\u2028", "<|bo", "s>|")


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.load(TINY)


def theirs(folder: Path) -> Any:
    """The tokenizer that transformers makes of a folder."""
    import transformers  # takes a second, which no process that only collects tests shall pay

    return transformers.AutoTokenizer.from_pretrained(folder)


def folder_with(tmp_path: Path, config: dict[str, Any] | str | None = None, **changes: Any) -> Path:
    """A folder with the tiny model's tokenizer.json, in which some fields are others, and a tokenizer_config.json."""
    spec = json.loads((TINY / "tokenizer.json").read_text("utf-8")) | changes
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    if config is not None:
        text = config if isinstance(config, str) else json.dumps(config)
        (tmp_path / "tokenizer_config.json").write_text(text)
    return tmp_path


def test_the_tiny_models_files_are_those_that_its_training_writes(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes()


def test_the_tiny_models_tokens_are_those_it_was_trained_on(tiny: Tokenizer) -> None:
    rng = random.Random(0)
    texts = [*TEXTS, *("".join(chr(rng.randrange(0xD800)) for _ in range(50)) for _ in range(20))]
    library = theirs(TINY)
    for text in texts:
        tokens = tiny.encode(text)
        assert tokens == (BOS, *encode(text)) == tuple(library.encode(text))
        assert tiny.encode(text, add_special_tokens=False) == tuple(encode(text))
        assert tiny.decode([*tokens, EOS]) == text == decode(tokens)
    assert tiny.decode((ord("a"), 0xE2, 0x82, 263)) == "a\ufffd"
    assert tiny.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}


def test_the_tiny_models_chat_is_what_transformers_makes_of_it(tiny: Tokenizer) -> None:
    chat = [{"role": "user", "content": "calc 47+38="}, {"role": "assistant", "content": "85;"}]
    chat.append({"role": "user", "content": "get kqz="})
    library = theirs(TINY)
    assert list(tiny.chat(chat)) == library.apply_chat_template(chat, return_dict=False)
    assert tiny.decode(tiny.chat(chat)) == "calc 47+38=85; get kqz="
    with pytest.raises(pd.RequestError, match="not by tool"):
        tiny.chat([{"role": "tool", "content": "7"}])


def test_what_stands_around_a_text_is_what_tokenizer_json_says(tmp_path: Path) -> None:
    """As in transformers, which reads add_bos_token only where it makes a tokenizer itself."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": True, "model_max_length": 10**30}
    folder = folder_with(
        tmp_path, config | {"bos_token": {"__type": "AddedToken", "content": "<|bos|>"}}, post_processor=None
    )
    made, library = Tokenizer.load(folder), theirs(folder)
    assert made.encode("a") == tuple(library.encode("a")) == (ord("a"),)
    assert made.special_tokens == {"bos_token": "<|bos|>"}


def test_nothing_is_cut_or_padded(tmp_path: Path) -> None:
    cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    fill = {"strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 258}
    fill |= {"pad_type_id": 0, "pad_token": "<|pad|>"}
    made = Tokenizer.load(folder_with(tmp_path, truncation=cut, padding=fill))
    assert len(made.encode("a long text")) == 12


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(pd.CheckpointError, match=r"has no tokenizer\.json.*save_pretrained"):
        Tokenizer.load(tmp_path)
    with pytest.raises(pd.CheckpointError, match="there is no folder"):
        Tokenizer.load(tmp_path / "missing")


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"model": {"type": "BPE"}}'])
def test_a_broken_tokenizer_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(pd.CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "tokenizer_config.json is not strict JSON"),
        ({"chat_template": 5}, "chat_template must be a text or a list"),
        ({"chat_template": [{"name": "default"}]}, "chat_template must be a text or a list"),
        ({"chat_template": [{"name": str(i), "template": ""} for i in range(99)]}, "more than 64 chat templates"),
        ({"chat_template": "{% if %}"}, "the chat template is broken"),
        ('{"model_max_length": 1' + "0" * 5000 + "}", "more than 40 digits"),
    ],
)
def test_a_broken_config_is_refused_by_name(tmp_path: Path, config: Any, says: str) -> None:
    with pytest.raises(pd.CheckpointError, match=re.escape(says)):
        Tokenizer.load(folder_with(tmp_path, config))


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").symlink_to(TINY / "tokenizer.json")
    with pytest.raises(pd.CheckpointError, match="outside the model folder"):
        Tokenizer.load(tmp_path / "model")


def test_text_that_is_none_is_refused(tiny: Tokenizer, tmp_path: Path) -> None:
    for text in ("\ud800", b"bytes", None):
        with pytest.raises(pd.RequestError, match="must be a str without lone surrogates"):
            tiny.encode(text)  # type: ignore[arg-type]
    with pytest.raises(pd.ConfigError, match="a chat needs a chat template, and the checkpoint has none"):
        Tokenizer.load(folder_with(tmp_path)).chat([{"role": "user", "content": "Hi"}])


def test_without_tokenizers_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(pd.BackendUnavailable, match=re.escape("pip install 'pdinfer[text]'")):
        Tokenizer.load(TINY)
