"""What is measured of engines, and of which steps it consists: `calibrate` finds what these cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np

from pdinfer.bench.summary import Summary
from pdinfer.checks import as_float, clip, float_in, int_in, one_of
from pdinfer.errors import ConfigError
from pdinfer.execution.warm_up import WarmUp
from pdinfer.planning.simulation import StepRows
from pdinfer.stats import DecodeLoad, PairingStats, PrefillLoad
from pdinfer.types import PeerAddress
from pdinfer.values import Value

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
    Requests come in waves of as many as both hold; each wave is prefilled at once, and ends before the next."""

    num_requests: int = attrs.field(validator=_COUNT)
    prompt_tokens: int = attrs.field(validator=_COUNT)
    output_tokens: int = attrs.field(validator=_COUNT)
    last_ttft_s: float = attrs.field(validator=_SECONDS, converter=as_float)
    slots: int = attrs.field(validator=_COUNT)
    kv_tokens: int = attrs.field(validator=_COUNT)
    groups: int = attrs.field(default=1, validator=_COUNT)


@attrs.frozen(kw_only=True)
class ClosedLoop(Value):
    """A run in which `concurrency` clients sent equal requests, each the next one when its last had ended, and how long
    all `num_requests` took.

    Each of `prefills` engines computes at most `chunk_tokens` in a step and has `prefill_groups` attention groups; all
    decodes together have `decode_groups`. Clients begin at once, and wait for each other's first prompts. After that
    they are as far apart as prefills set them, so a prompt has its step when it comes. Where prefills are always busy
    it waits longer, which `simulate` knows and this does not; but no prefill is busy for longer than its run took.
    Raises ConfigError for fewer requests than clients."""

    concurrency: int = attrs.field(validator=_COUNT)
    num_requests: int = attrs.field(validator=_COUNT)
    prompt_tokens: int = attrs.field(validator=_COUNT)
    output_tokens: int = attrs.field(validator=_COUNT)
    duration_s: float = attrs.field(validator=_SECONDS, converter=as_float)
    chunk_tokens: int = attrs.field(validator=_COUNT)
    prefills: int = attrs.field(default=1, validator=_COUNT)
    prefill_groups: int = attrs.field(default=1, validator=_COUNT)
    decode_groups: int = attrs.field(default=1, validator=_COUNT)

    def __attrs_post_init__(self) -> None:
        if self.num_requests < self.concurrency:
            raise ConfigError(
                f"{self.concurrency} clients sent {self.num_requests} requests: concurrency is that of clients that "
                f"sent some, at most {self.num_requests}"
            )


Rows = MeasuredStep | Burst | ClosedLoop | WarmUp | Summary | PairingStats


class Steps(NamedTuple):
    """Steps of equal rows, on the side with this number in SIDES, and how often they ran."""

    side: int
    times: float
    rows: StepRows


@attrs.frozen
class Seen:
    """Something that took `seconds`, and the steps that it consists of. Things of one kind are compared. Steps `within`
    it took no longer: those of an engine that may have had pauses."""

    kind: str
    steps: tuple[Steps, ...]
    seconds: float
    within: tuple[Steps, ...] = ()


def seen(measured: Iterable[Rows]) -> Iterator[Seen]:
    """Yield what was seen. Raise ConfigError for a row of another kind, or one that lacks something."""
    rows = list(measured)
    for row in rows:
        if isinstance(row, Burst):
            yield of_burst(row)
        elif isinstance(row, ClosedLoop):
            yield of_closed_loop(row)
        elif not isinstance(row, PairingStats):
            yield from (_together([step]) for step in _of_run(row))
    told = list(_of_stats([row for row in rows if isinstance(row, PairingStats)]))
    for kind in SIDES:
        yield from _neighbours([step for step in told if step.kind == kind])


def _together(steps: Sequence[MeasuredStep]) -> Seen:
    """Return steps of one kind, one after another."""
    side = SIDES.index(steps[0].kind)
    return Seen(steps[0].kind, tuple(Steps(side, 1, step.rows) for step in steps), sum(step.seconds for step in steps))


def _neighbours(steps: list[MeasuredStep]) -> Iterator[Seen]:
    """Yield steps of one kind, those of about equal rows together: sqrt(n)/2 of n.

    A step may take twice as long beside a busy process, and latencies follow from means. The fit takes the median of
    single steps; the longer a row, the nearer are both. Fewer rows tell less of how steps grow."""
    steps.sort(key=lambda step: (step.rows.num_tokens, step.rows.num_pairs))
    count = max(1, math.isqrt(len(steps) // 4))
    yield from (_together(steps[at : at + count]) for at in range(0, len(steps), count))


def _of_run(row: MeasuredStep | WarmUp | Summary) -> Iterable[MeasuredStep]:
    if isinstance(row, WarmUp):
        return _of_warm_up(row)
    if isinstance(row, Summary):
        return _of_summary(row)
    if not isinstance(row, MeasuredStep):
        raise ConfigError(
            f"calibrate takes steps, bursts, closed loops, warm-ups, summaries and stats, got {clip(row)}"
        )
    return [row]


def _prompt(num_tokens: int, count: int = 1) -> StepRows:
    """Return a prefill step of so many whole prompts."""
    return StepRows(count, count * num_tokens, count * num_tokens, count * num_tokens * (num_tokens + 1) // 2)


def of_burst(burst: Burst) -> Seen:
    """Return the steps up to the last first token: a prefill of each wave, and the decode of all waves but the last."""
    prompt, output = burst.prompt_tokens, burst.output_tokens
    most = min(burst.slots, burst.kv_tokens // (prompt + output))
    if most < 1:
        raise ConfigError(f"kv_tokens {burst.kv_tokens} hold no request of {prompt} + {output} tokens")
    num_before = (burst.num_requests - 1) // most
    full, last = (-(-count // burst.groups) for count in (most, burst.num_requests - num_before * most))
    context = full * (prompt + output // 2)
    steps = (
        Steps(0, num_before, _prompt(prompt, full)),
        Steps(0, 1, _prompt(prompt, last)),
        Steps(1, num_before * (output - 1), StepRows(full, full, context, context)),
    )
    return Seen("burst", steps, burst.last_ttft_s)


def of_closed_loop(loop: ClosedLoop) -> Seen:
    """Return the steps that a client waits for: those until the last of the first prompts is computed, one for each of
    its other prompts, and those of its answers. A prefill computes its share of all prompts within that, at best in
    full steps. Rows are means over groups: there may be fewer clients than groups."""
    prompt, output, waves = loop.prompt_tokens, loop.output_tokens, loop.num_requests / loop.concurrency
    first = -(-loop.concurrency // loop.prefills) * prompt
    num_full = loop.num_requests * prompt / loop.prefills / loop.chunk_tokens

    def chunk(num_tokens: int) -> StepRows:
        """Return a prefill step of so many tokens."""
        each = num_tokens / loop.prefill_groups
        return StepRows(each / prompt, each, each, each * (prompt + 1) / 2)

    running = loop.concurrency / loop.decode_groups
    context = running * (prompt + output / 2)
    steps = (
        Steps(0, -(-first // loop.chunk_tokens) + waves - 1, chunk(min(first, loop.chunk_tokens))),
        Steps(1, waves * (output - 1), StepRows(running, running, context, context)),
    )
    return Seen("closed loop", steps, loop.duration_s, within=(Steps(0, num_full, chunk(loop.chunk_tokens)),))


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
