"""Files that say where experts lie or how much each was used, as SGLang's `--init-expert-location` takes them.

JSON, one object: `physical_to_logical_map` [layers][slots], or `logical_count` [layers][experts] or
[steps][layers][experts], which are summed. Safetensors: the same names, int64 or int32, and `slot_shares` (float32),
which SGLang does not know. Its layers are all of the model's; ours are those with experts, so both directions take
`num_dense_layers`, the layers before the first of them. Fields as in SGLang's `srt/eplb/expert_location.py`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np

from pdinfer.checkpoint.reader import Checkpoint
from pdinfer.checks import check_int, clip, typed
from pdinfer.errors import CheckpointError, ConfigError
from pdinfer.files import read_json, writing
from pdinfer.moe.placement.placement import ExpertPlacement, Ints, Shares
from pdinfer.values import Value

MAX_JSON_BYTES = 64 << 20
MAX_TENSOR_BYTES = 256 << 20
MAX_COUNT = 1 << 40

MAP, COUNT, SHARES = "physical_to_logical_map", "logical_count", "slot_shares"

_CONVERT = (
    "import json, sys, torch; d = torch.load(sys.argv[1], weights_only=True); "
    f"print(json.dumps({{k: d[k].tolist() for k in ('{MAP}', '{COUNT}') if k in d}}))"
)


@attrs.frozen(kw_only=True, eq=False)
class ExpertLocation(Value):
    """What a file holds: a map from slots to experts, with or without shares, or counts of experts, summed over steps.

    Tables are [layers with experts, ...], int64 but for the shares. One of `physical_to_logical_map` and
    `logical_count` is None."""

    physical_to_logical_map: Ints | None = None
    slot_shares: Shares | None = None
    logical_count: Ints | None = None


@typed
def read_expert_location(path: str | os.PathLike[str], *, num_dense_layers: int = 0) -> ExpertLocation:
    """Read a .json or .safetensors file. The file need not be trusted.

    Raises ConfigError for other formats (for .pt with the command that converts it), for neither or both of the two
    names, and for tables that are ragged, too large, of other types, with negative entries, or with no layer that has
    experts."""
    path = Path(path)
    check_int("num_dense_layers", num_dense_layers, 0)
    if path.suffix == ".json":
        fields = _from_json(path)
    elif path.suffix == ".safetensors":
        fields = _from_safetensors(path)
    elif path.suffix in (".pt", ".pth", ".bin", ".pkl"):
        raise ConfigError(
            f"{path} was not opened: reading it can run code. Where it is trusted, convert it: "
            f'python -c "{_CONVERT}" {path.name} > {path.stem}.json'
        )
    else:
        raise ConfigError(f"{path} must be a .json or a .safetensors file")
    rows = {name: table[num_dense_layers:] for name, table in fields.items()}
    for name, table in rows.items():
        if 0 in table.shape:
            raise ConfigError(
                f"{path}: {name} has shape {fields[name].shape}; nothing is left of it after {num_dense_layers} dense "
                "layers"
            )
    return ExpertLocation(
        physical_to_logical_map=rows.get(MAP), slot_shares=rows.get(SHARES), logical_count=rows.get(COUNT)
    )


@typed
def write_placement(path: str | os.PathLike[str], placement: ExpertPlacement, *, num_dense_layers: int = 0) -> None:
    """Write a map in the format that the suffix of `path` names. Dense layers get rows that are never read.

    SGLang's JSON has no shares. Raises ConfigError for another suffix, for a file that cannot be written, and for JSON
    where copies have unequal shares: `attrs.evolve(placement, slot_shares=None)` gives them up."""
    path = Path(path)
    check_int("num_dense_layers", num_dense_layers, 0)
    if path.suffix == ".json" and placement.slot_shares is not None:
        raise ConfigError(
            f"{path}: JSON has no place for slot_shares; write .safetensors, or a placement without shares"
        )
    trivial = np.arange(placement.num_slots) % placement.num_logical_experts
    fields: dict[str, Any] = {MAP: np.vstack([trivial] * num_dense_layers + [placement.physical_to_logical_map])}
    if placement.slot_shares is not None:
        copies = np.bincount(trivial)[trivial]
        even = (1 / copies).astype(np.float32)
        fields[SHARES] = np.vstack([even] * num_dense_layers + [placement.slot_shares])
    _write(path, fields)


@typed
def write_counts(path: str | os.PathLike[str], counts: Any, *, num_dense_layers: int = 0) -> None:
    """Write [layers, experts] counts in the format that the suffix of `path` names. Dense layers get zeros.

    Raises ConfigError for another suffix, a file that cannot be written, and a table that does not hold counts."""
    path = Path(path)
    check_int("num_dense_layers", num_dense_layers, 0)
    table = _checked(np.asarray(counts), COUNT, "counts")
    _write(path, {COUNT: np.vstack([np.zeros((num_dense_layers, table.shape[1]), np.int64), table])})


def _one_name(names: Any, path: Path) -> str:
    """Return the name of the table that is in the file."""
    found = [name for name in (MAP, COUNT) if name in names]
    if len(found) != 1:
        raise ConfigError(
            f"{path} must hold {MAP} or {COUNT}, and not both; it holds {clip(', '.join(sorted(names)) or 'nothing')}"
        )
    return found[0]


def _from_json(path: Path) -> dict[str, Any]:
    value = read_json(path, max_bytes=MAX_JSON_BYTES)
    name = _one_name(value, path)
    if name == MAP and len(value) > 1:
        others = clip(", ".join(sorted(value.keys() - {MAP})))
        raise ConfigError(f"{path} holds more than {MAP}: {others}; SGLang does not take that either")
    rows: Any = value[name]
    depth = 2
    if name == COUNT and isinstance(rows, list) and rows and isinstance(rows[0], list) and rows[0]:
        depth += isinstance(rows[0][0], list)
    kind: Any = int
    for _ in range(depth):
        kind = list[kind]
    try:
        table = np.asarray(msgspec.convert(rows, kind))
    except (msgspec.ValidationError, ValueError) as failure:
        raise ConfigError(f"{path}: {name} is not a table of ints with rows of one length: {failure}") from None
    return {name: _checked(table, name, path)}


def _from_safetensors(path: Path) -> dict[str, Any]:
    try:
        with Checkpoint.open_file(path) as file:
            name = _one_name(file.tensors, path)
            names = [name, SHARES] if name == MAP and SHARES in file.tensors else [name]
            for name in names:
                size = file.tensors[name].num_bytes
                if size > MAX_TENSOR_BYTES:
                    raise ConfigError(f"{path}: {name} takes {size} bytes; at most {MAX_TENSOR_BYTES} are read")
            tensors = {name: file.read(file.tensors[name]) for name in names}
    except CheckpointError as failure:
        raise ConfigError(str(failure)) from None
    for name, tensor in tensors.items():
        if tensor.is_floating_point() != (name == SHARES) or tensor.element_size() < 4 or tensor.dim() < 2:
            raise ConfigError(f"{path}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}")
    return {
        name: tensor.numpy() if name == SHARES else _checked(tensor.numpy(), name, path)
        for name, tensor in tensors.items()
    }


def _checked(table: Any, name: str, source: Path | str) -> Ints:
    """Return the table as int64 [layers, slots or experts], summed over steps."""
    wanted = (2,) if name == MAP else (2, 3)
    if table.dtype.kind not in "iu" or table.ndim not in wanted:
        raise ConfigError(f"{source}: {name} must be a table of ints, got {table.dtype} of shape {table.shape}")
    if table.size and not (table.min() >= 0 and table.max() <= MAX_COUNT):
        low, high = table.min(), table.max()
        raise ConfigError(f"{source}: {name} must hold ints from 0 to {MAX_COUNT}, got {low} to {high}")
    ints: Ints = table.astype(np.int64)
    return ints.sum(0) if ints.ndim == 3 else ints


def _write(path: Path, fields: dict[str, Any]) -> None:
    if path.suffix == ".json":
        content = json.dumps({name: table.tolist() for name, table in fields.items()}).encode()
    elif path.suffix == ".safetensors":
        from safetensors.numpy import save

        content = save(fields)
    else:
        raise ConfigError(f"{path} must be a .json or a .safetensors file")
    with writing(path):
        path.write_bytes(content)
