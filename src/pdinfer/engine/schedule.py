"""Pure functions: who has the next turn, what runs in a step, and who gets pages. No engine, no tensor, no clock."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from typing import TypeVar

from pdinfer.errors import ConfigError

T = TypeVar("T")

PATIENCE_S = 30.0
"""How long a request without a deadline, or with a later one, may be overtaken by urgent ones of its priority."""
OLDEST_EVERY = 8
"""Of so many turns one is for who has waited longest, whatever its priority, once that is more than PATIENCE_S."""
RESUME_TOKENS = 128
"""What there must be room for, beyond its tokens, before a sequence that lost its KV comes back (less at its end): its
prompt and output are computed and sent again for that."""
GROWTH_RAISE = 0.1
GROWTH_DECAY = 1 / 512


# -- who comes first --------------------------------------------------------------------------------------------------


def due_at(submitted_at: float, deadline_at: float | None) -> float:
    """When a request should have its turn, by the clock of its arguments: requests of one priority come in this order.
    Its deadline, or PATIENCE_S after it came. Among those without a deadline that is age; one that has a deadline may
    overtake, and nobody is overtaken by who came PATIENCE_S after it."""
    patient_until = submitted_at + PATIENCE_S
    return patient_until if deadline_at is None else min(deadline_at, patient_until)


def is_late(deadline_at: float | None, num_tokens: int, *, now: float, tokens_per_s: float) -> bool:
    """Whether `num_tokens` cannot be computed before the deadline, even at `tokens_per_s`, the best speed seen so far
    (0 when none was measured)."""
    if deadline_at is None:
        return False
    return now + (num_tokens / tokens_per_s if tokens_per_s else 0.0) > deadline_at


def is_turn_of_oldest(num_turns: int) -> bool:
    """Whether the turn behind so many others is one that goes by age alone. So priorities are kept in all other turns,
    and who has waited for PATIENCE_S has its own after at most OLDEST_EVERY for each that has waited longer."""
    return num_turns % OLDEST_EVERY == OLDEST_EVERY - 1


def by_age(waiting: Iterable[T], since: Callable[[T], float], *, num_turns: int, now: float) -> T | None:
    """Who has the next turn because it has waited longest; None when the turn goes by priority."""
    if not is_turn_of_oldest(num_turns):
        return None
    return min((one for one in waiting if now - since(one) > PATIENCE_S), key=since, default=None)


# -- prefill steps ----------------------------------------------------------------------------------------------------


def plan_chunk(remaining: Sequence[int], classes: Sequence[Hashable], *, chunk_size: int, max_tokens: int) -> list[int]:
    """How many tokens of each prompt run this step, for prompts in order of preference; those of one class stand
    together, and a class gets what those before it leave.

    With a `chunk_size` the step has that many tokens, prompts may be cut, and within a class one half of the step goes
    down the order and the other to the shortest. Without one (-1) prompts run whole, the first always, and beside it
    the shortest that fit in `max_tokens` together with it.
    """
    budget = max_tokens if chunk_size == -1 else chunk_size
    counts: list[int] = []
    for _, members in groupby(zip(classes, remaining, strict=True), key=lambda pair: pair[0]):
        tokens = [count for _, count in members]
        share = _whole(tokens, budget, at_least_one=not counts) if chunk_size == -1 else _halves(tokens, budget)
        counts += share
        budget -= sum(share)
    return counts


def _halves(remaining: Sequence[int], budget: int) -> list[int]:
    counts = [0] * len(remaining)
    shortest = sorted(range(len(remaining)), key=remaining.__getitem__)
    for order, part in ((range(len(remaining)), budget - budget // 2), (shortest, budget // 2)):
        for index in order:
            count = min(remaining[index] - counts[index], part)
            counts[index] += count
            part -= count
    return counts


def _whole(remaining: Sequence[int], budget: int, *, at_least_one: bool) -> list[int]:
    counts = [0] * len(remaining)
    shortest = sorted(range(1, len(remaining)), key=remaining.__getitem__)
    for index in (0, *shortest):
        if remaining[index] <= budget or (at_least_one and index == 0):
            counts[index] = remaining[index]
            budget -= remaining[index]
    return counts


# -- pages ------------------------------------------------------------------------------------------------------------


def withheld_pages(num_pages: int, *, page_size: int, max_total_tokens: int | None) -> int:
    """How many pages of a pool stay unused so that those in use hold at most `max_total_tokens`; ConfigError when that
    leaves none."""
    if max_total_tokens is None:
        return 0
    if max_total_tokens < page_size:
        raise ConfigError(
            f"max_total_tokens is {max_total_tokens} and a page holds {page_size} tokens; allow at least one page"
        )
    return max(0, num_pages - max_total_tokens // page_size)


def may_grant(needed: int, *, available: int, watermark: int, others: int) -> bool:
    """Whether a sequence that needs `needed` pages, not counting those in use anyway, may have them: `watermark` of the
    pages that are free or cached stay so for the growth of the `others` that hold pages; alone, a sequence may take
    all."""
    return needed <= available - (watermark if others else 0)


def learn_growth(share: float, *, num_retracted: int) -> float:
    """The part of what running sequences may still generate for which pages are kept free, after a step that retracted
    `num_retracted` of them: up by GROWTH_RAISE for each, else slowly down, so that batches fill again."""
    return min(1.0, share + GROWTH_RAISE * num_retracted) if num_retracted else max(0.0, share - GROWTH_DECAY)


def choose_victim(sequences: Sequence[tuple[int, int, int]]) -> int:
    """Index of the sequence to retract, of (priority, attempts, arrival) each: of the lowest priority, of those that
    have had the fewest attempts, the one that arrived last. So nobody is retracted twice before all others once."""
    return min(range(len(sequences)), key=lambda i: (*sequences[i][:2], -sequences[i][2]))


# -- overload ---------------------------------------------------------------------------------------------------------


def queueing_s(*stages: tuple[int, float]) -> float | None:
    """Seconds until the last of a line has its turn, when each stage that the line goes through has to do so many
    tokens first, at so many tokens per second: they work at the same time, so the slowest counts. None when a stage
    that has tokens to do has not been measured."""
    if any(num_tokens and not tokens_per_s for num_tokens, tokens_per_s in stages):
        return None
    return max((num_tokens / tokens_per_s for num_tokens, tokens_per_s in stages if num_tokens), default=0.0)
