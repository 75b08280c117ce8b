"""Small checks shared by every configuration: ranges for attrs fields, memory, and how a bad value is shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs

from pdinfer.errors import ConfigError

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]

SHOWN_CHARACTERS = 60
SHOWN_INT_BITS = 128


def clip(value: object) -> str:
    """`repr(value)`, cut to 60 characters, for error messages; safe for huge ints and long strings."""
    if isinstance(value, int) and value.bit_length() > SHOWN_INT_BITS:
        return f"an int of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        value = value[:SHOWN_CHARACTERS]
    try:
        text = repr(value)
    except ValueError:  # an int of thousands of digits inside
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def is_int(value: object) -> bool:
    """Whether `value` is an int and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def within(inner: range, outer: range) -> bool:
    """Whether all of `inner`, whose step is 1, lies in `outer`."""
    return not inner or (outer.start <= inner.start and inner.stop <= outer.stop)


def as_float(value: float) -> float:
    """An int of at most 53 bits as the float of the same value; everything else unchanged, for a validator to judge."""
    return float(value) if is_int(value) and abs(value) <= 2**53 else value


def int_in(low: int, high: int) -> Validator:
    """An attrs validator: an int (not a bool) from `low` to `high`, both included. Raises ConfigError."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
        if not is_int(value) or not low <= value <= high:  # type: ignore[operator]
            raise ConfigError(f"{attribute.name} must be an int from {low} to {high}, got {clip(value)}")

    return check


def float_in(low: float, high: float, *, low_included: bool = False) -> Validator:
    """An attrs validator: a finite float in (low, high], or [low, high] if `low_included`. Raises ConfigError."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
        in_range = isinstance(value, float) and math.isfinite(value) and low <= value <= high
        if in_range and (low_included or value != low):
            return
        least = f"at least {low:g}" if low_included else f"greater than {low:g}"
        raise ConfigError(f"{attribute.name} must be a finite number, {least} and at most {high:g}, got {clip(value)}")

    return check


def one_of(*choices: str) -> Validator:
    """An attrs validator: one of the given strings. Raises ConfigError that lists them."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, str) or value not in choices:
            raise ConfigError(f"{attribute.name} must be one of {', '.join(choices)}, got {clip(value)}")

    return check


def instance_of(kind: type[object]) -> Validator:
    """An attrs validator: an instance of `kind`. Raises ConfigError."""

    def check(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
        if not isinstance(value, kind):
            raise ConfigError(f"{attribute.name} must be a {kind.__name__}, got {clip(value)}")

    return check


def a_bool(_instance: Any, attribute: attrs.Attribute[Any], value: object) -> None:
    """An attrs validator: True or False. Raises ConfigError."""
    if not isinstance(value, bool):
        raise ConfigError(f"{attribute.name} must be true or false, got {clip(value)}")


def check_fits(required_bytes: int, available_bytes: int, what: str) -> None:
    """Refuse an allocation before it is made. `what` completes "... needs about 3.2 GiB". Raises ConfigError."""
    if required_bytes > available_bytes:
        raise ConfigError(
            f"{what} needs about {required_bytes / 2**30:.1f} GiB ({required_bytes} bytes), but only "
            f"{available_bytes / 2**30:.1f} GiB ({available_bytes} bytes) are available: nothing was allocated; "
            f"make it smaller or use a device with more memory"
        )
