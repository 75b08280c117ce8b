"""The highest rate that keeps an SLO, found by several runs."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from pdinfer.bench.summarize import interval
from pdinfer.bench.summary import Interval, Summary
from pdinfer.checks import typed
from pdinfer.errors import ConfigError
from pdinfer.progress import Progress, telling
from pdinfer.values import Value

MIN_SEEDS = 3


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
    lowest rate that did not keep it, None when every rate did."""

    rate: float
    upper: float | None
    target: float
    trials: tuple[Trial, ...]


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
    target; if none does, the mean decides. `high` is tried first, then `low`. `progress(tried, rates)` is
    called after every rate; True draws a line on stderr. Raises ConfigError for bad bounds and
    for a summary without attainment.
    """
    if not 0 < low < high < float("inf") or not 0 < target <= 1:
        raise ConfigError(
            f"find_goodput needs 0 < low < high and 0 < target <= 1, got {low:g}, {high:g} and {target:g}"
        )
    if num_steps < 1 or max_seeds < MIN_SEEDS:
        raise ConfigError(f"find_goodput needs num_steps >= 1 and max_seeds >= {MIN_SEEDS}")
    trials: list[Trial] = []

    def is_met(rate: float) -> bool:
        trials.append(_try(run_at, rate, target, max_seeds))
        met = trials[-1].is_met
        is_last = met if len(trials) == 1 else len(trials) == 2 and not met
        tell(len(trials), len(trials) if is_last else 2 + num_steps)
        return met

    with telling(progress, "searching", "rates") as tell:
        if is_met(high):
            return Goodput(rate=high, upper=None, target=target, trials=tuple(trials))
        if not is_met(low):
            return Goodput(rate=0.0, upper=low, target=target, trials=tuple(trials))
        for _ in range(num_steps):
            middle = (low + high) / 2
            if is_met(middle):
                low = middle
            else:
                high = middle
    return Goodput(rate=low, upper=high, target=target, trials=tuple(trials))


def _try(run_at: Callable[[float, int], Summary], rate: float, target: float, max_seeds: int) -> Trial:
    attained: list[float] = []
    for seed in range(max_seeds):
        attainment = run_at(rate, seed).attainment
        if attainment is None:
            raise ConfigError("the summary has no attainment: give the run an SLO")
        attained.append(attainment)
        found = interval(attained)
        if len(attained) >= MIN_SEEDS and (found.low > target or found.high < target):
            break
    return Trial(rate=rate, attainment=found, is_met=found.mean >= target, num_seeds=len(attained))
