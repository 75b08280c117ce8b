"""Bugs in policies, in what they are shown, and in what is learned of steps and pages."""

from __future__ import annotations

from tests.planted.mutant import Mutant

TRAFFIC = "src/pdinfer/pairing/policies/traffic_aware.py"
TRAFFIC_TESTS = "tests/unit/pairing/policies/test_traffic_aware.py"
CHOOSING = "src/pdinfer/pairing/choosing.py"
CHOOSING_TESTS = "tests/unit/pairing/test_choosing.py"
FOUND = "src/pdinfer/pairing/found.py"
FOUND_TESTS = "tests/unit/pairing/test_found.py"
COSTS = "src/pdinfer/engine/costs.py"
COSTS_TESTS = "tests/unit/engine/test_costs.py"
EVENTS_TESTS = "tests/unit/kv/test_events.py"

MUTANTS = [
    Mutant(
        "a prompt is taken to compute what a prefill has cached",
        TRAFFIC,
        "size = max(1, num_tokens - known)",
        "size = max(1, num_tokens)",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "what a queue holds draws requests instead of turning them away",
        TRAFFIC,
        "terms.append((ahead * token_s + own_s,",
        "terms.append((own_s - ahead * token_s,",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "half of a prefill's steps is not known to go to short prompts",
        TRAFFIC,
        "min(2 * shorter + size, sum(queued))",
        "sum(queued)",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "the delay of those who are overtaken is forgotten",
        TRAFFIC,
        "self.delay_weight * own_s * longer",
        "0.0 * longer",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "granted requests take no place at a decode",
        TRAFFIC,
        "holding = load.num_running_requests + load.num_granted_requests",
        "holding = load.num_running_requests",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "a decode without pages is taken",
        TRAFFIC,
        "waiting > 0 or num_tokens - known > available or",
        "waiting > 0 or",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "the backlog of a link does not count",
        TRAFFIC,
        "(link.backlog_bytes + self.tail_share",
        "(self.tail_share",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "the first of equals is taken",
        TRAFFIC,
        "    first = turn % len(equal)\n",
        "    first = 0\n",
        "tests/unit/pairing/policies/test_by_load.py",
    ),
    Mutant(
        "a slow port is taken to be as fast as the others",
        TRAFFIC,
        "return [cost for cost, took_s in zip(costs, seconds, strict=True) if 0 < took_s <= ratio * least]",
        "return [cost for cost, took_s in zip(costs, seconds, strict=True) if 0 < took_s]",
        TRAFFIC_TESTS,
    ),
    Mutant(
        "promised prompts are forgotten",
        CHOOSING,
        "            if not tracked.forwarded:\n",
        "            if False:\n",
        CHOOSING_TESTS,
    ),
    Mutant(
        "a forwarded prompt is counted twice, as promised and as queued",
        CHOOSING,
        "            if not tracked.forwarded:\n",
        "            if True:\n",
        CHOOSING_TESTS,
    ),
    Mutant(
        "the link of a request that has landed keeps its backlog",
        CHOOSING,
        "tracked.landed or requests.get",
        "requests.get",
        CHOOSING_TESTS,
    ),
    Mutant(
        "a burst goes to the decode that was emptiest before it",
        CHOOSING,
        "        if joins:\n",
        "        if joins and False:\n",
        CHOOSING_TESTS,
    ),
    Mutant(
        "tokens of cached pages are promised to be computed",
        CHOOSING,
        "to_compute = num_tokens - at_prefill",
        "to_compute = num_tokens",
        CHOOSING_TESTS,
    ),
    Mutant(
        "the page of the last token counts as found",
        FOUND,
        "[: (len(tokens) - 1) // scheme.page_size]",
        "[: len(tokens) // scheme.page_size]",
        FOUND_TESTS,
    ),
    Mutant(
        "what another side of as many ports holds is taken",
        FOUND,
        "if len(known) == len(addresses) and all(map(is_, known, addresses)):",
        "if len(known) == len(addresses):",
        FOUND_TESTS,
    ),
    Mutant(
        "a prompt is looked up without its salt",
        FOUND,
        "scheme.chain(self.request.cache_salt, writers)",
        'scheme.chain(b"", writers)',
        FOUND_TESTS,
    ),
    Mutant(
        "bisection stops one page early",
        "src/pdinfer/kv/prefix.py",
        "return len(keys) - bisect_left(keys[::-1], True, key=known.__contains__)",
        "return len(keys) - bisect_left(keys[:-1][::-1], True, key=known.__contains__)",
        FOUND_TESTS,
    ),
    Mutant(
        "an engine that slows down is not seen to",
        COSTS,
        "SCALE_DECAY = 0.85",
        "SCALE_DECAY = 0.99",
        COSTS_TESTS,
    ),
    Mutant(
        "one pause makes an engine slow",
        COSTS,
        "            seconds = min(seconds, OUTLIER * max(expected))\n",
        "",
        COSTS_TESTS,
    ),
    Mutant(
        "an engine whose first step was slow gets no other",
        COSTS,
        "LEAST_STEPS = 8",
        "LEAST_STEPS = 1",
        COSTS_TESTS,
    ),
    Mutant(
        "an evicted page is told of for ever",
        "src/pdinfer/kv/prefix.py",
        "        self._removed(node.key)\n",
        "",
        EVENTS_TESTS + " tests/unit/remote/test_pages.py",
    ),
    Mutant(
        "new blocks continue nothing",
        "src/pdinfer/kv/pool.py",
        "keys[added[0] - 1] if added[0] else None",
        "None",
        EVENTS_TESTS,
    ),
    Mutant(
        "a new session is told of no pages from before",
        "src/pdinfer/remote/pages.py",
        'PageChanges(True, b"".join(key[:KEY_BYTES] for key in self._pool.keys))',
        "PageChanges(True)",
        "tests/unit/remote/test_pages.py",
    ),
    Mutant(
        "a mirror keeps pages that its engine has forgotten",
        "src/pdinfer/remote/pages.py",
        "            self._keys = set()\n",
        "            pass\n",
        "tests/unit/remote/test_pages.py",
    ),
]
