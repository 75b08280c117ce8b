"""Traces of real traffic, read as untrusted input: Mooncake, Azure, Splitwise, ShareGPT, a plain CSV.

A trace has lengths, arrivals and, from Mooncake, hashes of prefixes. Files may be compressed by gzip. What is wrong in
one raises ConfigError with file, line and field before any request is sent.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated, NoReturn, cast

import attrs
import msgspec
import numpy as np
from msgspec import Meta

from pdinfer.checks import clip, typed
from pdinfer.errors import ConfigError
from pdinfer.files import AnyPath
from pdinfer.values import Value

MAX_LINE_BYTES = 16 << 20
MAX_TRACE_BYTES = 1 << 30
"""Of the text, whatever its compressed size."""
MAX_LENGTH = 2**31
MAX_AT_S = 1e9
MAX_SEED = 2**63 - 1
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


@attrs.frozen(kw_only=True)
class Arrival(Value):
    """One request: when it is due in seconds, its tokens, the hashes of its blocks, equal for equal prefixes, and its
    priority and deadline as in `Request`."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    priority: int = 0
    deadline_s: float | None = None


@attrs.frozen(kw_only=True)
class Trace(Value):
    """Requests in order of arrival, and where they come from. `sha256` is that of the file."""

    name: str
    format: str
    sha256: str
    arrivals: tuple[Arrival, ...]
    block_tokens: int = BLOCK_TOKENS
    notes: tuple[str, ...] = ()


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
    output_length: Annotated[int, Meta(ge=1, le=MAX_LENGTH)]
    hash_ids: tuple[Annotated[int, Meta(ge=0, le=2**63 - 1)], ...]


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
    The notes of the trace say what was done. Raises ConfigError with file, line and field.
    """
    path = Path(path)
    if bins not in ("spread", "keep"):
        raise ConfigError(f"bins must be 'spread' or 'keep', got {clip(bins)}")
    lines = _Lines(path)
    try:
        if format is None:
            format = _recognized(lines)  # noqa: A001
        if format not in FORMATS:
            raise ConfigError(f"format must be one of {', '.join(FORMATS)}, got {clip(format)}")
        notes: tuple[str, ...] = ()
        if format == "mooncake":
            arrivals = [_mooncake(lines, line) for line in lines if line.strip()]
            _check_order(lines, arrivals)
            arrivals, notes = _unbinned(arrivals, bins, seed)
        elif format == "sharegpt":
            arrivals, notes = _sharegpt(lines, count_tokens)
        else:
            arrivals = _table(lines, COLUMNS[format])
            _check_order(lines, arrivals)
        if not arrivals:
            raise ConfigError(f"{path} has no request; a trace has at least one")
    finally:
        lines.close()
    digest = lines.sha256()
    return Trace(name=path.name, format=format, sha256=digest, arrivals=tuple(arrivals), notes=notes)


class _Lines:
    """The lines of a file, bounded in length and in sum. `number` is that of the last one, from 1; `numbers` those of
    the lines that became a request."""

    def __init__(self, path: Path) -> None:
        self.path, self.number, self.numbers = path, 0, list[int]()
        self._left, self._first = MAX_TRACE_BYTES, list[bytes]()
        try:
            if not path.is_file():
                raise ConfigError(f"{path}: is not a file; give the path of a trace")
            with path.open("rb") as file:
                packed = file.read(2) == b"\x1f\x8b"
            self._file = cast("IO[bytes]", gzip.open(path) if packed else path.open("rb"))  # noqa: SIM115
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from error

    def close(self) -> None:
        self._file.close()

    def sha256(self) -> str:
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def peek(self) -> bytes:
        """Return the first line, which stays to be read."""
        if not self._first:
            self._first.append(self._read())
        return self._first[0]

    def __iter__(self) -> Iterator[bytes]:
        while line := self._first.pop() if self._first else self._read():
            self.number += 1
            yield line

    def rest(self) -> bytes:
        """Return everything from here on, for formats that are one JSON value."""
        text = bytearray(self._first.pop() if self._first else b"")
        while piece := self._take(1 << 20):
            text += piece
        self.number = 1
        return bytes(text)

    def _read(self) -> bytes:
        line = self._take(MAX_LINE_BYTES + 1, lines=True)
        if len(line) > MAX_LINE_BYTES:
            self.number += 1
            self.fail("the line", f"is longer than {MAX_LINE_BYTES >> 20} MiB", "is this a trace?")
        return line

    def _take(self, most: int, *, lines: bool = False) -> bytes:
        try:
            data = self._file.readline(most) if lines else self._file.read(most)
        except (OSError, EOFError, zlib.error) as error:
            self.number += 1
            self.fail("the file", f"cannot be read on: {error}", "is it damaged?")
        self._left -= len(data)
        if self._left < 0:
            self.fail("the file", f"has more than {MAX_TRACE_BYTES >> 30} GiB of text", "split it")
        return data

    def fail(self, field: str, wrong: str, advice: str, *, number: int | None = None) -> NoReturn:
        """Raise ConfigError with file, line and field."""
        raise ConfigError(f"{self.path}, line {number or self.number}: {field} {wrong}; {advice}")


def _recognized(lines: _Lines) -> str:
    """Return the format that the first line speaks for."""
    first = lines.peek().lstrip(b"\xef\xbb\xbf").strip()
    if first.startswith(b"{"):
        return "mooncake"
    if first.startswith(b"["):
        return "sharegpt"
    names = first.decode("utf-8", "replace").replace('"', "").split(",")
    for name, columns in COLUMNS.items():
        if set(columns) <= {column.strip() for column in names}:
            return name
    shown = clip(first.decode("utf-8", "replace"))
    raise ConfigError(f"{lines.path}, line 1: is of no known format: {shown}; give `format`")


_MOONCAKE = msgspec.json.Decoder(_MooncakeLine)


def _mooncake(lines: _Lines, line: bytes) -> Arrival:
    try:
        row = _MOONCAKE.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)
        lines.fail(_field_of(reason), f"is wrong: {reason[:200]}", "every line is a JSON object as Mooncake writes it")
    needed = -(-row.input_length // BLOCK_TOKENS)
    if len(row.hash_ids) != needed:
        wrong = f"has {len(row.hash_ids)} hashes, and {row.input_length} tokens have {needed} blocks of {BLOCK_TOKENS}"
        lines.fail("hash_ids", wrong, "give one hash for each block")
    at_s = _time(lines, "timestamp", row.timestamp / 1e3)
    lines.numbers.append(lines.number)
    return Arrival(at_s=at_s, prompt_tokens=row.input_length, output_tokens=row.output_length, hash_ids=row.hash_ids)


def _field_of(reason: str) -> str:
    """Return the field that msgspec names in an error."""
    found = re.search(r"`\$\.([a-z_]+)|required field `([a-z_]+)`", reason)
    return (found[1] or found[2]) if found else "the line"


def _time(lines: _Lines, field: str, at_s: float) -> float:
    if not math.isfinite(at_s) or not 0 <= at_s <= MAX_AT_S:
        lines.fail(field, f"is {at_s:g} s", f"times are finite, from 0 to {MAX_AT_S:g} s")
    return at_s


def _check_order(lines: _Lines, arrivals: Sequence[Arrival]) -> None:
    for at in range(1, len(arrivals)):
        if arrivals[at].at_s < arrivals[at - 1].at_s:
            wrong = f"goes back from {arrivals[at - 1].at_s:g} s to {arrivals[at].at_s:g} s"
            lines.fail("the time", wrong, "sort the trace by arrival", number=lines.numbers[at])


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


def _table(lines: _Lines, columns: tuple[str, str, str]) -> list[Arrival]:
    """Read a CSV with these columns: the time, prompt tokens, output tokens. Dates count from the first one."""
    places: list[int] = []
    arrivals: list[Arrival] = []
    origin = 0.0
    for line in lines:
        if not line.strip():
            continue
        try:
            cells = next(csv.reader([line.decode("utf-8-sig").strip("\r\n")], strict=True), [])
        except (UnicodeDecodeError, csv.Error, StopIteration) as error:
            lines.fail("the line", f"is not CSV: {error}", "write it as UTF-8 with commas")
        if not places:
            missing = [name for name in columns if name not in cells]
            if missing:
                lines.fail(missing[0], f"is no column of {clip(','.join(cells))}", f"needed are {', '.join(columns)}")
            places = [cells.index(name) for name in columns]
            continue
        if len(cells) <= max(places):
            lines.fail(columns[-1], f"is missing: the line has {len(cells)} cells", "every line has all columns")
        at_s = _moment(lines, columns[0], cells[places[0]])
        origin = origin if arrivals or columns[0] != "TIMESTAMP" else at_s
        prompt, output = (_length(lines, columns[at], cells[places[at]]) for at in (1, 2))
        if at_s < origin:
            lines.fail(columns[0], "goes back before the first line", "sort the trace by arrival")
        lines.numbers.append(lines.number)
        moment = _time(lines, columns[0], at_s - origin)
        arrivals.append(Arrival(at_s=moment, prompt_tokens=prompt, output_tokens=output))
    return arrivals


def _moment(lines: _Lines, field: str, cell: str) -> float:
    """Return a cell with a date (UTC, any number of digits) or a number as seconds."""
    cell = cell.strip()
    if found := _DATE.fullmatch(cell):
        try:
            whole = datetime.fromisoformat(cell[:19]).replace(tzinfo=UTC).timestamp()
        except ValueError as error:
            lines.fail(field, f"is not a date: {error}", "write it as 2023-11-16 18:17:03.97996")
        return whole + float(f"0{found[1] or '.0'}")
    if field == "TIMESTAMP":
        lines.fail(field, f"is not a date: {clip(cell)}", "write it as 2023-11-16 18:17:03.97996")
    try:
        return float(cell)
    except ValueError:
        lines.fail(field, f"is not a number of seconds: {clip(cell)}", "write seconds since the first request")


def _length(lines: _Lines, field: str, cell: str) -> int:
    text = cell.strip()
    if not text.isascii() or not text.isdigit() or len(text) > 10 or not 1 <= int(text) <= MAX_LENGTH:
        lines.fail(field, f"is {clip(text)}", "lengths are whole numbers from 1 to 2^31")
    return int(text)


def _sharegpt(lines: _Lines, count_tokens: Callable[[str], int] | None) -> tuple[list[Arrival], tuple[str, ...]]:
    """Read the first question and answer of each conversation. There are no times: all arrive at 0."""
    try:
        talks = msgspec.json.decode(lines.rest().removeprefix(b"\xef\xbb\xbf"), type=list[_Conversation])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)
        lines.fail("conversations", f"is wrong: {reason[:200]}", "ShareGPT is a list of {id, conversations: [...]}")
    count = count_tokens or (lambda text: -(-len(text) // CHARACTERS_PER_TOKEN))
    pairs = [talk.conversations[:2] for talk in talks]
    whole = [pair for pair in pairs if len(pair) == 2 and all(turn.value for turn in pair)]
    arrivals = [
        Arrival(at_s=0.0, prompt_tokens=max(1, count(asked.value)), output_tokens=max(1, count(answered.value)))
        for asked, answered in whole
    ]
    notes = ["the trace has no times: use its lengths in a burst, a closed or an open loop"]
    if count_tokens is None:
        notes.append(f"tokens were counted as {CHARACTERS_PER_TOKEN} characters each")
    if len(whole) < len(pairs):
        notes.append(f"{len(pairs) - len(whole)} conversations without question and answer were left out")
    return arrivals, tuple(notes)
