"""Configs in place of those in use: which a kernel asks for, what else they may be, and which are worth running."""

from __future__ import annotations

import functools
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import attrs
import torch
from case import Case
from timing import Call, sentence

from pdinfer.kernels import resolve_ops
from pdinfer.kernels.triton import configs
from pdinfer.kernels.triton.configs import Config

PROVIDER = "triton"
ROOM = "pdinfer.kernels.triton."
CARD = "H100"
"""What ops are chosen for where nothing runs."""
WARPS, STAGES, TILES = (4, 8), (2, 3, 4, 5), (16, 32, 64, 128, 256)
Key = tuple[str, str]
"""What gives a config: a function of `configs` and its arguments as text, or the name of a constant and nothing."""
Values = dict[str, int]
"""A config as plain numbers: its tiles, its warps, its stages, and what else is a number."""


@attrs.frozen
class Choices:
    """Which configs are used instead of others, and which ones were asked for, by what was asked."""

    instead: Mapping[Key, Config] = attrs.field(factory=dict)
    asked: dict[Key, Config] = attrs.field(factory=dict)

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with these choices."""

        @functools.wraps(function)
        def choose(*arguments: Any, **named: Any) -> Any:
            key, found = (function.__name__, repr((arguments, sorted(named.items())))), function(*arguments, **named)
            if not isinstance(found, Config):
                return found
            self.asked.setdefault(key, found)
            return self.instead.get(key, found)

        return choose

    def changed(self, name: str, value: Any) -> Any:
        """Return what stands for a public name of `configs`."""
        if isinstance(value, FunctionType):
            return self.of(value)
        return self.instead.get((name, ""), value) if isinstance(value, Config) else value


@contextmanager
def chosen(choices: Choices) -> Iterator[None]:
    """Let the families that are imported get their configs from `choices`."""
    room = [module for path, module in sys.modules.items() if path.startswith(ROOM)]
    public = [
        (name, value, choices.changed(name, value)) for name, value in vars(configs).items() if not name.startswith("_")
    ]
    users = [
        (module, name, value, changed)
        for module in room
        for name, value, changed in public
        if changed is not value and vars(module).get(name) is value
    ]
    try:
        for module, name, _, changed in users:
            setattr(module, name, changed)
        yield
    finally:
        for module, name, value, _ in users:
            setattr(module, name, value)


@functools.cache
def aot() -> ModuleType:
    """Return the module that compiles kernels and judges them, which is among the tests of this repository."""
    sys.path.append(str(Path(__file__).parents[2]))
    from tests.unit.kernels import aot as module

    return module


def op_of(case: Case, device: torch.device | str) -> Any:
    """Return the op of the provider that is tuned."""
    return resolve_ops(case.spec(device), forced={case.op: PROVIDER}).ops[case.op]


def call_without_memory(case: Case) -> Call:
    """Return a call of the kernel on tensors that have no memory."""
    # an interpreter has a CPU only
    op = op_of(case, "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else CARD)
    inputs = case.inputs(torch.device("meta"), 0)
    return lambda: case.call(op, inputs)


def asked_by(case: Case) -> dict[Key, Config]:
    """Return the configs that a call of the kernel asks for. Constants are those whose tiles a kernel was started
    with."""
    choices, call = Choices(), call_without_memory(case)
    with chosen(choices):
        started = [constants.items() for _, _, constants in aot().launches(call)]
    constants = {
        (name, ""): value
        for name, value in vars(configs).items()
        if isinstance(value, Config) and value.tiles and any(value.constants.items() <= each for each in started)
    }
    known = list(choices.asked.values())
    return choices.asked | {key: value for key, value in constants.items() if not any(value is one for one in known)}


def values_of(config: Config) -> Values:
    fields = {field.name: getattr(config, field.name) for field in attrs.fields(Config)}
    return {**config.tiles, **{name: value for name, value in fields.items() if type(value) is int}}


def with_values(config: Config, values: Mapping[str, int]) -> Config:
    """Return a config with other values, by name. Names that it does not have are left out."""
    tiles = {name: values.get(name, tile) for name, tile in config.tiles.items()}
    fields = {name: value for name, value in values.items() if name in values_of(config) and name not in tiles}
    return attrs.evolve(config, tiles=tiles, **fields)


def candidates(config: Config) -> list[Config]:
    """Return what differs from a config in one or two of its values. A tile becomes the next smaller or larger power of
    two; other numbers among the tiles are switches, and stay."""
    values = values_of(config)
    changes = [(name, other) for name, value in values.items() for other in _others(name, value)]
    pairs = [pair for pair in itertools.combinations(changes, 2) if pair[0][0] != pair[1][0]]
    return [with_values(config, dict(some)) for some in [*((change,) for change in changes), *pairs]]


def _others(name: str, value: int) -> list[int]:
    if name == "num_warps":
        return [warps for warps in WARPS if warps != value]
    if name == "num_stages":
        return [stages for stages in STAGES if stages != value]
    if name == "maxnreg":
        return []
    return [tile for tile in TILES if tile in (value // 2, value * 2)] if value in TILES else []


def judged(case: Case, key: Key, tried: Sequence[Config]) -> list[list[str]]:
    """Return for each config why it is not worth running: what the gates say of the kernels that it makes."""
    num_processes = max(1, min(os.cpu_count() or 1, len(tried)))
    with ProcessPoolExecutor(num_processes, get_context("spawn"), initializer=_compile) as pool:
        return list(pool.map(functools.partial(_judge, case, key), map(values_of, tried)))


def _compile() -> None:
    """Let Triton compile in this process, even where the one that asks interprets."""
    os.environ.pop("TRITON_INTERPRET", None)


def _judge(case: Case, key: Key, values: Values) -> list[str]:
    # narrow loads are those of page tables and scales, in every config
    specimen = aot().Specimen(case.name, call_without_memory(case), narrow=sys.maxsize)
    try:
        with chosen(Choices({key: with_values(asked_by(case)[key], values)})):
            return [reason for one in aot().measure(specimen) for reason in one.missed]
    except Exception as error:  # noqa: BLE001 what the compiler refuses is no candidate
        return [sentence(error)]
