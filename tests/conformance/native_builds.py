"""The native library, compiled as for another CPU or with planted failures."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdinfer.errors import BackendUnavailable
from pdinfer.kernels.native import build
from pdinfer.kernels.native import ops as native
from pdinfer.process import compiled

HEADERS = Path(__file__).parent / "native"


@functools.cache
def built_with(*flags: str) -> ctypes.CDLL:
    """Return the library compiled with more flags. Skips the test where this machine has no such library at all."""
    try:
        native.library()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "FLAGS", (*compiled.FLAGS, *flags))
        return compiled.find_or_build(build.sources(), compiled.cpu_flags())


@contextmanager
def as_native(library: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    """Let the native ops be those of this library."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: library)
        yield library
