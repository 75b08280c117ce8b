"""The highest rate that keeps an SLO, found by several runs."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs

from pdinfer.bench.summarize import interval
from pdinfer.bench.summary import Interval, Summary
from pdinfer.checks import clip, typed
from pdinfer.errors import ConfigError
from pdinfer.progress import Progress, telling
from pdinfer.values import Value

MIN_SEEDS = 3
ALONE, MEET = 0.1, 0.5
"""Requests in flight at a rate that is to show an SLO without load, and those from which it does not."""


@attrs.frozen(kw_only=True)
class Trial(Value):
    """One rate that was tried: its attainment over the seeds, and whether that keeps the target."""

    rate: float
    attainment: Interval
    is_met: bool
    num_seeds: int


@attrs.frozen(kw_only=True)
class Goodput(Value):
    """The highest rate that was found to keep the target, 0 if none did, and every trial on the way. `upper` is the
    lowest rate that did not keep it, None when every rate did. For a rate of 0, `reason` says whether a lower one may
    keep the target or none can; it is empty otherwise."""

    rate: float
    upper: float | None
    target: float
    trials: tuple[Trial, ...]
    reason: str = ""


@typed
def find_goodput(
    run_at: Callable[[float, int], Summary],
    low: float,
    high: float,
    *,
    target: float = 0.9,
    num_steps: int = 6,
    max_seeds: int = 6,
    progress: Progress = None,
) -> Goodput:
    """Bisect for the highest rate whose attainment is at least `target`, between `low` and `high`.

    `run_at(rate, seed)` returns the summary of one run with an SLO: of a Pairing, or of a simulation. Each rate is
    tried with seeds 0, 1 and 2, then with more, at most `max_seeds`, until the 95 % interval of the mean excludes the
    target; if none does, the mean decides. `high` is tried first, then `low`. When `low` does not keep the target and
    its requests met in flight, a rate is tried that is so low that they rarely do: an SLO that fails there fails at any
    rate, and of one that does not the rate is sought between both, in proportion. `progress(tried, rates)` is called
    after every rate; True draws a line on stderr. Raises ConfigError for bad bounds, and where `run_at` returns
    something else, or a summary whose attainment is none."""
    if not 0 < low < high < float("inf") or not 0 < target <= 1:
        raise ConfigError(
            f"find_goodput needs 0 < low < high and 0 < target <= 1, got {low:g}, {high:g} and {target:g}"
        )
    if num_steps < 1 or max_seeds < MIN_SEEDS:
        raise ConfigError(f"find_goodput needs num_steps >= 1 and max_seeds >= {MIN_SEEDS}")
    trials: list[Trial] = []

    def tried(rate: float) -> tuple[Trial, float | None]:
        found = _try(run_at, rate, target, max_seeds)
        trials.append(found[0])
        return found

    def found(rate: float, upper: float | None, reason: str = "") -> Goodput:
        tell(len(trials), len(trials))
        return Goodput(rate=rate, upper=upper, target=target, trials=tuple(trials), reason=reason)

    with telling(progress, "searching", "rates") as tell:
        if tried(high)[0].is_met:
            return found(high, None)
        tell(1, 2 + num_steps)
        trial, concurrency = tried(low)
        is_below = not trial.is_met
        if is_below and (alone := _alone_rate(low, concurrency)) < low:
            tell(2, 3 + num_steps)
            low, high = alone, low
            trial, concurrency = tried(low)
        if not trial.is_met:
            return found(0.0, trials[1].rate, _reason(trial, concurrency, target))
        for left in range(num_steps, 0, -1):
            tell(len(trials), len(trials) + left)
            middle = math.sqrt(low * high) if is_below else (low + high) / 2
            if tried(middle)[0].is_met:
                low = middle
            else:
                high = middle
        return found(low, high)


def _alone_rate(rate: float, concurrency: float | None) -> float:
    """Return a rate at which requests rarely meet, where so many are in flight at `rate`. By Little's law there are
    fewer in proportion to the rate, and by more than that where they waited for each other."""
    return rate if concurrency is None or concurrency <= ALONE else rate * ALONE / concurrency


def _reason(trial: Trial, concurrency: float | None, target: float) -> str:
    attained = (
        f"at {trial.rate:.3g} req/s {trial.attainment.mean:.3g} of the requests keep the SLO, and {target:g} should"
    )
    if concurrency is None:
        return f"{attained}; nothing says how many were in flight, so lower rates may: try a lower `low`"
    if concurrency > MEET:
        return f"{attained}; {concurrency:.3g} requests are in flight there, so lower rates may: try a lower `low`"
    return (
        f"the SLO cannot be met at any rate: {attained}, though requests rarely meet there; loosen a limit, send "
        "shorter requests, or make steps faster"
    )


def _try(
    run_at: Callable[[float, int], Summary], rate: float, target: float, max_seeds: int
) -> tuple[Trial, float | None]:
    """Return a trial, and the mean number of requests in flight over its runs if all say it."""
    attained: list[float] = []
    held: list[float] = []
    for seed in range(max_seeds):
        summary = run_at(rate, seed)
        if not isinstance(summary, Summary):
            raise ConfigError(f"run_at must return the Summary of a run, got {clip(summary)}")
        attainment = summary.attainment
        if attainment is None:
            raise ConfigError("the summary has no attainment: give the run an SLO")
        if not 0 <= attainment <= 1:
            raise ConfigError(f"the summary of {rate:g} req/s has an attainment of {attainment:g}; a share is 0 to 1")
        attained.append(attainment)
        held += [] if summary.concurrency is None else [summary.concurrency]
        found = interval(attained)
        if len(attained) >= MIN_SEEDS and (found.low > target or found.high < target):
            break
    trial = Trial(rate=rate, attainment=found, is_met=found.mean >= target, num_seeds=len(attained))
    return trial, sum(held) / len(held) if len(held) == len(attained) else None
