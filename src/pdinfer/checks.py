"""Small checks that all public names share: ranges for attrs fields, kinds of arguments, token ids, memory, and how a
bad value is shown."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import itertools
import math
import numbers
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, ParamSpec, Protocol, TypeVar, Union

import attrs

from pdinfer.errors import ConfigError
from pdinfer.values import shown

Args = ParamSpec("Args")
Result = TypeVar("Result")
Fits = Callable[[Any], bool]
Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]

SHOWN_CHARACTERS = 60
MAX_WAIT_S = 2e6
"""The longest wait in one call of the system, 23 days: some count milliseconds in 32 bits, and raise for more."""


def clip(value: object) -> str:
    """Return `repr(value)`, cut to 60 characters, for error messages. Safe for huge ints, long strings and tensors."""
    return shown(value, SHOWN_CHARACTERS)


def is_int(value: object) -> bool:
    """Return whether `value` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether `value` is an int or a finite float, and not a bool."""
    return not isinstance(value, bool) and (
        isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    )


def within(inner: range, outer: range) -> bool:
    """Return whether all of `inner`, whose step is 1, is in `outer`."""
    return not inner or (outer.start <= inner.start and inner.stop <= outer.stop)


def as_float(value: float) -> float:
    """Return an int of at most 53 bits as the float of the same value, and everything else unchanged for a validator to
    judge."""
    return float(value) if is_int(value) and abs(value) <= 2**53 else value


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise ConfigError for anything but an int (not a bool) of at least `low`, and of at most `high`."""
    if not is_int(value) or not low <= value <= (value if high is None else high):  # type: ignore[operator]
        limits = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise ConfigError(f"{name} must be an int {limits}, got {clip(value)}")


def _must_be(kind: str, fits: Fits) -> Validator:
    """Return an attrs validator for values that fit. It raises ConfigError, which says what a value must be."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
        if not fits(value):
            raise ConfigError(f"{attribute.name} must be {kind}, got {clip(value)}")

    return check


def int_in(low: int, high: int) -> Validator:
    """Return a validator for an int (not a bool) from `low` to `high`, both included."""
    return _must_be(f"an int from {low} to {high}", lambda value: is_int(value) and low <= value <= high)


def float_in(low: float, high: float, *, low_included: bool = False) -> Validator:
    """Return a validator for a finite float in (low, high], or [low, high] if `low_included`."""

    def fits(value: object) -> bool:
        in_range = isinstance(value, float) and math.isfinite(value) and low <= value <= high
        return in_range and (low_included or value != low)

    least = f"at least {low:g}" if low_included else f"greater than {low:g}"
    return _must_be(f"a finite number, {least} and at most {high:g}", fits)


def int_field(low: int, high: int, *, default: int | None) -> Any:
    """Return an attrs field for an int from `low` to `high`, or for None, too, where that is the default."""
    check = int_in(low, high)
    return attrs.field(default=default, validator=attrs.validators.optional(check) if default is None else check)


def float_field(
    low: float, high: float, *, default: float | None, low_included: bool = False, or_none: bool = False
) -> Any:
    """Return an attrs field for a number in (low, high], or [low, high] if `low_included`, that is kept as a float. It
    may be None with `or_none`, and where that is the default."""
    check = float_in(low, high, low_included=low_included)
    if default is not None and not or_none:
        return attrs.field(default=default, converter=as_float, validator=check)
    convert = attrs.converters.optional(as_float)
    return attrs.field(default=default, converter=convert, validator=attrs.validators.optional(check))


def one_of(*choices: str) -> Validator:
    """Return a validator for one of the given strings."""
    return _must_be(f"one of {', '.join(choices)}", lambda value: isinstance(value, str) and value in choices)


def instance_of(kind: type[object]) -> Validator:
    """Return a validator for an instance of `kind`."""
    return _must_be(f"a {kind.__name__}", lambda value: isinstance(value, kind))


a_bool = _must_be("true or false", lambda value: isinstance(value, bool))
"""The validator for True or False."""


def check_fits(required_bytes: int, available_bytes: int, what: str) -> None:
    """Refuse an allocation before it is made. `what` completes "... needs about 3.2 GiB". Raise ConfigError."""
    if required_bytes > available_bytes:
        raise ConfigError(
            f"{what} needs about {required_bytes / 2**30:.1f} GiB ({required_bytes} bytes), but only "
            f"{available_bytes / 2**30:.1f} GiB ({available_bytes} bytes) are available: nothing was allocated; "
            f"make it smaller or use a device with more memory"
        )


# -- arguments --------------------------------------------------------------------------------------------------------


def typed(function: Callable[Args, Result]) -> Callable[Args, Result]:
    """Make a public function or method raise ConfigError for an argument of another kind than annotated. An int passes
    for a float; a bool passes for neither, nor does NaN. Of protocols the names are checked, of lists and tuples the
    items where they are objects; what an iterator will give is not. Annotations are read at the first call. Ranges are
    checked by whoever uses the values."""
    parameters = inspect.signature(function).parameters
    positional = [
        name for name, one in parameters.items() if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    rest = [name for name, one in parameters.items() if one.kind is one.VAR_POSITIONAL]

    @functools.cache
    def kinds() -> dict[str, tuple[Any, Fits]]:
        hints = typing.get_type_hints(function)
        kinds = {name: (hint, _fits(hint)) for name, hint in hints.items() if name in parameters}
        return {name: kind for name, kind in kinds.items() if kind[1] is not _anything}

    @functools.wraps(function)
    def call(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        wanted = kinds()
        in_place = zip(itertools.chain(positional, itertools.cycle(rest)), args, strict=False)
        for name, value in (*in_place, *kwargs.items()):
            if name in wanted and not wanted[name][1](value):
                is_made = function.__name__ == "__init__"
                where = type(args[0]).__qualname__ if is_made else function.__qualname__
                raise ConfigError(_sentence(f"{where}: {name}", wanted[name][0], value))
        return function(*args, **kwargs)

    return call


def _sentence(what: str, hint: Any, value: object) -> str:
    kind = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    kind = re.sub(r"\b(?:\w+\.)+", "", kind)  # where a type lives is not what a host writes
    advice = f"; make an object of it first: {value.__name__}(...)" if isinstance(value, type) else ""
    if getattr(hint, "_is_protocol", False) and not advice:  # somebody's own: most of it may be there
        names = sorted(_members(hint))
        missing = [name for name in names if not hasattr(value, name)]
        advice = f", which has no {', '.join(missing)}" if 0 < len(missing) < len(names) else ""
    return f"{what} must be {kind}, got {clip(value)}{advice}"


def _anything(_: object) -> bool:
    return True


def _fits(hint: Any) -> Fits:
    """Return whether a value is what an annotation says, as far as this can be seen cheaply."""
    origin, inside = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _fits(inside[0])
    if origin in (Union, types.UnionType):
        parts = [_fits(part) for part in inside]
        return _anything if _anything in parts else functools.partial(_fits_one_of, parts)
    if origin is collections.abc.Callable:
        return callable
    if hint is int:
        return lambda value: not isinstance(value, bool) and isinstance(value, numbers.Integral)
    if hint is float:
        return _is_float
    if isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
        is_pair = origin is tuple and Ellipsis not in inside
        return functools.partial(_holds, origin, _fits(inside[0]), items=_is_object(inside[0]) and not is_pair)
    if not isinstance(origin or hint, type) or hint in (object, Any):
        return _anything
    if getattr(hint, "_is_protocol", False):
        members = _members(hint)
        return lambda value: not isinstance(value, type) and all(hasattr(value, name) for name in members)
    kind: type = origin or hint
    return kind.__instancecheck__  # what `isinstance` asks, without a call of our own


def _fits_one_of(parts: Sequence[Fits], value: object) -> bool:
    for fits in parts:  # noqa: SIM110 - a generator would be another call for each part
        if fits(value):
            return True
    return False


def _holds(kind: type, fits: Fits, value: object, *, items: bool) -> bool:
    """Return whether `value` is a collection of this kind. A text never is; long lists of numbers are
    for those to check who read them."""
    if not isinstance(value, kind) or isinstance(value, str):
        return False
    if items and (isinstance(value, bytes) or hasattr(value, "dtype")):
        return False
    return not items or not isinstance(value, list | tuple) or all(map(fits, value))


def _is_float(value: object) -> bool:
    """Return whether `value` is a number, infinity among them, and is or has a float."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return not math.isnan(value)
    except OverflowError:
        return False


def _is_object(hint: Any) -> bool:
    return hint not in (int, float, bytes, Any, Ellipsis)


def _members(protocol: type) -> Collection[str]:
    """Return the public names of a protocol and of the protocols it extends."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False) and base is not typing.Protocol]
    names = {name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    return [name for name in names if not name.startswith("_")]


# -- token ids --------------------------------------------------------------------------------------------------------


class CheckedTokens(tuple[int, ...]):
    """Token ids that this process has compared with a vocabulary. None is negative, and `largest` is the largest.

    Only `admission.check_request` makes them. Everything derived from them is a plain tuple again: slices, sums,
    unpickled copies, and what another process unpacks from a message."""

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
    read = _listed(given) if hasattr(given, "tolist") else given
    if not set(map(type, read)) <= {int}:
        read = [_as_int(index, token, tokens) for index, token in enumerate(read)]
    return read if type(read) is tuple else tuple(read)


def _listed(array: Any) -> Any:
    """Return the items of an array. A sparse tensor of torch has no list of them, and one on "meta" has none at all."""
    try:
        return array.tolist()
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"the tokens of {shown(array)} cannot be read: {error}; give a dense array of them"
        ) from error


def _as_int(index: int, token: Any, tokens: object) -> int:
    """Return one id that may be an int of numpy or torch."""
    try:
        if not isinstance(token, bool) and "bool" not in str(getattr(token, "dtype", "")):
            return operator.index(token)
    except TypeError:
        pass
    within = f" of {shown(tokens)}" if hasattr(tokens, "dtype") else ""
    raise ConfigError(f"token ids are ints, got {shown(token)} at index {index}{within}")
