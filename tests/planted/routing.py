"""Bugs in policies, in what they are shown, and in what is learned of steps and pages."""

from __future__ import annotations

from tests.planted.mutant import Mutant

TRAFFIC_TESTS = "test_traffic_aware.py"
CHOOSING_TESTS = "test_choosing.py"
FOUND_TESTS = "test_found.py"
COSTS_TESTS = "test_costs.py"
EVENTS_TESTS = "test_events.py"

MUTANTS = [
    Mutant(
        "a prompt is taken to compute what a prefill has cached",
        "size = max(1, num_tokens - known)",
        "size = max(1, num_tokens)",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "what a queue holds draws requests instead of turning them away",
        "terms.append((ahead * token_s + own_s,",
        "terms.append((own_s - ahead * token_s,",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "half of a prefill's steps is not known to go to short prompts",
        "min(2 * shorter + size, sum(queued))",
        "sum(queued)",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "the delay of those who are overtaken is forgotten",
        "self.delay_weight * own_s * longer",
        "0.0 * longer",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "granted requests take no place at a decode",
        "holding = load.num_running_requests + load.num_granted_requests",
        "holding = load.num_running_requests",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "a decode without pages is taken",
        "waiting > 0 or num_tokens - known > available or",
        "waiting > 0 or",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "the backlog of a link does not count",
        "(link.backlog_bytes + self.tail_share",
        "(self.tail_share",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "the first of equals is taken",
        "    first = turn % len(equal)\n",
        "    first = 0\n",
        "test_by_load.py",
    ),
    Mutant(
        "a slow port is taken to be as fast as the others",
        "return [cost for cost, took_s in zip(costs, seconds, strict=True) if 0 < took_s <= ratio * least]",
        "return [cost for cost, took_s in zip(costs, seconds, strict=True) if 0 < took_s]",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "promised prompts are forgotten",
        "            if not tracked.forwarded:\n",
        "            if False:\n",
        CHOOSING_TESTS,
    ),
    Mutant(
        "a forwarded prompt is counted twice, as promised and as queued",
        "            if not tracked.forwarded:\n",
        "            if True:\n",
        CHOOSING_TESTS,
    ),
    Mutant(
        "the link of a request that has landed keeps its backlog",
        "tracked.landed or requests.get",
        "requests.get",
        CHOOSING_TESTS,
    ),
    Mutant(
        "a burst goes to the decode that was emptiest before it",
        "        if joins:\n",
        "        if joins and False:\n",
        CHOOSING_TESTS,
    ),
    Mutant(
        "tokens of cached pages are promised to be computed",
        "to_compute = num_tokens - at_prefill",
        "to_compute = num_tokens",
        CHOOSING_TESTS,
    ),
    Mutant(
        "the page of the last token counts as found",
        "[: (len(tokens) - 1) // scheme.page_size]",
        "[: len(tokens) // scheme.page_size]",
        FOUND_TESTS,
    ),
    Mutant(
        "what another side of as many ports holds is taken",
        "if len(known) == len(addresses) and all(map(is_, known, addresses)):",
        "if len(known) == len(addresses):",
        FOUND_TESTS,
    ),
    Mutant(
        "a prompt is looked up without its salt",
        "scheme.chain(self.request.cache_salt, writers)",
        'scheme.chain(b"", writers)',
        FOUND_TESTS,
    ),
    Mutant(
        "bisection stops one page early",
        "return len(keys) - bisect_left(keys[::-1], True, key=known.__contains__)",
        "return len(keys) - bisect_left(keys[:-1][::-1], True, key=known.__contains__)",
        FOUND_TESTS,
    ),
    Mutant(
        "an engine that slows down is not seen to",
        "SCALE_DECAY = 0.85",
        "SCALE_DECAY = 0.99",
        COSTS_TESTS,
    ),
    Mutant(
        "one pause makes an engine slow",
        "            seconds = min(seconds, OUTLIER * max(expected))\n",
        "",
        COSTS_TESTS,
    ),
    Mutant(
        "an engine whose first step was slow gets no other",
        "LEAST_STEPS = 8",
        "LEAST_STEPS = 1",
        COSTS_TESTS,
    ),
    Mutant(
        "an evicted page is told of for ever",
        "        self._removed(node.key)\n",
        "",
        EVENTS_TESTS + " remote/test_pages.py",
    ),
    Mutant(
        "new blocks continue nothing",
        "keys[added[0] - 1] if added[0] else None",
        "None",
        EVENTS_TESTS,
    ),
    Mutant(
        "a new session is told of no pages from before",
        'PageChanges(True, b"".join(key[:KEY_BYTES] for key in self._pool.keys))',
        "PageChanges(True)",
        "remote/test_pages.py",
    ),
    Mutant(
        "a mirror keeps pages that its engine has forgotten",
        "            self._keys = set()\n",
        "            pass\n",
        "remote/test_pages.py",
    ),
]
