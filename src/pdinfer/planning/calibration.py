"""A few factors over a prior, found from measured steps: what every step costs beside it, and how much slower it is.

The fit is robust: of all lines through two of the rows it is the one with the least mean |log(predicted / seen)|, where
a row counts for MOST_LOSS at most. Half of the rows are held out, and the error that is told is that on these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from pdinfer.bench.summary import Summary
from pdinfer.checks import clip, float_in, is_number, one_of
from pdinfer.errors import ConfigError
from pdinfer.execution.warm_up import WarmUp
from pdinfer.planning.simulation import StepRows
from pdinfer.planning.simulation.deployment import StepSeconds
from pdinfer.values import Value

MOST_LOSS = 2.0
MOST_ROWS = 200
"""More rows of a side are thinned out evenly by size: lines are tried through every two."""
LEAST_ROWS = 4
SCALES = (0.1, 100.0)
TOLERANCE = 0.25
"""How far halves may be apart, and held-out rows from what was predicted, in the median."""
FLAT_LOSS = 0.01
"""A factor that may be halved or doubled for less is not known."""


@attrs.frozen(kw_only=True)
class MeasuredStep(Value):
    """A step of a "prefill" or a "decode", and its seconds."""

    kind: str = attrs.field(validator=one_of("prefill", "decode"))
    rows: StepRows
    seconds: float = attrs.field(validator=float_in(0.0, 1e6), converter=float)


@attrs.frozen(kw_only=True)
class StepCost(Value):
    """The seconds of steps: `fixed_s` + `scale` * `prior(rows)`, and never less than the prior's own `floor_s`."""

    prior: StepSeconds
    fixed_s: float = 0.0
    scale: float = 1.0

    def __call__(self, rows: StepRows) -> Any:
        """Return the seconds of a step."""
        floor: Callable[[StepRows], Any] = getattr(self.prior, "floor_s", lambda _: 0.0)
        return np.maximum(floor(rows), self.fixed_s + self.scale * self.prior(rows))

    def over(self, prior: StepSeconds) -> StepCost:
        """Return the same factors over another prior, such as that of an engine of another size."""
        return attrs.evolve(self, prior=prior)


@attrs.frozen(kw_only=True)
class Cost(Value):
    """What steps of both sides cost. Errors are medians of |predicted / seen - 1| over the rows that were held out,
    None where a side had no rows and its prior is taken as it is. `flat` names factors that the rows do not tell,
    `at_bounds` those that are as small or as large as they may be."""

    prefill: StepCost
    decode: StepCost
    prefill_error: float | None
    decode_error: float | None
    flat: tuple[str, ...]
    at_bounds: tuple[str, ...]


Rows = MeasuredStep | WarmUp | Summary


def calibrate(rows: Iterable[Rows], *, prior: tuple[StepSeconds, StepSeconds], holdout: float = 0.5) -> Cost:
    """Fit `prior` = (prefill, decode), such as two rooflines, to what was measured.

    Rows are steps; warm-ups, of which the second of an engine is steady; and summaries of runs without drafts, which
    tell a decode step by TPOT and concurrency, and with one request at a time a prefill. Of each side `holdout` of the
    rows are kept for the error. Raises ConfigError where a side has fewer than 4 rows but some, where the fits of both
    parts disagree by more than a quarter, and where held-out rows are further from what is predicted: then rows are of
    different settings, or the prior has the wrong shape.
    """
    if not is_number(holdout) or not 0.1 <= holdout <= 0.9:
        raise ConfigError(f"holdout must be from 0.1 to 0.9, got {clip(holdout)}")
    steps = [step for row in rows for step in _steps_of(row)]
    if not steps:
        raise ConfigError("calibrate got no step of a prefill or a decode")
    sides, flat, at_bounds = [], list[str](), list[str]()
    for kind, of_side in zip(("prefill", "decode"), prior, strict=True):
        seen = [step for step in steps if step.kind == kind]
        cost, error = _fit(kind, of_side, seen, holdout) if seen else (StepCost(prior=of_side), None)
        sides.append((cost, error))
        bounds = {"fixed_s": (0.0,), "scale": SCALES}
        at_bounds += [f"{kind}.{name}" for name in bounds if seen and getattr(cost, name) in bounds[name]]
        flat += [f"{kind}.{name}" for name in bounds if not seen or _is_flat(cost, name, seen)]
    return Cost(
        prefill=sides[0][0],
        decode=sides[1][0],
        prefill_error=sides[0][1],
        decode_error=sides[1][1],
        flat=tuple(name for name in flat if name not in at_bounds),
        at_bounds=tuple(at_bounds),
    )


# -- rows -------------------------------------------------------------------------------------------------------------


def _steps_of(row: Rows) -> Iterator[MeasuredStep]:
    if isinstance(row, MeasuredStep):
        yield row
    elif isinstance(row, WarmUp):
        for step in row.steps:
            if step.kind == "prefill":
                size = step.size
                told = StepRows(1, size, size, size * (size + 1) // 2)
                yield MeasuredStep(kind="prefill", rows=told, seconds=step.seconds)
            elif step.kind == "decode":  # each sequence has one token in its pages
                told = StepRows(step.size, step.size, 2 * step.size, 2 * step.size)
                yield MeasuredStep(kind="decode", rows=told, seconds=step.seconds)
    elif isinstance(row, Summary):
        yield from _steps_of_summary(row)
    else:
        raise ConfigError(f"calibrate takes steps, warm-ups and summaries, got {clip(row)}")


def _steps_of_summary(summary: Summary) -> Iterator[MeasuredStep]:
    """Yield the mean step of a run's decodes, and the prefill of its mean prompt if no two were there at once."""
    found = {
        name: getattr(summary, name)
        for name in (
            *("mean_input_tokens", "mean_output_tokens", "concurrency", "mean_e2el_ms", "mean_ttft_ms"),
            "median_tpot_ms",
        )
    }
    if missing := [name for name, value in found.items() if not value]:
        raise ConfigError(f"a summary to calibrate from needs {', '.join(missing)}, which {summary.name!r} lacks")
    if (summary.accept_length or 1.0) != 1.0:
        raise ConfigError(f"the summary {summary.name!r} is of a run with drafts; give its steps as MeasuredStep")
    prompt, output = found["mean_input_tokens"], found["mean_output_tokens"]
    num_decodes = max(1, sum(engine.role == "decode" for engine in summary.engines))
    share = 1.0 - found["mean_ttft_ms"] / found["mean_e2el_ms"]
    running = max(1, round(found["concurrency"] * share / num_decodes))
    context = round(running * (prompt + output / 2))
    decode = StepRows(running, running, context, context)
    yield MeasuredStep(kind="decode", rows=decode, seconds=found["median_tpot_ms"] / 1e3)
    if found["concurrency"] <= 1.0 and not summary.cached_tokens:
        tokens = round(prompt)
        rows = StepRows(1, tokens, tokens, tokens * (tokens + 1) // 2)
        yield MeasuredStep(kind="prefill", rows=rows, seconds=found["mean_ttft_ms"] / 1e3)


# -- the fit ----------------------------------------------------------------------------------------------------------


def _fit(kind: str, prior: StepSeconds, seen: Sequence[MeasuredStep], holdout: float) -> tuple[StepCost, float]:
    """Return the factors of the rows that are not held out, and the error on those that are."""
    if len(seen) < LEAST_ROWS:
        raise ConfigError(f"calibrate needs at least {LEAST_ROWS} steps of a {kind}, got {len(seen)}")
    ordered = sorted(seen, key=lambda step: float(prior(step.rows)))
    held = [step for at, step in enumerate(ordered) if int((at + 1) * holdout) > int(at * holdout)]
    kept = [step for step in ordered if not any(step is other for other in held)]
    ours, theirs = (StepCost(prior=prior, **_factors(prior, part)) for part in (kept, held))
    apart = _median_off([float(theirs(step.rows)) for step in seen], [float(ours(step.rows)) for step in seen])
    if apart > TOLERANCE:
        raise ConfigError(
            f"the halves of the {kind} steps disagree: what follows from one is {apart:.0%} off the other in the "
            f"median; are all steps of one setting, and none of them first uses?"
        )
    error = _median_off([float(ours(step.rows)) for step in held], [step.seconds for step in held])
    if error > TOLERANCE:
        raise ConfigError(
            f"held-out {kind} steps are {error:.0%} off what is predicted in the median, more than {TOLERANCE:.0%}; "
            f"are all steps of one setting, and does the prior fit the engine?"
        )
    return ours, error


def _median_off(predicted: Sequence[float], seen: Sequence[float]) -> float:
    return float(np.median(np.abs(np.array(predicted) / np.array(seen) - 1.0)))


def _arrays(prior: StepSeconds, steps: Sequence[MeasuredStep]) -> tuple[np.ndarray, np.ndarray]:
    """Return the prior's seconds and those that were seen, of at most MOST_ROWS steps."""
    thinned = steps[:: math.ceil(len(steps) / MOST_ROWS)]
    return np.array([float(prior(step.rows)) for step in thinned]), np.array([step.seconds for step in thinned])


def _loss(fixed: Any, scale: Any, prior_s: np.ndarray, seen_s: np.ndarray) -> Any:
    """Return the mean |log(predicted / seen)| of each pair of factors."""
    predicted = np.asarray(fixed)[..., None] + np.asarray(scale)[..., None] * prior_s
    return np.minimum(np.abs(np.log(predicted / seen_s)), MOST_LOSS).mean(axis=-1)


def _factors(prior: StepSeconds, steps: Sequence[MeasuredStep]) -> dict[str, float]:
    """Return the best of the lines through two rows, or through one and a bound; of equals the one at a bound."""
    prior_s, seen_s = _arrays(prior, steps)
    first, second = np.triu_indices(len(seen_s), 1)
    run = prior_s[second] - prior_s[first]
    slopes = np.divide(seen_s[second] - seen_s[first], run, out=np.full(len(run), SCALES[0]), where=run > 0)
    every = np.arange(len(seen_s))
    at = np.concatenate([every, every, every, first])
    scale = np.concatenate([seen_s / prior_s, *(np.full(len(seen_s), bound) for bound in SCALES), slopes]).clip(*SCALES)
    fixed = np.maximum(0.0, seen_s[at] - scale * prior_s[at])
    fixed[: len(every)] = 0.0  # these begin at 0, but for rounding
    best = int(np.argmin(_loss(fixed, scale, prior_s, seen_s).round(12)))
    return {"fixed_s": float(fixed[best]), "scale": float(scale[best])}


def _is_flat(cost: StepCost, name: str, steps: Sequence[MeasuredStep]) -> bool:
    """Return whether half of a factor, or twice as much, does nearly as well with the other factor free."""
    prior_s, seen_s = _arrays(cost.prior, sorted(steps, key=lambda step: float(cost.prior(step.rows))))
    least = float(_loss(cost.fixed_s, cost.scale, prior_s, seen_s))
    losses = []
    for value in (getattr(cost, name) / 2, getattr(cost, name) * 2):
        if name == "fixed_s":
            scale = ((seen_s - value) / prior_s).clip(*SCALES)
            fixed = np.full(len(scale), value)
        else:
            fixed = np.maximum(0.0, seen_s - value * prior_s)
            scale = np.full(len(fixed), value)
        losses.append(float(_loss(fixed, scale, prior_s, seen_s).min()))
    return min(losses) < least + FLAT_LOSS
