"""Files of tuned configs, in the names and keys of vLLM and SGLang.

Experts: `E=32,N=2048,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json`, where N is the number of
channels between the two products. A matrix: `N=2112,K=7168,device_name=...` with the same end. Both projects read such
files from folders of theirs (vllm/model_executor/layers/fused_moe/configs and
.../quantization/utils/configs, sglang/srt/layers/moe/fused_moe_triton/configs/triton_<version>); SGLang writes a space
after the comma of the blocks, and its folders may have older versions of Triton beside them.

A file maps a number of tokens to a config, and a reader takes the nearest number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

KEYS = {
    "ROWS": "BLOCK_SIZE_M",
    "CHANNELS": "BLOCK_SIZE_N",
    "DEPTH": "BLOCK_SIZE_K",
    "NEAR": "GROUP_SIZE_M",
}
"""Names of tiles here and there. Others are left as they are."""
DTYPE, BLOCK_SHAPE = "fp8_w8a8", [128, 128]
Tiles = dict[str, int]


@attrs.frozen(kw_only=True)
class Target:
    """What a file is for: sizes by name, in order, such as {"E": 32, "N": 2048}, and the card as torch names it."""

    sizes: Mapping[str, int] = attrs.field(converter=dict)
    device_name: str
    down: bool = False
    """Whether this is for the second product of experts, for which SGLang has files of their own."""

    @property
    def file_name(self) -> str:
        """The name as vLLM writes it."""
        sizes = ",".join(f"{name}={size}" for name, size in self.sizes.items())
        blocks = json.dumps(BLOCK_SHAPE, separators=(",", ":"))
        end = "_down" * self.down
        return f"{sizes},device_name={plain(self.device_name)},dtype={DTYPE},block_shape={blocks}{end}.json"

    def find(self, folder: Path) -> Iterator[Path]:
        """Yield the files for this in a folder and those below it, whoever wrote them."""
        wanted = self.file_name.replace(" ", "")
        yield from sorted(path for path in folder.rglob("*.json") if path.name.replace(" ", "") == wanted)


def unread(folder: Path, targets: Collection[Target]) -> Iterator[tuple[str, str]]:
    """Yield the name of each file in a folder, and below it, that is for none of these, and for what it is."""
    found = {path for target in targets for path in target.find(folder)}
    for path in sorted({*folder.rglob("*.json")} - found):
        sizes, _, card = path.stem.partition(",device_name=")
        yield path.name, f"is for {sizes} on {card.partition(',')[0] or 'a card that it does not name'}"


def plain(device_name: str) -> str:
    """Return the name of a card in names of files. vLLM has one name for all variants of the H200."""
    name = device_name.replace(" ", "_")
    return "NVIDIA_H200" if name.startswith("NVIDIA_H200") else name


def read(path: Path) -> dict[int, Tiles]:
    """Return the entries of a file by their number of tokens. Raises ValueError for a file of another kind."""
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} holds a {type(found).__name__}, not one entry for each number of tokens")
    entries = {name: entry for name, entry in found.items() if name != "triton_version"}
    for name, entry in entries.items():
        whole = isinstance(entry, dict) and all(type(value) is int for value in entry.values())
        if not re.fullmatch(r"[1-9]\d*", name) or not whole:
            raise ValueError(f"{path.name}: {name!r} is no number of tokens with whole numbers")
    return {int(name): entry for name, entry in entries.items()}


def nearest(entries: Mapping[int, Tiles], num_tokens: int) -> Tiles:
    """Return the entry that a reader takes for so many tokens."""
    return entries[min(entries, key=lambda each: abs(each - num_tokens))]


def write(path: Path, entries: Mapping[int, Tiles]) -> None:
    """Write entries, those of a file that is there already among them."""
    merged = {**(read(path) if path.exists() else {}), **entries}
    told: dict[str, Any] = {str(num_tokens): merged[num_tokens] for num_tokens in sorted(merged)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told, indent=4) + "\n")


def to_entry(values: Mapping[str, int]) -> Tiles:
    """Return the values of a config in their keys."""
    return {KEYS.get(name, name): value for name, value in values.items()}


def of_entry(entry: Mapping[str, int]) -> Tiles:
    """Return an entry in the names of configs here."""
    ours = {theirs: name for name, theirs in KEYS.items()}
    return {ours.get(name, name): value for name, value in entry.items()}
