"""A policy that predicts, for every pair, when the first token comes and how fast the others follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import attrs

from pdinfer.checks import as_float, float_in
from pdinfer.pairing.policy.by_load import weight
from pdinfer.stats import DecodeCost, DecodeLoad, Links, PrefillCost, PrefillLoad
from pdinfer.types import Choice, Link, RequestShape

Cost = TypeVar("Cost", PrefillCost, DecodeCost)

UNMEASURED_PREFILL = PrefillCost(token_s=1e-4)
"""What prefills are taken to cost before any has been measured: then only the ratios of their queues matter."""
UNMEASURED_DECODE = DecodeCost(step_s=0.02, sequence_s=1e-4, token_s=2e-8)
TAIL_SHARE = 0.1
"""The share of a prompt's bytes that crosses the link after the prefill has computed the prompt."""


@attrs.frozen(kw_only=True)
class TrafficAware:
    """Choose the pair with the least predicted seconds, over every pair that reaches each other:

    - `prefill_s`: until the prefill is done, at the pace of recent steps (`at_prefill`). It computes only the
      tokens that its pages lack;
    - `work_s`: the seconds that the prefill computes it, `work_weight` times, and once more for each request that is
      queued there, `max_crowd` at most: as long as a queue lasts, others come that will wait for them;
    - `delay_s`: `delay_weight` times the seconds that longer prompts queued there wait for its tokens, which overtake
      theirs;
    - `link_s`: the backlog of the link, and `tail_share` of the prompt's own bytes. The others cross the link while the
      prefill computes. 0 where no speed was measured;
    - `line_s`: this many seconds for the request itself and for each that waits already, when it would wait for pages
      or for a place at the decode;
    - `step_s`: the decode's step once the request and those ahead of it have joined;
    - `pool_s`: `pool_weight` times the share of the decode's pool that they hold.

    Prefills whose seconds are within `prefill_slack_s` of the least count as equal, and so do decodes within
    `decode_slack_s`; they have their turns. Ports whose steps take at most `pace_ratio` times as long as those of the
    fastest are taken to be equally fast, since measured seconds scatter, and so is a port that was not measured yet;
    only slower ones are judged by their own steps."""

    work_weight: float = weight(1.0)
    max_crowd: float = weight(4.0)
    delay_weight: float = weight(1.0)
    tail_share: float = weight(TAIL_SHARE)
    line_s: float = weight(5.0)
    pool_weight: float = weight(0.02)
    prefill_slack_s: float = weight(0.01)
    decode_slack_s: float = weight(0.002)
    pace_ratio: float = attrs.field(default=1.5, converter=as_float, validator=float_in(1.0, 1e6, low_included=True))

    def __call__(
        self, shape: RequestShape, prefills: Sequence[PrefillLoad], decodes: Sequence[DecodeLoad]
    ) -> Choice | None:
        """Choose a pair; None when a side is empty or no two ports reach each other."""
        if not prefills or not decodes:
            return None
        num_tokens = shape.num_prompt_tokens + shape.num_output_tokens
        found = [shape.found_at([load.address for load in loads]) for loads in (prefills, decodes)]
        slow = self._prefills(prefills, num_tokens, found[0])
        late = self._decodes(decodes, num_tokens, found[1])
        pair = self._best_pair(
            shape, prefills, [one + two + three for one, two, three in slow], decodes, [a + b + c for a, b, c in late]
        )
        if pair is None:
            return None
        at, to, link_s = pair
        return Choice(
            prefill=prefills[at].address,
            decode=decodes[to].address,
            score=(
                *zip(("prefill_s", "work_s", "delay_s"), slow[at], strict=True),
                ("link_s", link_s),
                *zip(("line_s", "step_s", "pool_s"), late[to], strict=True),
            ),
        )

    def _prefills(
        self, loads: Sequence[PrefillLoad], num_tokens: int, found: Sequence[int]
    ) -> list[tuple[float, float, float]]:
        """Return, for each prefill, the seconds until it has computed what it lacks of `num_tokens` behind what it has,
        those of this work, and of the delay that it means to others."""
        costs = [load.cost for load in loads]
        seconds = [cost.seconds(num_tokens) for cost in costs]
        costs = _reckoned(costs, seconds, self.pace_ratio, _mean_prefill, UNMEASURED_PREFILL)
        terms = []
        for load, cost, known in zip(loads, costs, found, strict=True):
            queue_s, own_s, delay_s = at_prefill(load, cost, max(1, num_tokens - known))
            work = self.work_weight + min(self.max_crowd, load.num_queued_requests)
            terms.append((queue_s + own_s, work * own_s, self.delay_weight * delay_s))
        return terms

    def _decodes(
        self, loads: Sequence[DecodeLoad], num_tokens: int, found: Sequence[int]
    ) -> list[tuple[float, float, float]]:
        """Return, for each decode, the seconds in its line, those of its step with `num_tokens` more, and those for the
        share of its pool."""
        costs = [load.cost for load in loads]
        batch = 1 + sum([load.num_running_requests for load in loads]) / len(loads)
        context = sum([load.num_running_tokens for load in loads]) / len(loads)
        seconds = [cost.seconds(batch, context) for cost in costs]
        costs = _reckoned(costs, seconds, self.pace_ratio, _mean_decode, UNMEASURED_DECODE)
        terms = []
        for load, cost, known in zip(loads, costs, found, strict=True):
            place, step_s, share = at_decode(load, cost, num_tokens, known)
            terms.append((self.line_s * place, step_s, self.pool_weight * share))
        return terms

    def _link_s(self, shape: RequestShape, decode: DecodeLoad, link: Link) -> float:
        num_tokens = shape.num_prompt_tokens + shape.num_output_tokens - shape.found_tokens.get(decode.address, 0)
        return over_link(link, self.tail_share * num_tokens * decode.token_bytes)

    def _best_pair(
        self,
        shape: RequestShape,
        prefills: Sequence[PrefillLoad],
        slow: Sequence[float],
        decodes: Sequence[DecodeLoad],
        late: Sequence[float],
    ) -> tuple[int, int, float] | None:
        """Return the places of the pair with the least seconds, and those of its link. `slow` and `late` are the
        seconds of the ports. Ports are tried in the order in which to take them if links made no difference. So the
        first pair is usually good enough, and few others are looked at."""
        soonest = min(late)
        enough = min(slow) + self.prefill_slack_s, soonest + self.decode_slack_s
        near = [at for at, seconds in enumerate(slow) if seconds <= enough[0]]
        free = [to for to, seconds in enumerate(late) if seconds <= enough[1]]
        links, least, best = Links.of(shape.links), float("inf"), None
        for at in _in_turn(slow, near, shape.ordinal):
            if slow[at] + soonest >= least:
                continue
            for to in _in_turn(late, free, shape.ordinal // len(near)):
                if slow[at] + late[to] >= least:
                    continue
                link = links.between(prefills[at].address, decodes[to].address)
                if link is None and links:
                    continue
                link_s = 0.0 if link is None else self._link_s(shape, decodes[to], link)
                seconds = slow[at] + late[to] + link_s
                if seconds < least:
                    least, best = seconds, (at, to, link_s)
                if seconds <= sum(enough):
                    return best
        return best


traffic_aware = TrafficAware()


def _in_turn(scores: Sequence[float], equal: Sequence[int], turn: int) -> Iterator[int]:
    """Yield the places of scores in the order in which to try them: the `equal` in turn, then the others by score."""
    first = turn % len(equal)
    yield from (*equal[first:], *equal[:first])
    yield from sorted(set(range(len(scores))).difference(equal), key=lambda at: (scores[at], at))


def _reckoned(
    costs: list[Cost], seconds: Sequence[float], ratio: float, mean: Callable[[Sequence[Cost]], Cost], unmeasured: Cost
) -> list[Cost]:
    """Return the costs to reckon with: the mean of those whose `seconds` are at most `ratio` times the least that were
    measured, for them and for ports that were not measured, and their own for slower ones."""
    least = min(seconds) or min([took_s for took_s in seconds if took_s], default=0.0)
    alike = [cost for cost, took_s in zip(costs, seconds, strict=True) if 0 < took_s <= ratio * least]
    if not alike:
        return [unmeasured] * len(costs)
    of_most = mean(alike)
    if len(alike) == len(costs):
        return [of_most] * len(costs)
    return [cost if took_s > ratio * least else of_most for cost, took_s in zip(costs, seconds, strict=True)]


def _mean_prefill(alike: Sequence[PrefillCost]) -> PrefillCost:
    return PrefillCost(
        step_s=sum([cost.step_s for cost in alike]) / len(alike),
        token_s=sum([cost.token_s for cost in alike]) / len(alike),
        chunk_tokens=max([cost.chunk_tokens for cost in alike]),
    )


def _mean_decode(alike: Sequence[DecodeCost]) -> DecodeCost:
    return DecodeCost(
        step_s=sum([cost.step_s for cost in alike]) / len(alike),
        sequence_s=sum([cost.sequence_s for cost in alike]) / len(alike),
        token_s=sum([cost.token_s for cost in alike]) / len(alike),
    )


# -- the terms of its predictions, which are those of `promise.predict` too --------------------------------------------


def at_prefill(load: PrefillLoad, cost: PrefillCost, size: int) -> tuple[float, float, float]:
    """Return, for a prompt of which `size` tokens have to be computed, the seconds until its turn, those that it takes,
    and those by which all the longer prompts that it overtakes are later, together. They wait for its tokens, and not
    for steps of their own.

    Half of a prefill's steps goes to the shortest prompts, so it is done after twice the shorter prompts in its queue
    and itself, or after all of its queue and itself, whichever is sooner."""
    own_s = cost.seconds(size)
    token_s = cost.token_s + (cost.step_s / cost.chunk_tokens if cost.chunk_tokens else 0.0)
    queued, counts = load.queued.num_tokens, load.queued.num_requests
    if not queued:  # an idle port, or one that does not tell sizes
        return load.num_queued_tokens * token_s, own_s, 0.0
    bits = size.bit_length()
    shorter, longer = sum(queued[:bits]), float(sum(counts[bits + 1 :]))
    if bits < len(queued):  # of about its own size: half of them are shorter
        shorter += queued[bits] // 2
        longer += counts[bits] / 2
    return min(2 * shorter + size, sum(queued)) * token_s, own_s, longer * size * token_s


def at_decode(load: DecodeLoad, cost: DecodeCost, num_tokens: int, known: int) -> tuple[int, float, float]:
    """Return, for a request whose context has `num_tokens`, of which the decode's pages hold `known`, its place in the
    line for pages and slots (0 when it need not wait), the seconds of a step once it and those ahead of it have joined,
    and the share of the pool that they hold."""
    waiting, most, page_size = load.num_waiting_requests, load.max_running_requests, load.page_size
    holding = num_held(load)
    available = load.num_available_pages * page_size
    waits = waiting > 0 or num_tokens - known > available or (most > 0 and holding >= most)
    together = holding + waiting + 1
    context = load.num_running_tokens + load.num_waiting_tokens + num_tokens
    step_s = cost.seconds(min(together, most) if most else together, context)
    return waiting + 1 if waits else 0, step_s, context / (load.num_total_pages * page_size)


def num_held(load: DecodeLoad) -> int:
    """Return how many requests hold pages of a decode."""
    return load.num_running_requests + load.num_granted_requests


def over_link(link: Link, num_bytes: float) -> float:
    """Return the seconds until `num_bytes` have crossed a link behind its backlog; 0 where no speed was measured."""
    return (link.backlog_bytes + num_bytes) / link.bytes_per_s if link.bytes_per_s else 0.0
