"""Reading files nobody vouches for: regular files of one folder, and strict JSON.

A model folder comes from strangers. What is opened is a plain file inside that folder, never a device, a pipe or a
link that leads out; what is parsed has a size, a depth and a number of parts that were checked before.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path

from pdinfer.checks import clip
from pdinfer.errors import ConfigError, PDInferError

MAX_JSON_BYTES = 1 << 20
MAX_JSON_DEPTH = 64
MAX_JSON_CONTAINERS = 10_000
MAX_DIGITS = 20

_JSON_MARKS = re.compile(r'["\[\]{}]|NaN|Infinity|[0-9]{21,}')
_JSON_SPACE = re.compile(r"[ \t\n\r]*")


def check_file_name(name: object, what: str, error: type[PDInferError]) -> str:
    """`name`, if it names a file directly inside a folder; anything that could lead elsewhere raises `error`."""
    if (
        not isinstance(name, str)
        or not 0 < len(name) <= 255
        or name in (".", "..")
        or "/" in name
        or "\\" in name
        or not name.isprintable()
    ):
        raise error(f"{what} must be a plain file name inside the model folder, got {clip(name)}")
    return name


def open_regular(folder: Path, name: str, error: type[PDInferError]) -> int:
    """Open `folder/name` for reading and return the file descriptor, which the caller closes.

    Only regular files are opened. A symbolic link counts when it ends inside `folder`, so nothing outside can be read
    under a name of the model. Raises `error`.
    """
    path = folder / check_file_name(name, "a file to open", error)
    try:
        root = folder.resolve(strict=True)
        inside = path.resolve(strict=True)
        if not inside.is_relative_to(root):
            raise error(
                f"{path} is a link to {clip(str(inside))}, outside the model folder: "
                f"copy the files it points to into the folder (a hub cache stores links; download to a plain folder)"
            )
        # O_NONBLOCK: opening a FIFO must not wait for its writer; it has no effect on regular files.
        fd = os.open(inside, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, RuntimeError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else str(failure)
        raise error(f"cannot open {path}: {reason}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise error(f"{path} is not a regular file (a device, a pipe, a socket or a folder); it was not read")
    return fd


def read_regular(folder: Path, name: str, max_bytes: int, error: type[PDInferError]) -> bytes:
    """The content of a small file. Raises `error` where it is larger than `max_bytes`; then nothing was read."""
    fd = open_regular(folder, name, error)
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        data = file.read(max_bytes + 1) if size <= max_bytes else b""
    if size > max_bytes or len(data) > max_bytes:
        raise error(f"{folder / name} is too large: {size} bytes, the limit is {max_bytes}; it was not parsed")
    return data


def read_json(
    path: str | os.PathLike[str],
    *,
    max_bytes: int = MAX_JSON_BYTES,
    error: type[PDInferError] = ConfigError,
) -> dict[str, object]:
    """The JSON object in a file, parsed strictly (see `parse_json`). Raises `error` with the path and the position."""
    path = Path(path)
    return parse_json(read_regular(path.parent, path.name, max_bytes, error), str(path), error)


def parse_json(data: bytes, source: str, error: type[PDInferError]) -> dict[str, object]:
    """One JSON object, or `error` naming `source` and the character position.

    Stricter than RFC 8259: UTF-8 without a byte order mark, no duplicate keys, no NaN or Infinity, no run of more than
    20 digits, at most 64 levels and 10,000 objects and arrays. Everything but the grammar is checked before parsing.
    """
    if data.startswith(b"\xef\xbb\xbf"):
        raise error(f"{source} starts with a byte order mark at position 0; save it as UTF-8 without one")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise error(f"{source} is not UTF-8: {failure.reason} at byte position {failure.start}") from None
    _check_marks(text, source, error)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as failure:
        raise error(f"{source} is not strict JSON: {failure.msg} at position {failure.pos}") from None
    if not isinstance(value, dict):
        raise error(f"{source} must hold one JSON object at position 0, got {clip(value)}")
    return value


def _check_marks(text: str, source: str, error: type[PDInferError]) -> None:
    """One linear pass over brackets, strings and numbers: depth, count, duplicate keys, literals outside JSON."""
    keys: list[set[str]] = []
    containers = 0
    position = 0
    while mark := _JSON_MARKS.search(text, position):
        start, position = mark.span()
        match mark.group()[0]:
            case '"':
                position = string_end(text, position)
                if keys and text.startswith(":", after_space(text, position)):
                    _add_key(keys[-1], text[start:position], start, source, error)
            case "{" | "[":
                containers += 1
                keys.append(set())
                if len(keys) > MAX_JSON_DEPTH:
                    raise error(f"{source} is nested too deep: more than {MAX_JSON_DEPTH} levels at position {start}")
                if containers > MAX_JSON_CONTAINERS:
                    raise error(f"{source} has more than {MAX_JSON_CONTAINERS} objects and arrays at position {start}")
            case "}" | "]":
                if keys:
                    keys.pop()
            case "N" | "I":
                raise error(f"{source} is not strict JSON: {mark.group()} at position {start} is not a JSON number")
            case _:
                raise error(f"{source} has a number of more than {MAX_DIGITS} digits at position {start}")


def string_end(text: str, position: int) -> int:
    """The position after the string whose content starts at `position`; the end of `text` if it never ends."""
    while (quote := text.find('"', position)) >= 0:
        content = quote
        while content > position and text[content - 1] == "\\":
            content -= 1
        position = quote + 1
        if (quote - content) % 2 == 0:
            return position
    return len(text)


def after_space(text: str, position: int) -> int:
    """The position of the first character from `position` that is not JSON white space."""
    space = _JSON_SPACE.match(text, position)
    return space.end() if space else position


def _add_key(seen: set[str], quoted: str, position: int, source: str, error: type[PDInferError]) -> None:
    try:
        key = json.loads(quoted) if "\\" in quoted else quoted[1:-1]
    except json.JSONDecodeError as failure:
        raise error(f"{source} is not strict JSON: {failure.msg} at position {position + failure.pos}") from None
    if key in seen:
        raise error(f"{source} is not strict JSON: key {clip(key)} appears twice, again at position {position}")
    seen.add(key)
