"""Values in one short line, as a table, or as plain data; none of them looks into a tensor."""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from html import escape
from numbers import Number
from types import FunctionType
from typing import Any

import attrs
import msgspec

from pdinfer.errors import ConfigError, Overloaded, PDInferError

MAX_CHARACTERS = 400
"""No `repr` of pdinfer is longer."""
INNER_CHARACTERS = 120
_ITEM_CHARACTERS = 60
_INT_BITS = 128
_PLAIN = (bool, int, float, str, bytes, tuple, range, enum.Enum, type(None))


def brief(value: object) -> str:
    """Return the text of an attrs value or a msgspec struct: its fields that differ from their defaults, as many as
    fit into 400 characters. Made to be the `__repr__` of a class."""
    return _fields(value, MAX_CHARACTERS)


class Value:
    """Base of attrs values. They are shown by `brief`, unless they say how themselves."""

    __slots__ = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__repr__" not in vars(cls):
            cls.__repr__ = brief  # type: ignore[method-assign]  # before attrs looks whether to write one


def as_table(value: object) -> str:
    """Return the fields that `brief` shows as a table in HTML, all of them. Made to be the `_repr_html_` of a class."""
    return table(((type(value).__name__,), *_seen(value, INNER_CHARACTERS)))


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return rows of texts as a table in HTML: escaped, and with a border."""
    cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    return f'<table border="1">{"".join(f"<tr>{row}</tr>" for row in cells)}</table>'


def shown(value: object, limit: int = _ITEM_CHARACTERS) -> str:
    """Return `repr(value)` cut to `limit` characters, at least 20. It shows the beginning of what is long, and the
    dtype, shape and device of what is a tensor. Safe for ints of any size."""
    match value:
        case partial():  # which may have tensors
            return shown(value.func, limit)
        case enum.Enum():
            text = f"{type(value).__name__}.{value.name}"
        case bool() | None:
            text = repr(value)
        case int():
            text = repr(value) if value.bit_length() <= _INT_BITS else f"an int of {value.bit_length()} bits"
        case Number():  # of numpy, too
            text = repr(value)
        case str():
            text = repr(value[:limit])
        case bytes():
            text = repr(value) if len(value) <= _INT_BITS // 16 else f"{value[:4].hex()}… of {len(value)} bytes"
        case tuple() | list() | set() | frozenset() | Mapping():
            text = _items(value, limit)
        case type() | FunctionType():
            text = f"{'class' if isinstance(value, type) else 'function'} {value.__qualname__}"
        case _:
            text = _tensor(value) or (_fields(value, limit) if _is_brief(value) else _whole(value))
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _is_brief(value: object) -> bool:
    """Return whether a value is shown by its fields: one of ours, or one whose `__repr__` attrs made, which shows all
    of them whole."""
    method: Any = type(value).__repr__
    return method is brief or (attrs.has(type(value)) and "attrs generated" in method.__code__.co_filename)


def _whole(value: object) -> str:
    try:
        return repr(value)
    except ValueError:  # an int of thousands of digits inside
        return f"a {type(value).__name__}"


def _tensor(value: object) -> str | None:
    """Return what is known of a tensor or an array without reading it."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None or isinstance(value, type):
        return None
    device = getattr(value, "device", None)
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}{'' if device is None else f' on {device}'}"


def _items(items: Collection[Any], limit: int) -> str:
    left, right = "()" if isinstance(items, tuple) else "[]" if isinstance(items, list) else "{}"
    room = limit - len(f"{left}… {len(items)} in all{right}")
    parts: list[str] = []
    for item in items:
        text = shown(item, min(limit, _ITEM_CHARACTERS))
        if isinstance(items, Mapping):
            text += f": {shown(items[item], min(limit, _ITEM_CHARACTERS))}"
        room -= len(text) + len(", ")
        if room < 0:
            return f"{left}{''.join(f'{part}, ' for part in parts)}… {len(items)} in all{right}"
        parts.append(text)
    return f"{left}{', '.join(parts)}{',' if isinstance(items, tuple) and len(items) == 1 else ''}{right}"


def _fields(value: object, limit: int) -> str:
    text, inner = f"{type(value).__name__}(", max(20, limit * INNER_CHARACTERS // MAX_CHARACTERS)
    for name, seen in _seen(value, inner):
        part = f"{'' if text.endswith('(') else ', '}{name}={seen}"
        if len(text) + len(part) > limit - len(", …)"):
            return f"{text}{'' if text.endswith('(') else ', '}…)"
        text += part
    return f"{text})"


def _seen(value: object, limit: int) -> Iterator[tuple[str, str]]:
    """Yield the name and the text, of at most `limit` characters, of each field that differs from its default."""
    for name, field, default in _defaults(value):
        if not _equal(field, default):
            yield name, f"{field:.6g}" if isinstance(field, float) else shown(field, limit)


def _defaults(value: object) -> Iterator[tuple[str, Any, object]]:
    """Yield the name, the value and the default of each field that is to be seen."""
    if isinstance(value, msgspec.Struct):
        for info in msgspec.structs.fields(type(value)):
            factory = info.default_factory
            yield info.name, getattr(value, info.name), info.default if factory is msgspec.NODEFAULT else factory()
        return
    for field, default in fields_of(type(value)):
        if field.repr:
            yield field.alias, getattr(value, field.name), default


def fields_of(kind: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each field of an attrs class, and its default, which is `attrs.NOTHING` where there is none."""
    for field in attrs.fields(kind):
        default: Any = field.default
        yield field, default.factory() if isinstance(default, attrs.Factory) and not default.takes_self else default  # type: ignore[arg-type]


def changed_fields(value: Any) -> dict[str, Any]:
    """Return the fields of an attrs value that differ from their defaults, in type or in value."""
    fields = ((field.name, getattr(value, field.name), default) for field, default in fields_of(type(value)))
    return {name: own for name, own, default in fields if type(own) is not type(default) or own != default}


def _equal(value: object, default: object) -> bool:
    """Return whether a field has its default; what may hold tensors is not compared."""
    comparable = isinstance(value, _PLAIN) or _is_brief(value)
    return value is default or (comparable and type(value) is type(default) and bool(value == default))


def asdict(value: Any) -> dict[str, Any]:
    """Return a value of pdinfer as plain data, which `json.dumps` takes: an event, a load, stats, a configuration, a
    layout, a plan. Bytes become their hexadecimal digits, enums their values, ranges [start, stop], addresses that are
    keys their text, errors their `code` and `message`; a number that is not finite becomes None.

    Raises ConfigError for anything but a value, such as an engine or a tensor: ask it for its `load()` or `stats`."""
    if not (isinstance(value, msgspec.Struct) or attrs.has(type(value))):
        raise ConfigError(f"asdict takes a value such as a load, stats or an event, got {shown(value)}")
    plain: dict[str, Any] = _plain(value)
    return plain


def _plain(value: Any) -> Any:
    match value:
        case enum.Enum():
            return value.value
        case bool() | int() | str() | None:
            return value
        case float():
            return value if math.isfinite(value) else None
        case bytes():
            return value.hex()
        case range():
            return [value.start, value.stop]
        case Mapping():
            return {str(key): _plain(item) for key, item in value.items()}
        case PDInferError():
            retry = {"retry_after_s": value.retry_after_s} if isinstance(value, Overloaded) else {}
            return {"code": value.code, "message": str(value), **retry}
        case msgspec.Struct():
            return {name: _plain(getattr(value, name)) for name in value.__struct_fields__}
    if attrs.has(type(value)):
        return {field.alias: _plain(getattr(value, field.name)) for field in attrs.fields(type(value)) if field.repr}
    if isinstance(value, Collection) and _tensor(value) is None:
        return [_plain(item) for item in value]
    raise ConfigError(
        f"asdict takes values of pdinfer, got {shown(value)}: ask engines and channels for their load() or stats"
    )
