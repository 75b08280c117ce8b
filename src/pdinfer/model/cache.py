"""The components of a cache layout, by the format asked for. Each attention says which of them its tokens leave.

A component's `format` is text that is equal where bytes mean the same. "fp8" packs rows as `kernels.formats.cache_rows`
says."""

from __future__ import annotations

from pdinfer.kv.layout import KVComponent
from pdinfer.kv.view import PAGE_DTYPES

FP8 = "fp8"


def plain_component(name: str, form: str, dtype: str, width: int, layers: tuple[int, ...]) -> KVComponent:
    """Return a component whose rows are `width` numbers of `dtype`."""
    size = width * PAGE_DTYPES[dtype].itemsize
    return KVComponent(name=name, format=form, dtype=dtype, width=width, token_bytes=size, layers=layers)


def packed_component(name: str, form: str, size: int, layers: tuple[int, ...]) -> KVComponent:
    """Return a component whose rows are packed into `size` bytes."""
    return KVComponent(name=name, format=form, dtype="uint8", width=size, token_bytes=size, layers=layers)
