"""The bytes of a pool as tensors: `PageMemory` owns them, `KVView` is what one step may read and write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from pdinfer.errors import ConfigError
from pdinfer.kv.layout import KVLayout, Spans
from pdinfer.kv.memfd import CAN_SHARE, Memfd
from pdinfer.kv.memory import Memory

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PAGE_DTYPES = DTYPES | {"uint8": torch.uint8}


class PageMemory:
    """One flat block of bytes on one device, and typed views of its regions.

    Transports read and write host memory in place; device memory goes through host copies. With "auto" and "shared",
    host memory is a `memfd` on systems that have them, which other processes may be given to read: a forked child then
    shares the pages and must leave them alone. "pinned" memory is not a memfd.
    """

    def __init__(self, layout: KVLayout, num_pages: int, *, device: torch.device, memory: str = "auto") -> None:
        if memory != "auto" and device.type != "cpu":
            raise ConfigError(
                f'memory="{memory}" is about pools in main memory, and the pool of a model on {device} lies there; '
                'use "auto"'
            )
        if memory == "pinned" and not torch.cuda.is_available():
            raise ConfigError('memory="pinned" needs a CUDA device; use "auto"')
        self.layout = layout
        self.num_pages = num_pages
        self.device = device
        self.num_bytes = num_bytes = num_pages * layout.page_bytes
        self.memfd: Memfd | None = None
        if CAN_SHARE and device.type == "cpu" and memory != "pinned":
            self.memfd = Memfd(num_bytes, "pool")
            self.buffer = torch.frombuffer(self.memfd.map, dtype=torch.uint8)
        else:
            self.buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=device, pin_memory=memory == "pinned")
            if memory == "shared":
                self.buffer.share_memory_()  # type: ignore[no-untyped-call]
        self._host = self.buffer.numpy().data if device.type == "cpu" else None

    def pages(self, name: str, layer: int) -> Tensor:
        """Return the [num_pages, page_size, width] view of one component of one layer, in its own dtype."""
        component = next(c for c in self.layout.components if c.name == name)
        start = self.layout.region_offset(name, layer, self.num_pages)
        size = self.num_pages * self.layout.page_size * component.token_bytes
        flat = self.buffer[start : start + size].view(PAGE_DTYPES[component.dtype])
        return flat.view(self.num_pages, self.layout.page_size, component.width)

    def read(self, spans: Spans) -> list[memoryview]:
        if self._host is not None:
            return [self._host[start : start + length] for start, length in spans]
        return [self.buffer[start : start + length].cpu().numpy().data for start, length in spans]

    def landing(self, spans: Spans) -> list[memoryview]:
        if self._host is not None:
            return self.read(spans)
        return [memoryview(bytearray(length)) for _, length in spans]

    def commit(self, spans: Spans, landed: Sequence[memoryview]) -> None:
        if self._host is not None:
            return
        for (start, length), data in zip(spans, landed, strict=True):
            host = torch.from_numpy(np.frombuffer(data, dtype=np.uint8))
            self.buffer[start : start + length].copy_(host)

    def copy_from(self, spans: Spans, source: Memory, source_spans: Spans) -> None:
        if not isinstance(source, PageMemory):
            raise ConfigError(f"cannot copy pages from a {type(source).__name__}")
        for (to, start), length in _paired(spans, source_spans):
            self.buffer[to : to + length].copy_(source.buffer[start : start + length])


def _paired(left: Spans, right: Spans) -> list[tuple[tuple[int, int], int]]:
    """Cut two span lists of the same total length at each other's borders. Return ((left offset, right offset),
    length)."""
    pieces = []
    remaining = iter(right)
    start, available = 0, 0
    for offset, length in left:
        while length:
            if not available:
                start, available = next(remaining)
            step = min(length, available)
            pieces.append(((offset, start), step))
            offset, length = offset + step, length - step
            start, available = start + step, available - step
    return pieces


@attrs.frozen
class KVView:
    """The cache as the attention of one step sees it: every region, addressed by the batch's page table and slots."""

    latents: Mapping[int, Tensor]
    """Per layer [num_pages, page_size, kv_lora_rank + qk_rope_head_dim]: normed latent, then rotated key. When packed
    in "fp8", uint8 with a last axis that counts bytes."""

    index_keys: Mapping[int, Tensor]
    """Per layer with an indexer [num_pages, page_size, index_head_dim], or bytes when packed."""

    @classmethod
    def of(cls, memory: PageMemory) -> KVView:
        """Return the components named "latent" and "index_k", whatever the dotted prefix of their names."""

        def regions(kind: str) -> dict[int, Tensor]:
            return {
                layer: memory.pages(component.name, layer)
                for component in memory.layout.components
                if component.name.split(".")[-1] == kind
                for layer in component.layers
            }

        return cls(regions("latent"), regions("index_k"))
