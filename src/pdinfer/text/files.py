"""The files of a model folder about its text, except the tokenizer itself: special and added tokens, what ends
an answer, how tokens are drawn, chat templates."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import attrs

from pdinfer.checks import clip
from pdinfer.config.hf import MAX_VOCAB, ending_ids, sampling_defaults
from pdinfer.errors import CheckpointError, ConfigError
from pdinfer.files import MAX_CONFIG_BYTES, AnyPath, inside, parse_json, read_regular

MAX_TEMPLATE_BYTES = 1 << 19
MAX_LONG_DIGITS = 40
"""`model_max_length` is often 10**30, which says that there is no limit."""
MAX_TEMPLATES = 64
MAX_ADDED = 1 << 16

DEFAULT = "default"
DEEPSEEK_V32 = Path(__file__).with_name("deepseek_v32.jinja")
"""For folders of DeepSeek-V3.2, which have no template."""
TOKENIZER, MODEL, GENERATION = "tokenizer_config.json", "config.json", "generation_config.json"


@attrs.frozen
class Added:
    """An entry of `added_tokens_decoder`: the text of a token, and how the library `tokenizers` looks for it."""

    text: str
    flags: Mapping[str, bool]


@attrs.frozen
class TextFiles:
    """`special_tokens` are texts by name, as templates read them ("bos_token"), `added_tokens` are by id, and
    `templates` are sources by name. `ends` are the ids that the engines end an answer at, and `all_ends` those that any
    of config.json and generation_config.json names. `max_tokens` is the longest text of the model. `kind` is the class
    that its maker made of the tokenizer."""

    special_tokens: Mapping[str, str] = attrs.field(factory=dict)
    templates: Mapping[str, str] = attrs.field(factory=dict)
    added_tokens: Mapping[int, Added] = attrs.field(factory=dict)
    adds_bos: bool = False
    adds_eos: bool = False
    kind: str | None = None
    ends: frozenset[int] = frozenset()
    all_ends: frozenset[int] = frozenset()
    sampling: Mapping[str, float | int] = attrs.field(factory=dict)
    max_tokens: int | None = None

    @classmethod
    def read(cls, folder: Path, trusted_roots: Iterable[AnyPath] = ()) -> TextFiles:
        """Read tokenizer_config.json, config.json, generation_config.json, chat_template.jinja and
        additional_chat_templates, all of which may be missing. Raise CheckpointError for files that say something
        else."""
        roots = tuple(trusted_roots)
        config, model, generation = (_read(folder, name, roots) for name in (TOKENIZER, MODEL, GENERATION))
        source = str(folder / TOKENIZER)
        kind = config.get("tokenizer_class")
        templates = {**_templates(config.get("chat_template"), source), **_template_files(folder, roots)}
        if not templates and model.get("model_type") == "deepseek_v32":
            templates = {DEFAULT: DEEPSEEK_V32.read_text("utf-8")}
        with _naming(folder / GENERATION):
            sampling, last = sampling_defaults(generation), ending_ids({}, generation)
        with _naming(folder / MODEL):
            first = ending_ids(model, {})
        return cls(
            special_tokens=_special_tokens(config),
            templates=templates,
            added_tokens=_added_tokens(config.get("added_tokens_decoder"), source),
            adds_bos=_flag(config, "add_bos_token", source),
            adds_eos=_flag(config, "add_eos_token", source),
            kind=kind if isinstance(kind, str) else None,
            ends=frozenset(ending_ids(model, generation)),
            all_ends=frozenset((*first, *last)),
            sampling=sampling,
            max_tokens=_max_tokens(model),
        )


def _max_tokens(model: Mapping[str, object]) -> int | None:
    """Return what config.json says of the longest text, also where that of a text model stands inside."""
    inside = model.get("text_config")
    most = (inside if isinstance(inside, dict) else model).get("max_position_embeddings")
    return most if isinstance(most, int) and not isinstance(most, bool) and most > 0 else None


def _read(folder: Path, name: str, roots: tuple[AnyPath, ...]) -> dict[str, object]:
    """Return a JSON object of the folder, an empty one where there is no such file."""
    if not os.path.lexists(folder / name):
        return {}
    data = read_regular(folder, name, MAX_CONFIG_BYTES, CheckpointError, roots)
    return parse_json(data, str(folder / name), CheckpointError, max_digits=MAX_LONG_DIGITS)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Say of what the files of a model may not say that it is a fault of the checkpoint, and in which file."""
    try:
        yield
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _flag(raw: Mapping[str, object], name: str, source: str) -> bool:
    value = raw.get(name)
    if value is not None and not isinstance(value, bool):
        raise CheckpointError(f"{source}: {name} must be true or false, got {clip(value)}")
    return bool(value)


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Return the texts of bos_token and the like, each of which is a text or an object with a content."""
    found = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _added_tokens(value: object, source: str) -> dict[int, Added]:
    """Return the tokens of `added_tokens_decoder`, by id and in its order."""
    entries = {} if value is None else value
    if not isinstance(entries, dict) or len(entries) > MAX_ADDED:
        raise CheckpointError(f"{source}: added_tokens_decoder must be an object of at most {MAX_ADDED} tokens")
    found = {}
    for key, entry in entries.items():
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        text = entry.get("content") if isinstance(entry, dict) else None
        is_id = key.isascii() and key.isdecimal() and int(key) < MAX_VOCAB
        if not isinstance(text, str) or not text or not is_id:
            raise CheckpointError(
                f"{source}: added_tokens_decoder must have texts by id, got {clip(key)}: {clip(entry)}"
            )
        found[int(key)] = Added(text, {name: _flag(entry, name, f"{source}: {clip(text)}") for name in flags})
    if len({added.text for added in found.values()}) < len(found):
        raise CheckpointError(f"{source}: added_tokens_decoder gives one text to two ids")
    return dict(sorted(found.items()))


def _templates(value: object, source: str) -> dict[str, str]:
    """Return the templates of tokenizer_config.json: one, or a list with names."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    named = value if isinstance(value, list) else [value]
    if len(named) > MAX_TEMPLATES:
        raise CheckpointError(f"{source} has more than {MAX_TEMPLATES} chat templates")
    templates = {}
    for entry in named:
        match entry:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
            case _:
                raise CheckpointError(f"{source}: chat_template must be a text or a list of names and templates")
    return templates


def _template_files(folder: Path, roots: tuple[AnyPath, ...]) -> dict[str, str]:
    """Return the templates that are files of their own, which go before those of tokenizer_config.json."""
    more = folder / "additional_chat_templates"
    if os.path.lexists(more):
        inside(more, folder, CheckpointError, roots)
    paths = sorted(more.glob("*.jinja"))
    if len(paths) > MAX_TEMPLATES:
        raise CheckpointError(f"{folder} has more than {MAX_TEMPLATES} chat templates")
    named = [(path.stem, path) for path in paths]
    if os.path.lexists(alone := folder / "chat_template.jinja"):
        named.append((DEFAULT, alone))
    templates = {}
    for name, path in named:
        try:
            data = read_regular(path.parent, path.name, MAX_TEMPLATE_BYTES, CheckpointError, roots)
            templates[name] = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8: {error.reason} at byte position {error.start}") from None
    return templates
