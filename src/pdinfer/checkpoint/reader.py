"""The tensors of a model folder by name, read from safetensors files without trusting them and without knowing models.

Every read leaves digests of the blocks that it has read something of. So ranks that read different rows of a tensor
have those of the whole together, and where two have read one block, they notice that their files differ. A block is
digested while it is in the core's cache, by xxh3_128, which is faster than memory.

Everything a header says is checked against the size of the file before anything is allocated. Reading copies with
`preadv` instead of mapping, so that a file which is cut short later is an error and not a SIGBUS. Other formats are
refused by name and never opened. Format: https://huggingface.co/docs/safetensors, "Format"."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NoReturn

import attrs
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pdinfer.checkpoint.header import MAX_TENSORS, HeaderSource, TensorInfo, header_bytes, parse_header
from pdinfer.checks import clip
from pdinfer.errors import CheckpointError
from pdinfer.files import AnyPath, check_file_name, check_folder, open_regular, read_json

__all__ = ["Checkpoint", "Prefixes", "TensorInfo", "names_in_files", "renamed"]

MAX_INDEX_BYTES = 64 << 20
MAX_FILES = 4096
SAMPLE_BYTES = 1024
BLOCK_BYTES = 1 << 20
ABSENT = -1
"""Stands for the digest of a block that was not read."""
_BITS_63 = (1 << 63) - 1
SHOWN_NAMES = 10

INDEX_SUFFIX = ".safetensors.index.json"
SUFFIX = ".safetensors"
ADAPTER_CONFIG = "adapter_config.json"
REFUSED_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".npz")

Prefixes = tuple[tuple[str, str], ...]
Words = npt.NDArray[np.int64]
"""The digests of a tensor's blocks, [blocks, 2]: 126 bits each, as two numbers that are not negative."""


def renamed(name: str, prefixes: Prefixes) -> str:
    """Return `name` with the first prefix that it starts with replaced. Prefixes are pairs (in the file, here)."""
    for stored, here in prefixes:
        if name.startswith(stored):
            return here + name.removeprefix(stored)
    return name


def names_in_files(name: str, prefixes: Prefixes) -> list[str]:
    """Return the names that `renamed` makes to `name`, which is one of them."""
    return [name, *(stored + name.removeprefix(here) for stored, here in prefixes if name.startswith(here))]


class Checkpoint:
    """An open model folder. `tensors` are those that the index names, or all tensors of a single file. Reading needs no
    lock.

    A context manager: `close` closes the files. `unlisted` are the names of tensors that the index does not name; they
    are checked like the others and never read. `prefixes` are pairs of what names begin with in the files and here.
    `trusted_roots` are folders besides this one in which links may end. `blocks` holds, by name, the digests of what
    `read` has read so far."""

    def __init__(
        self,
        folder: Path,
        descriptors: dict[str, int],
        tensors: Mapping[str, TensorInfo],
        unlisted: Iterable[str] = (),
        prefixes: Prefixes = (),
        trusted_roots: Iterable[AnyPath] = (),
    ) -> None:
        self.folder = folder
        self.files = tuple(descriptors)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))
        self.total_bytes = sum(info.num_bytes for info in tensors.values())
        self.unlisted = tuple(unlisted)
        self.prefixes = prefixes
        self.trusted_roots = tuple(trusted_roots)
        self.blocks: dict[str, Words] = {}
        self._descriptors = descriptors

    @classmethod
    def open(cls, folder: AnyPath, *, prefixes: Prefixes = (), trusted_roots: Iterable[AnyPath] = ()) -> Checkpoint:
        """Open and check every file of a model folder; no tensor is read. Names are changed by `renamed`.

        Raises CheckpointError: no folder, no or several candidates, an adapter next to them, other formats, links that
        lead out of the folder, its hub cache's blobs and `trusted_roots`, malformed headers, and an index that
        disagrees with its files."""
        folder, roots = check_folder(folder), tuple(trusted_roots)
        files, weight_map = _find_weights(folder, roots)
        descriptors: dict[str, int] = {}
        found: dict[str, TensorInfo] = {}
        twice: list[str] = []
        try:
            for file in files:
                descriptors[file] = open_regular(folder, file, CheckpointError, roots)
                infos = _read_header(descriptors[file], file, folder / file)
                twice += infos.keys() & found.keys()
                found |= infos
            if not found:
                raise CheckpointError(f"{folder} holds no tensors")
            if twice:
                raise CheckpointError(f"{folder} holds more than one of {_listed(sorted(twice))}")
            tensors = found if weight_map is None else _match_index(folder, weight_map, found)
            unlisted = [renamed(name, prefixes) for name in found if name not in tensors]
            tensors = _all_renamed(folder, tensors, prefixes)
        # an interrupt must leave no file open either
        except BaseException:
            _close_all(descriptors)
            raise
        return cls(folder, descriptors, tensors, unlisted, prefixes, roots)

    @classmethod
    def open_file(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open and check one file, whatever else is in its folder; no tensor is read. Raises CheckpointError."""
        path = Path(path)
        descriptors = {path.name: open_regular(path.parent, path.name, CheckpointError)}
        try:
            tensors = _read_header(descriptors[path.name], path.name, path)
        except BaseException:
            _close_all(descriptors)
            raise
        return cls(path.parent, descriptors, tensors)

    def read(self, info: TensorInfo, rows: range | None = None) -> torch.Tensor:
        """Return a fresh CPU tensor with the bytes of `info`, or of these rows of its first axis. Of others no more is
        read than what is in a block with these. Raises CheckpointError where the file has become shorter."""
        path = self.folder / info.file
        descriptor = self._descriptor(info)
        # the header was checked when the file was opened; a download may have cut it since
        if os.fstat(descriptor).st_size < info.offset + info.num_bytes:
            _cut_short(path, info)
        shape, first = info.shape, 0
        if rows is not None:
            shape, first = (len(rows), *info.shape[1:]), rows.start * (info.num_bytes // info.shape[0])
        buffer = torch.empty(math.prod(shape) * info.dtype.itemsize, dtype=torch.uint8, device="cpu")
        self._read_blocks(info, buffer.numpy().data, first)
        return buffer.view(info.dtype).view(shape)

    def _read_blocks(self, info: TensorInfo, buffer: memoryview, first: int) -> None:
        """Fill `buffer` with the bytes of a tensor from its byte `first`, and digest the blocks that these are in."""
        blocks = self.blocks.setdefault(info.name, np.full((num_blocks(info), 2), ABSENT, np.int64))
        path, descriptor = self.folder / info.file, self._descriptor(info)
        indexes = range(first // BLOCK_BYTES, -(-(first + len(buffer)) // BLOCK_BYTES))
        digests = []
        for index in indexes:
            start, stop = index * BLOCK_BYTES, min((index + 1) * BLOCK_BYTES, info.num_bytes)
            part = buffer[max(0, start - first) : stop - first]
            # the rest of a block at an edge is read, too: whoever reads the other rows must get the same digest
            block = part if len(part) == stop - start else memoryview(bytearray(stop - start))
            _read_into(descriptor, block, info, path, start)
            digests.append(xxhash.xxh3_128_digest(block))
            if block is not part:
                part[:] = block[max(0, first - start) :][: len(part)]
        # without signs: ranks take the larger digest of two, and ABSENT has to be the least
        words = np.frombuffer(b"".join(digests), "<i8").reshape(-1, 2)
        blocks[indexes.start : indexes.stop] = words & _BITS_63

    def in_file_order(self, names: Iterable[str]) -> Iterator[TensorInfo]:
        """Return those tensors in their order on disk. Raises CheckpointError with the names that are not
        there."""
        wanted = list(names)
        missing = [name for name in wanted if name not in self.tensors]
        if missing:
            raise CheckpointError(f"{self.folder} lacks tensors, {_listed(missing)}")
        return iter(sorted((self.tensors[name] for name in wanted), key=lambda info: (info.file, info.offset)))

    def sample_digest(self) -> bytes:
        """Return 32 bytes that distinguish one set of weights from another without reading it: SHA-256 of names,
        dtypes, shapes and first kilobytes. Weights that differ only later in their tensors have the same digest."""
        digest = hashlib.sha256(b"pdinfer weights 1\n")
        for name, info in sorted(self.tensors.items()):
            sample = bytearray(min(info.num_bytes, SAMPLE_BYTES))
            _read_into(self._descriptor(info), memoryview(sample), info, self.folder / info.file)
            digest.update(f"{name}\n{info.dtype}\n{info.shape}\n".encode())
            digest.update(sample)
        return digest.digest()

    def close(self) -> None:
        """Close the files. `tensors` stays, and reading then raises CheckpointError. May be called again."""
        _close_all(self._descriptors)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _descriptor(self, info: TensorInfo) -> int:
        if info.file not in self._descriptors:
            raise CheckpointError(
                f"cannot read {clip(info.name)}: {self.folder / info.file} is closed or not part of it"
            )
        return self._descriptors[info.file]


def num_blocks(info: TensorInfo) -> int:
    """Return the number of blocks of a tensor. The last one may be shorter than BLOCK_BYTES."""
    return -(-info.num_bytes // BLOCK_BYTES)


def _close_all(descriptors: dict[str, int]) -> None:
    while descriptors:
        # popped first, so that none is closed twice where close raises
        os.close(descriptors.popitem()[1])


def _listed(names: list[str]) -> str:
    """Return "3: 'a', 'b', 'c'", with at most 10 of them by name."""
    rest = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{len(names)}: {', '.join(clip(name) for name in names[:SHOWN_NAMES])}{rest}"


def _find_weights(folder: Path, roots: tuple[AnyPath, ...]) -> tuple[list[str], dict[str, str] | None]:
    """Return the names of the files to open and, where there is an index, the file of each tensor."""
    try:
        names = sorted(os.listdir(folder))
    except OSError as failure:
        raise CheckpointError(f"cannot open model folder {folder}: {failure.strerror}") from None
    of_weights = (SUFFIX, INDEX_SUFFIX, *REFUSED_SUFFIXES)
    adapters = [n for n in names if n == ADAPTER_CONFIG or (n.startswith("adapter") and n.endswith(of_weights))]
    if adapters:
        raise CheckpointError(
            f"{folder} holds an adapter (LoRA), {_listed(adapters)}, which would not be applied; merge it into the "
            "weights (merge_and_unload of peft), or move it out of the folder to load the model without it"
        )
    indexes = [name for name in names if name.endswith(INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(SUFFIX)]
    if len(indexes) > 1:
        raise CheckpointError(f"{folder} holds more than one *{INDEX_SUFFIX}, {_listed(indexes)}; keep one")
    if indexes:
        weight_map = _read_index(folder / indexes[0], roots)
        wanted = sorted(set(weight_map.values()))
        if len(wanted) > MAX_FILES:
            raise CheckpointError(f"{folder / indexes[0]} names {len(wanted)} files; at most {MAX_FILES} are opened")
        missing = sorted(set(wanted) - set(names))
        if missing:
            raise CheckpointError(f"{folder} lacks files that {indexes[0]} names, {_listed(missing)}; download them")
        return wanted, weight_map
    if len(files) == 1:
        return files, None
    if files:
        raise CheckpointError(f"{folder} holds several *{SUFFIX}, {_listed(files)}, but no *{INDEX_SUFFIX}; add it")
    refused = [name for name in names if name.lower().endswith(REFUSED_SUFFIXES)]
    if refused:
        raise CheckpointError(
            f"{folder} holds no *{SUFFIX}; {_listed(refused)}: such formats are not accepted and were not opened; "
            f"convert them to safetensors"
        )
    raise CheckpointError(f"{folder} holds no *{SUFFIX}")


def _read_index(path: Path, roots: tuple[AnyPath, ...]) -> dict[str, str]:
    """Return the `weight_map` of an index: file by tensor name. `metadata` is advisory and ignored."""
    index = read_json(path, max_bytes=MAX_INDEX_BYTES, error=CheckpointError, trusted_roots=roots)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not 0 < len(weight_map) <= MAX_TENSORS:
        raise CheckpointError(
            f"{path}: weight_map must be an object of 1 to {MAX_TENSORS} names, got {clip(weight_map)}"
        )
    for name, file in weight_map.items():
        check_file_name(file, f"{path}: weight_map of {clip(name)}", CheckpointError)
        if not file.endswith(SUFFIX):
            raise CheckpointError(f"{path}: weight_map of {clip(name)} must be a *{SUFFIX}, got {clip(file)}")
    return weight_map


def _match_index(folder: Path, weight_map: Mapping[str, str], found: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors that the index names, each checked to be in the file that the index says."""
    lost = [name for name, file in weight_map.items() if name not in found or found[name].file != file]
    if lost:
        raise CheckpointError(f"{folder} lacks tensors in the files where its index puts them, {_listed(sorted(lost))}")
    return {name: found[name] for name in weight_map}


def _all_renamed(folder: Path, tensors: Mapping[str, TensorInfo], prefixes: Prefixes) -> dict[str, TensorInfo]:
    infos = [attrs.evolve(info, name=renamed(name, prefixes)) for name, info in tensors.items()]
    short = {info.name: info for info in infos}
    if len(short) < len(infos):
        twice = sorted(info.name for info in infos if short[info.name] is not info)
        raise CheckpointError(f"{folder} holds under several prefixes {_listed(twice)}")
    return short


def _read_header(descriptor: int, file: str, path: Path) -> dict[str, TensorInfo]:
    file_bytes = os.fstat(descriptor).st_size
    try:
        length = header_bytes(os.pread(descriptor, 8, 0), file_bytes, str(path))
        header = os.pread(descriptor, length, 8)
    except OSError as failure:
        raise CheckpointError(f"cannot read the header of {path}: {failure.strerror}") from None
    if len(header) < length:
        raise CheckpointError(f"{path} ends within its header: {len(header)} of {length} bytes")
    start = 8 + length
    return parse_header(
        header, HeaderSource(file=file, path=str(path), data_start=start, data_bytes=file_bytes - start)
    )


def _read_into(descriptor: int, buffer: memoryview, info: TensorInfo, path: Path, first: int = 0) -> None:
    """Fill `buffer` with the bytes of a tensor from its byte `first`."""
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(descriptor, [buffer[done:]], info.offset + first + done)
        except OSError as failure:
            raise CheckpointError(f"cannot read tensor {clip(info.name)} of {path}: {failure.strerror}") from None
        if count == 0:
            _cut_short(path, info)
        done += count


def _cut_short(path: Path, info: TensorInfo) -> NoReturn:
    raise CheckpointError(
        f"{path} was cut short after it was opened: tensor {clip(info.name)} needs bytes {info.offset} to "
        f"{info.offset + info.num_bytes}; restore the file and open the folder again"
    )
