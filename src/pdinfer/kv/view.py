"""The bytes of a pool as tensors: `PageMemory` owns them, `KVView` is what one step may read and write."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from msgspec import UNSET
from torch import Tensor

from pdinfer.errors import ConfigError
from pdinfer.kv.copies import BLOCK_BYTES, DeviceCopies, PageOps
from pdinfer.kv.layout import KVLayout, Spans
from pdinfer.kv.memfd import CAN_SHARE, Memfd
from pdinfer.kv.memory import Landing, Memory, take
from pdinfer.values import Value

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PAGE_DTYPES = DTYPES | {"uint8": torch.uint8, "int8": torch.int8}


class PageMemory(Memory):
    """One flat block of bytes on one device, and typed views of its regions.

    Transports read and write host memory in place; what they move to and from a device goes through `DeviceCopies`,
    made of `ops`. With "auto" and "shared", host memory is a `memfd` on systems that have them, which other processes
    may be given to read: a forked child then shares the pages and must leave them alone. "pinned" memory is not a
    memfd. Raises ConfigError for memory that a device does not have, and for a device without `ops`."""

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        *,
        device: torch.device,
        memory: str = "auto",
        ops: PageOps | None = None,
    ) -> None:
        _check_kind(memory, device)
        self.layout = layout
        self.num_pages = num_pages
        num_bytes = self.num_bytes
        self.memfd: Memfd | None = None
        if CAN_SHARE and device.type == "cpu" and memory != "pinned":
            self.memfd = Memfd(num_bytes, "pool")
            self.buffer = torch.frombuffer(self.memfd.map, dtype=torch.uint8)
        else:
            self.buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=memory == "pinned")
            if memory == "shared":
                self.buffer.share_memory_()  # type: ignore[no-untyped-call]
        self.device = self.buffer.device
        self._host = self.buffer.numpy().data if device.type == "cpu" else memoryview(b"")
        self.copies = None if device.type == "cpu" else self._on_device(ops)

    def _on_device(self, ops: PageOps | None) -> DeviceCopies:
        if ops is None:
            raise ConfigError(
                f"a pool on {self.device} needs the ops that copy its pages; Model.allocate_pages gives them"
            )
        parts = self.layout.components
        borders = [self.layout.region_offset(part.name, part.layers[0], self.num_pages) for part in parts]
        return DeviceCopies(self.buffer, borders, ops)

    @property
    def num_bytes(self) -> int:
        return self.num_pages * self.layout.page_bytes

    @property
    def scratch_page(self) -> int:
        """The last page: a `PagePool` has it in its memory and gives it to no request."""
        return self.num_pages - 1

    def pages(self, name: str, layer: int) -> Tensor:
        """Return the [num_pages, page_size, width] view of one component of one layer, in its own dtype. A component
        with heads is [num_pages, heads, page_size, width], whatever the order in memory."""
        component = next(c for c in self.layout.components if c.name == name)
        start = self.layout.region_offset(name, layer, self.num_pages)
        if component.shape is not UNSET:
            rows = self.buffer.view(PAGE_DTYPES[component.dtype])
            value_bytes, strides = rows.itemsize, component.strides(self.layout.page_size, self.num_pages)
            shape = self.num_pages, component.num_heads, self.layout.page_size, component.width
            steps = (strides.page, strides.head, strides.token)
            return rows.as_strided(shape, (*(step // value_bytes for step in steps), 1), start // value_bytes)
        size = self.num_pages * self.layout.page_size * component.token_bytes
        flat = self.buffer[start : start + size].view(PAGE_DTYPES[component.dtype])
        return flat.view(self.num_pages, self.layout.page_size, component.width)

    def step(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which this thread runs a step over the pages: after what has arrived in them."""
        return contextlib.nullcontext() if self.copies is None else self.copies.step()

    def computed(self) -> Callable[[], None] | None:
        """Return what to call before the next `read`, in the thread of that, for what the step has computed so far. It
        does not wait. None for the host, which may read at once."""
        return None if self.copies is None else self.copies.computed()

    @property
    def block_bytes(self) -> int:
        return self.num_bytes if self.copies is None else BLOCK_BYTES

    def read(self, spans: Spans) -> list[memoryview]:
        if self.copies is not None:
            return self.copies.read(spans)
        return [self._host[start : start + length] for start, length in spans]

    def landing(self, spans: Spans) -> Landing:
        return Landing(self.read(spans)) if self.copies is None else self.copies.landing(spans)

    def copy_from(self, spans: Spans, source: Memory, source_spans: Spans) -> None:
        if not isinstance(source, PageMemory):
            raise ConfigError(f"cannot copy pages from a {type(source).__name__}")
        if self.copies is not None and source.copies is not None and self.device == source.device:
            self.copies.copy_from(_paired(spans, source_spans), source.copies)
        elif self.copies is None and source.copies is None:
            for to, start, length in _paired(spans, source_spans):
                self.buffer[to : to + length].copy_(source.buffer[start : start + length])
        else:
            landing, data = self.landing(spans), memoryview(b"".join(source.read(source_spans)))
            for view in landing.views:
                view[:], data = data[: len(view)], data[len(view) :]
            landing.commit()


def _check_kind(memory: str, device: torch.device) -> None:
    """Raise ConfigError for a kind of main memory that is not there."""
    if memory != "auto" and device.type != "cpu":
        raise ConfigError(
            f'memory="{memory}" is about pools in main memory, and the pool of a model on {device} lies there; '
            'use "auto"'
        )
    if memory == "pinned" and not torch.accelerator.is_available():
        raise ConfigError('memory="pinned" needs a device that torch sees, and there is none; use "auto"')


def _paired(left: Spans, right: Spans) -> list[tuple[int, int, int]]:
    """Cut two span lists of the same total length at each other's borders. Return (left offset, right offset,
    length)."""
    rest, pieces = deque(right), []
    for offset, length in left:
        for start, step in take(rest, length):
            pieces.append((offset, start, step))
            offset += step
    return pieces


@attrs.frozen
class KVView(Value):
    """The cache as the attention of one step sees it: every region, addressed by the batch's page table and slots.
    Where the layout has a value in two parts, a layer has a pair of tensors in place of one."""

    latents: Mapping[int, Any]
    """Per layer [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]: normed latent, then rotated key. When packed
    in "fp8", uint8 with a last axis that counts bytes."""

    index_keys: Mapping[int, Any]
    """Per layer with an indexer [num_pages, page_size, index_head_dim], or bytes when packed."""

    @classmethod
    def of(cls, memory: PageMemory) -> KVView:
        """Return the components named "latent" and "index_k", with the second parts of them that the layout has. Their
        names may have any dotted prefix."""

        def regions(kind: str) -> dict[int, Tensor]:
            return {
                layer: memory.pages(component.name, layer)
                for component in memory.layout.components
                if component.name.split(".")[-1] == kind
                for layer in component.layers
            }

        def in_parts(kind: str, second: str) -> dict[int, Any]:
            firsts, seconds = regions(kind), regions(second)
            return {layer: (part, seconds[layer]) if layer in seconds else part for layer, part in firsts.items()}

        return cls(in_parts("latent", "latent_rope"), in_parts("index_k", "index_k_scale"))
