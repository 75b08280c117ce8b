"""Stop strings, and the text of a request as it may be shown: nothing of a stop string is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from pdinfer.checks import clip
from pdinfer.errors import RequestError
from pdinfer.stop import MAX_STOP_LENGTH, MAX_STOPS, Automaton, StopMatcher
from pdinfer.text.detokenizer import Detokenizer
from pdinfer.text.tokenizer import Tokenizer
from pdinfer.types import FinishReason, Request, TokenEvent


class StopStrings(StopMatcher):
    """A `Request.stop`: the request ends with the token whose text completes one of these strings, wherever tokens
    begin and end. One that is the text of a special token stops at that token, which has no text otherwise. Serves any
    number of requests.

    Raises RequestError for more than 64 strings, for an empty one, for one of more than 256 characters, and for one
    that has the text of a special token inside, which never comes.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        if isinstance(strings, str) or not all(isinstance(string, str) for string in strings):
            raise RequestError(f"stop strings must be a list of texts, got {clip(strings)}")
        if len(strings) > MAX_STOPS:
            raise RequestError(f"there are {len(strings)} stop strings, at most {MAX_STOPS}")
        for string in strings:
            if not 0 < len(string) <= MAX_STOP_LENGTH:
                raise RequestError(f"a stop string has 1 to {MAX_STOP_LENGTH} characters, got {clip(string)}")
            inside = next((text for text in tokenizer.special_texts if text in string), string)
            if inside != string and string not in tokenizer.special_texts:
                raise RequestError(
                    f"the stop string {clip(string)} has the special token {clip(inside)} inside, which has no text in "
                    "an answer: give it alone"
                )
        self.tokenizer = tokenizer
        self.strings = tuple(strings)
        self.automaton: Automaton[str] = Automaton.of(self.strings)
        special = tokenizer.special_texts
        self.special = {special[string]: string for string in self.strings if string in special}
        """The stop strings that are special tokens, by their ids."""

    def begin(self, prompt: Sequence[int]) -> Callable[[int], bool]:
        """Return a function from a token to whether a request of this prompt stops with it."""
        detokenizer = Detokenizer(self.tokenizer, prompt)
        search = _Search(self.automaton)
        return lambda token: token in self.special or search.first_end(detokenizer.push(token)) is not None


class TextStream:
    """The text of one request, from its events, as it may be shown to a reader.

    The end of the text that may belong to a stop string is held back until it is known whether it does, and what does
    is never shown. The strings are those of the request's `stop`, if that is a StopStrings. A stop token's own text is
    shown, unless the token is special and not among `shown`, whose text is. Tokens in `Request.output` were shown by an
    earlier stream.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request, *, shown: Collection[int] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer, request.prompt, shown=shown)
        self._stop = stop = request.stop
        self._search = _Search(stop.automaton if isinstance(stop, StopStrings) else Automaton.of(()))
        self._held = ""
        self.stop_string: str | None = None
        for token in request.output:
            new = self._detokenizer.push(token)
            self._search.first_end(new)
            self._without_held(self._held + new)

    def __repr__(self) -> str:
        return f"TextStream({len(self._held)} characters held back, stop_string={clip(self.stop_string)})"

    def push(self, event: TokenEvent) -> str:
        """Take the next event of the request, and return the text that may be shown now and might not before. After the
        last event, `stop_string` is the one that ended the request, or None."""
        if event.finish_reason is FinishReason.STOP and isinstance(self._stop, StopStrings):
            self.stop_string = self._stop.special.get(-1 if event.token is None else event.token)
            if self.stop_string is not None:
                return self._held + self._detokenizer.flush()
        new = "" if event.token is None else self._detokenizer.push(event.token)
        text = self._held + new
        end = self._search.first_end(new)
        if event.finish_reason is None:
            return self._without_held(text)
        self._held = ""
        if event.finish_reason is FinishReason.STOP and end is not None:
            num_behind, length = end
            before = len(text) - num_behind - length
            self.stop_string = text[before : before + length]
            return text[:before]
        return text + self._detokenizer.flush()

    def _without_held(self, text: str) -> str:
        """Return what of the text may be shown, and hold the rest back."""
        num_shown = len(text) - self._search.num_held
        self._held = text[num_shown:]
        return text[:num_shown]


class _Search:
    """One stream of characters through an automaton."""

    def __init__(self, automaton: Automaton[str]) -> None:
        self._automaton = automaton
        self._state = 0

    @property
    def num_held(self) -> int:
        """The number of last characters that may belong to a sequence that has not come whole."""
        return self._automaton.held[self._state]

    def first_end(self, text: str) -> tuple[int, int] | None:
        """Pass over this text. Return, of the first sequence that ends in it, how many characters come after it and
        how many it has."""
        first = None
        # all of the text passes, also after an end, so that the state is that of the stream
        for num_behind, character in zip(reversed(range(len(text))), text, strict=True):
            self._state = self._automaton.next(self._state, character)
            if first is None and self._automaton.found[self._state]:
                first = num_behind, self._automaton.found[self._state]
        return first
