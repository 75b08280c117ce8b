"""Where a request has to stop: what a matcher promises, and the automaton that finds sequences in a stream.

A Pairing asks `Request.stop` for a fresh function per request and calls it with each token. Sequences of tokens are
found by an `Automaton`, and stop strings (`pdinfer.text`) by one over characters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import attrs

MAX_STOPS = 64
"""The most sequences or strings that may end one request."""
MAX_STOP_LENGTH = 256
"""The most tokens or characters of each."""

Symbol = TypeVar("Symbol", bound=Hashable)


class StopMatcher(Protocol):
    """Finds where requests have to stop. One matcher may serve any number of requests at once."""

    def begin(self, prompt: Sequence[int]) -> Callable[[int], bool]:
        """Return a new function for one request. It gets each token of the output, once and in order, and returns
        whether the request stops with this token. It may be called again after that, as `min_new_tokens` may not be
        reached. What it raises ends its request."""


@attrs.frozen(eq=False)
class Automaton(Generic[Symbol]):
    """Finds sequences in a stream in constant time per symbol: Aho and Corasick, Communications of the ACM 18 (6),
    1975.

    A state is an int, 0 at the beginning of a stream: the longest end of the stream that begins a sequence. Any number
    of streams may share an automaton. `found[state]` is the length of the longest sequence that ends here, or 0;
    `held[state]` is how many of the last symbols may become part of a sequence that has not ended yet."""

    found: list[int]
    held: list[int]
    _children: list[dict[Symbol, int]]
    _shorter: list[int]

    @classmethod
    def of(cls, sequences: Iterable[Sequence[Symbol]]) -> Automaton[Symbol]:
        """Return the automaton of these sequences, none of which is empty."""
        children: list[dict[Symbol, int]] = [{}]
        depth, found = [0], [0]
        for sequence in sequences:
            state = 0
            for symbol in sequence:
                if symbol not in children[state]:
                    children[state][symbol] = len(children)
                    children.append({})
                    depth.append(depth[state] + 1)
                    found.append(0)
                state = children[state][symbol]
            found[state] = depth[state]
        shorter, held = [0] * len(children), [0] * len(children)
        made = cls(found, held, children, shorter)
        waiting = deque(children[0].values())
        while waiting:  # by depth, so that what is shorter is known
            state = waiting.popleft()
            found[state] = found[state] or found[shorter[state]]
            held[state] = depth[state] if children[state] else held[shorter[state]]
            for symbol, child in children[state].items():
                shorter[child] = made.next(shorter[state], symbol)
                waiting.append(child)
        return made

    def next(self, state: int, symbol: Symbol) -> int:
        """Return the state after one more symbol."""
        while state and symbol not in self._children[state]:
            state = self._shorter[state]
        return self._children[state].get(symbol, 0)


@attrs.frozen
class StopSequences:
    """The matcher of token sequences."""

    sequences: tuple[tuple[int, ...], ...]

    def begin(self, prompt: Sequence[int]) -> Callable[[int], bool]:
        automaton = Automaton.of(self.sequences)
        state = 0

        def stops(token: int) -> bool:
            nonlocal state
            state = automaton.next(state, token)
            return automaton.found[state] > 0

        return stops
