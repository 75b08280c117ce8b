"""A few factors over a prior, found from what was measured: what every step costs beside it, and how much slower it is.

What is seen is a sum of factors with known weights, so the fit is linear. It is robust: of all factors that are not
negative it has the least mean |predicted / seen - 1|, in which a row that took too long counts for 1 at most. Half of
the rows are held out, and the errors that are told are those on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import attrs
import numpy as np

from pdinfer.checks import clip, is_number, typed
from pdinfer.errors import ConfigError
from pdinfer.planning.measured import SIDES, Rows, Seen, Steps, seen
from pdinfer.planning.simulation import StepRows
from pdinfer.planning.simulation.deployment import StepSeconds
from pdinfer.planning.simulation.deployment import seconds as step_seconds
from pdinfer.values import Value

FACTORS = ("prefill.fixed_s", "prefill.scale", "decode.fixed_s", "decode.scale")
LEAST_ROWS = 4
TOLERANCE = 0.25
"""How far halves may be apart, and held-out rows from what was predicted, in the median."""
LEAST_TIMES, MOST_TIMES = 0.01, 500.0
"""Rows that take fewer or more times what their prior says are in another unit: a second is a thousand milliseconds.
Where a step has little to do its fixed cost alone may be a hundred times the prior."""
FLAT_LOSS = 0.01
"""A factor that may be halved or doubled for less is not known."""
FIRM = 1e3
"""The weight of a limit that is reached, in rows."""
ROUNDS = 80


def _floor_s(prior: StepSeconds, rows: StepRows) -> Any:
    """Return the seconds that a step cannot be faster than, as far as its prior knows."""
    floor: Callable[[StepRows], Any] = getattr(prior, "floor_s", lambda _: 0.0)
    return floor(rows)


@attrs.frozen(kw_only=True)
class StepCost(Value):
    """The seconds of steps: `fixed_s` + `scale` * `prior(rows)`, and never less than the prior's own `floor_s`."""

    prior: StepSeconds
    fixed_s: float = 0.0
    scale: float = 1.0

    def __call__(self, rows: StepRows) -> Any:
        """Return the seconds of a step."""
        return np.maximum(_floor_s(self.prior, rows), self.fixed_s + self.scale * self.prior(rows))

    def over(self, prior: StepSeconds) -> StepCost:
        """Return the same factors over another prior, such as that of an engine of another size."""
        return attrs.evolve(self, prior=prior)


@attrs.frozen(kw_only=True)
class Cost(Value):
    """What steps of both sides cost. `errors` are medians of |predicted / seen - 1| over the rows that were held out,
    by their kind: "prefill", "decode", "burst" or "closed loop". `flat` names factors that the rows do not tell; a side
    without rows has its prior as it is. `at_bounds` names those that would be negative if they might, and are 0."""

    prefill: StepCost
    decode: StepCost
    errors: Mapping[str, float]
    flat: tuple[str, ...]
    at_bounds: tuple[str, ...]


@attrs.frozen
class _Row:
    """What was seen took `seconds`: the sum of FACTORS times `terms`, at least `floor_s`, and not less than the sum of
    them times `within`."""

    kind: str
    terms: np.ndarray
    within: np.ndarray
    floor_s: float
    seconds: float


@typed
def calibrate(rows: Iterable[Rows], *, prior: tuple[StepSeconds, StepSeconds], holdout: float = 0.5) -> Cost:
    """Fit `prior` = (prefill, decode), such as two rooflines, to what was measured.

    Rows are steps; bursts; closed loops; warm-ups, of which the second of an engine is steady; summaries of runs
    without drafts, which tell a decode step by TPOT and concurrency, and with one request at a time a prefill; and the
    stats of one Pairing after each of its steps, which tell the steps of its engines. Of each kind `holdout` of the
    rows are kept for the error. Raises ConfigError where there are fewer than 4 rows of a kind but some or
    none of them would be held out, where a prior gives no seconds, where rows took less than LEAST_TIMES or more than
    MOST_TIMES what it says, where the fits of both parts disagree by more than a quarter, and where held-out rows are
    further from what is predicted: then rows are of different settings, or the prior has the wrong shape."""
    if not is_number(holdout) or not 0.1 <= holdout <= 0.9:
        raise ConfigError(f"holdout must be from 0.1 to 0.9, got {clip(holdout)}")
    if len(prior) != 2 or not all(map(callable, prior)):
        raise ConfigError(f"prior must be two functions, of prefill and of decode, got {clip(prior)}")
    found = sorted((_row(each, prior) for each in seen(rows)), key=lambda row: (row.kind, sum(row.terms)))
    if not found:
        raise ConfigError("calibrate got no step and no burst")
    kept, held, kinds = list[_Row](), list[_Row](), sorted({row.kind for row in found})
    for kind in kinds:
        of_kind = [row for row in found if row.kind == kind]
        if len(of_kind) < LEAST_ROWS:
            raise ConfigError(f"calibrate needs at least {LEAST_ROWS} rows of the kind {kind}, got {len(of_kind)}")
        if len(of_kind) * holdout < 1:
            raise ConfigError(f"holdout={holdout:g} keeps none of {len(of_kind)} {kind} rows for the error; raise it")
        _check_units(kind, of_kind)
        for at, row in enumerate(of_kind):
            (held if int((at + 1) * holdout) > int(at * holdout) else kept).append(row)
    ours, theirs = _fitted(kept), _fitted(held)
    errors = {kind: _error(kind, found, held, ours, theirs) for kind in kinds}
    known = _used(found)
    flat = [name for at, name in enumerate(FACTORS) if not known[at] or (ours[at] and _is_flat(at, found, ours))]
    sides = [
        StepCost(prior=of_side, fixed_s=float(ours[at]), scale=float(ours[at + 1]))
        if known[at : at + 2].any()
        else StepCost(prior=of_side)
        for at, of_side in zip((0, 2), prior, strict=True)
    ]
    return Cost(
        prefill=sides[0],
        decode=sides[1],
        errors=errors,
        flat=tuple(flat),
        at_bounds=tuple(name for at, name in enumerate(FACTORS) if known[at] and not ours[at]),
    )


def _check_units(kind: str, rows: Sequence[_Row]) -> None:
    """Raise ConfigError where rows took so many times what their prior says that one of both is not in seconds."""
    said = float(np.median([row.terms[1::2].sum() / row.seconds for row in rows]))
    if said and not LEAST_TIMES <= 1 / said <= MOST_TIMES:  # a prior may also say 0, and leave all to the fixed cost
        raise ConfigError(
            f"{kind} rows took {1 / said:.2g} times as long as their prior says, in the median; both are seconds: is "
            "one in milliseconds, or the prior that of another part?"
        )


def _row(of: Seen, prior: tuple[StepSeconds, StepSeconds]) -> _Row:
    """Return what was seen by what its steps take in the prior."""

    def terms(steps: tuple[Steps, ...]) -> np.ndarray:
        found = np.zeros(len(FACTORS))
        for side, times, rows in steps:
            step_s = step_seconds(f"the prior of {SIDES[side]}", prior[side], rows)
            found[2 * side : 2 * side + 2] += times, times * step_s
        return found

    floor_s = sum(times * float(_floor_s(prior[side], rows)) for side, times, rows in of.steps)
    return _Row(of.kind, terms(of.steps), terms(of.within), floor_s, of.seconds)


# -- the fit ----------------------------------------------------------------------------------------------------------


def _terms(rows: Sequence[_Row]) -> np.ndarray:
    """Return what FACTORS are multiplied with, each over the seconds that were seen: [rows, 4]."""
    return np.array([row.terms / row.seconds for row in rows])


def _used(rows: Sequence[_Row]) -> np.ndarray:
    """Return which factors any row has."""
    return np.asarray(_terms(rows).any(axis=0))


def _within(rows: Sequence[_Row]) -> np.ndarray:
    """Return what FACTORS are multiplied with for at most 1: [rows, 4], 0 where a row has no such limit."""
    return np.array([row.within / row.seconds for row in rows])


def _fitted(rows: Sequence[_Row]) -> np.ndarray:
    """Return the best factors, 0 for those that no row has."""
    return _best(_terms(rows), np.ones(len(rows)), _within(rows), np.ones(len(rows)))


def _best(terms: np.ndarray, wanted: np.ndarray, within: np.ndarray, most: np.ndarray) -> np.ndarray:
    """Return factors as `_least` does, with `within @ factors` of at most `most`: the limit that is exceeded by most
    becomes an equation, until none is."""
    reached = list[int]()
    while True:
        factors = _least(np.vstack([terms, FIRM * within[reached]]), np.concatenate([wanted, FIRM * most[reached]]))
        over = within @ factors - most
        worst = int(over.argmax())
        if over[worst] <= 1e-6 or worst in reached:
            return factors
        reached.append(worst)


def _least(terms: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return factors >= 0 with the least sum of |terms @ factors - wanted|: least squares again and again, with weights
    that make them absolute (iteratively reweighted least squares)."""
    weights, factors = np.ones(len(wanted)), np.zeros(terms.shape[1])
    for at in range(ROUNDS):
        factors = _least_squares(terms * weights[:, None], wanted * weights)
        off = np.abs(terms @ factors - wanted)
        weights = np.maximum(off, max(1e-6, 0.1 * 0.7**at)) ** -0.5
    return factors


def _least_squares(terms: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return factors >= 0 with the least squared error. There are few, so every set that may be above 0 is tried, the
    largest first: where the error grows without any one factor of a set, no part of the set is better. Of sets that are
    as good the one with scales is taken: rows of one size say nothing of others, and the prior does."""
    used = [at for at in (1, 3, 0, 2) if terms[:, at].any()]
    best, least = np.zeros(terms.shape[1]), float(wanted @ wanted)
    rounding = 1e-12 * least
    found, enough = list[tuple[tuple[int, ...], np.ndarray, float]](), list[set[int]]()
    for some in [some for count in range(1, len(used) + 1) for some in combinations(used, count)][::-1]:
        if any(whole.issuperset(some) for whole in enough):
            continue
        of_some = terms[:, some]
        solved, _, rank, _ = np.linalg.lstsq(of_some, wanted, rcond=1e-9)
        if solved.min() < 0:
            continue
        found.append((some, solved, float(((of_some @ solved - wanted) ** 2).sum())))
        if rank == len(some):
            growth = solved**2 / np.linalg.inv(of_some.T @ of_some).diagonal()  # of the error, without each
            if growth.min() > rounding:
                enough.append(set(some))
    for some, solved, error in reversed(found):
        if error < least - rounding:
            best, least = np.zeros(terms.shape[1]), error
            best[list(some)] = solved
    return best


def _predicted(rows: Sequence[_Row], factors: np.ndarray) -> np.ndarray:
    """Return the seconds that factors predict, over those that were seen."""
    floors = np.array([row.floor_s / row.seconds for row in rows])
    return np.asarray(np.maximum(floors, _terms(rows) @ factors))


def _error(kind: str, rows: Sequence[_Row], held: Sequence[_Row], ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the median error on the held-out rows of a kind. Raise ConfigError where there is nothing to rely on."""
    of_kind = [row for row in rows if row.kind == kind]
    apart = float(np.median(np.abs(_predicted(of_kind, theirs) / _predicted(of_kind, ours) - 1.0)))
    if apart > TOLERANCE:
        raise ConfigError(
            f"the halves of the {kind} rows disagree: what follows from one is {apart:.0%} off the other in the "
            f"median; are all of one setting, and none of them first uses?"
        )
    error = float(np.median(np.abs(_predicted([row for row in held if row.kind == kind], ours) - 1.0)))
    if error > TOLERANCE:
        raise ConfigError(
            f"held-out {kind} rows are {error:.0%} off what is predicted in the median, more than {TOLERANCE:.0%}; "
            f"are all of one setting, and does the prior fit the engine?"
        )
    return error


def _is_flat(at: int, rows: Sequence[_Row], factors: np.ndarray) -> bool:
    """Return whether half of a factor, or twice as much, does nearly as well with the others free."""
    terms, within, losses = _terms(rows), _within(rows), []
    free = np.arange(len(FACTORS)) != at
    for value in (factors[at] / 2, factors[at] * 2):
        wanted, most = 1.0 - value * terms[:, at], 1.0 - value * within[:, at]
        others = _best(terms * free, wanted, within * free, most)
        if (within * free @ others <= most + 1e-6).all():
            losses.append(np.abs(terms * free @ others - wanted).mean())
    return bool(min(losses, default=np.inf) < np.abs(terms @ factors - 1.0).mean() + FLAT_LOSS)
