"""Token ids come in any sequence of ints, and are kept as a tuple."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, Protocol

from pdinfer.errors import ConfigError
from pdinfer.values import shown


class CheckedTokens(tuple[int, ...]):
    """Token ids that this process has compared with a vocabulary. None is negative, and `largest` is the largest.

    Only `admission.check_request` makes them. Everything derived from them is a plain tuple again: slices, sums,
    unpickled copies, and what another process unpacks from a message.
    """

    largest: int

    @classmethod
    def of(cls, tokens: tuple[int, ...]) -> CheckedTokens:
        """Mark token ids that were compared."""
        if isinstance(tokens, CheckedTokens):
            return tokens
        checked = cls(tokens)
        checked.largest = max(tokens)
        return checked

    def __reduce__(self) -> tuple[type[tuple[int, ...]], tuple[tuple[int, ...]]]:
        return tuple, (tuple(self),)


class IntArray(Protocol):
    """A one-dimensional array or tensor of ints, on any device."""

    @property
    def ndim(self) -> int: ...

    def tolist(self) -> Any: ...


MAX_TOKEN = 2**31 - 1
MAX_TOKENS = 2**24
"""The most in a sequence: as many as a message between engines holds."""


def token_ids(tokens: Sequence[int] | IntArray) -> tuple[int, ...]:
    """Return token ids as a tuple of ints, see `ints_of`. Raises ConfigError also for an id below 0 or above 2**31 - 1.
    Whether a model has these tokens is checked where it is known."""
    if isinstance(tokens, CheckedTokens):
        return tokens
    ids = ints_of(tokens)
    if ids and not 0 <= min(ids) <= max(ids) <= MAX_TOKEN:
        index, token = next(pair for pair in enumerate(ids) if not 0 <= pair[1] <= MAX_TOKEN)
        raise ConfigError(f"token ids are ints from 0 to {MAX_TOKEN}, got {shown(token)} at index {index}")
    return ids


def ints_of(tokens: Sequence[int] | IntArray) -> tuple[int, ...]:
    """Return a sequence or a one-dimensional array of ints as a tuple. A tensor on a device is copied, which waits for
    the device. Raises ConfigError for text, floats, bools and more dimensions."""
    given: Any = tokens  # it may be anything
    if hasattr(given, "ndim") and hasattr(given, "tolist") and not isinstance(given, type):
        if given.ndim != 1:
            raise ConfigError(f"token ids have one dimension, got {shown(given)}: make a request for each row")
    elif isinstance(given, str):
        raise ConfigError(f"a prompt is token ids, got the text {shown(given)}: encode it with the model's tokenizer")
    elif not isinstance(given, Sequence):
        raise ConfigError(f"token ids are a sequence of ints, got {shown(given)}: give a list, a tuple or an array")
    if len(given) > MAX_TOKENS:
        raise ConfigError(f"a sequence has at most {MAX_TOKENS} tokens, got {len(given)}: {shown(given)}")
    read = given.tolist() if hasattr(given, "tolist") else given
    if not set(map(type, read)) <= {int}:
        read = [_as_int(index, token, tokens) for index, token in enumerate(read)]
    return read if type(read) is tuple else tuple(read)


def _as_int(index: int, token: Any, tokens: object) -> int:
    """Return one id that may be an int of numpy or torch."""
    try:
        if not isinstance(token, bool) and "bool" not in str(getattr(token, "dtype", "")):
            return operator.index(token)
    except TypeError:
        pass
    within = f" of {shown(tokens)}" if hasattr(tokens, "dtype") else ""
    raise ConfigError(f"token ids are ints, got {shown(token)} at index {index}{within}")
