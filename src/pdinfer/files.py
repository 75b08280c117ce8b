"""Reading untrusted files: regular files of one folder, and strict JSON.

A model folder comes from strangers. Only a plain file inside that folder is opened, never a device, a pipe or a link
that leads out of it; the exceptions are the blobs of a hub cache that the folder is part of, and roots that the host
names. Size, depth and number of parts are checked before anything is parsed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from pdinfer.checks import clip
from pdinfer.errors import CheckpointError, ConfigError, PDInferError

AnyPath = str | os.PathLike[str]

MAX_JSON_BYTES = 1 << 20
MAX_CONFIG_BYTES = 16 << 20
"""Of a config.json, in which modelslim names each tensor of a large model."""
MAX_JSON_DEPTH = 64
MAX_JSON_CONTAINERS = 10_000
MAX_JSON_STRINGS = 1 << 20
MAX_DIGITS = 20

BOM = b"\xef\xbb\xbf"
"""The byte order mark of UTF-8, which some editors write."""
_JSON_MARKS = re.compile(r'["\[\]{}]|NaN|Infinity|[0-9]{21,}')
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_JSON_SPACE = re.compile(r"[ \t\n\r]*")


def check_file_name(name: object, what: str, error: type[PDInferError]) -> str:
    """Return `name` if it names a file directly inside a folder. Raise `error` for a name that could lead elsewhere."""
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


def check_folder(folder: AnyPath) -> Path:
    """Return `folder` as a path if it is a folder. Raise CheckpointError, and say how to get a model, for users who
    expect it to be downloaded."""
    path = Path(folder)
    try:
        if stat.S_ISDIR(path.stat().st_mode):
            return path
        raise CheckpointError(f"{path} is not a folder: give the one that holds config.json and the safetensors files")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as failure:
        reason = failure.strerror if isinstance(failure, OSError) else str(failure)
        raise CheckpointError(f"cannot open model folder {clip(os.fspath(folder))}: {reason}") from None
    text = os.fspath(folder)
    name = text if _HUB_ID.fullmatch(text) else "ORGANIZATION/MODEL"
    raise CheckpointError(
        f"there is no folder {path}. pdinfer does not download models: get one with "
        f"`hf download {name} --local-dir FOLDER` (of huggingface_hub) and give that folder"
    )


def open_regular(folder: Path, name: str, error: type[PDInferError], trusted_roots: Iterable[AnyPath] = ()) -> int:
    """Open `folder/name` for reading and return the file descriptor, which the caller closes.

    Only regular files are opened. A symbolic link is followed when it ends inside `folder`, in the blobs of the hub
    cache whose snapshot `folder` is, or in one of `trusted_roots`, so nothing else can be read under a name of the
    model. Raises `error`."""
    path = folder / check_file_name(name, "a file to open", error)
    target = inside(path, folder, error, trusted_roots)
    try:
        # O_NONBLOCK: opening a FIFO must not wait for its writer; it has no effect on regular files.
        fd = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as failure:
        mend = "; let this process open more (ulimit -n 65536)" if failure.errno == errno.EMFILE else ""
        raise error(f"cannot open {path}: {failure.strerror}{mend}") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise error(f"{path} is not a regular file (a device, a pipe, a socket or a folder); it was not read")
    return fd


def inside(path: Path, folder: Path, error: type[PDInferError], trusted_roots: Iterable[AnyPath] = ()) -> Path:
    """Return where `path`, which is directly inside `folder`, is without links. Raises `error` for a place that
    `open_regular` does not allow."""
    try:
        root = folder.resolve(strict=True)
        target = path.resolve(strict=True)
        roots = (root, *_own_blobs(root), *(Path(trusted).resolve() for trusted in trusted_roots))
    except (OSError, RuntimeError, ValueError) as failure:  # the last for a path with a zero byte
        reason = failure.strerror if isinstance(failure, OSError) else str(failure)
        raise error(f"cannot open {path}: {reason}") from None
    if not any(map(target.is_relative_to, roots)):
        raise error(
            f"{path} is a link to {clip(str(target))}, outside the model folder: copy the files it points to into "
            f"the folder, or name the folder they are in among trusted_roots"
        )
    return target


def _own_blobs(root: Path) -> Iterator[Path]:
    """Yield the blobs of the hub cache in which `root`, without links in its path, is a snapshot or inside one:
    models--ORGANIZATION--MODEL/snapshots/REVISION links to files there. Blobs that are themselves a link do not count:
    the path compared with them has followed every link. Source: https://huggingface.co/docs/huggingface_hub,
    "Understand caching"."""
    for folder in (root, *root.parents):
        snapshots, cache = folder.parent, folder.parent.parent
        if snapshots.name == "snapshots" and cache.name.startswith("models--"):
            yield cache / "blobs"


@contextlib.contextmanager
def naming(path: AnyPath, error: type[PDInferError] = ConfigError) -> Iterator[None]:
    """Raise as `error` what a ConfigError says of the content of a file, with the path of that file before it."""
    try:
        yield
    except ConfigError as failure:
        raise error(f"{os.fspath(path)}: {failure}") from None


@contextlib.contextmanager
def writing(path: AnyPath) -> Iterator[None]:
    """Raise as ConfigError what the system says of a file or folder that cannot be written."""
    try:
        yield
    except (OSError, ValueError) as failure:  # the latter for a path with a zero byte
        reason = getattr(failure, "strerror", None) or failure
        raise ConfigError(f"cannot write to {os.fspath(path)}: {reason}; make room, or choose another folder") from None


def read_regular(
    folder: Path, name: str, max_bytes: int, error: type[PDInferError], trusted_roots: Iterable[AnyPath] = ()
) -> bytes:
    """Return the content of a small file. Raise `error`, without reading it, when it is larger than `max_bytes`."""
    fd = open_regular(folder, name, error, trusted_roots)
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        data = file.read(size + 1) if size <= max_bytes else b""
    if size > max_bytes or len(data) > size:
        raise error(
            f"{folder / name} is too large, or grows: {size} bytes, the limit is {max_bytes}; it was not parsed"
        )
    return data


def read_json(
    path: AnyPath,
    *,
    max_bytes: int = MAX_JSON_BYTES,
    error: type[PDInferError] = ConfigError,
    trusted_roots: Iterable[AnyPath] = (),
) -> dict[str, object]:
    """Return the JSON object in a file, parsed strictly (see `parse_json`). Raise `error` with the path and the
    position."""
    path = Path(path)
    return parse_json(read_regular(path.parent, path.name, max_bytes, error, trusted_roots), str(path), error)


def parse_json(
    data: bytes, source: str, error: type[PDInferError], *, max_digits: int = MAX_DIGITS
) -> dict[str, object]:
    """Return the one JSON object in `data`. Raise `error` with `source` and the character position.

    Stricter than RFC 8259: UTF-8 without a byte order mark, no duplicate keys, no NaN or Infinity, no run of more than
    `max_digits` digits, at most 64 levels, 10,000 objects and arrays and 2^20 strings. Everything but the grammar is
    checked before parsing."""
    if data.startswith(BOM):
        raise error(f"{source} starts with a byte order mark at position 0; save it as UTF-8 without one")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise error(f"{source} is not UTF-8: {failure.reason} at byte position {failure.start}") from None
    _check_marks(text, source, error, max_digits)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as failure:
        raise error(f"{source} is not strict JSON: {failure.msg} at position {failure.pos}") from None
    if not isinstance(value, dict):
        raise error(f"{source} must hold one JSON object at position 0, got {clip(value)}")
    return value


def unambiguous(data: bytes | str) -> bytes:
    """Return JSON as UTF-8 without a byte order mark. Raise ConfigError where an object has a key twice:
    some readers take the first and some the last. What is no JSON is left to the decoder."""
    text = (data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data).removeprefix(BOM)
    with contextlib.suppress(ValueError, RecursionError):
        json.loads(text, object_pairs_hook=_unique, parse_int=str, parse_float=str)
    return text


def _unique(pairs: list[tuple[str, object]]) -> None:
    keys = [key for key, _ in pairs]
    if len(set(keys)) < len(keys):
        twice = next(key for at, key in enumerate(keys) if key in keys[:at])
        raise ConfigError(f"key {clip(twice)} appears twice in one object; keep one of the two")


def _check_marks(text: str, source: str, error: type[PDInferError], max_digits: int) -> None:
    """Check depth, count, duplicate keys and literals outside JSON, in one linear pass over brackets, strings and
    numbers."""
    if text.count('"') > 2 * MAX_JSON_STRINGS:
        raise error(f"{source} has more than {MAX_JSON_STRINGS} strings")
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
            case _ if position - start > max_digits:
                raise error(f"{source} has a number of more than {max_digits} digits at position {start}")


def string_end(text: str, position: int) -> int:
    """Return the position after the string whose content starts at `position`, or the end of `text` if it never
    ends."""
    while (quote := text.find('"', position)) >= 0:
        content = quote
        while content > position and text[content - 1] == "\\":
            content -= 1
        position = quote + 1
        if (quote - content) % 2 == 0:
            return position
    return len(text)


def after_space(text: str, position: int) -> int:
    """Return the position of the first character from `position` that is not JSON white space."""
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
