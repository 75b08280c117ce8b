"""The modes in which this library computes, whatever those of its host are."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pdinfer.errors import ConfigError
from pdinfer.process.locks import new_lock
from pdinfer.process.streams import on_device

EXIT_S = 5.0
"""How long the end of Python waits for steps in daemon threads."""

_SMALLEST = 5e-324
_EXACTLY = frozenset({"ieee", "none"})


@contextlib.contextmanager
def own_modes(device: torch.device | None = None) -> Iterator[None]:
    """Compute as a fresh torch does, until the context ends: without autograd, inference mode (what is made in it can
    be written nowhere else), autocast, rounded products of float32, and numbers next to zero that count as zero.
    Defaults of the host for dtypes and devices matter to nothing that names its own. `device` is the current one.

    Raises ConfigError as `check_tensors_are_real` does."""
    check_tensors_are_real()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_EXACT)
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        there = "cuda"
        if device is not None and device.type != "cpu":
            stack.enter_context(on_device(device))
            there = device.type
        for kind in ("cpu", there):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if _SMALLEST * 1.0 == 0.0:
            torch.set_flush_denormal(False)
            stack.callback(torch.set_flush_denormal, True)
        yield


def check_tensors_are_real() -> None:
    """Raise ConfigError where a mode of the host (FakeTensorMode, or another), or a transform of torch.func, makes
    tensors that hold nothing."""
    with _EXACT.door:
        kind = _unreal()
    if kind is not None:
        raise ConfigError(
            f"a mode of torch is active in which tensors are {kind}s, and pdinfer needs memory and numbers: "
            "leave the mode before this call"
        )


def _unreal() -> str | None:
    """Return what tensors are now, or None if they hold something."""
    made = torch.empty(1, dtype=torch.uint8, device="cpu")
    if type(made) is not Tensor:
        return type(made).__name__
    try:
        return None if made.data_ptr() else "shadow"
    except RuntimeError:  # torch.func.grad's have none to point to
        return "shadow"


class _Exact:
    """Products of float32 are not rounded to TF32 or bfloat16 while any thread is inside. What the host has set is the
    whole process's, and it is there again when the last thread has left, or in a forked child. Who comes in passes the
    `door`."""

    def __init__(self) -> None:
        self.door = new_lock()
        self._lock = new_lock()
        self._num_inside = 0
        self._undo: list[Callable[[], None]] = []
        os.register_at_fork(after_in_child=self._begin_as_child)

    @property
    def is_empty(self) -> bool:
        """Whether no thread is inside."""
        return self._num_inside <= 0

    def _begin_as_child(self) -> None:
        """Forget the parent's threads, which a child does not have."""
        self.door, self._lock, self._num_inside = new_lock(), new_lock(), 0
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> None:
        with self.door, self._lock:
            self._num_inside += 1
            self._undo += _make_exact()  # also where others are inside: the host may have set it meanwhile

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            while self.is_empty and self._undo:
                self._undo.pop()()


def _make_exact() -> list[Callable[[], None]]:
    """Round no products of float32, and return what sets it back, in reverse order. torch has one setting for all of
    them and one for each backend, and raises where a product finds that they differ; so both are changed together."""
    before = [place.fp32_precision for place in _PLACES]
    with contextlib.suppress(RuntimeError):  # they differ already, and the host multiplies nothing that minds
        if (of_all := torch.get_float32_matmul_precision()) != "highest":
            torch.set_float32_matmul_precision("highest")
            return [*_setting_back(before), partial(torch.set_float32_matmul_precision, of_all)]
    if _EXACTLY.issuperset(before):
        return []
    for place in _PLACES:
        place.fp32_precision = "ieee"
    return _setting_back(before)


def _setting_back(before: Sequence[str]) -> list[Callable[[], None]]:
    """Return what sets each backend back to what it was."""
    return [partial(setattr, place, "fp32_precision", said) for place, said in zip(_PLACES, before, strict=True)]


_PLACES: tuple[Any, ...] = tuple(
    backend.matmul
    for backend in (torch.backends.mkldnn, torch.backends.cuda)
    if hasattr(getattr(backend, "matmul", None), "fp32_precision")
)
"""Where torch keeps how each backend multiplies: nowhere in versions that do not tell backends apart."""
_EXACT = _Exact()


@atexit.register
def _end() -> None:
    """Shut the door before Python ends, and wait for the steps of daemon threads: one that comes back from torch while
    Python ends takes the process down with SIGABRT."""
    _EXACT.door.acquire()
    until = time.monotonic() + EXIT_S
    while not _EXACT.is_empty and time.monotonic() < until:
        time.sleep(0.01)
