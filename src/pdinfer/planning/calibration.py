"""A few factors over a prior, found from what was measured: what every step costs beside it, and how much slower it is.

What is seen is a sum of factors with known weights, so the fit is linear. It is robust: of all factors that are not
negative it has the least mean |predicted / seen - 1|, in which a row that took too long counts for 1 at most. Half of
the rows are held out, and the errors that are told are those on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, combinations
from typing import Any

import attrs
import numpy as np

from pdinfer.bench.summary import Summary
from pdinfer.checks import as_float, clip, float_in, int_in, is_number, one_of, typed
from pdinfer.errors import ConfigError
from pdinfer.execution.warm_up import WarmUp
from pdinfer.planning.simulation import StepRows
from pdinfer.planning.simulation.deployment import StepSeconds
from pdinfer.planning.simulation.deployment import seconds as step_seconds
from pdinfer.stats import DecodeLoad, PairingStats, PrefillLoad
from pdinfer.types import PeerAddress
from pdinfer.values import Value

FACTORS = ("prefill.fixed_s", "prefill.scale", "decode.fixed_s", "decode.scale")
LEAST_ROWS = 4
TOLERANCE = 0.25
"""How far halves may be apart, and held-out rows from what was predicted, in the median."""
FLAT_LOSS = 0.01
"""A factor that may be halved or doubled for less is not known."""
ROUNDS = 80
SIDES = ("prefill", "decode")
_COUNT = int_in(1, 1 << 40)
_SECONDS = float_in(0.0, 1e6)


def _has_sizes(_instance: Any, _attribute: attrs.Attribute[Any], rows: object) -> None:
    sizes = attrs.astuple(rows) if isinstance(rows, StepRows) else (None,)
    if not all(isinstance(size, int | float | np.integer | np.floating) and 1 <= size < math.inf for size in sizes):
        raise ConfigError(f"rows must be StepRows of numbers of at least 1, got {clip(rows)}")


@attrs.frozen(kw_only=True)
class MeasuredStep(Value):
    """A step of a "prefill" or a "decode", and its seconds."""

    kind: str = attrs.field(validator=one_of(*SIDES))
    rows: StepRows = attrs.field(validator=_has_sizes)
    seconds: float = attrs.field(validator=_SECONDS, converter=as_float)


@attrs.frozen(kw_only=True)
class Burst(Value):
    """A burst of equal requests at an engine that prefills and decodes in turn, and when the last of them had its first
    token.

    The engine has `groups` attention groups, and together these have `slots` sequences and `kv_tokens` tokens of KV.
    Requests come in waves of as many as both hold; each wave is prefilled at once, and ends before the next.
    """

    num_requests: int = attrs.field(validator=_COUNT)
    prompt_tokens: int = attrs.field(validator=_COUNT)
    output_tokens: int = attrs.field(validator=_COUNT)
    last_ttft_s: float = attrs.field(validator=_SECONDS, converter=as_float)
    slots: int = attrs.field(validator=_COUNT)
    kv_tokens: int = attrs.field(validator=_COUNT)
    groups: int = attrs.field(default=1, validator=_COUNT)


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
    by their kind: "prefill", "decode" or "burst". `flat` names factors that the rows do not tell; a side without rows
    has its prior as it is. `at_bounds` names those that would be negative if they might, and are 0."""

    prefill: StepCost
    decode: StepCost
    errors: Mapping[str, float]
    flat: tuple[str, ...]
    at_bounds: tuple[str, ...]


Rows = MeasuredStep | Burst | WarmUp | Summary | PairingStats


@attrs.frozen
class _Row:
    """What was seen took `seconds`: the sum of FACTORS times `terms`, and at least `floor_s`."""

    kind: str
    terms: np.ndarray
    floor_s: float
    seconds: float


@typed
def calibrate(rows: Iterable[Rows], *, prior: tuple[StepSeconds, StepSeconds], holdout: float = 0.5) -> Cost:
    """Fit `prior` = (prefill, decode), such as two rooflines, to what was measured.

    Rows are steps; bursts; warm-ups, of which the second of an engine is steady; summaries of runs without drafts,
    which tell a decode step by TPOT and concurrency, and with one request at a time a prefill; and the stats of one
    Pairing after each of its steps, which tell the steps of its engines (`_of_stats`). Of each kind `holdout` of the
    rows are kept for the error. Raises ConfigError where there are fewer than 4 rows of a kind but some or
    none of them would be held out, where a prior gives no seconds, where the fits of both parts disagree by more than a
    quarter, and where held-out rows are further from what is predicted: then rows are of different settings, or the
    prior has the wrong shape.
    """
    if not is_number(holdout) or not 0.1 <= holdout <= 0.9:
        raise ConfigError(f"holdout must be from 0.1 to 0.9, got {clip(holdout)}")
    if len(prior) != 2 or not all(map(callable, prior)):
        raise ConfigError(f"prior must be two functions, of prefill and of decode, got {clip(prior)}")
    measured = list(rows)
    measured += _of_stats([row for row in measured if isinstance(row, PairingStats)])
    found = sorted((seen for row in measured for seen in _seen(row, prior)), key=lambda row: (row.kind, sum(row.terms)))
    if not found:
        raise ConfigError("calibrate got no step and no burst")
    kept, held, kinds = list[_Row](), list[_Row](), sorted({row.kind for row in found})
    for kind in kinds:
        of_kind = [row for row in found if row.kind == kind]
        if len(of_kind) < LEAST_ROWS:
            raise ConfigError(f"calibrate needs at least {LEAST_ROWS} rows of the kind {kind}, got {len(of_kind)}")
        if len(of_kind) * holdout < 1:
            raise ConfigError(f"holdout={holdout:g} keeps none of {len(of_kind)} {kind} rows for the error; raise it")
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


# -- rows -------------------------------------------------------------------------------------------------------------


def _seen(row: Rows, prior: tuple[StepSeconds, StepSeconds]) -> Iterator[_Row]:
    if isinstance(row, MeasuredStep):
        at = SIDES.index(row.kind)
        yield _row(row.kind, [(at, 1, row.rows)], row.seconds, prior)
    elif isinstance(row, Burst):
        yield _of_burst(row, prior)
    elif isinstance(row, WarmUp | Summary):
        for step in _of_warm_up(row) if isinstance(row, WarmUp) else _of_summary(row):
            yield from _seen(step, prior)
    elif not isinstance(row, PairingStats):
        raise ConfigError(f"calibrate takes steps, bursts, warm-ups, summaries and stats, got {clip(row)}")


def _row(
    kind: str, steps: Sequence[tuple[int, int, StepRows]], seconds: float, prior: tuple[StepSeconds, StepSeconds]
) -> _Row:
    """Return a row of steps, each the number of its side, how often it ran, and its rows."""
    terms, floor_s = np.zeros(len(FACTORS)), 0.0
    for side, count, rows in steps:
        step_s = step_seconds(f"the prior of {SIDES[side]}", prior[side], rows)
        terms[2 * side : 2 * side + 2] += count, count * step_s
        floor_s += count * float(_floor_s(prior[side], rows))
    return _Row(kind, terms, floor_s, seconds)


def _prompt(num_tokens: int, count: int = 1) -> StepRows:
    """Return a prefill step of so many whole prompts."""
    return StepRows(count, count * num_tokens, count * num_tokens, count * num_tokens * (num_tokens + 1) // 2)


def _of_burst(burst: Burst, prior: tuple[StepSeconds, StepSeconds]) -> _Row:
    """Return the steps up to the last first token: a prefill of each wave, and the decode of all waves but the last."""
    prompt, output = burst.prompt_tokens, burst.output_tokens
    most = min(burst.slots, burst.kv_tokens // (prompt + output))
    if most < 1:
        raise ConfigError(f"kv_tokens {burst.kv_tokens} hold no request of {prompt} + {output} tokens")
    num_before = (burst.num_requests - 1) // most
    full, last = (-(-count // burst.groups) for count in (most, burst.num_requests - num_before * most))
    context = full * (prompt + output // 2)
    steps = [
        (0, num_before, _prompt(prompt, full)),
        (0, 1, _prompt(prompt, last)),
        (1, num_before * (output - 1), StepRows(full, full, context, context)),
    ]
    return _row("burst", steps, burst.last_ttft_s, prior)


def _of_warm_up(warm_up: WarmUp) -> Iterator[MeasuredStep]:
    """Yield its steps; in those of decode each sequence has one token in its pages."""
    for step in warm_up.steps:
        size = step.size
        told = {"prefill": _prompt(size), "decode": StepRows(size, size, 2 * size, 2 * size)}
        if step.kind in told:
            yield MeasuredStep(kind=step.kind, rows=told[step.kind], seconds=step.seconds)


def _of_summary(summary: Summary) -> Iterator[MeasuredStep]:
    """Yield the mean step of a run's decodes, and the prefill of its mean prompt if no two were there at once."""
    names = ("mean_input_tokens", "mean_output_tokens", "concurrency", "mean_e2el_ms", "mean_ttft_ms", "median_tpot_ms")
    found = {name: getattr(summary, name) for name in names}
    if missing := [name for name, value in found.items() if not value]:
        raise ConfigError(f"a summary to calibrate from needs {', '.join(missing)}, which {summary.name!r} lacks")
    if (summary.accept_length or 1.0) != 1.0:
        raise ConfigError(f"the summary {summary.name!r} is of a run with drafts; give its steps as MeasuredStep")
    prompt = round(found["mean_input_tokens"])
    num_decodes = max(1, sum(engine.role == "decode" for engine in summary.engines))
    share = 1.0 - found["mean_ttft_ms"] / found["mean_e2el_ms"]
    running = max(1, round(found["concurrency"] * share / num_decodes))
    context = round(running * (prompt + found["mean_output_tokens"] / 2))
    decode = StepRows(running, running, context, context)
    yield MeasuredStep(kind="decode", rows=decode, seconds=found["median_tpot_ms"] / 1e3)
    if found["concurrency"] <= 1.0 and not summary.cached_tokens:
        yield MeasuredStep(kind="prefill", rows=_prompt(prompt), seconds=found["mean_ttft_ms"] / 1e3)


def _of_stats(told: Sequence[PairingStats]) -> Iterator[MeasuredStep]:
    """Yield the steps between the stats of one Pairing, taken after each of its steps.

    What an engine has computed since the stats before is one step, unless it is more than one can have: the chunk of a
    prefill, or all requests of a decode. A prefill step is taken to be of one prompt from its first token, since loads
    do not tell more. Steps with drafts, and those of an engine that was not there before, are left out."""
    before: dict[PeerAddress, PrefillLoad | DecodeLoad] = {}
    for stats in told:
        for load in stats.loads:
            known = before.get(load.address)
            if known is not None and load.busy_s > known.busy_s:
                count, took_s = load.num_tokens - known.num_tokens, load.busy_s - known.busy_s
                if isinstance(load, PrefillLoad) and 0 < count <= (load.cost.chunk_tokens or count):
                    yield MeasuredStep(kind="prefill", rows=_prompt(count), seconds=took_s)
                elif isinstance(load, DecodeLoad) and isinstance(known, DecodeLoad):
                    most = known.num_running_requests + known.num_granted_requests + known.num_waiting_requests
                    if 0 < count <= most and load.num_draft_tokens == known.num_draft_tokens:
                        context = max(count, known.num_running_tokens)
                        yield MeasuredStep(kind="decode", rows=StepRows(count, count, context, context), seconds=took_s)
            before[load.address] = load


# -- the fit ----------------------------------------------------------------------------------------------------------


def _terms(rows: Sequence[_Row]) -> np.ndarray:
    """Return what FACTORS are multiplied with, each over the seconds that were seen: [rows, 4]."""
    return np.array([row.terms / row.seconds for row in rows])


def _used(rows: Sequence[_Row]) -> np.ndarray:
    """Return which factors any row has."""
    return np.asarray(_terms(rows).any(axis=0))


def _fitted(rows: Sequence[_Row]) -> np.ndarray:
    """Return the best factors, 0 for those that no row has."""
    return _least(_terms(rows), np.ones(len(rows)))


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
    """Return factors >= 0 with the least squared error. There are few, so every set that may be above 0 is tried."""
    used = [at for at in range(terms.shape[1]) if terms[:, at].any()]
    best, least = np.zeros(terms.shape[1]), float(wanted @ wanted)
    rounding = 1e-12 * least
    for some in chain.from_iterable(combinations(used, count) for count in range(1, len(used) + 1)):
        of_some = terms[:, some]
        solved = np.linalg.lstsq(of_some, wanted, rcond=1e-9)[0]
        error = float(((of_some @ solved - wanted) ** 2).sum())
        if solved.min() >= 0 and error < least - rounding:
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
    terms, losses = _terms(rows), []
    for value in (factors[at] / 2, factors[at] * 2):
        rest, wanted = terms.copy(), 1.0 - value * terms[:, at]
        rest[:, at] = 0.0
        losses.append(np.abs(rest @ _least(rest, wanted) - wanted).mean())
    return bool(min(losses) < np.abs(terms @ factors - 1.0).mean() + FLAT_LOSS)
