"""Pure functions that decide which request is next, what runs in a step, and which sequence gets pages; and what steps
take, which some of them are told. They know no engine, no tensor and no clock."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations, groupby
from operator import mul
from typing import TypeVar

import attrs
import numpy as np

from pdinfer.config import EngineConfig
from pdinfer.errors import ConfigError
from pdinfer.stats import DecodeCost
from pdinfer.types import Request

T = TypeVar("T")


@attrs.define(eq=False, kw_only=True)
class Scheduled:
    """One request as the decisions see it, the one number `arrival` of its engine. Times are those of one clock. One
    that `is_resumed` has given tokens before. One that is `alone` shares no step."""

    arrival: int
    submitted_at: float
    deadline_at: float | None = None
    priority: int = 0
    is_resumed: bool = False
    alone: bool = False


PATIENCE_S = 30.0
"""How long urgent requests may overtake one of the same priority that has a later deadline or none."""
OLDEST_EVERY = 8
"""One turn in this many goes to the request that has waited longest, whatever its priority, once it has waited for
more than PATIENCE_S."""
WORTH_A_STEP = 4.0
"""The tokens of a prefill step take at least so many times as long as the step does without them, however little time
it has. In smaller chunks prompts would mostly wait for what every step costs."""
GROWTH_RAISE = 0.1
GROWTH_DECAY = 1 / 512


# -- how large a step may be ------------------------------------------------------------------------------------------


def largest_decode_step(config: EngineConfig) -> tuple[int, str]:
    """Return the most tokens that a decode step has, drafts included, and the reason."""
    requests, drafts = config.max_running_requests, config.num_draft_tokens
    reason = f"max_running_requests * (1 + num_draft_tokens) = {requests} * (1 + {drafts})"
    return requests * (1 + drafts), reason


def largest_prefill_step(config: EngineConfig, max_position_embeddings: int) -> tuple[int, str]:
    """Return the most tokens that a prefill step has, and the reason."""
    if config.chunked_prefill_size != -1:
        return config.chunked_prefill_size, f"chunked_prefill_size = {config.chunked_prefill_size}"
    most = max(config.max_prefill_tokens, max_position_embeddings)
    return most, f"chunked_prefill_size = -1 runs prompts of up to {most} tokens whole"


# -- who comes first --------------------------------------------------------------------------------------------------


def due_at(submitted_at: float, deadline_at: float | None) -> float:
    """Return when a request is due, by the clock of the arguments: at its deadline, or PATIENCE_S after it came.

    Requests of one priority are served in this order. Those without a deadline are therefore served by age. A request
    with a deadline may overtake them, but none is overtaken by a request that came PATIENCE_S after it."""
    patient_until = submitted_at + PATIENCE_S
    return patient_until if deadline_at is None else min(deadline_at, patient_until)


def order_of(
    priority: int, submitted_at: float, deadline_at: float | None, arrival: int, *, is_new: bool
) -> tuple[int, bool, float, int]:
    """Return the sort key of a request: priority first, then those that are not new, then deadline and age."""
    return -priority, is_new, due_at(submitted_at, deadline_at), arrival


def is_late(deadline_at: float | None, num_tokens: int, *, now: float, tokens_per_s: float) -> bool:
    """Return whether `num_tokens` cannot be computed before the deadline even at `tokens_per_s`, the best speed so far
    (0 when none was measured)."""
    if deadline_at is None:
        return False
    return now + (num_tokens / tokens_per_s if tokens_per_s else 0.0) > deadline_at


def is_turn_of_oldest(num_turns: int) -> bool:
    """Return whether the turn after `num_turns` others goes by age alone. All other turns keep to the priorities. A
    request that has waited for PATIENCE_S gets its turn after at most OLDEST_EVERY turns for each that has waited
    longer."""
    return num_turns % OLDEST_EVERY == OLDEST_EVERY - 1


def by_age(waiting: Iterable[T], since: Callable[[T], float], *, num_turns: int, now: float) -> T | None:
    """Return the one that has waited longest if the next turn goes by age, and None if it goes by priority."""
    if not is_turn_of_oldest(num_turns):
        return None
    return min((one for one in waiting if now - since(one) > PATIENCE_S), key=since, default=None)


# -- steps ------------------------------------------------------------------------------------------------------------


def share_a_step(rows: list[T], is_alone: Callable[[T], bool], *, num_steps: int) -> list[T]:
    """Return those of `rows` that may run in the step after `num_steps` others: `rows` itself where none must run
    alone. Each that must has a turn of its own, and all others have one together."""
    turns = [[row] for row in rows if is_alone(row)]
    if not turns:
        return rows
    if others := [row for row in rows if not is_alone(row)]:
        turns.append(others)
    return turns[num_steps % len(turns)]


# -- prefill steps ----------------------------------------------------------------------------------------------------


def chunk_beside(
    decoding_s: float, *, target_itl_s: float, chunk_size: int, costs: tuple[float, float], tokens_per_s: float
) -> int:
    """Return the most tokens, from 1 to `chunk_size`, of a prefill step that takes turns with decode steps of
    `decoding_s`.

    Both together shall take `target_itl_s`, but prefill gets as much time as decode in any case, and as much as makes
    its step worth the while (WORTH_A_STEP). `costs` are the seconds of a step and of each token in it, zeros when they
    are not known. No token is thought to be faster than at `tokens_per_s`, the best speed so far: without it (0) nobody
    knows how long a step takes, and it keeps its size."""
    step_s, token_s = costs
    if not tokens_per_s:
        return chunk_size
    token_s = max(token_s, 1 / tokens_per_s)
    seconds = max(target_itl_s - decoding_s, decoding_s) - step_s
    return max(1, min(chunk_size, int(max(seconds, WORTH_A_STEP * step_s) / token_s)))


def plan_chunk(remaining: Sequence[int], classes: Sequence[Hashable], *, chunk_size: int, max_tokens: int) -> list[int]:
    """Return how many tokens of each prompt run in this step. The prompts come in order of preference, those of one
    class together. A class gets what the classes before it leave.

    With a `chunk_size` the step has that many tokens and prompts may be cut. Within a class one half of the step goes
    to prompts in order and the other half to the shortest. Without one (-1) prompts run whole: the first always runs,
    and with it the shortest that fit into `max_tokens` together with it."""
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
    """Return how many pages of a pool must stay unused so that the others hold at most `max_total_tokens`. Raise
    ConfigError when that leaves none."""
    if max_total_tokens is None:
        return 0
    if max_total_tokens < page_size:
        raise ConfigError(
            f"max_total_tokens is {max_total_tokens} and a page holds {page_size} tokens; allow at least one page"
        )
    return max(0, num_pages - max_total_tokens // page_size)


def forecast_tokens(request: Request) -> int:
    """Return how many tokens the prompt and output of a request are expected to make."""
    most = request.sampling.max_new_tokens
    return len(request.prompt) + min(most, most if request.expected_new_tokens is None else request.expected_new_tokens)


def may_grant(needed: int, *, available: int, watermark: int, others: int) -> bool:
    """Return whether a sequence may have the `needed` pages, not counting pages in use anyway. `watermark` of the free
    and cached pages are kept for the growth of the `others` that hold pages. A sequence that is alone may take all."""
    return needed <= available - (watermark if others else 0)


def learn_growth(share: float, *, num_retracted: int) -> float:
    """Return the new `share` after a step that retracted `num_retracted` sequences. For this share of the tokens that
    running sequences may still generate, pages are kept free. It rises by GROWTH_RAISE for each retraction; otherwise
    it falls slowly, so that batches fill again."""
    return min(1.0, share + GROWTH_RAISE * num_retracted) if num_retracted else max(0.0, share - GROWTH_DECAY)


def choose_victim(sequences: Sequence[tuple[int, int, int]]) -> int:
    """Return the index of the sequence to retract. Each is given as (priority, attempts, arrival). Among those of the
    lowest priority, and then among those with the fewest attempts, it is the one that arrived last. So none is
    retracted twice before all others were retracted once."""
    return min(range(len(sequences)), key=lambda i: (*sequences[i][:2], -sequences[i][2]))


# -- overload ---------------------------------------------------------------------------------------------------------


def queueing_s(*stages: tuple[int, float]) -> float | None:
    """Return the seconds until the last request in a queue has its turn. Each stage that the queue passes is given as
    (tokens to process first, tokens per second). Stages work at the same time, so the slowest one counts. Return None
    when a stage that has tokens to process has not been measured."""
    if any(num_tokens and not tokens_per_s for num_tokens, tokens_per_s in stages):
        return None
    return max((num_tokens / tokens_per_s for num_tokens, tokens_per_s in stages if num_tokens), default=0.0)


RATIO_DECAY = 0.99
"""What a step counts for in the ratios after each later one: about 100 steps are remembered."""
SCALE_DECAY = 0.85
"""The same for the scale: after 20 steps the old pace counts for 4 % of it."""
OUTLIER = 4.0
"""A step counts for at most this many times what was expected of it: one pause says nothing of the next step. A step
that takes so many times less proves that those before it were the exceptions, such as first uses. Both hold whichever
term the seconds belong to, since sizes that were not seen before prove nothing."""
FIT_EVERY = 8
LEAST_STEPS = 8
"""Fewer steps say too little: an engine whose first one happened to be slow would never be given another."""
LEAST_PIVOT = 1e-6
"""Terms that varied together cannot be told apart."""


class StepCosts:
    """What the steps of an engine take, learned from the steps themselves. A step's seconds are taken to be a sum of
    terms with constant weights: so much for the step, so much for each token. The weights' ratios are fitted to many
    steps, because only sizes that varied tell them apart; their scale follows the last few steps, so that an engine
    that slows down is soon seen to.

    `weights` are those of `num_terms` terms, none of them negative. All steps together took `busy_s` seconds for
    `num_tokens` tokens; `best_tokens_per_s` is the best speed so far, 0 before one is known."""

    def __init__(self, num_terms: int) -> None:
        self.num_tokens = 0
        self.busy_s = 0.0
        self.best_tokens_per_s = 0.0
        self._num_terms = num_terms
        self._products: np.ndarray
        self._unfitted: list[tuple[float, ...]]
        self._ratios: list[float] | None
        self._recent_terms: list[float]
        self._recent_s: float
        self._num_steps: int
        self.forget()

    @property
    def weights(self) -> tuple[float, ...]:
        """Seconds per unit of each term; zeros before there were LEAST_STEPS steps."""
        if self._num_steps < LEAST_STEPS:
            return (0.0,) * self._num_terms
        ratios, scale = self._fit()
        return tuple([scale * ratio for ratio in ratios])

    def forget(self) -> None:
        """Begin again."""
        self._products = np.zeros((self._num_terms + 1, self._num_terms + 1))  # of terms and seconds, summed over steps
        self._unfitted = []
        self._ratios = [0.0] * self._num_terms
        self._recent_terms = [0.0] * self._num_terms
        self._recent_s = 0.0
        self._num_steps = 0

    def count(self, num_tokens: int, took_s: float) -> None:
        """Count a step, or steps that took so long together."""
        self.num_tokens += num_tokens
        self.busy_s += took_s
        if took_s > 0:
            self.best_tokens_per_s = max(self.best_tokens_per_s, num_tokens / took_s)

    def add(self, terms: Sequence[float], seconds: float) -> None:
        """Learn from one step. The first term should be 1."""
        if self._recent_s > 0:
            expected = [self._recent_s / total * term for total, term in zip(self._recent_terms, terms, strict=True)]
            if seconds * OUTLIER < min(expected) or seconds > OUTLIER * max(expected):  # what was fitted may allow it
                ratios, scale = self._fit()
                expected.append(scale * sum(map(mul, ratios, terms)))
                if seconds * OUTLIER < min(expected):
                    self.forget()
                seconds = min(seconds, OUTLIER * max(expected))
        self._unfitted.append((*terms, seconds))
        self._recent_terms = [SCALE_DECAY * old + new for old, new in zip(self._recent_terms, terms, strict=True)]
        self._recent_s = SCALE_DECAY * self._recent_s + seconds
        self._num_steps += 1
        if self._num_steps < FIT_EVERY or self._num_steps % FIT_EVERY == 0:
            rows, count = np.array(self._unfitted), len(self._unfitted)
            self._unfitted = []
            self._products *= RATIO_DECAY**count
            self._products += (rows.T * RATIO_DECAY ** np.arange(count - 1, -1, -1)) @ rows
            self._ratios = None

    def _fit(self) -> tuple[list[float], float]:
        """Return the weights' ratios, and their scale. They are fitted when somebody asks: most steps are as long as
        expected, and most loads are never read."""
        if self._ratios is None:
            self._ratios = _fitted(self._products.tolist())
        expected = sum(map(mul, self._ratios, self._recent_terms))
        return self._ratios, self._recent_s / expected if expected > 0 else 0.0


def _fitted(products: list[list[float]]) -> list[float]:
    """Return the weights w >= 0 with the least squared error, w' products w - 2 w' sums, which are the last column.
    There are few terms, so every set of them that may have weights above 0 is tried, the set of all first: without a
    negative weight nothing is better."""
    *products, sums = products
    best, least = [0.0] * len(products), 0.0
    for count in range(len(products), 0, -1):
        for used in combinations(range(len(products)), count):
            solved = _solve([[products[i][j] for j in used] for i in used], [sums[i] for i in used])
            if solved is None or min(solved) < 0:
                continue
            error = -sum(weight * sums[i] for weight, i in zip(solved, used, strict=True))
            if error < least:
                least, best = error, [0.0] * len(products)
                for index, weight in zip(used, solved, strict=True):
                    best[index] = weight
                if count == len(products):
                    return best
    return best


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Return the solution of symmetric equations by elimination, or None when they are nearly dependent."""
    size = len(right)
    diagonal = [matrix[i][i] for i in range(size)]
    for i in range(size):
        if matrix[i][i] <= LEAST_PIVOT * diagonal[i]:
            return None
        for j in range(i + 1, size):
            factor = matrix[j][i] / matrix[i][i]
            matrix[j] = [below - factor * above for below, above in zip(matrix[j], matrix[i], strict=True)]
            right[j] -= factor * right[i]
    solved = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(matrix[i][j] * solved[j] for j in range(i + 1, size))
        solved[i] = (right[i] - rest) / matrix[i][i]
    return solved


def decode_cost(costs: StepCosts) -> DecodeCost:
    """Return what the steps of a decode take, whose terms are 1, their sequences and the tokens of their contexts."""
    step_s, sequence_s, token_s = costs.weights
    return DecodeCost(step_s=step_s, sequence_s=sequence_s, token_s=token_s)
