"""What the process of a spawned engine is told, and what it says until it serves. Each is one MessagePack frame.

    spawn ── Order ──────────────────────────► child        over the pipe, so that a key is in no list of processes
    spawn ◄── Loading … Loading, Loaded or Failed ── child

Functions travel by name and plain values by value: nothing is unpickled."""

from __future__ import annotations

import functools
import importlib
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from pdinfer.checks import clip
from pdinfer.errors import ConfigError, PDInferError, TransferError, error_from_code
from pdinfer.execution.warm_up import WarmUp


class Named(msgspec.Struct):
    """A function or class that any process finds by its name, with the first of its arguments where it has some."""

    module: str
    name: str
    positional: tuple[Any, ...] = ()
    keywords: dict[str, Any] = {}

    @classmethod
    def of(cls, what: str, function: object) -> Named:
        """Name a function, class or `functools.partial` of one. Raises ConfigError, which calls it `what`, when no
        other process would find it, or for arguments that are not plain data."""
        if isinstance(function, functools.partial):
            named = cls.of(what, function.func)
            named.positional, named.keywords = plain(what, function.args), plain(what, function.keywords)
            return named
        if not callable(function):
            raise ConfigError(
                f"{what} must be a function or class that is called in the engine's process, got {clip(function)}; "
                "give arguments with functools.partial"
            )
        module, name = str(getattr(function, "__module__", "")), str(getattr(function, "__qualname__", ""))
        try:
            found = operator.attrgetter(name)(sys.modules[module])
        except (KeyError, AttributeError):
            found = None
        if module == "__main__" or found != function:
            raise ConfigError(
                f"{what} is {clip(function)}, which the engine's process cannot import: define it at the top of a "
                "module, not in a script, a notebook or another function"
            )
        return cls(module, name)

    def find(self) -> Callable[..., Any]:
        """Import it. Raises ImportError or AttributeError when it is not there."""
        found: Callable[..., Any] = operator.attrgetter(self.name)(importlib.import_module(self.module))
        return functools.partial(found, *self.positional, **self.keywords)


class Order(msgspec.Struct):
    """An engine to make, to warm up `warm_up` times and to serve. `cache`, `engine`, `other_engine` and `remote` are
    the fields of configurations."""

    role: str
    checkpoint: str
    device: str
    dtype: str | None
    cache: dict[str, Any]
    engine: dict[str, Any]
    other_engine: dict[str, Any]
    remote: dict[str, Any]
    transport: Named
    logits_processors: dict[str, Named]
    trusted_roots: list[str]
    key: bytes | None
    warm_up: int
    log_level: int


class Loading(msgspec.Struct, tag="loading"):
    """How many bytes of the model were read, of how many."""

    done_bytes: int
    total_bytes: int


class Warming(msgspec.Struct, tag="warming"):
    """How many steps of all warm-ups were run, of how many."""

    done: int
    total: int


class Loaded(msgspec.Struct, tag="loaded"):
    """The engine is made, and was warmed up. What follows is the session of `pdinfer.remote.served`."""

    warm_ups: tuple[WarmUp, ...] = ()


class Failed(msgspec.Struct, tag="failed"):
    """Why there will be no engine."""

    code: str
    message: str

    def error(self) -> PDInferError:
        return error_from_code(self.code, self.message)


Said = Loading | Warming | Loaded | Failed


def plain(what: str, value: Any) -> Any:
    """Return `value` with tuples for sequences and strings for paths. Raises ConfigError unless it is plain data."""
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        return tuple(plain(what, each) for each in value)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(what, each) for key, each in value.items()}
    raise ConfigError(
        f"{what} has the argument {clip(value)}; what another process is told is plain data: numbers, strings, bytes, "
        "lists and dicts of them"
    )


def decode_order(data: bytes) -> Order:
    """Return the order in the first message of a parent, which started this very code."""
    return msgspec.msgpack.decode(data, type=Order)


def decode_said(data: bytes) -> Said:
    """Return what a child says. Raises TransferError for anything else."""
    try:
        said: Said = msgspec.msgpack.decode(data, type=Said)
        return said
    except msgspec.MsgspecError as error:
        raise TransferError(f"the process of an engine sent something that cannot be read: {error}") from error
