"""The pages of a simulated decode's sequences.

A sequence needs a page when one more than a multiple of `page_size` tokens are there: once in so many steps. While all
run in every step, these pages are counted for all together. Where there are too few, or drafts need more, the scheduler
plans the step and asks for each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from itertools import accumulate

from pdinfer.planning.simulation.engine import SimEngine
from pdinfer.planning.simulation.job import Job
from pdinfer.planning.simulation.pages import Held


class SimTables:
    """What sequences hold of a decode's pages (`SequencePages`). `orphans` are rooms that were given up and whose
    prefills have not stopped yet.

    In step s, a sequence of offset o has o + s tokens. It holds the pages of all but the last one, or as many as
    `_planned` says: those that a planned step has asked for are more. One that is protected holds all it ever needs.
    `ends` has an item for each step that has ended.
    """

    def __init__(self, engine: SimEngine, ends: Sequence[float], *, by_writer: bool) -> None:
        self.orphans: dict[Job, Held] = {}
        self._engine, self._pages, self._page_size = engine, engine.pages, engine.page_size
        self._ends, self._by_writer = ends, by_writer
        self._planned: dict[Job, int] = {}
        self._growing = [0] * self._page_size  # how many need a page in step s, by s % page_size

    # -- what the scheduler asks: see `SequencePages` -----------------------------------------------------------------

    @property
    def num_available(self) -> int:
        return self._engine.num_available

    @property
    def num_orphans(self) -> int:
        return len(self.orphans)

    def num_in_use(self, job: Job, /) -> int:
        job.found = self._engine.find(job, job.num_tokens, self._domain(job))
        return job.found.num_known - self._pages.num_unused(job.found)

    def extend(self, job: Job, num_drafts: int = 0, /) -> bool:
        held = self._num_held(job)
        if self._num_pages(job.num_tokens + num_drafts) <= held:
            return True
        if self.num_available <= 0:
            return False
        self._pages.take(1)
        self._planned[job] = held + 1
        return True

    def release(self, job: Job, /) -> None:
        """Take the pages of a running request. Others may find those of the tokens whose KV its drafts need, too."""
        held = job.held
        held.num_own = self._num_held(job) - held.num_known
        self._count(job, -1)
        self._planned.pop(job, None)
        self._keep(job, job.num_tokens - 1)
        self._pages.release(held)

    # -- a request's way ---------------------------------------------------------------------------------------------

    def grant(self, job: Job) -> None:
        """Take the pages of a room, in addition to those that were found."""
        job.held = found = job.found
        self._pages.share(found)
        found.num_own = self._num_pages(job.reserved_tokens) - found.num_known
        self._pages.take(found.num_own)
        job.num_found = found.num_known * self._page_size

    def adopt(self, job: Job) -> None:
        """Let others find the pages of a request that runs from now on, with one token more than has landed."""
        self._keep(job, job.num_tokens - 1)
        self._count(job, 1)

    def shift(self, job: Job, by: int) -> None:
        """Let a request have `by` tokens more than by the steps that it runs."""
        self._count(job, -1)
        job.offset += by
        self._count(job, 1)

    def settle(self, job: Job) -> bool:
        """Free the pages of an orphan. Return False if there are none."""
        held = self.orphans.pop(job, None)
        if held is not None:
            self._pages.release(held)
        return held is not None

    # -- steps -------------------------------------------------------------------------------------------------------

    def needs(self, count: int) -> list[int]:
        """Return how many pages each of the next `count` steps needs in which all run."""
        first, page_size = len(self._ends), self._page_size
        return [self._growing[step % page_size] for step in range(first, first + count)]

    def affordable(self, count: int) -> int:
        """Return how many of the next `count` steps there are enough pages for."""
        return bisect_right([*accumulate(self.needs(count))], self.num_available)

    def trim(self) -> None:
        """Note that a planned step has ended: return pages that only wrong drafts needed, as `PageTables.trim` does."""
        for job, held in list(self._planned.items()):
            self._planned[job] = fit = min(held, self._num_pages(job.num_tokens))
            self._pages.give_back(held - fit)
            if fit == self._num_pages(job.num_tokens - 1):
                del self._planned[job]

    # -- inside ------------------------------------------------------------------------------------------------------

    def _count(self, job: Job, by: int) -> None:
        if not job.protected:
            self._growing[(1 - job.offset) % self._page_size] += by

    def _num_held(self, job: Job) -> int:
        return self._planned.get(job) or self._num_pages(job.max_tokens if job.protected else job.num_tokens - 1)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self._page_size)

    def _keep(self, job: Job, num_tokens: int) -> None:
        num_tokens -= self._engine.model.engine.num_draft_tokens > 0  # drafts need the token after each
        self._pages.keep(job.held, job.keys(self._page_size, num_tokens), self._domain(job))

    def _domain(self, job: Job) -> Hashable:
        return job.prefill if self._by_writer else None
