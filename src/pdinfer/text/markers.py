"""Keeps users from writing the markers of a chat: in what strangers say, the texts of added tokens are text.

While the template renders, the characters that would make a marker of such a text are others, which stand for them and
which no message contains. What the library then finds as added tokens are the host's. In what is encoded, these have
secret texts, and what strangers wrote is as they wrote it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs

from pdinfer.checks import clip
from pdinfer.errors import CheckpointError, RequestError

if TYPE_CHECKING:
    import tokenizers

HOSTS = ("assistant", "developer", "system")
"""The roles whose turns the host answers for."""
UNWRITTEN = (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900))
"""Characters that hardly a text has: those that Unicode keeps free for programs, then those of private use."""


@attrs.frozen
class Hidden:
    """A chat in which characters stand for others."""

    values: dict[str, Any]
    meant: Mapping[str, str]

    def shown(self, text: str) -> str:
        """Return rendered text with what was meant, also where the template has written JSON of ASCII alone."""
        for character, meant in self.meant.items():
            text = text.replace(character, meant)
            text = text.replace(json.dumps(character)[1:-1], json.dumps(meant)[1:-1])
        return text


class Markers:
    """The added tokens of a tokenizer, except those of white space alone."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        self._added = library.get_added_tokens_decoder()
        self._ids = {token.content: index for index, token in self._added.items() if token.content.strip()}
        self._normalizer = library.normalizer if any(token.normalized for token in self._added.values()) else None
        texts = set(self._ids)
        if self._normalizer is not None:  # what a text is compared with once both are normalized
            texts |= {self._normalizer.normalize_str(text) for text in texts} - {""}
        self._longest = max(map(len, texts), default=0)
        self._first: dict[str, list[str]] = {}
        self._last: dict[str, list[str]] = {}
        for text in sorted(texts):
            self._first.setdefault(text[0], []).append(text)
            self._last.setdefault(text[-1], []).append(text)

    def hide(self, values: dict[str, Any], template: str) -> Hidden | None:
        """Return a chat of plain values as the template may see it, or None for one without a marker in the messages of
        others than the host and in the documents. Raises RequestError for one that is nested too deep, or that has
        every character that no text contains."""
        stands: dict[str, str] = {}
        free = _unwritten(values, template)

        def look(value: Any) -> Any:
            match value:
                case str():
                    text, spots = self._spots(value)
                    characters = list(text)
                    for spot in spots:
                        if (meant := text[spot]) not in stands:
                            stands[meant] = next(free)
                        characters[spot] = stands[meant]
                    return "".join(characters) if spots else value
                case list():
                    return [look(item) for item in value]
                case dict():
                    return {look(key): look(item) for key, item in value.items()}
            return value

        def look_at(message: dict[str, Any]) -> dict[Any, Any]:
            if message.get("role") in HOSTS:
                return message
            return {look(key): item if key == "role" else look(item) for key, item in message.items()}

        try:
            changed = {"messages": list(map(look_at, values["messages"])), "documents": look(values["documents"])}
        except RecursionError as error:
            raise RequestError("the chat is nested too deep") from error
        return Hidden({**values, **changed}, {stand: meant for meant, stand in stands.items()}) if stands else None

    def encode(self, text: str, hidden: Hidden) -> list[int]:
        """Return the tokens of a rendered chat. Raises RequestError when its plain text makes a marker."""
        plain, ids = self._plain
        (found,) = self._library.encode_batch([text], add_special_tokens=False)  # which leaves threads the interpreter
        parts, at = [], 0
        for token, (begin, end) in zip(found.ids, found.offsets, strict=True):
            if token in self._secrets:
                parts += [hidden.shown(text[at:begin]), self._secrets[token]]
                at = end
        parts.append(hidden.shown(text[at:]))
        tokens = plain.encode_batch(["".join(parts)], add_special_tokens=False)[0].ids
        if forged := self._secrets.keys() & set(tokens) - ids.keys():
            name = self._added[min(forged)].content
            raise RequestError(f"a message has {clip(name)}, which this tokenizer cannot distinguish from the token")
        return [ids.get(token, token) for token in tokens]

    @cached_property
    def _secrets(self) -> dict[int, str]:
        """The texts of the host's markers, by id, which cannot be guessed."""
        # U+FDD0 is no character of any text, and the number cannot be guessed
        nonce = os.urandom(16).hex()
        return {index: f"\ufdd0{nonce}{index}\ufdd0" for index in self._ids.values()}

    @cached_property
    def _plain(self) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The same tokenizer, of the same model, whose markers are the secret texts; and what its added tokens are in
        the first one."""
        plain = type(self._library)(self._library.model)
        plain.normalizer, plain.pre_tokenizer = self._library.normalizer, self._library.pre_tokenizer
        blank = {token.content: index for index, token in self._added.items() if index not in self._secrets}
        plain.add_tokens([self._added[index] for index in blank.values()])
        plain.add_special_tokens(list(self._secrets.values()))
        new = plain.get_vocab(with_added_tokens=True)
        ids = {new[text]: index for index, text in self._secrets.items()}
        if strange := [index for index in ids if self._library.model.id_to_token(index) is not None]:
            raise CheckpointError(f"the ids of the tokenizer's model have gaps, and {strange[0]} comes after one")
        return plain, ids | {new[text]: index for text, index in blank.items()}

    @cached_property
    def _search(self) -> re.Pattern[str]:
        """Finds the first character of every marker in a text, of those within another too."""
        firsts = (
            f"{re.escape(first)}(?={_any_of([text[1:] for text in texts])})" for first, texts in self._first.items()
        )
        return re.compile("|".join(firsts) or "(?!)")

    def _spots(self, text: str) -> tuple[str, set[int]]:
        """Return the text, and where in it another character keeps it from being a marker, or a part of one that goes
        on in what stands before or after it."""
        if self._normalizer is not None and self._search.search(normal := self._normalizer.normalize_str(text)):
            text = normal
        return text, {found.start() for found in self._search.finditer(text)}.union(self._edges(text))

    def _edges(self, text: str) -> Iterator[int]:
        """Yield where a part of a marker is the beginning or the end of a text, with or without white space around it.
        A part of one word at most does not count."""
        for end in {len(text), len(text.rstrip())}:
            for spot in range(max(0, end - self._longest), end):
                markers = () if text[spot].isalnum() else self._first.get(text[spot], ())
                if any(marker.startswith(text[spot:end]) for marker in markers):
                    yield spot
        for begin in {0, len(text) - len(text.lstrip())}:
            for spot in range(begin, min(begin + self._longest, len(text))):
                markers = () if text[spot].isalnum() else self._last.get(text[spot], ())
                if any(marker.endswith(text[begin : spot + 1]) for marker in markers):
                    yield spot


def _any_of(texts: list[str], depth: int = 3) -> str:
    """Return a pattern of any of these texts. It looks at few of them for each character, as many begin alike."""
    if depth == 0 or "" in texts:
        return "" if "" in texts else "|".join(map(re.escape, texts))
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[0], []).append(text[1:])
    return "|".join(f"{re.escape(first)}(?:{_any_of(rest, depth - 1)})" for first, rest in rests.items())


def _unwritten(values: dict[str, Any], template: str) -> Iterator[str]:
    """Yield the characters that hardly a text has, and neither this chat nor its template."""
    # JSON writes characters of private use as \uXXXX, however deep they are in the chat
    written = json.dumps([values, template])
    taken = set(re.findall(r"\\u([ef][0-9a-f]{3})", written))
    yield from (chr(code) for code in UNWRITTEN if f"{code:x}" not in taken)
    raise RequestError("the chat has every character of private use, and none is left to mark its texts")
