"""Which of several providers is faster for how many rows, as measured: crossovers.json. The next measurement corrects
it without code.

Between two numbers of rows that were measured, the nearer one counts, by their ratio; beyond them, the last one. A card
that was not measured takes the nearest one, by multiprocessors and bandwidth."""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import attrs
import msgspec
import torch

from pdinfer.kernels.formats.fp8 import FP8Blocks
from pdinfer.kernels.spec import OpSpec
from pdinfer.values import Value

Form = Literal["dense", "sorted", "room"]


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A card, with what its vendor says of it."""

    name: str
    multiprocessors: int
    gigabytes_per_s: int

    def distance(self, other: Card) -> float:
        """Return how unlike another card it is: 0 for the same sizes."""
        sizes = (self.multiprocessors / other.multiprocessors, self.gigabytes_per_s / other.gigabytes_per_s)
        return sum(abs(math.log(ratio)) for ratio in sizes)


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The providers of an op on a card, the fastest first: for so many dense rows, rows of each expert, or rows that
    each expert has room for. `results` is a file of benchmarks/results. What one op has on one card names the same
    providers, form by form and in the order of rows."""

    card: str
    op: str
    form: Form
    rows: int
    fastest: tuple[str, ...]
    results: str


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file has."""

    cards: tuple[Card, ...]
    measured: tuple[Measured, ...]


IN_FORM: Mapping[Form, str] = MappingProxyType({"dense": "", "sorted": "", "room": "in room "})
OF_FORM: Mapping[Form, str] = MappingProxyType({"dense": "", "sorted": " of each expert", "room": " of each expert"})
"""How rows are told in a sentence."""


@functools.cache
def table() -> Table:
    """Return what the file has."""
    return msgspec.json.decode(Path(__file__).with_suffix(".json").read_bytes(), type=Table)


def of(op: str, spec: OpSpec) -> Crossovers | None:
    """Return what is known of an op on a device: what was measured on the nearest card, or on the first one where the
    device is no card of the file. None where nothing was measured; all of it was in bfloat16."""
    device, measured = spec.device, [each for each in table().measured if each.op == op]
    if device.type != "cuda" or spec.dtype != torch.bfloat16 or not measured:
        return None
    cards = {card.name: card for card in table().cards}
    names, ours = dict.fromkeys(each.card for each in measured), device.name.split()
    mine = next((cards[name] for name in ours if name in cards), cards[next(iter(names))])
    nearest = min(names, key=lambda name: mine.distance(cards[name]))
    return Crossovers(str(device), tuple(each for each in measured if each.card == nearest))


@attrs.frozen
class Crossovers(Value):
    """What is known of one op on a device. All of it was measured on one card."""

    device: str
    measured: tuple[Measured, ...]

    @property
    def names(self) -> frozenset[str]:
        """The providers that were compared."""
        return frozenset(name for each in self.measured for name in each.fastest)

    @functools.cached_property
    def _by_form(self) -> Mapping[Form, tuple[Sequence[int], Sequence[Measured]]]:
        """What was measured in each form, after the squares of the rows where one measurement gives way to the next.
        Found once: `order` is asked for each product of a step."""
        forms = {form: [*group] for form, group in groupby(self.measured, key=lambda each: each.form)}
        return {form: ([a.rows * b.rows for a, b in pairwise(group)], group) for form, group in forms.items()}

    def order(self, names: Iterable[str], arguments: Sequence[Any]) -> list[str]:
        """Return the names of providers for a call with these arguments: the fastest first, and last those that were
        not measured."""
        form, rows = form_of(*arguments)
        if form not in self._by_form or not _as_measured(*arguments):
            return [*names]
        borders, of_form = self._by_form[form]
        fastest = of_form[bisect_left(borders, rows * rows)].fastest
        return sorted(names, key=lambda name: fastest.index(name) if name in fastest else len(fastest))

    def told(self, names: Collection[str]) -> str:
        """Return in a sentence which of these providers is the fastest for how many rows, and where that was
        measured."""
        parts = []
        for form, group in groupby(self.measured, key=lambda each: each.form):
            won = [(each.rows, next(name for name in each.fastest if name in names)) for each in group]
            parts.append(f"{IN_FORM[form]}{won[0][1]}")
            for (fewer, before), (more, after) in pairwise(won):
                if after != before:
                    parts[-1] += f" up to {math.isqrt(fewer * more)} rows{OF_FORM[form]}, {after} above"
        card, files = self.measured[0].card, ", ".join(sorted({each.results for each in self.measured}))
        where = f"on {card}" if card in self.device.split() else f"on {card}, the nearest card to {self.device}"
        return f"fastest {where}: {'; '.join(parts)} ({files})"


def _as_measured(*arguments: Any) -> bool:
    """Return whether weights are like those that were measured. Others torch makes floats of in every call."""
    weight = arguments[-1]
    return not isinstance(weight, FP8Blocks) or weight.numbers.ndim > 2 or weight.is_whole


def form_of(x: Any, *more: Any) -> tuple[Form, int]:
    """Return in which form rows come to a product with weights or to experts, and how many: those of each expert on
    average, or for which each has room."""
    if len(more) == 1:
        return "dense", len(x)
    return ("room", x.shape[1]) if x.ndim == 3 else ("sorted", -(-len(x) // len(more[0])))
