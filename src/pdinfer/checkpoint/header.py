"""The header of a safetensors file, parsed strictly: which tensors the file holds, and which bytes belong to each.

A file is 8 bytes of header length (little-endian), the header (a JSON object, padded with spaces), and the data. Each
entry is `"name": {"dtype": ..., "shape": [...], "data_offsets": [begin, end]}`; `__metadata__` is the one exception.
Source: https://huggingface.co/docs/safetensors, "Format". Stricter here: tensors are not empty, have at most 8
dimensions, and cover the data exactly."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import MappingProxyType

import attrs
import torch

from pdinfer.checks import clip, is_int
from pdinfer.errors import CheckpointError
from pdinfer.files import after_space, parse_json, string_end

MAX_HEADER_BYTES = 16 << 20
MAX_METADATA_CHARACTERS = 1 << 20
MAX_ENTRY_CHARACTERS = 1024
MAX_TENSORS = 10**6
MAX_NAME_CHARACTERS = 512
MAX_RANK = 8

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I8": torch.int8,
        "I32": torch.int32,
        "I64": torch.int64,
        "U8": torch.uint8,
    }
)

# Pairs instead of a dict, because a dict would hide duplicate keys.
_ENTRY = json.JSONDecoder(object_pairs_hook=list)


@attrs.frozen(kw_only=True)
class TensorInfo:
    """The place of one tensor: `num_bytes` bytes from byte `offset` of `file`, row-major and little-endian."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    offset: int
    num_bytes: int


@attrs.frozen(kw_only=True)
class HeaderSource:
    """The file a header came from: its name in the folder, its path for messages, and where its data starts and how
    long it is.

    `data_start` and `data_bytes` are in bytes."""

    file: str
    path: str
    data_start: int
    data_bytes: int


def header_bytes(prefix: bytes, file_bytes: int, source: str) -> int:
    """Return the length of the header that the first 8 bytes of a file of `file_bytes` announce. Raises
    CheckpointError."""
    if file_bytes < 8 or len(prefix) < 8:
        raise CheckpointError(f"{source} is {file_bytes} bytes long: too short for a safetensors file (at least 8)")
    length = int.from_bytes(prefix[:8], "little")
    if not 2 <= length <= MAX_HEADER_BYTES or length > file_bytes - 8:
        raise CheckpointError(
            f"{source} announces a header of {length} bytes; it must be 2 to {MAX_HEADER_BYTES} and fit the file of "
            f"{file_bytes} bytes"
        )
    return length


def parse_header(header: bytes, source: HeaderSource) -> dict[str, TensorInfo]:
    """Return the tensors of one file by name, in the order of their data.

    Raises CheckpointError with the position or the tensor at fault."""
    try:
        text = header.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise CheckpointError(
            f"header of {source.path} is not UTF-8: {failure.reason} at position {failure.start}"
        ) from None
    tensors = _parse_entries(text, source)
    end = source.data_start
    ordered = sorted(tensors.values(), key=lambda info: info.offset)
    for info in ordered:
        # holes are refused as well: what nothing names could be anything, and the digests would miss it
        if info.offset != end:
            problem = "overlaps the tensor before it" if info.offset < end else "leaves a hole before it"
            raise CheckpointError(
                f"{source.path}: tensor {clip(info.name)} {problem}: data_offsets start at "
                f"{info.offset - source.data_start}, expected {end - source.data_start}"
            )
        end += info.num_bytes
    if end != source.data_start + source.data_bytes:
        raise CheckpointError(
            f"{source.path} holds {source.data_bytes} bytes of data, but its tensors cover {end - source.data_start}"
        )
    return {info.name: info for info in ordered}


def _parse_entries(text: str, source: HeaderSource) -> dict[str, TensorInfo]:
    """Parse entry by entry, so that a hostile header costs no more memory than the entries before its fault."""
    if not text.startswith("{"):
        raise CheckpointError(f"header of {source.path} must start with {{ at position 0, got {clip(text[:1])}")
    tensors: dict[str, TensorInfo] = {}
    position = after_space(text, 1)
    metadata = False
    more = not text.startswith("}", position)
    while more:
        start = position
        name, position = _name(text, position, source)
        if name in tensors or (metadata and name == "__metadata__"):
            raise CheckpointError(f"header of {source.path}: {clip(name)} appears twice, again at position {start}")
        if name == "__metadata__":
            metadata = True
            position = _skip_metadata(text, position, source)
        else:
            # an entry has no nested object, so its first brace ends it
            end = text.find("}", position, position + MAX_ENTRY_CHARACTERS) + 1
            if not end:
                raise CheckpointError(
                    f"header of {source.path}: tensor {clip(name)} at position {start} has no entry that ends within "
                    f"{MAX_ENTRY_CHARACTERS} characters"
                )
            tensors[name] = _tensor(text[position:end], position, name, source)
            position = end
        if len(tensors) > MAX_TENSORS:
            raise CheckpointError(f"header of {source.path} has more than {MAX_TENSORS} tensors at position {start}")
        position = after_space(text, position)
        more = text.startswith(",", position)
        position = after_space(text, position + 1) if more else position
    if not text.startswith("}", position):
        raise CheckpointError(f"header of {source.path} is not strict JSON: expected , or }} at position {position}")
    if after_space(text, position + 1) != len(text):
        raise CheckpointError(f"header of {source.path} is not strict JSON: extra data at position {position + 1}")
    return tensors


def _name(text: str, position: int, source: HeaderSource) -> tuple[str, int]:
    """Return the key at `position` and the position of its value."""
    end = string_end(text, position + 1)
    try:
        name = json.loads(text[position:end]) if end - position <= MAX_ENTRY_CHARACTERS else None
    except (json.JSONDecodeError, RecursionError):
        name = None
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise CheckpointError(
            f"header of {source.path}: expected a tensor name at position {position} (a string of 1 to "
            f"{MAX_NAME_CHARACTERS} printable characters), got {clip(text[position : min(end, position + 60)])}"
        )
    colon = after_space(text, end)
    if not text.startswith(":", colon):
        raise CheckpointError(f"header of {source.path} is not strict JSON: expected : at position {colon}")
    return name, after_space(text, colon + 1)


def _skip_metadata(text: str, position: int, source: HeaderSource) -> int:
    """Return the position after `__metadata__`, an object of strings that nothing here uses."""
    end = position
    while not text.startswith("}", end):
        end = string_end(text, end + 1) if text.startswith('"', end) else end + 1
        if end - position > MAX_METADATA_CHARACTERS or end >= len(text):
            raise CheckpointError(
                f"header of {source.path}: __metadata__ at position {position} has no end within "
                f"{MAX_METADATA_CHARACTERS} characters"
            )
    metadata = parse_json(text[position : end + 1].encode(), f"__metadata__ of {source.path}", CheckpointError)
    if not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"header of {source.path}: __metadata__ at position {position} must hold strings only")
    return end + 1


def _tensor(entry: str, position: int, name: str, source: HeaderSource) -> TensorInfo:
    """Return the TensorInfo of one entry, checked to be within the data. Overlaps show when all entries are put in
    order."""
    what = f"{source.path}: tensor {clip(name)}"
    try:
        pairs = _ENTRY.decode(entry)
    except (json.JSONDecodeError, RecursionError) as failure:
        raise CheckpointError(f"{what} at position {position} is not strict JSON: {failure}") from None
    # pairs and not a dict, in which a key that comes twice would win in silence
    fields = dict(pairs) if isinstance(pairs, list) and len(pairs) == 3 else {}
    if fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{what} at position {position} must have dtype, shape and data_offsets, once each, got {clip(pairs)}"
        )
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{what} has dtype {clip(dtype)}; allowed: {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or not all(is_int(size) and size > 0 for size in shape):
        raise CheckpointError(
            f"{what} has shape {clip(shape)}; it must have at most {MAX_RANK} dimensions, each an int of at least 1"
        )
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(is_int(offset) for offset in offsets):
        raise CheckpointError(f"{what} has data_offsets {clip(offsets)}; they must be two ints, begin and end")
    begin, end = offsets
    if not 0 <= begin <= end <= source.data_bytes:
        raise CheckpointError(
            f"{what} has data_offsets {clip(offsets)}; they must be in order, not negative and within the "
            f"{source.data_bytes} bytes of data"
        )
    num_bytes = math.prod(shape) * DTYPES[dtype].itemsize
    if end - begin != num_bytes:
        raise CheckpointError(
            f"{what}: data_offsets {clip(offsets)} span {end - begin} bytes, but {dtype} of shape {clip(shape)} takes "
            f"{clip(num_bytes)}"
        )
    return TensorInfo(
        name=name,
        dtype=DTYPES[dtype],
        shape=tuple(shape),
        file=source.file,
        offset=source.data_start + begin,
        num_bytes=num_bytes,
    )
