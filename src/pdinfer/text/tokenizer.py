"""The tokenizer of a checkpoint: its tokenizer.json or tiktoken.model, read by the library `tokenizers`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pdinfer.bounds import escaped
from pdinfer.checks import clip
from pdinfer.config.hf import MAX_VOCAB
from pdinfer.errors import BackendUnavailable, CheckpointError, ConfigError, PDInferError, RequestError
from pdinfer.files import AnyPath, check_folder, read_regular
from pdinfer.text import tiktoken
from pdinfer.text.chat import ChatTemplate, Message, plain_chat
from pdinfer.text.files import DEFAULT, MAX_ADDED, TOKENIZER, Added, TextFiles
from pdinfer.text.markers import Markers

if TYPE_CHECKING:
    import tokenizers

MAX_TOKENIZER_BYTES = 128 << 20
LONG_TEXT = 4096
"""The number of characters from which a text is encoded while other threads run."""


class Tokenizer:
    """Turns text into tokens and back. Frozen once it is loaded, so any thread may use it.

    `special_tokens` has the texts of bos_token and the like, `special_texts` the ids of all special tokens by their
    texts, `templates` the checkpoint's chat templates by name, and `library` is what the library `tokenizers` made of
    tokenizer.json. `model_eos_token_ids` are the ids that engines end an answer at, and `eos_token_ids` all that the
    folder calls an end. `max_tokens` is how many tokens its config.json says that the model takes, None where it does
    not. `sampling_defaults` is how its generation_config.json would have tokens drawn, by the names of
    `SamplingParams`. Make one with `Tokenizer.load`.
    """

    def __init__(self, library: tokenizers.Tokenizer, files: TextFiles) -> None:
        """Take a tokenizer of the library and what the other files say. Raise CheckpointError for a broken template,
        and for files that contradict each other."""
        library.no_truncation()  # as tokenizer.json may ask for what only training needs
        library.no_padding()
        _add(library, files.added_tokens)
        if (last := max(library.get_vocab().values(), default=0)) >= MAX_VOCAB:
            raise CheckpointError(
                f"the tokenizer has a token {last}, and the last that a model can have is {MAX_VOCAB - 1}"
            )
        self.library = library
        self.special_tokens = dict(files.special_tokens)
        self.templates = {name: ChatTemplate(text, files.special_tokens) for name, text in files.templates.items()}
        added = library.get_added_tokens_decoder()
        self.special_texts = {token.content: index for index, token in added.items() if token.special}
        self._special_ids = frozenset(self.special_texts.values())
        eos = library.token_to_id(files.special_tokens.get("eos_token", ""))
        self.model_eos_token_ids = files.ends
        self.eos_token_ids = files.all_ends if eos is None else files.all_ends | {eos}
        self.max_tokens = files.max_tokens
        self.sampling_defaults: Mapping[str, float | int] = dict(files.sampling)
        around = library.encode("a").ids
        self._before = self._left_out("bos_token", files.adds_bos, around[:1])
        self._behind = self._left_out("eos_token", files.adds_eos, around[-1:])

    def __repr__(self) -> str:
        return f"Tokenizer({self.library.get_vocab_size()} tokens, {len(self.templates)} chat templates)"

    @classmethod
    def load(cls, checkpoint: AnyPath, *, trusted_roots: Sequence[AnyPath] = ()) -> Tokenizer:
        """Read the tokenizer of a model folder: tokenizer.json or Moonshot's tiktoken.model, and if they are there
        tokenizer_config.json, config.json, generation_config.json, chat_template.jinja and additional_chat_templates.
        Links may lead to where `load_model` follows them; `trusted_roots` is as there.

        Raises CheckpointError for a folder or a file that is missing or broken, and BackendUnavailable without the
        libraries.
        """
        folder = check_folder(checkpoint)
        files = TextFiles.read(folder, trusted_roots)
        name, most = "tokenizer.json", MAX_TOKENIZER_BYTES
        if not os.path.lexists(folder / name):
            name, most = "tiktoken.model", tiktoken.MAX_MODEL_BYTES
            if not os.path.lexists(folder / name) or files.kind != tiktoken.KIND:
                raise CheckpointError(
                    f"{folder} has no tokenizer.json, and no tiktoken.model of a {tiktoken.KIND}, the kinds of "
                    "tokenizers that are read: convert another kind with transformers, "
                    "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
                )
        data = read_regular(folder, name, most, CheckpointError, trusted_roots)
        if name == "tiktoken.model":
            data = tiktoken.tokenizer_json(data, str(folder / name))
        library = _library()
        try:
            return cls(library.from_buffer(data), files)
        except PDInferError:
            raise
        except BaseException as error:
            raise _fault(error, CheckpointError, f"{folder / name} is not a tokenizer") from error

    def _left_out(self, name: str, wanted: bool, there: Sequence[int]) -> tuple[int, ...]:
        """Return a special token that is `wanted` at an end of a text, unless tokenizer.json puts it `there`. Raises
        CheckpointError when there is no such token."""
        token = self.library.token_to_id(self.special_tokens.get(name, ""))
        if wanted and token is None:
            raise CheckpointError(f"{TOKENIZER}: add_{name} is true, and the tokenizer has no {name}")
        return (token,) if wanted and token is not None and [token] != there else ()

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The template for chats, or None for a checkpoint without one."""
        return self.templates.get(DEFAULT)

    @cached_property
    def markers(self) -> Markers:
        """The texts that users must not write in a chat."""
        return Markers(self.library)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the tokens of a text, with those that the checkpoint puts around every text, such as bos, unless
        `add_special_tokens` is False. What reads like an added token becomes one, whoever wrote it; in chats, see
        `chat`. Raises RequestError for what is not Unicode text."""
        try:
            if len(text) < LONG_TEXT:
                tokens = tuple(self.library.encode(text, add_special_tokens=add_special_tokens).ids)
            else:  # a batch leaves the interpreter to other threads meanwhile
                tokens = tuple(self.library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
        except BaseException as error:
            raise _fault(
                error, RequestError, "cannot encode the text, which must be a str without lone surrogates"
            ) from error
        return (*self._before, *tokens, *self._behind) if add_special_tokens else tokens

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        allow_markers: bool = False,
    ) -> tuple[int, ...]:
        """Return the tokens of a chat, see `ChatTemplate.render`. A template named "tool_use" is used when there are
        `tools`.

        Texts of added tokens, such as "<|im_end|>", are tokens where the template or a turn of the roles assistant,
        system and developer has them. In documents and in messages of other roles they are plain text, unless
        `allow_markers`; the role itself is the host's word. Raises ConfigError when the checkpoint has no template.
        """
        template = self.template_for(tools)
        values = plain_chat(messages, tools, documents, variables)
        try:
            hidden = None if allow_markers else self.markers.hide(values, template.source)
            if hidden is None:
                return self.encode(template.text_of(values, add_generation_prompt), add_special_tokens=False)
            return tuple(self.markers.encode(template.text_of(hidden.values, add_generation_prompt), hidden))
        except PDInferError:
            raise
        except BaseException as error:
            raise _fault(error, RequestError, "cannot encode the chat") from error

    def template_for(self, tools: object) -> ChatTemplate:
        """Return the template of a chat that may use these tools. Raises ConfigError when the checkpoint has none."""
        template = self.templates.get("tool_use") if tools is not None else None
        template = template or self.chat_template
        if template is None:
            known = f"only {', '.join(map(escaped, self.templates))[:200]}" if self.templates else "none"
            raise ConfigError(f"a chat needs a chat template, and the checkpoint has {known}; encode a text instead")
        return template

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Special tokens have none, and neither have ids that the tokenizer does not know.
        Bytes outside any character become U+FFFD. For tokens that come one by one, see `Detokenizer`."""
        return self.joined([token for token in tokens if self.has_text(token)])

    def has_text(self, token: int) -> bool:
        """Return whether a token is known and not special."""
        is_known = 0 <= token < MAX_VOCAB and self.library.id_to_token(token) is not None
        return is_known and token not in self._special_ids

    def joined(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, all of which have text."""
        try:
            return self.library.decode(tokens, skip_special_tokens=False)
        except BaseException as error:
            raise _fault(error, CheckpointError, "the tokenizer cannot decode its own tokens") from error


def _add(library: tokenizers.Tokenizer, added: Mapping[int, Added]) -> None:
    """Add the tokens that tokenizer.json lacks, with their ids. What is free between them is reserved, by names that
    Moonshot's own tokenizers give it. Raises CheckpointError when an id has another text, or a text another id."""
    from tokenizers import AddedToken

    known = library.get_added_tokens_decoder()
    free, new = library.get_vocab_size(), []
    for index, token in added.items():
        if index - free > MAX_ADDED:
            raise CheckpointError(
                f"{TOKENIZER}: added_tokens_decoder has {clip(token.text)} as {index}, far above {free}"
            )
        if index not in known:
            new += [AddedToken(f"<|reserved_token_{unused}|>", special=True) for unused in range(free, index)]
            new.append(AddedToken(token.text, **token.flags))
            free = max(free, index + 1)
    library.add_tokens(new)
    for index, token in added.items():
        if library.token_to_id(token.text) != index or library.id_to_token(index) != token.text:
            raise CheckpointError(
                f"{TOKENIZER}: added_tokens_decoder has {clip(token.text)} as {index}, where the tokenizer has "
                f"{clip(library.id_to_token(index))}, and {clip(token.text)} as {library.token_to_id(token.text)}"
            )


def _fault(error: BaseException, kind: type[PDInferError], what: str) -> PDInferError:
    """Return what to raise instead of an error of the library. A panic of its Rust code is not an Exception, and means
    that the tokenizer cannot be used. Any other BaseException is raised as it is."""
    if type(error).__name__ == "PanicException":
        return CheckpointError(f"{what}: the library tokenizers panics: {escaped(str(error))[:300]}")
    if not isinstance(error, Exception):
        raise error
    return kind(f"{what}: {escaped(str(error))[:300]}")


def _library() -> type[tokenizers.Tokenizer]:
    try:
        import tokenizers
    except ImportError as error:
        raise BackendUnavailable(
            f"text is read by tokenizers, which cannot be imported ({error}): pip install 'pdinfer[text]'"
        ) from error
    return tokenizers.Tokenizer
