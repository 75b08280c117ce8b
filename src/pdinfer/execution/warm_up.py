"""Warm-up: every size of step runs once, so that no request pays for a first use.

A first use compiles, fills the caches that libraries keep per shape, and reads weights that the system has only mapped.
The steps run on free pages and give them back. They evict nothing, and no request finds what they wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import attrs

from pdinfer.config import EngineConfig
from pdinfer.errors import Overloaded
from pdinfer.execution.drafting import Draft
from pdinfer.execution.runner import ModelRunner
from pdinfer.execution.sampling import Draw
from pdinfer.kv.pool import PagePool
from pdinfer.model.batch import Row
from pdinfer.progress import Tell, nobody
from pdinfer.types import NamedState, RequestLimits, SamplingParams
from pdinfer.values import Value

SMALL_PREFILL_TOKENS = 16
MAX_DECODE_SEQUENCES = 512
"""The largest batch size at which decode is warmed up. Beyond it one more sequence changes little."""

MAX_CAPTURED_SEQUENCES = 256
"""The largest number of sequences whose steps are captured when none are named: each takes time and memory."""

_GREEDY = SamplingParams(temperature=0.0)
_FILTERED = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=0)


@attrs.frozen(kw_only=True)
class WarmUpStep(Value):
    """One step of a warm-up. `kind` is "prefill" (`size` tokens), "decode" (`size` sequences), "draft" (`size`
    sequences with drafts) or "capture" (of steps of `size` sequences). `seconds` is how long this first time took."""

    kind: str
    size: int
    seconds: float


@attrs.frozen(kw_only=True)
class WarmUp(Value):
    """The steps that a warm-up ran, in order."""

    steps: tuple[WarmUpStep, ...]

    @property
    def seconds(self) -> float:
        """How long all steps took."""
        return sum(step.seconds for step in self.steps)

    @property
    def longest_s(self) -> float:
        """How long the longest step took."""
        return max((step.seconds for step in self.steps), default=0.0)


@attrs.frozen
class WarmUpRun:
    """A warm-up of one engine. `tell` is called with the number of steps that were run, and of all."""

    runner: ModelRunner
    pool: PagePool
    config: EngineConfig
    limits: RequestLimits
    clock: Callable[[], float]
    tell: Tell = nobody

    def prefill(self) -> Iterator[WarmUpStep]:
        """Run a small prompt and a chunk as long as steps allow. Raise Overloaded when no page is free."""
        pool = self.pool
        self._check_free(1)
        chunk = self.config.chunked_prefill_size
        longest = self.config.max_prefill_tokens if chunk == -1 else chunk
        longest = min(longest, self.limits.max_tokens, pool.num_free * pool.layout.page_size)
        sizes = sorted({min(SMALL_PREFILL_TOKENS, longest), longest})
        for at, size in enumerate(sizes, 1):
            pages = pool.own(pool.layout.num_pages(size))
            try:
                started = self.clock()
                tokens = [self._token(at) for at in range(size)]
                self._compute([Row(tokens, 0, pages)])
                self.runner.first_tokens([0], [Draw(sampling=_FILTERED, prompt=tokens, output=())])
                yield WarmUpStep(kind="prefill", size=size, seconds=self.clock() - started)
                self.tell(at, len(sizes))
            finally:
                pool.release(pages)

    def decode(self) -> Iterator[WarmUpStep]:
        """Capture what can be captured, and run batches of 1, 2, 4, … sequences, up to as many as may run, without
        drafts and with them. Raise Overloaded when no sequence fits into the free pages."""
        pool, num_drafts = self.pool, self.config.num_draft_tokens
        num_pages = pool.layout.num_pages(2 + num_drafts)
        self._check_free(num_pages)
        most = min(self.config.max_running_requests, pool.num_free // num_pages, MAX_DECODE_SEQUENCES)
        pages = pool.own(most * num_pages)
        try:
            tables = [pages[at : at + num_pages] for at in range(0, len(pages), num_pages)]
            self._compute([Row((self._token(at),), 0, table) for at, table in enumerate(tables)])
            states = self.runner.states(range(most))
            rows = [Row((self._token(at + 1),), 1, table) for at, table in enumerate(tables)]
            draws = [
                Draw(sampling=(_GREEDY, _FILTERED)[at % 2], prompt=(self._token(at),), output=row.tokens)
                for at, row in enumerate(rows)
            ]
            captured, sizes = captured_sizes(self.config) if self.runner.resident.captures else (), batch_sizes(most)
            total = len(captured) + len(sizes) * (2 if num_drafts else 1)
            steps = chain(self._capture(captured), self._batches(sizes, rows, draws, states))
            for done, step in enumerate(steps, 1):
                yield step
                self.tell(done, total)
        finally:
            pool.release(pages)

    def _capture(self, sizes: Sequence[int]) -> Iterator[WarmUpStep]:
        started = self.clock()
        most, num_drafts = self.config.max_running_requests, self.config.num_draft_tokens
        for size in self.runner.resident.capture(sizes, most, num_drafts=num_drafts):
            yield WarmUpStep(kind="capture", size=size, seconds=self.clock() - started)
            started = self.clock()

    def _batches(
        self, sizes: Sequence[int], rows: Sequence[Row], draws: Sequence[Draw], states: Sequence[Sequence[NamedState]]
    ) -> Iterator[WarmUpStep]:
        for size in sizes:
            started = self.clock()
            self.runner.decode(rows[:size], draws[:size], [Draft() for _ in range(size)])
            yield WarmUpStep(kind="decode", size=size, seconds=self.clock() - started)
            if self.config.num_draft_tokens:
                started = self.clock()
                drafts = [self.runner.draft(state) for state in states[:size]]
                for draft in drafts:
                    draft.num_tokens = self.config.num_draft_tokens
                self.runner.decode(rows[:size], draws[:size], drafts)
                yield WarmUpStep(kind="draft", size=size, seconds=self.clock() - started)

    def _compute(self, rows: list[Row]) -> None:
        for _ in self.runner.prefill(rows):
            pass

    def _token(self, at: int) -> int:
        """Return a token id. Different positions get different ids, so that they go to different experts."""
        return at * 7919 % self.limits.vocab_size

    def _check_free(self, num_pages: int) -> None:
        if self.pool.num_free < num_pages:
            raise Overloaded(
                f"a warm-up needs {num_pages} free pages and {self.pool.num_free} of {self.pool.num_pages} are free: "
                "warm up before the first request"
            )


def captured_sizes(config: EngineConfig) -> Sequence[int]:
    """Return the numbers of sequences whose steps a decode captures, where it can."""
    if config.graph_batch_sizes is not None:
        return config.graph_batch_sizes
    return batch_sizes(min(config.max_running_requests, MAX_CAPTURED_SEQUENCES))


def batch_sizes(most: int) -> list[int]:
    """Return 1, 2, 4, 8, … below `most`, and `most` itself."""
    return [*(1 << power for power in range((most - 1).bit_length())), most]
