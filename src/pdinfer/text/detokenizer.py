"""Text from tokens that come one by one. Nothing is shown that a later token may change."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pdinfer.text.tokenizer import Tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_HELD = 3
"""Of a character of UTF-8 that has not come whole, at most three bytes are there. A decoder shows them as one or as
three replacement characters."""
CONTEXT = 8
"""The number of tokens that hold the whole of any character, so that those after them decode as in the whole text."""
MAX_PENDING = 24


class Detokenizer:
    """The text of one request's output, piece by piece. The pieces together are what the output adds to the text of
    `prompt`, or of the part of it after its last special token. Special tokens have no text, but for those `shown`.

    Works with any decoder: it decodes a window of the last tokens, with some before them, since a decoder may treat the
    first token of a text in another way (a leading space is dropped). The window is bounded, so a token costs the same
    however long the text is.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), *, shown: Collection[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        self._context: list[int] = []
        for token in reversed(prompt):
            if len(self._context) == CONTEXT or not tokenizer.has_text(token):
                break
            self._context.insert(0, token)
        self._before = self._settled(tokenizer.joined(self._context))
        self._pending: list[int] = []
        self._num_shown = 0

    def push(self, token: int) -> str:
        """Take the next token, and return the text that is certain now and was not before."""
        if token not in self._shown and not self._tokenizer.has_text(token):
            return ""
        self._pending.append(token)
        text = self._pending_text()
        settled = self._settled(text)
        piece = settled[self._num_shown :]
        self._num_shown = max(self._num_shown, len(settled))
        if text and settled == text:
            self._move(self._pending)
        elif len(self._pending) >= MAX_PENDING:
            self._move([*self._context, *self._pending])
        return piece

    def flush(self) -> str:
        """Return the rest of the text, with U+FFFD for a character that never came whole. The next token begins after
        it."""
        text = self._pending_text()
        piece = text[self._num_shown :]
        self._move([*self._context, *self._pending])
        self._before = self._tokenizer.joined(self._context)
        return piece

    def _pending_text(self) -> str:
        text = self._tokenizer.joined([*self._context, *self._pending])
        if text.startswith(self._before):
            return text[len(self._before) :]
        # A decoder may show a whole run of bytes as replacement characters, as long as its last character is not whole.
        return self._tokenizer.joined(self._pending)

    def _move(self, tokens: list[int]) -> None:
        """Let the last of these tokens be the context of those to come."""
        self._context = tokens[-CONTEXT:]
        self._before = self._settled(self._tokenizer.joined(self._context))
        self._pending = []
        self._num_shown = 0

    @staticmethod
    def _settled(text: str) -> str:
        """Return the text without what may be the beginning of a character."""
        end = len(text)
        while len(text) - end < MAX_HELD and text.endswith(REPLACEMENT, 0, end):
            end -= 1
        return text[:end]
