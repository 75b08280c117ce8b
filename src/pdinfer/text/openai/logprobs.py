"""Log-probabilities as clients read them: by token. Two tokens may have one text, and a token may be part of a
character, so that a text alone does not say which token is meant."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pdinfer.text.tiktoken import byte_names
from pdinfer.text.tokenizer import Tokenizer
from pdinfer.types import TokenEvent

Logprobs = dict[str, Any]
_BYTES = {name: byte for byte, name in enumerate(byte_names())}


class TokenNames:
    """The bytes of tokens, which joined are those of the text, and the names that clients know tokens by."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._library = tokenizer.library
        self._is_byte_level = self._library.decoder is not None and b"ByteLevel" in self._library.decoder.__getstate__()
        self._added = frozenset(self._library.get_added_tokens_decoder())

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; of a special one, those of its name."""
        name = self._library.id_to_token(token)
        if name is None:
            return f"<{token}>".encode()
        if token in self._added:
            return name.encode()
        if self._is_byte_level and all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        if byte := re.fullmatch("<0x([0-9A-F]{2})>", name):
            return bytes([int(byte[1], 16)])
        # after itself, since decoders may drop a space at the beginning of a text
        return self._tokenizer.joined([token, token]).removeprefix(self._tokenizer.joined([token])).encode()

    def name(self, token: int) -> str:
        """Return the text of a token, or its bytes as OpenAI writes those of part of a character."""
        data = self.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def for_chat(self, events: Iterable[TokenEvent]) -> Logprobs:
        """Return `logprobs` of a chat's choice."""
        content = [
            {**self._named(token, event.logprob), "top_logprobs": [self._named(*top) for top in event.top_logprobs]}
            for event in events
            if (token := event.token) is not None
        ]
        return {"content": content, "refusal": None}

    def for_completion(self, events: Iterable[TokenEvent]) -> Logprobs:
        """Return `logprobs` of a completion's choice. The token that was drawn is always among the best, under its own
        name."""
        table: Logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": []}
        for event in events:
            if event.token is None:
                continue
            best = {self.name(event.token): event.logprob}
            for token, logprob in event.top_logprobs:
                if token != event.token:
                    name = self.name(token)
                    best[f"token_id:{token}" if name in best else name] = logprob
            table["tokens"].append(self.name(event.token))
            table["token_logprobs"].append(event.logprob)
            table["top_logprobs"].append(best)
        return table

    def _named(self, token: int, logprob: float | None) -> Logprobs:
        return {"token": self.name(token), "logprob": logprob, "bytes": list(self.bytes_of(token))}
