"""Traces of real traffic, read as untrusted input: Mooncake, Azure, Splitwise, ShareGPT, a plain CSV.

A trace has lengths, arrivals and, from Mooncake, hashes of prefixes. Files may be compressed by gzip. What is wrong in
one raises ConfigError with file, line and field before any request is sent."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import attrs
import msgspec
import numpy as np
from msgspec import Meta

from pdinfer.bounds import escaped
from pdinfer.checks import as_float, check_int, clip, float_field, float_in, int_field, int_in, is_int, typed
from pdinfer.config.options import MAX_DEADLINE_S
from pdinfer.errors import ConfigError
from pdinfer.files import BOM, AnyPath, unambiguous
from pdinfer.values import Value

MAX_LINE_BYTES = 16 << 20
MAX_TRACE_BYTES = 1 << 30
"""Of the text, whatever its compressed size."""
MAX_LENGTH = 2**31
MAX_AT_S = 1e9
MAX_SEED = MAX_HASH = 2**63 - 1
BLOCK_TOKENS = 512
CHARACTERS_PER_TOKEN = 4
LEAST_BIN_S = 1.0
"""Arrivals of which several share a time, and none are closer otherwise, were put into bins."""
FORMATS = ("mooncake", "azure", "splitwise", "sharegpt", "csv")
COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "splitwise": ("arrival_timestamp", "prompt_size", "token_size"),
    "csv": ("at_s", "prompt_tokens", "output_tokens"),
}
_DATE = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d{1,9})?(\+00:00|Z)?", re.ASCII)


def _hashes(_instance: Arrival, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, tuple) or not all(is_int(one) and 0 <= one <= MAX_HASH for one in value):
        raise ConfigError(f"{attribute.name} must be a tuple of ints from 0 to {MAX_HASH}, got {clip(value)}")


@attrs.frozen(kw_only=True)
class Arrival(Value):
    """One request: when it is due in seconds, its tokens, the hashes of its blocks, equal for equal prefixes, and its
    priority and deadline as in `Request`. Raises ConfigError for a time that is negative or beyond MAX_AT_S, for
    lengths that are not from 1 to MAX_LENGTH, for hashes that are not from 0 to MAX_HASH, and for what no `Request` may
    have."""

    at_s: float = attrs.field(validator=float_in(0.0, MAX_AT_S, low_included=True), converter=as_float)
    prompt_tokens: int = attrs.field(validator=int_in(1, MAX_LENGTH))
    output_tokens: int = attrs.field(validator=int_in(1, MAX_LENGTH))
    hash_ids: tuple[int, ...] = attrs.field(default=(), validator=_hashes)
    priority: int = int_field(1 - 2**31, 2**31 - 1, default=0)
    deadline_s: float | None = float_field(0.0, MAX_DEADLINE_S, default=None, low_included=True)


@attrs.frozen(kw_only=True)
class Trace(Value):
    """Requests in order of arrival, at least one, and where they come from. `sha256` is that of the file."""

    name: str
    format: str
    sha256: str
    arrivals: tuple[Arrival, ...]
    block_tokens: int = BLOCK_TOKENS
    notes: tuple[str, ...] = ()

    def __attrs_post_init__(self) -> None:
        check_arrivals("a trace", self.arrivals)
        if not self.arrivals:
            raise ConfigError(f"the trace {clip(self.name)} has no request; a trace has at least one")


def check_arrivals(what: str, arrivals: object) -> None:
    """Raise ConfigError for what is no tuple of arrivals in order of their times."""
    if not isinstance(arrivals, tuple) or not all(isinstance(one, Arrival) for one in arrivals):
        raise ConfigError(f"{what} has a tuple of arrivals, got {clip(arrivals)}")
    for before, after in pairwise(arrivals):
        if after.at_s < before.at_s:
            raise ConfigError(f"arrivals go back from {before.at_s:g} s to {after.at_s:g} s; sort them by at_s")


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
    output_length: Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
    hash_ids: tuple[Annotated[int, Meta(ge=0, le=MAX_HASH)], ...]


class _Turn(msgspec.Struct):
    value: str
    sender: str = msgspec.field(name="from")


class _Conversation(msgspec.Struct):
    conversations: tuple[_Turn, ...]


@typed
def read_trace(
    path: AnyPath,
    *,
    format: str | None = None,  # noqa: A002 - what everybody calls it
    bins: str = "spread",
    seed: int = 0,
    count_tokens: Callable[[str], int] | None = None,
) -> Trace:
    """Read a trace. `format` is one of FORMATS, found out from the first line when it is None.

    `bins` says what becomes of arrivals that the trace rounded to whole bins (the conversation trace has bins of 3 s,
    which are bursts when they are replayed): "spread" draws a time within each bin by `seed`, "keep" leaves them.
    ShareGPT has text instead of lengths: `count_tokens` counts them; without it 4 characters are taken for a token.
    The notes of the trace say what was done. Raises ConfigError with file, line and field."""
    path = Path(path)
    if bins not in ("spread", "keep"):
        raise ConfigError(f"bins must be 'spread' or 'keep', got {clip(bins)}")
    text = _text(path)
    if format is None:
        format = _recognized(path, io.BytesIO(text).readline())  # noqa: A001
    notes: tuple[str, ...] = ()
    if format == "sharegpt":
        arrivals, notes = _sharegpt(Place(path, 1), text, count_tokens)
    elif format == "mooncake":
        arrivals, notes = _unbinned(_in_order(_mooncake(path, text)), bins, seed)
    elif format in COLUMNS:
        arrivals = _in_order(_table(path, text, COLUMNS[format]))
    else:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}, got {clip(format)}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Trace(name=escaped(path.name), format=format, sha256=digest, arrivals=tuple(arrivals), notes=notes)


class Place(NamedTuple):
    """A line of a file, from 1."""

    path: Path
    number: int

    def fail(self, field: str, wrong: str, advice: str) -> NoReturn:
        """Raise ConfigError with file, line and field."""
        raise ConfigError(f"{self.path}, line {self.number}: {field} {wrong}; {advice}")


Rows = Iterator[tuple[Place, Arrival]]


def _text(path: Path) -> bytes:
    """Return the text of a file, unpacked and without a byte order mark."""
    try:
        if not path.is_file():
            raise ConfigError(f"{path}: is not a file; give the path of a trace")
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_packed else path.open("rb") as file:
            text = file.read(MAX_TRACE_BYTES + 1)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read on: {error}; is it damaged?") from error
    if len(text) > MAX_TRACE_BYTES:
        raise ConfigError(f"{path}: has more than {MAX_TRACE_BYTES >> 30} GiB of text; split it")
    return text.removeprefix(BOM)


def _recognized(path: Path, line: bytes) -> str:
    first = line.decode("utf-8", "replace").strip()
    if first.startswith("{"):
        return "mooncake"
    if first.startswith("["):
        return "sharegpt"
    names = {column.strip() for column in first.replace('"', "").split(",")}
    for name, columns in COLUMNS.items():
        if names.issuperset(columns):
            return name
    raise ConfigError(f"{path}, line 1: is of no known format: {clip(first)}; give `format`")


def _in_order(rows: Rows) -> list[Arrival]:
    arrivals: list[Arrival] = []
    for place, arrival in rows:
        if arrivals and arrival.at_s < arrivals[-1].at_s:
            wrong = f"goes back from {arrivals[-1].at_s:g} s to {arrival.at_s:g} s"
            place.fail("the time", wrong, "sort the trace by arrival")
        arrivals.append(arrival)
    return arrivals


_MOONCAKE = msgspec.json.Decoder(_MooncakeLine)
_LEAST_QUOTES = 2 * len(_MooncakeLine.__struct_fields__)
"""A line with so many has every key once, and no other string."""


def _mooncake(path: Path, text: bytes) -> Rows:
    for number, line in enumerate(io.BytesIO(text), start=1):
        place = Place(path, number)
        if len(line) > MAX_LINE_BYTES:
            place.fail("the line", f"is longer than {MAX_LINE_BYTES >> 20} MiB", "is this a trace?")
        if not line.strip():
            continue
        try:
            row = _MOONCAKE.decode(line if line.count(b'"') == _LEAST_QUOTES else unambiguous(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError) as error:
            wrong = f"is wrong: {str(error)[:200]}"
            place.fail(_field_of(str(error)), wrong, "every line is a JSON object as Mooncake writes it")
        needed = -(-row.input_length // BLOCK_TOKENS)
        if len(row.hash_ids) != needed:
            wrong = (
                f"has {len(row.hash_ids)} hashes, and {row.input_length} tokens have {needed} blocks of {BLOCK_TOKENS}"
            )
            place.fail("hash_ids", wrong, "give one hash for each block")
        yield (
            place,
            Arrival(
                at_s=_time(place, "timestamp", row.timestamp / 1e3),
                prompt_tokens=row.input_length,
                output_tokens=row.output_length,
                hash_ids=row.hash_ids,
            ),
        )


def _field_of(reason: str) -> str:
    """Return the field that msgspec names in an error."""
    found = re.search(r"`\$\.([a-z_]+)|required field `([a-z_]+)`", reason)
    return (found[1] or found[2]) if found else "the line"


def _time(place: Place, field: str, at_s: float) -> float:
    if not 0 <= at_s <= MAX_AT_S:
        place.fail(field, f"is {at_s:g} s", f"times are from 0, or that of the first line, to {MAX_AT_S:g} s")
    return at_s


def rng_of(seed: int, *more: int) -> np.random.Generator:
    """Return the generator of a seed and of numbers of our own. Raise ConfigError for anything but a seed."""
    if not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"seed must be an int from 0 to {MAX_SEED}, got {clip(seed)}")
    return np.random.default_rng([seed, *more])


def _unbinned(arrivals: list[Arrival], bins: str, seed: int) -> tuple[list[Arrival], tuple[str, ...]]:
    """Return the arrivals, spread within the bins that they were rounded to, and what was done."""
    times_s = sorted({arrival.at_s for arrival in arrivals})
    gaps_s = np.diff(times_s)
    if len(times_s) == len(arrivals) or not gaps_s.size or gaps_s.min() < LEAST_BIN_S:
        return arrivals, ()
    width_s = round(float(np.median(gaps_s)), 3)
    if bins == "keep":
        return arrivals, (f"arrivals are in bins of {width_s:g} s, which were kept: each bin is a burst",)
    offsets = rng_of(seed).uniform(0.0, width_s, len(arrivals))
    spread = [attrs.evolve(one, at_s=one.at_s + float(offset)) for one, offset in zip(arrivals, offsets, strict=True)]
    note = f"arrivals were in bins of {width_s:g} s, and were spread within them, uniformly, with seed {seed}"
    return sorted(spread, key=lambda arrival: arrival.at_s), (note,)


def _table(path: Path, text: bytes, columns: tuple[str, str, str]) -> Rows:
    """Read a CSV with these columns: the time, prompt tokens, output tokens. Dates count from the first one."""
    places: list[int] = []
    origin: float | None = None if columns[0] == "TIMESTAMP" else 0.0
    for place, cells in _cells(path, text):
        if not places:
            if missing := [name for name in columns if name not in cells]:
                place.fail(missing[0], f"is no column of {clip(','.join(cells))}", f"needed are {', '.join(columns)}")
            places = [cells.index(name) for name in columns]
            continue
        if len(cells) <= max(places):
            place.fail(columns[-1], f"is missing: the line has {len(cells)} cells", "every line has all columns")
        moment, prompt, output = (cells[at].strip() for at in places)
        at_s = (_date if columns[0] == "TIMESTAMP" else _seconds)(place, columns[0], moment)
        origin = at_s if origin is None else origin
        yield (
            place,
            Arrival(
                at_s=_time(place, columns[0], at_s - origin),
                prompt_tokens=_length(place, columns[1], prompt),
                output_tokens=_length(place, columns[2], output),
            ),
        )


def _cells(path: Path, text: bytes) -> Iterator[tuple[Place, list[str]]]:
    """Yield the rows of a CSV that are not empty."""
    rows = csv.reader(io.TextIOWrapper(io.BytesIO(text), "utf-8", newline=""), strict=True)
    try:
        for cells in rows:
            if cells:
                yield Place(path, rows.line_num), cells
    except (UnicodeDecodeError, csv.Error) as error:
        Place(path, rows.line_num).fail("the line", f"is not CSV: {error}", "write it as UTF-8 with commas")


def _date(place: Place, field: str, cell: str) -> float:
    """Return a date (UTC, with up to nine digits of a second) as seconds."""
    found = _DATE.fullmatch(cell)
    try:
        whole = datetime.fromisoformat(cell[:19] if found else "").replace(tzinfo=UTC).timestamp()
    except ValueError:
        place.fail(field, f"is not a date: {clip(cell)}", "write it as 2023-11-16 18:17:03.97996")
    return whole + float(f"0{(found and found[1]) or '.0'}")


def _seconds(place: Place, field: str, cell: str) -> float:
    try:
        return float(cell)
    except ValueError:
        place.fail(field, f"is not a number of seconds: {clip(cell)}", "write seconds since the first request")


def _length(place: Place, field: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 10 or not 1 <= int(text) <= MAX_LENGTH:
        place.fail(field, f"is {clip(text)}", "lengths are whole numbers from 1 to 2^31")
    return int(text)


def _sharegpt(
    place: Place, text: bytes, count_tokens: Callable[[str], int] | None
) -> tuple[list[Arrival], tuple[str, ...]]:
    """Read the first question and answer of each conversation. There are no times: all arrive at 0."""
    try:
        talks = msgspec.json.decode(unambiguous(text), type=list[_Conversation])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError) as error:
        place.fail("conversations", f"is wrong: {str(error)[:200]}", "ShareGPT is a list of {id, conversations: [...]}")

    def size(text: str) -> int:
        count = -(-len(text) // CHARACTERS_PER_TOKEN) if count_tokens is None else count_tokens(text)
        check_int("what count_tokens returns", count, 0)
        return max(1, count)

    pairs = [talk.conversations[:2] for talk in talks]
    whole = [pair for pair in pairs if len(pair) == 2 and all(turn.value for turn in pair)]
    arrivals = [
        Arrival(at_s=0.0, prompt_tokens=size(asked.value), output_tokens=size(answered.value))
        for asked, answered in whole
    ]
    notes = ["the trace has no times: use its lengths in a burst, a closed or an open loop"]
    if count_tokens is None:
        notes.append(f"tokens were counted as {CHARACTERS_PER_TOKEN} characters each")
    if len(whole) < len(pairs):
        notes.append(f"{len(pairs) - len(whole)} conversations without question and answer were left out")
    return arrivals, tuple(notes)
