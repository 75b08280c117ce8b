"""What the files of a model folder say about its text, beside tokenizer.json: special tokens and chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from pdinfer.errors import CheckpointError
from pdinfer.files import AnyPath, parse_json, read_regular

MAX_CONFIG_BYTES = 16 << 20
MAX_TEMPLATE_BYTES = 1 << 20
MAX_LONG_DIGITS = 40
"""`model_max_length` is often 10**30, which says that there is no limit."""
MAX_TEMPLATES = 64

DEFAULT = "default"


@attrs.frozen
class TextFiles:
    """`special_tokens` are texts by name, as templates read them ("bos_token"). `templates` are sources by name."""

    special_tokens: Mapping[str, str] = attrs.field(factory=dict)
    templates: Mapping[str, str] = attrs.field(factory=dict)

    @classmethod
    def read(cls, folder: Path) -> TextFiles:
        """Read tokenizer_config.json, chat_template.jinja and additional_chat_templates, all of which may be missing.
        Raise CheckpointError for files that say something else."""
        name = "tokenizer_config.json"
        path = folder / name
        config: dict[str, object] = {}
        if path.exists():
            data = read_regular(folder, name, MAX_CONFIG_BYTES, CheckpointError)
            config = parse_json(data, str(path), CheckpointError, max_digits=MAX_LONG_DIGITS)
        templates = {**_templates(config.get("chat_template"), str(path)), **_template_files(folder)}
        return cls(_special_tokens(config), templates)


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Return the texts of bos_token and the like, each of which is a text or an object with a content."""
    found = {}
    for name, value in config.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _templates(value: object, source: str) -> dict[str, str]:
    """Return the templates of tokenizer_config.json: one, or a list with names."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: value}
    named = value if isinstance(value, list) else [value]
    templates = {}
    for entry in named[: MAX_TEMPLATES + 1]:
        match entry:
            case {"name": str(name), "template": str(template)}:
                templates[name] = template
            case _:
                raise CheckpointError(f"{source}: chat_template must be a text or a list of names and templates")
    if len(templates) > MAX_TEMPLATES:
        raise CheckpointError(f"{source} has more than {MAX_TEMPLATES} chat templates")
    return templates


def _template_files(folder: AnyPath) -> dict[str, str]:
    """Return the templates that are files of their own, which go before those of tokenizer_config.json."""
    folder = Path(folder)
    paths = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    if len(paths) > MAX_TEMPLATES:
        raise CheckpointError(f"{folder} has more than {MAX_TEMPLATES} chat templates")
    named = [(path.stem, path) for path in paths]
    if (alone := folder / "chat_template.jinja").exists():
        named.append((DEFAULT, alone))
    templates = {}
    for name, path in named:
        try:
            data = read_regular(path.parent, path.name, MAX_TEMPLATE_BYTES, CheckpointError)
            templates[name] = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path} is not UTF-8: {error.reason} at byte position {error.start}") from None
    return templates
