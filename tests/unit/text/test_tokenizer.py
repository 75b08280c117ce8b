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
from pdinfer.text.tokenizer import LONG_TEXT
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
    assert tiny.decode((ord("a"), 0xE2, 0x82, 263, -1, 2**40)) == "a\ufffd"
    assert tiny.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}


def test_the_tiny_models_chat_is_what_transformers_makes_of_it(tiny: Tokenizer) -> None:
    chat = [{"role": "user", "content": "calc 47+38="}, {"role": "assistant", "content": "85;"}]
    chat.append({"role": "user", "content": "get kqz="})
    library = theirs(TINY)
    assert list(tiny.chat(chat)) == library.apply_chat_template(chat, return_dict=False)
    assert tiny.decode(tiny.chat(chat)) == "calc 47+38=85; get kqz="
    with pytest.raises(pd.RequestError, match="not by tool"):
        tiny.chat([{"role": "tool", "content": "7"}])


def test_a_text_has_the_bos_and_the_eos_that_tokenizer_config_asks_for_once(tmp_path: Path) -> None:
    """As with the makers' transformers 4. Version 5 asks tokenizer.json alone, unless it makes the tokenizer itself."""
    named = {"bos_token": {"__type": "AddedToken", "content": "<|bos|>"}, "eos_token": "<|eos|>"}
    config = named | {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**30}
    both = {"add_bos_token": True, "add_eos_token": True}
    for wanted, before, behind in ((both, (BOS,), (EOS,)), ({"add_bos_token": False, "add_eos_token": None}, (), ())):
        made = Tokenizer.load(folder_with(tmp_path, config | wanted, post_processor=None))
        assert made.encode("a") == (*before, ord("a"), *behind)
        assert made.encode("a", add_special_tokens=False) == (ord("a"),)
        assert made.special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    assert Tokenizer.load(folder_with(tmp_path, config | both)).encode("a") == (BOS, ord("a"), EOS)
    for broken in ({"add_bos_token": True}, {"add_bos_token": 1}):
        with pytest.raises(pd.CheckpointError, match=r"tokenizer_config\.json: add_bos_token"):
            Tokenizer.load(folder_with(tmp_path, broken))


def test_tokens_of_tokenizer_config_are_added_with_their_ids(tmp_path: Path) -> None:
    entries = {"262": {"content": "<x>", "rstrip": True}, "256": {"content": "<|bos|>"}, "259": {"content": "<y>"}}
    entries["259"]["special"] = True
    made = Tokenizer.load(folder_with(tmp_path, {"added_tokens_decoder": entries}))
    assert made.encode("<x>  <y>b<|reserved_token_260|>", add_special_tokens=False) == (262, 259, ord("b"), 260)
    assert made.decode((262, 259, 260, 261)) == "<x>"


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"257": {"content": "<|bos|>"}}, "'<|bos|>' as 257, where the tokenizer has '<|eos|>', and '<|bos|>' as 256"),
        ({"256": {"content": "<x>"}}, "'<x>' as 256, where the tokenizer has '<|bos|>'"),
        ({"70": {"content": "<x>"}}, "'<x>' as 70, where the tokenizer has"),
        ({"300": {"content": "<x>"}, "301": {"content": "<x>"}}, "gives one text to two ids"),
        ({"16000000": {"content": "<x>"}}, "far above 259"),
        ({"-1": {"content": "<x>"}}, "must have texts by id"),
        ({"300": {"content": "<x>", "special": 1}}, "special must be true or false"),
        ({"300": "<x>"}, "must have texts by id"),
        ([], "must be an object"),
    ],
)
def test_added_tokens_that_contradict_are_refused(tmp_path: Path, entries: Any, says: str) -> None:
    with pytest.raises(pd.CheckpointError, match=re.escape(says)):
        Tokenizer.load(folder_with(tmp_path, {"added_tokens_decoder": entries}))


def test_what_ends_an_answer_and_how_tokens_are_drawn_is_what_the_folder_says(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"eos_token": "<|eos|>"})
    assert (Tokenizer.load(folder).eos_token_ids, Tokenizer.load(folder).model_eos_token_ids) == ({EOS}, frozenset())
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [3, 4]}}))
    made = Tokenizer.load(folder)
    assert (made.eos_token_ids, made.model_eos_token_ids, made.sampling_defaults) == ({3, 4, EOS}, {3, 4}, {})
    said = {"eos_token_id": 5, "temperature": 0.6, "top_p": 0.95, "top_k": 40, "min_p": None, "repetition_penalty": 1}
    (tmp_path / "generation_config.json").write_text(json.dumps(said | {"do_sample": True, "max_length": 9}))
    made = Tokenizer.load(folder)
    assert (made.eos_token_ids, made.model_eos_token_ids) == ({3, 4, 5, EOS}, {5})
    assert made.sampling_defaults == {"temperature": 0.6, "top_p": 0.95, "top_k": 40, "repetition_penalty": 1}
    pd.SamplingParams(**made.sampling_defaults)
    (tmp_path / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6}')
    assert Tokenizer.load(folder).sampling_defaults == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"temperature": -1}, "temperature must be a number from 0 to 100"),
        ({"top_k": 1.5}, "top_k must be an int from 0"),
        ({"top_p": 0}, "top_p must be a number"),
        ({"repetition_penalty": True}, "repetition_penalty must be a number"),
        ({"do_sample": "no"}, "do_sample must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an int"),
        ({"eos_token_id": [1, 2**24]}, "eos_token_id must be an int from 0"),
        ({"eos_token_id": -1}, "eos_token_id must be an int from 0 to 16777215"),
    ],
)
def test_a_broken_generation_config_is_refused_by_name(tmp_path: Path, said: dict[str, Any], says: str) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    with pytest.raises(pd.CheckpointError, match=rf"generation_config\.json: {says}"):
        Tokenizer.load(folder_with(tmp_path))


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
    "broken",
    [
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"post_processor": {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}},
    ],
)
def test_a_tokenizer_that_makes_the_library_panic_is_refused(tmp_path: Path, broken: dict[str, Any]) -> None:
    """A panic of Rust is a BaseException."""
    if "post_processor" in broken:
        broken["post_processor"]["single"] = [{"SpecialToken": {"id": "x", "type_id": 0}}]
    with pytest.raises(pd.CheckpointError, match=r"tokenizer\.json is not a tokenizer: the library tokenizers panics"):
        Tokenizer.load(folder_with(tmp_path, **broken))


def test_a_panic_while_a_host_encodes_or_decodes_is_an_error(tiny: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    class Panics:
        def encode(self, *_: Any, **__: Any) -> None:
            raise PanicException("index out of bounds")

        decode = encode

    monkeypatch.setattr(tiny, "library", Panics())
    for call in (lambda: tiny.encode("a"), lambda: tiny.joined((1,))):
        with pytest.raises(pd.CheckpointError, match="panics: index out of bounds"):
            call()
    monkeypatch.setattr(Panics, "encode", lambda *_, **__: sys.exit(3))
    with pytest.raises(SystemExit):
        tiny.encode("a")


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


def test_an_id_beyond_every_vocabulary_is_refused(tmp_path: Path) -> None:
    vocab = json.loads((TINY / "tokenizer.json").read_text("utf-8"))["model"]
    vocab["vocab"]["zz"] = 2**24
    with pytest.raises(pd.CheckpointError, match="has a token 16777216, and the last that a model can have"):
        Tokenizer.load(folder_with(tmp_path, model=vocab))


def test_links_lead_where_those_of_load_model_do(tmp_path: Path) -> None:
    """Also those of a folder of templates: what is in it is read as if it were the model's."""
    blobs, other = tmp_path / "models--a--b" / "blobs", tmp_path / "disk"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0"
    for folder in (blobs, other, snapshot / "additional_chat_templates"):
        folder.mkdir(parents=True)
    (blobs / "0").write_bytes((TINY / "tokenizer.json").read_bytes())
    (other / "rag.jinja").write_text("R")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/0")
    assert not Tokenizer.load(snapshot).templates
    (snapshot / "additional_chat_templates").rmdir()
    (snapshot / "additional_chat_templates").symlink_to(other)
    with pytest.raises(pd.CheckpointError, match=r"additional_chat_templates is a link to .* outside .*trusted_roots"):
        Tokenizer.load(snapshot)
    assert set(Tokenizer.load(snapshot, trusted_roots=[other]).templates) == {"rag"}
    (snapshot / "chat_template.jinja").symlink_to("nowhere")
    with pytest.raises(pd.CheckpointError, match=r"cannot open .*chat_template\.jinja: No such file"):
        Tokenizer.load(snapshot, trusted_roots=[other])


def test_processors_of_schemas_follow_links_where_the_host_says(tmp_path: Path) -> None:
    pytest.importorskip("llguidance", reason="answers of a schema are made with it")
    (tmp_path / "tokenizer.json").symlink_to(TINY / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").symlink_to(TINY / "tokenizer_config.json")
    with pytest.raises(pd.CheckpointError, match="outside the model folder"):
        pd.text.schema_processors(tmp_path)["json_schema"]("{}")
    pd.text.schema_processors(tmp_path, trusted_roots=[TINY])["json_schema"]("{}")


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


def test_a_long_text_has_the_tokens_of_its_parts() -> None:
    tokenizer = Tokenizer.load(TINY)
    words = [f"{number} words, " for number in range(2000)]
    whole = tokenizer.encode("".join(words))
    assert len("".join(words)) > LONG_TEXT
    assert whole[1:] == tuple(token for word in words for token in tokenizer.encode(word, add_special_tokens=False))
    assert whole[0] == 256
    with pytest.raises(pd.RequestError, match="lone surrogates"):
        tokenizer.encode("\ud800" * (LONG_TEXT + 1))
