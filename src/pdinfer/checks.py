"""Small checks that all public names share: ranges for attrs fields, kinds of arguments, memory, and how a bad value is
shown."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import itertools
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Collection
from typing import Annotated, Any, ParamSpec, TypeVar, Union

import attrs

from pdinfer.errors import ConfigError
from pdinfer.values import shown

Args = ParamSpec("Args")
Result = TypeVar("Result")
Fits = Callable[[Any], bool]
Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]

SHOWN_CHARACTERS = 60


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


def int_in(low: int, high: int) -> Validator:
    """Return an attrs validator for an int (not a bool) from `low` to `high`, both included. It raises ConfigError."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
        if not is_int(value) or not low <= value <= high:  # type: ignore[operator]
            raise ConfigError(f"{attribute.name} must be an int from {low} to {high}, got {clip(value)}")

    return check


def float_in(low: float, high: float, *, low_included: bool = False) -> Validator:
    """Return an attrs validator for a finite float in (low, high], or [low, high] if `low_included`. It raises
    ConfigError."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
        in_range = isinstance(value, float) and math.isfinite(value) and low <= value <= high
        if in_range and (low_included or value != low):
            return
        least = f"at least {low:g}" if low_included else f"greater than {low:g}"
        raise ConfigError(f"{attribute.name} must be a finite number, {least} and at most {high:g}, got {clip(value)}")

    return check


def one_of(*choices: str) -> Validator:
    """Return an attrs validator for one of the given strings. It raises ConfigError that lists them."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, str) or value not in choices:
            raise ConfigError(f"{attribute.name} must be one of {', '.join(choices)}, got {clip(value)}")

    return check


def instance_of(kind: type[object]) -> Validator:
    """Return an attrs validator for an instance of `kind`. It raises ConfigError."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, kind):
            raise ConfigError(f"{attribute.name} must be a {kind.__name__}, got {clip(value)}")

    return check


def a_bool(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    """Validate, for attrs, that a value is True or False. Raise ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name} must be true or false, got {clip(value)}")


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
    where = function.__qualname__.removesuffix(".__init__")

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
        return _anything if _anything in parts else lambda value: any(fits(value) for fits in parts)
    if origin is collections.abc.Callable:
        return callable
    if hint is int:
        return lambda value: not isinstance(value, bool) and isinstance(value, numbers.Integral)
    if hint is float:
        return lambda value: not isinstance(value, bool) and isinstance(value, numbers.Real) and value == value
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


def _holds(kind: type, fits: Fits, value: object, *, items: bool) -> bool:
    """Return whether `value` is a collection of this kind. A text never is; long lists of numbers are
    for those to check who read them."""
    if not isinstance(value, kind) or isinstance(value, str):
        return False
    if items and (isinstance(value, bytes) or hasattr(value, "dtype")):
        return False
    return not items or not isinstance(value, list | tuple) or all(map(fits, value))


def _is_object(hint: Any) -> bool:
    return hint not in (int, float, bytes, Any, Ellipsis)


def _members(protocol: type) -> Collection[str]:
    """Return the public names of a protocol and of the protocols it extends."""
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False) and base is not typing.Protocol]
    names = {name for base in bases for name in (*vars(base), *vars(base).get("__annotations__", ()))}
    return [name for name in names if not name.startswith("_")]
