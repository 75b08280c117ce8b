"""What programs that use this library do to torch, to numpy and to their process, each as a context. With
`--host NAME` pytest runs whatever it runs under one of them: each step of an engine, each call of a model, each op of
the conformance suites."""

from __future__ import annotations

import contextlib
import functools
import locale
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pdinfer.engine.engine import Engine
from pdinfer.model.model import Model

_SETTING = threading.Lock()
_INSIDE: dict[tuple[object, object], tuple[int, object]] = {}
"""How many threads have set a value that is the process's, and what it was before the first of them."""


@contextlib.contextmanager
def _set(setter: Callable[[Any], object], value: object, before: object) -> Iterator[None]:
    with _SETTING:
        count, first = _INSIDE.get((setter, value), (0, before))
        _INSIDE[setter, value] = count + 1, first
        setter(value)
    try:
        yield
    finally:
        with _SETTING:
            count, first = _INSIDE.pop((setter, value))
            if count > 1:
                _INSIDE[setter, value] = count - 1, first
            else:
                setter(first)


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return _set(torch.set_default_dtype, dtype, torch.get_default_dtype())


@contextlib.contextmanager
def precision(value: str) -> Iterator[None]:
    """Round products of float32, by torch's word for all of them, or "each" backend by its own."""
    places = [torch.backends.mkldnn.matmul, torch.backends.cuda.matmul]
    before, of_all = [place.fp32_precision for place in places], "highest"
    with contextlib.suppress(RuntimeError):  # backends that differ have no word for all of them
        of_all = torch.get_float32_matmul_precision()
    if value == "each":
        for place, own in zip(places, ("bf16", "tf32"), strict=True):
            place.fp32_precision = own
    else:
        torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        if value != "each":
            torch.set_float32_matmul_precision(of_all)
        for place, old in zip(places, before, strict=True):
            place.fp32_precision = old


@contextlib.contextmanager
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    with _set(torch.use_deterministic_algorithms, True, False):  # fills what is new with NaN
        yield


class _Seeded:
    """Seeds the generators that all share, while any thread is inside. Nothing of ours draws from them."""

    def __init__(self) -> None:
        self._lock, self._num_inside = threading.Lock(), 0
        self._before = self._seeded = torch.random.get_rng_state(), random.getstate()

    def __enter__(self) -> None:
        with self._lock:
            self._num_inside += 1
            if self._num_inside == 1:
                self._before = torch.random.get_rng_state(), random.getstate()
                torch.manual_seed(0)
                random.seed(0)
                self._seeded = torch.random.get_rng_state(), random.getstate()

    def __exit__(self, failed: object, *_: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if self._num_inside == 0 and failed is None:  # a mode in which tensors hold nothing may be what failed
                states = torch.random.get_rng_state(), random.getstate()
                torch.random.set_rng_state(self._before[0])
                assert torch.equal(states[0], self._seeded[0])
                assert states[1] == self._seeded[1]


_SEEDED = _Seeded()


@contextlib.contextmanager
def _process() -> Iterator[None]:
    before, places = os.umask(0o077), locale.setlocale(locale.LC_ALL)
    for name in ("de_DE.UTF-8", "C.UTF-8", "C"):
        with contextlib.suppress(locale.Error):
            locale.setlocale(locale.LC_ALL, name)
            break
    try:
        yield
    finally:
        os.umask(before)
        locale.setlocale(locale.LC_ALL, places)


class _Passes(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return op(*args, **(kwargs or {}))


@contextlib.contextmanager
def _busy_threads() -> Iterator[None]:
    """Set defaults of torch over and over in another thread, as a host does that runs two models."""
    ended = threading.Event()

    def flip() -> None:
        while not ended.wait(0.001):
            with default_dtype(torch.float16), precision("medium"):
                pass

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


SETTINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "default-dtype-bfloat16": lambda: default_dtype(torch.bfloat16),
    "default-dtype-float64": lambda: default_dtype(torch.float64),
    "default-device": lambda: torch.device("meta"),
    "inference-mode": torch.inference_mode,
    "autograd": torch.enable_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": _deterministic,
    "rounded-products": lambda: precision("medium"),
    "rounded-products-of-each-backend": lambda: precision("each"),
    "flush-to-zero": lambda: _set(torch.set_flush_denormal, True, False),
    "numpy-raises": lambda: np.errstate(all="raise"),
    "warnings-are-errors": _warnings_are_errors,
    "seeded": lambda: _SEEDED,
    "locale-and-umask": _process,
    "a-dispatch-mode": _Passes,
    "other-threads": lambda: _set(torch.set_num_threads, 3, torch.get_num_threads()),
    "changed-meanwhile": _busy_threads,
}
LEFT_BY_STEPS = (
    "autocast",
    "rounded-products",
    "rounded-products-of-each-backend",
    "flush-to-zero",
    "changed-meanwhile",
)
"""What engines and models undo before they call an op, and an op by itself does not."""


def within(setting: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return what calls it under a setting."""

    @functools.wraps(call)
    def run(*given: Any, **options: Any) -> Any:
        with SETTINGS[setting]():
            return call(*given, **options)

    return run


@contextlib.contextmanager
def around_ours(setting: str) -> Iterator[None]:
    """Let engines step, and models run in one piece, under a setting."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Engine, "step"), (Engine, "warm_up"), (Model, "logits")):
            patch.setattr(owner, name, within(setting, getattr(owner, name)))
        yield
