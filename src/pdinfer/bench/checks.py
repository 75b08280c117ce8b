"""Ten checks of a summary's honesty. Most have caught a published figure that was none.

    identities      rate x time = count
    decode floor    no client sees tokens faster than an engine makes them
    single token    one token per request has no output rate
    Little          requests in flight = rate x time in the system
    delivery        the client reads tokens when they are there
    monotone        more tokens do not arrive sooner
    repeats         figures that scatter too much to be reported
    failures        percentiles leave out what failed
    order           percentiles rise, and no mean is above the greatest value
    bounds          no share is above 1, no request takes longer than its parts or than the run

A check whose fields are not there is left out. `compare` refuses what repeats cannot distinguish."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from pdinfer.bench.summary import Finding, Summary
from pdinfer.checks import typed

IDENTITY_TOLERANCE = 0.005
FLOOR_SHARE = 0.9
"""A step may be a little faster than the fastest that was recorded."""
LEAST_TOKENS = 16
"""The tokens of a request from which its mean step can be distinguished from one late read."""
LITTLE_TOLERANCE = 0.1
LITTLE_FACTOR = 3.0
"""In an open loop, `concurrency` is the mean while requests were sent, and rate x E2E that of the whole run. They
differ by chance, and by what is in flight after the last send: at most all requests."""
LEAST_REQUESTS = 20
"""The requests of an open loop whose number in flight is a mean of many."""
DELIVERY_SHARE = 0.05
DELIVERY_S = 0.01
"""Later than this, too: below it, P99 of delivery is what one turn of a host's loop takes."""
FALLS_BY = 1.3
FALLS_BY_S = 1.0
"""The excess time of the smaller of two bursts from which it counts: by this factor, and by more than one round of
prefill, which costs 0.3 to 2 s where experts are spread over nodes."""
MOST_CV = 0.25
FAILED_SHARE = 0.01
IMPOSSIBLE = frozenset({"Little", "order", "bounds"})
"""What no run shows, however it went."""
ROUNDED = 1 + 1e-3
"""How far printed figures may be rounded."""


@typed
def check(summary: Summary, beside: Sequence[Summary] = ()) -> tuple[Finding, ...]:
    """Return what is wrong with a summary. `beside` are other runs of the same deployment (equal `name`), which
    `monotone` compares it with."""
    return (
        *_failures(summary),
        *_identities(summary),
        *_single_token(summary),
        *_decode_floor(summary),
        *_little(summary),
        *_delivery(summary),
        *_monotone(summary, beside),
        *_repeats(summary),
        *_order(summary),
        *_bounds(summary),
    )


def _identities(run: Summary) -> Iterator[Finding]:
    duration_s = run.duration_s
    output_s = duration_s if run.output_duration_s is None else run.output_duration_s
    num_tokens = (run.total_input_tokens or 0) + (run.total_output_tokens or 0)
    rows = (
        ("request_throughput", run.request_throughput, duration_s, run.completed, 1),
        ("input_throughput", run.input_throughput, run.input_duration_s or duration_s, run.total_input_tokens, 1),
        ("output_throughput", run.output_throughput, output_s, run.total_output_tokens, 2),
        ("total_token_throughput", run.total_token_throughput, duration_s, num_tokens, 1),
    )
    for name, rate, seconds, count, num_times in rows:
        if rate is None or seconds is None or not count or run.num_repeats > 1:
            continue
        if name == "output_throughput" and run.max_output_tokens == 1:
            continue
        rounding = num_times * run.time_resolution_ms / 2e3 / seconds if seconds > 0 else 0.0
        if seconds <= 0 or abs(rate * seconds / count - 1) > IDENTITY_TOLERANCE + rounding:
            yield Finding(
                check="identities",
                expected=f"{name} x seconds = {count}",
                found=f"{rate:g} x {seconds:g} s = {rate * seconds:g}",
                advice="do not use the rate: compute it from counts and times that belong together",
            )


def _decode_floor(run: Summary) -> Iterator[Finding]:
    fastest_ms = run.fastest_step_ms
    seen_ms = run.median_tpot_ms if run.min_tpot_ms is None else run.min_tpot_ms
    if fastest_ms is None or seen_ms is None or run.max_output_tokens == 1:
        return
    floor_ms = FLOOR_SHARE * fastest_ms - (run.max_step_ms or 0.0) / (LEAST_TOKENS - 1)
    if seen_ms < floor_ms:
        yield Finding(
            check="decode floor",
            expected=f"at least {floor_ms:.3g} ms per token after the first, {FLOOR_SHARE:g} of the fastest step",
            found=f"{seen_ms:.3g} ms",
            advice="the client saw first tokens late: use E2E, and no output rate or TTFT of this run",
        )


def _single_token(run: Summary) -> Iterator[Finding]:
    rate = run.output_throughput or run.peak_output_throughput
    if run.max_output_tokens == 1 and rate is not None:
        yield Finding(
            check="single token",
            expected="no output rate when every request has one output token",
            found=f"{rate:g} tok/s",
            advice="use the input rate and TTFT; ask for more tokens to measure decode",
        )


def _little(run: Summary) -> Iterator[Finding]:
    asked, held = run.max_concurrency, run.concurrency
    if held is None and run.request_throughput is not None and run.mean_e2el_ms is not None:
        held = run.request_throughput * run.mean_e2el_ms / 1e3
    if run.mode == "open_loop":
        yield from _open_little(run)
    if run.mode != "closed_loop" or not asked or held is None:
        return
    if abs(held / asked - 1) > LITTLE_TOLERANCE:
        yield Finding(
            check="Little",
            expected=f"{asked:g} requests in flight, as asked for",
            found=f"{held:.4g}",
            advice=f"report this run as concurrency {held:.4g}, or find what keeps the client from sending",
        )


def _open_little(run: Summary) -> Iterator[Finding]:
    held, rate, e2e_ms, sent = run.concurrency, run.request_throughput, run.mean_e2el_ms, run.num_requests
    if not held or not rate or not e2e_ms or sent < LEAST_REQUESTS or run.failed_share > FAILED_SHARE:
        return
    taken = rate * (e2e_ms - (run.mean_slip_ms or 0.0)) / 1e3
    offered = 1.0  # the share of the run in which requests were sent
    if run.request_rate and run.duration_s:
        offered = min(1.0, (sent - 1) / run.request_rate / run.duration_s)
    least, most = held * offered / LITTLE_FACTOR, held * LITTLE_FACTOR + sent * (1.0 - offered)
    if not least <= taken <= most:
        yield Finding(
            check="Little",
            expected=f"rate x mean E2E from {least:.4g} to {most:.4g}, since {held:.4g} requests were in flight",
            found=f"{rate:.4g} x {e2e_ms / 1e3:.4g} s = {taken:.4g}",
            advice="one of the three is of another run or in another unit: use none of them",
        )


def _delivery(run: Summary) -> Iterator[Finding]:
    late_ms, ttft_ms = run.p99_delivery_ms, run.p99_ttft_ms
    if late_ms is None or ttft_ms is None:
        return
    most_ms = max(DELIVERY_SHARE * ttft_ms, DELIVERY_S * 1e3) + (run.max_step_ms or 0.0)
    if late_ms > most_ms:
        yield Finding(
            check="delivery",
            expected=f"tokens read within {most_ms:.3g} ms of being made (P99), about 5 % of P99 TTFT",
            found=f"{late_ms:.3g} ms",
            advice="the client is the bottleneck: step more often, or give the client a process of its own",
        )


def _monotone(run: Summary, beside: Sequence[Summary]) -> Iterator[Finding]:
    tokens, ttft_ms = run.total_input_tokens, run.max_ttft_ms
    if run.mode != "burst" or not tokens or ttft_ms is None:
        return
    for other in beside:
        if other.mode != run.mode or other.name != run.name or other.max_ttft_ms is None:
            continue
        longer = other.total_input_tokens or 0
        most_ms = max(FALLS_BY * other.max_ttft_ms, other.max_ttft_ms + FALLS_BY_S * 1e3)
        if longer >= 2 * tokens and ttft_ms > most_ms:
            yield Finding(
                check="monotone",
                expected=f"the last first token of {tokens} tokens within {most_ms / 1e3:.3g} s, since {longer} took "
                f"{other.max_ttft_ms / 1e3:.3g} s",
                found=f"{ttft_ms / 1e3:.3g} s",
                advice="something stalled, such as a shape that was not warm: warm up and measure again",
            )
            return


def _repeats(run: Summary) -> Iterator[Finding]:
    for name, interval in run.intervals.items():
        if interval.cv is not None and interval.cv > MOST_CV and name in ("request_goodput", "mean_ttft_ms"):
            yield Finding(
                check="repeats",
                expected=f"{name} within a CV of {MOST_CV:.0%} over {run.num_repeats} repeats",
                found=f"CV {interval.cv:.0%}, 95 % interval {interval.low:.4g} to {interval.high:.4g}",
                advice="find what changes between runs, or repeat more often, before you compare",
            )


def _failures(run: Summary) -> Iterator[Finding]:
    if run.failed_share > FAILED_SHARE:
        yield Finding(
            check="failures",
            expected=f"at most {FAILED_SHARE:.0%} of the requests without an answer",
            found=f"{run.failed + run.unfinished} of {run.num_requests}"
            + "".join(f"; {count} refused: {reason}" for reason, count in run.refusals.items()),
            advice="percentiles leave these requests out: read them as censored, and use attainment",
        )


def _order(run: Summary) -> Iterator[Finding]:
    for metric in ("ttft", "tpot", "itl", "e2el", "slip", "delivery"):
        rising = _known(run, *(f"{part}_{metric}_ms" for part in ("min", "median", "p90", "p95", "p99", "max")))
        means = _known(run, f"mean_{metric}_ms", f"max_{metric}_ms")
        if metric == "tpot":
            rising = [(name, value) for name, value in rising if name != "min_tpot_ms"]  # is of long requests only
        for (low, lower), (high, higher) in [*pairwise(rising), *pairwise(means)]:
            if lower > higher * ROUNDED + run.time_resolution_ms:
                yield Finding(
                    check="order",
                    expected=f"{low} at most {high}",
                    found=f"{lower:g} and {higher:g} ms",
                    advice="columns were mixed up, or are of different runs: use neither figure",
                )


def _known(run: Summary, *names: str) -> list[tuple[str, float]]:
    """Return the figures that are there. Of repeats those count that are means over all of them."""
    values = ((name, getattr(run, name, None)) for name in names if run.num_repeats == 1 or name in run.intervals)
    return [(name, value) for name, value in values if value is not None]


def _bounds(run: Summary) -> Iterator[Finding]:
    for name, value, low, high in _bounded(run):
        if not low <= value * ROUNDED or not value <= high * ROUNDED:
            yield Finding(
                check="bounds",
                expected=f"{name} from {low:.4g} to {high:.4g}",
                found=f"{value:.4g}",
                advice="it cannot be so: look for a unit, a division or a column that is wrong",
            )


def _bounded(run: Summary) -> Iterator[tuple[str, float, float, float]]:
    """Yield figures with what they are at least and at most."""
    rounded_ms = run.time_resolution_ms
    shares = [("attainment", run.attainment), *((f"share of {stage.name}", stage.share) for stage in run.stages)]
    for use in run.engines:
        shares += [(f"{part} of {use.name}", getattr(use, part)) for part in ("mean_slots", "max_slots", "max_pages")]
    yield from ((name, share, 0.0, 1.0) for name, share in shares if share is not None)
    for name, good, rate in (
        ("request_goodput", run.request_goodput, run.request_throughput),
        ("token_goodput", run.token_goodput, run.output_throughput),
    ):
        if good is not None and rate is not None:
            yield name, good, 0.0, rate
    e2e_ms, ttft_ms, tpot_ms, num_tokens = run.mean_e2el_ms, run.mean_ttft_ms, run.max_tpot_ms, run.mean_output_tokens
    if e2e_ms is None or run.num_repeats > 1:
        return
    if run.duration_s is not None:
        yield "mean_e2el_ms", e2e_ms, 0.0, run.duration_s * 1e3 + rounded_ms
    if ttft_ms is not None:
        longest_ms = (
            ttft_ms + tpot_ms * (num_tokens - 1) if tpot_ms is not None and num_tokens is not None else math.inf
        )
        yield "mean_e2el_ms", e2e_ms, ttft_ms - rounded_ms, longest_ms + rounded_ms
