"""What a request would get from a pair of ports, and the door that takes only requests whose limits a pair would keep.

    loads, link ─► predict ─► Prediction ─► Door ─► taken, or Overloaded(retry_after_s=)

`predict` is a pure function of snapshots. Its terms are those by which `policy.traffic_aware` chooses. A Pairing and
`planning.simulate` have the same `Door`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from pdinfer.config import SLO
from pdinfer.errors import Overloaded
from pdinfer.pairing.policy.traffic_aware import TAIL_SHARE, at_decode, at_prefill, num_held, over_link
from pdinfer.stats import DecodeLoad, EngineLoad, Links, PrefillLoad, QueuedSizes, changed
from pdinfer.types import Link, PeerAddress, RequestShape, TokensByPort

MAX_CLASSES = 1024
"""Answers are learned for this many classes."""
MAX_WEIGHT = 64
"""A mean of answers follows the last ones as if there had been this many."""
FEW_ANSWERS = 8
"""A class with fewer answers is taken to be like all of them."""
LATE_ONE_IN, MOST_LATE = 100, 10
"""After a hundred requests in a row that it took, a door takes one that would miss, and after a thousand ten: below the
rate that ports bear these are rare, and nobody gains by a refusal. One that it refused ends the row."""


# -- a prediction -----------------------------------------------------------------------------------------------------


class Prediction(NamedTuple):
    """Seconds of one request at one pair: in the line of the decode, in the queue of the prefill, for its own prompt,
    on the link, and for a step of the decode with it.

    `line_s` and `queue_s` pass at the same time. Behind the prompt come two steps of the decode: one is under way when
    the KV lands, and the next brings the token."""

    line_s: float
    queue_s: float
    own_s: float
    link_s: float
    step_s: float

    @property
    def wait_s(self) -> float:
        """Seconds until the prefill begins with it."""
        return max(self.line_s, self.queue_s)

    @property
    def ttft_s(self) -> float:
        """Seconds until its first token."""
        return self.wait_s + self.own_s + self.link_s + 2 * self.step_s


def predict(
    shape: RequestShape,
    prefill: PrefillLoad,
    decode: DecodeLoad,
    link: Link | None,
    *,
    new_tokens: float = 0.0,
    answer_tokens: float = 0.0,
) -> Prediction:
    """Return what a request would get from this pair, by the costs that the loads tell.

    It is expected to be answered with `new_tokens`, and grows by half of them on average. Those that run take
    `answer_tokens` each: with n of them one ends, and leaves its slot and pages, every 1/n of that many steps. 0 is not
    known, and then no line takes time."""
    held = shape.found_at([prefill.address, decode.address])
    return _told(shape, (prefill, decode, link), held, new_tokens, answer_tokens)


def _told(shape: RequestShape, pair: Pair, held: Sequence[int], new_tokens: float, answer_tokens: float) -> Prediction:
    """Return the prediction for a pair whose pages hold so many tokens of the request, each."""
    (prefill, decode, link), (at_source, at_target) = pair, held
    num_tokens = shape.num_prompt_tokens + shape.num_output_tokens
    queue_s, own_s, _ = at_prefill(prefill, prefill.cost, max(1, num_tokens - at_source))
    place, step_s, _ = at_decode(decode, decode.cost, num_tokens + round(new_tokens / 2), at_target)
    pace_s = step_s / max(1.0, decode.accept_length)
    line_s = _share_to_end(decode, num_tokens - at_target) * answer_tokens * pace_s if place else 0.0
    link_s = 0.0 if link is None else over_link(link, TAIL_SHARE * (num_tokens - at_target) * decode.token_bytes)
    return Prediction(line_s, queue_s, own_s, link_s, pace_s)


def _share_to_end(load: DecodeLoad, num_tokens: int) -> float:
    """Return which share of the sequences that hold pages has to end before one with `num_tokens` more has its turn
    behind those that wait: for slots, or for pages. It is 0 where there is room for all of them. Those who wait hold
    what is free before any of them has to wait for others."""
    holding, waiting, most = num_held(load), load.num_waiting_requests, load.max_running_requests
    free = load.num_available_pages * load.page_size
    slots = holding + waiting + 1 - most if most else 0
    tokens = load.num_waiting_tokens + num_tokens - free
    held = load.num_running_tokens + min(load.num_waiting_tokens, free) or load.num_total_pages * load.page_size
    return max(0.0, slots / max(1, min(holding + waiting, most)), tokens / held)


# -- what answers take ------------------------------------------------------------------------------------------------

Class = tuple[int, bytes]
"""A priority and a tenant, or b"" where tenants are not told apart."""


class Answers:
    """How many tokens answers took, as running means of each class and of all: `max_new_tokens` says little of it. One
    thread notes them, any may ask."""

    def __init__(self) -> None:
        self._all = 0, 0.0
        self._of: dict[Class, tuple[int, float]] = {}

    def __len__(self) -> int:
        return len(self._of)

    def note(self, kind: Class, num_tokens: int) -> None:
        """Note an answer of a class. The class that had one longest ago is forgotten when there are too many."""
        self._all = _moved(self._all, num_tokens)
        self._of[kind] = _moved(self._of.pop(kind, (0, 0.0)), num_tokens)
        if len(self._of) > MAX_CLASSES:
            del self._of[next(iter(self._of))]

    def expect(self, kind: Class | None = None) -> float:
        """Return how many tokens an answer takes: of this class, or of any where it has too few; 0 before the first."""
        count, mean = self._of.get(kind, (0, 0.0)) if kind is not None else (0, 0.0)
        return mean if count >= FEW_ANSWERS else self._all[1]


def _moved(known: tuple[int, float], num_tokens: int) -> tuple[int, float]:
    count, mean = min(known[0] + 1, MAX_WEIGHT), known[1]
    return count, mean + (num_tokens - mean) / count


# -- the door ---------------------------------------------------------------------------------------------------------


class Coming(NamedTuple):
    """A request without a first token: what its prefill has to compute, the tokens with which it waits for pages at its
    decode, 0 once it has them, and its ports, None before they are chosen."""

    priority: int
    to_compute: int
    waiting_tokens: int
    prefill: PeerAddress | None = None
    decode: PeerAddress | None = None


class Door:
    """Takes the requests for which some pair would keep `slo`, by what was seen at the last `look` and who came since,
    and the few for which none would when these are rare (LATE_ONE_IN).

    A request waits only for those of its priority and above. Limits that a port would miss with nothing else to do are
    no reason to refuse: waiting would not help, and a port that was slow once would stay shut for good. A port that was
    not measured yet is taken to need no time. Loads are as old as the last step, or older from another process, and a
    port may have done a step's work since: that much waiting is not held against a request.

    Its host sees to it that one thread calls at a time."""

    def __init__(self, slo: SLO) -> None:
        self.answers = Answers()
        self._slo = slo
        self._links = Links()
        self._at = -math.inf
        self._turn = 0
        self._num_in_row = 0
        self._coming: list[Coming] = []
        self._lowest: float = math.inf
        self._ports = _Ports((), ())
        self._from: dict[int, _Ports] = {}

    def look(
        self,
        prefills: Mapping[PeerAddress, PrefillLoad],
        decodes: Mapping[PeerAddress, DecodeLoad],
        links: Links,
        coming: Iterable[Coming],
        now: float,
    ) -> None:
        """See the loads of the ports, their links, and the requests under way. Loads count those that have ports."""
        self._ports, self._links, self._at = _Ports(prefills.values(), decodes.values()), links, now
        self._from = {}
        everybody = list(coming)
        self._coming = [one for one in everybody if one.prefill is not None]
        self._lowest = min((one.priority for one in self._coming), default=math.inf)
        for one in everybody:
            if one.prefill is None and prefills and decodes:
                self._add(Coming(one.priority, one.to_compute, one.waiting_tokens, *self._ports.idlest))

    def take(self, shape: RequestShape, kind: Class, expected: int | None, now: float) -> None:
        """Count a request among those that come. Raise Overloaded, and count nothing, if no pair would keep the SLO.

        `expected` is how many tokens its answer takes, if its host knows. A pair in turn is asked first, and all ports
        only if that one would miss: most requests are taken by the first. A refusal is the one with the least time."""
        new_tokens = min(self.answers.expect(kind) if expected is None else expected, shape.max_new_tokens)
        ports, age_s, answer_tokens = self._seen_from(shape.priority), now - self._at, self.answers.expect()
        self._turn += 1
        pair = ports.in_turn(shape, self._links, self._turn)
        if pair is not None:
            found, at = shape.found_tokens, pair[0].address
            known = found.at_prefill(at) if isinstance(found, TokensByPort) else found.get(at, 0)
            if self._refusal(shape, pair, _told(shape, pair, (known, 0), new_tokens, answer_tokens), age_s) is None:
                self._take(shape, pair, known)
                return
        refused: list[tuple[Overloaded, Pair, int]] = []
        for pair in ports.soonest(shape, self._links):
            held = shape.found_at([pair[0].address, pair[1].address])
            refusal = self._refusal(shape, pair, _told(shape, pair, held, new_tokens, answer_tokens), age_s)
            if refusal is None:
                self._take(shape, pair, held[0])
                return
            refused.append((refusal, pair, held[0]))
        if refused:  # who waits for a port or a link waits in the queue
            refusal, pair, known = min(refused, key=lambda one: one[0].retry_after_s or 0.0)
            if self._num_in_row < LATE_ONE_IN:
                self._num_in_row = 0
                raise refusal
            self._num_in_row -= LATE_ONE_IN
            self._take(shape, pair, known)

    def _take(self, shape: RequestShape, pair: Pair, known: int) -> None:
        self._num_in_row = min(MOST_LATE * LATE_ONE_IN, self._num_in_row + 1)
        num_tokens = shape.num_prompt_tokens + shape.num_output_tokens
        to_compute = max(1, num_tokens - known)
        self._add(Coming(shape.priority, to_compute, num_tokens, pair[0].address, pair[1].address))

    def _refusal(self, shape: RequestShape, pair: Pair, told: Prediction, age_s: float) -> Overloaded | None:
        """Return why a request would miss at a pair because of others, or None if it would not."""
        limit_s, step_limit_s, ttft_s = self._slo.ttft_limit_s(shape.num_prompt_tokens), self._slo.tpot_s, told.ttft_s
        if ttft_s <= (limit_s or math.inf) and told.step_s <= (step_limit_s or math.inf):
            return None
        (prefill, decode, _), reasons, retry_s = pair, list[str](), 0.0
        if limit_s is not None and ttft_s > limit_s:
            next_s = prefill.cost.seconds(_chunk(prefill))
            late_s = min(ttft_s - limit_s, told.wait_s) - min(age_s + (prefill.step_age_s or 0.0), next_s)
            if late_s > 0:
                reasons.append(f"its first token would come after about {ttft_s:.2g} s, and may take {limit_s:g} s")
                retry_s = max(late_s, next_s / 2)  # nothing changes before its step ends
        if step_limit_s is not None and told.step_s > step_limit_s and num_held(decode) + decode.num_waiting_requests:
            reasons.append(f"its tokens would come every {told.step_s:.2g} s, and may take {step_limit_s:g} s")
            fixed_s = decode.cost.step_s / max(1.0, decode.accept_length)
            share = (told.step_s - step_limit_s) / max(told.step_s - fixed_s, 1e-9)
            retry_s = max(retry_s, told.step_s, min(1.0, share) * self.answers.expect() * told.step_s)
        if not reasons:
            return None
        return Overloaded(f"the promise would be broken: {'; '.join(reasons)}", retry_after_s=retry_s)

    def _seen_from(self, priority: int) -> _Ports:
        """Return the loads without those of lower priorities."""
        if priority <= self._lowest:
            return self._ports
        if priority not in self._from:
            self._from[priority] = ports = _Ports(self._ports.prefills, self._ports.decodes)
            for one in self._coming:
                if one.priority < priority:
                    ports.count(one, -1)
        return self._from[priority]

    def _add(self, one: Coming) -> None:
        self._coming.append(one)
        self._lowest = min(self._lowest, one.priority)
        self._ports.count(one, 1)
        for priority, ports in self._from.items():
            if one.priority >= priority:
                ports.count(one, 1)


class _Sizes:
    """The prompts in a queue by size, as in `QueuedSizes`, with prompts counted in or out."""

    def __init__(self, told: QueuedSizes) -> None:
        self.num_requests, self.num_tokens = list(told.num_requests), list(told.num_tokens)

    def count(self, size: int, sign: int) -> None:
        bits, requests, tokens = size.bit_length(), self.num_requests, self.num_tokens
        if bits >= len(tokens):
            missing = [0] * (bits + 1 - len(tokens))
            requests += missing
            tokens += missing
        requests[bits] = max(0, requests[bits] + sign)
        tokens[bits] = max(0, tokens[bits] + sign * size)


class _Ports:
    """Copies of loads in which requests are counted in or out: in place, as new ones take a third of a decision."""

    def __init__(self, prefills: Iterable[PrefillLoad], decodes: Iterable[DecodeLoad]) -> None:
        self.prefills = [changed(load, queued=_Sizes(load.queued)) for load in prefills]
        self.decodes = [changed(load) for load in decodes]
        self._prefills: dict[PeerAddress | None, PrefillLoad] = {load.address: load for load in self.prefills}
        self._decodes: dict[PeerAddress | None, DecodeLoad] = {load.address: load for load in self.decodes}

    @property
    def idlest(self) -> tuple[PeerAddress, PeerAddress]:
        """The prefill with the fewest tokens queued, and the decode with the shortest line."""
        return (
            min(self.prefills, key=attrgetter("num_queued_tokens")).address,
            min(self.decodes, key=attrgetter("num_waiting_requests")).address,
        )

    def count(self, one: Coming, sign: int) -> None:
        """Count a request in (1) or out (-1), of which a part may have been computed."""
        prefill, decode = self._prefills.get(one.prefill), self._decodes.get(one.decode)
        if prefill is not None:
            values = vars(prefill)
            values["num_queued_tokens"] = max(0, values["num_queued_tokens"] + sign * one.to_compute)
            values["queued"].count(one.to_compute, sign)
        if decode is not None and one.waiting_tokens:
            values = vars(decode)
            values["num_waiting_requests"] = max(0, values["num_waiting_requests"] + sign)
            values["num_waiting_tokens"] = max(0, values["num_waiting_tokens"] + sign * one.waiting_tokens)

    def in_turn(self, shape: RequestShape, links: Links, turn: int) -> Pair | None:
        """Return the pair whose turn it is, or None if it does not hold the request or reach each other."""
        if not self.prefills or not self.decodes:
            return None
        prefill, decode = self.prefills[turn % len(self.prefills)], self.decodes[turn % len(self.decodes)]
        link = links.between(prefill.address, decode.address)
        fits = _holds(prefill, shape) and _holds(decode, shape) and (link is not None or not links)
        return (prefill, decode, link) if fits else None

    def soonest(self, shape: RequestShape, links: Links) -> Iterator[Pair]:
        """Yield the decode with the shortest line and then the shortest step, and the prefill that is done soonest
        among those that reach it; then alike for prefills that do not. Each of the N prefills and M decodes is judged
        once, and not N * M pairs."""
        num_tokens = shape.num_prompt_tokens + shape.num_output_tokens
        decodes = [load for load in self.decodes if _holds(load, shape)]
        prefills = [load for load in self.prefills if _holds(load, shape)]
        while decodes and prefills:
            steps = [at_decode(load, load.cost, num_tokens, 0) for load in decodes]
            decode = decodes.pop(steps.index(min(steps)))
            far = [load for load in prefills if links and links.between(load.address, decode.address) is None]
            near = [load for load in prefills if load not in far]
            if near:
                sizes = [max(1, num_tokens - known) for known in shape.found_at([load.address for load in near])]
                done_s = [sum(at_prefill(load, load.cost, size)[:2]) for load, size in zip(near, sizes, strict=True)]
                prefill = near[done_s.index(min(done_s))]
                yield prefill, decode, links.between(prefill.address, decode.address)
            prefills = far


Pair = tuple[PrefillLoad, DecodeLoad, Link | None]
"""Two ports, and the link between them where links are known."""


def _holds(load: EngineLoad, shape: RequestShape) -> bool:
    """Return whether the pool of a port has room for a request when nothing else is there."""
    return shape.num_prompt_tokens + shape.max_new_tokens <= load.num_total_pages * load.page_size


def _chunk(load: PrefillLoad) -> int:
    """Return how many tokens the next step of a prefill has."""
    return min(load.num_queued_tokens, load.cost.chunk_tokens or load.num_queued_tokens)
