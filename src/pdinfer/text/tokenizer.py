"""The tokenizer of a checkpoint: its tokenizer.json, read by the library `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdinfer.bounds import escaped
from pdinfer.errors import BackendUnavailable, CheckpointError, ConfigError, RequestError
from pdinfer.files import AnyPath, check_folder, read_regular
from pdinfer.text.chat import ChatTemplate, Message
from pdinfer.text.files import DEFAULT, TextFiles

if TYPE_CHECKING:
    import tokenizers

MAX_TOKENIZER_BYTES = 128 << 20


class Tokenizer:
    """Turns text into tokens and back. Frozen once it is loaded, so any thread may use it.

    `special_tokens` has the texts of bos_token and the like, `templates` the checkpoint's chat templates by name, and
    `library` is what the library `tokenizers` made of tokenizer.json. Make one with `Tokenizer.load`.
    """

    def __init__(self, library: tokenizers.Tokenizer, files: TextFiles) -> None:
        """Take a tokenizer of the library and what the other files say. Raise CheckpointError for a broken template."""
        library.no_truncation()  # as tokenizer.json may ask for what only training needs
        library.no_padding()
        self.library = library
        self.special_tokens = dict(files.special_tokens)
        self.templates = {name: ChatTemplate(text, files.special_tokens) for name, text in files.templates.items()}
        added = library.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)

    @classmethod
    def load(cls, checkpoint: AnyPath) -> Tokenizer:
        """Read the tokenizer of a model folder: tokenizer.json, and if they are there tokenizer_config.json,
        chat_template.jinja and additional_chat_templates.

        Raises CheckpointError for a folder or a file that is missing or broken, and BackendUnavailable without the
        libraries.
        """
        folder = check_folder(checkpoint)
        name = "tokenizer.json"
        if not (folder / name).exists():
            raise CheckpointError(
                f"{folder} has no {name}, the only kind of tokenizer that is read: convert another kind with "
                "transformers, AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
        data = read_regular(folder, name, MAX_TOKENIZER_BYTES, CheckpointError)
        library = _library()
        try:
            made = library.from_buffer(data)
        except Exception as error:
            raise CheckpointError(f"{folder / name} is not a tokenizer: {escaped(str(error))[:300]}") from error
        return cls(made, TextFiles.read(Path(folder)))

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template for chats, or None for a checkpoint without one."""
        return self.templates.get(DEFAULT)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the tokens of a text, with those that tokenizer.json puts around every text, such as bos, unless
        `add_special_tokens` is False. What reads like a special token becomes one: check text that others write, if it
        must not. Raises RequestError for what is not Unicode text."""
        try:
            return tuple(self.library.encode(text, add_special_tokens=add_special_tokens).ids)
        except (TypeError, ValueError) as error:
            raise RequestError(
                f"cannot encode the text, which must be a str without lone surrogates: {error}"
            ) from error

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Return the tokens of a chat, see `ChatTemplate.render`. A template named "tool_use" is used when there are
        `tools`. Raises ConfigError when the checkpoint has no template."""
        template = self.templates.get("tool_use") if tools is not None else None
        template = template or self.chat_template
        if template is None:
            known = f"only {', '.join(map(escaped, self.templates))[:200]}" if self.templates else "none"
            raise ConfigError(f"a chat needs a chat template, and the checkpoint has {known}; encode a text instead")
        text = template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            variables=variables,
        )
        return self.encode(text, add_special_tokens=False)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Special tokens have none, and neither have ids that the tokenizer does not know.
        Bytes that are no character become U+FFFD. For tokens that come one by one, see `Detokenizer`."""
        return self.joined([token for token in tokens if self.has_text(token)])

    def has_text(self, token: int) -> bool:
        """Whether a token is known and not special."""
        return token not in self._special_ids and self.library.id_to_token(token) is not None

    def joined(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, all of which have text."""
        return self.library.decode(tokens, skip_special_tokens=False)


def _library() -> type[tokenizers.Tokenizer]:
    try:
        import tokenizers
    except ImportError as error:
        raise BackendUnavailable(
            f"text is read by tokenizers, which cannot be imported ({error}): pip install 'pdinfer[text]'"
        ) from error
    return tokenizers.Tokenizer
