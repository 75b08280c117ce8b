"""The modes in which this library computes, whatever those of its host are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pdinfer.errors import ConfigError
from pdinfer.process.locks import new_lock

_SMALLEST = 5e-324


@contextlib.contextmanager
def own_modes() -> Iterator[None]:
    """Compute as a fresh torch does, until the context ends: without autograd, inference mode (what is made in it can
    be written nowhere else), autocast, rounded products of float32, and numbers next to zero that count as zero.
    Defaults of the host for dtypes and devices matter to nothing that names its own.

    Raises ConfigError as `check_tensors_are_real` does."""
    with contextlib.ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if _SMALLEST * 1.0 == 0.0:
            torch.set_flush_denormal(False)
            stack.callback(torch.set_flush_denormal, True)
        stack.enter_context(_EXACT)
        check_tensors_are_real()
        yield


def check_tensors_are_real() -> None:
    """Raise ConfigError where a mode of the host (FakeTensorMode, or another) makes tensors that hold nothing."""
    if (kind := type(torch.empty(0, dtype=torch.float32, device="cpu"))) is not Tensor:
        raise ConfigError(
            f"a mode of torch is active in which tensors are {kind.__name__}s, and pdinfer needs memory and numbers: "
            "leave the mode before this call"
        )


class _Exact:
    """Products of float32 are not rounded to TF32 or bfloat16 while any thread is inside. What the host has set is the
    whole process's, and it is there again when the last thread has left."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._num_inside = 0
        self._before: list[tuple[Any, str]] = []

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            for place in _products():  # also where others are inside: the host may have set it meanwhile
                if (precision := place.fp32_precision) != "ieee":
                    self._before.append((place, precision))
                    place.fp32_precision = "ieee"

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            while self._num_inside <= 0 and self._before:
                place, precision = self._before.pop()
                place.fp32_precision = precision


def _products() -> Iterator[Any]:
    """Yield where torch keeps how it multiplies float32: by device, in versions that tell them apart."""
    for backend in (torch.backends.mkldnn, torch.backends.cuda):
        if hasattr(place := getattr(backend, "matmul", None), "fp32_precision"):
            yield place


_EXACT = _Exact()
