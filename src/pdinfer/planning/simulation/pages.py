"""The pages of one simulated pool, counted by runs of pages that have one fate.

It keeps the accounts of `kv.pool` and the order of `kv.prefix`: the longest at rest is evicted first, the end of a
sequence before its beginning. What an operation costs depends neither on the page size nor on the length of a prompt:
runs form a radix tree, as in SGLang's RadixCache, and are split where sequences part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Hashable

import attrs

from pdinfer.errors import PDInferError


@attrs.frozen(eq=False)
class Keys:
    """What names the full pages of a sequence: blocks, equal for equal beginnings, and how many pages there are up to
    the end of each. Every block ends at least one page."""

    names: tuple[Hashable, ...] = ()
    ends: tuple[int, ...] = ()

    @property
    def num_pages(self) -> int:
        """The pages of all blocks."""
        return self.ends[-1] if self.ends else 0

    def and_block(self, name: Hashable, end: int) -> Keys:
        """Return the keys with one block more."""
        return Keys((*self.names, name), (*self.ends, end))

    def up_to(self, num_pages: int) -> Keys:
        """Return the keys of the blocks that end within so many pages."""
        count = bisect_right(self.ends, num_pages)
        return Keys(self.names[:count], self.ends[:count])


class Run:
    """Pages that continue `parent`, behind `begin` others in `depth` blocks. The first `num_pages` of them are there.
    The root has none. `num_users` sequences hold it; without any it rests."""

    __slots__ = ("begin", "children", "depth", "ends", "names", "num_pages", "num_users", "parent")

    def __init__(
        self, parent: Run | None, depth: int = 0, names: tuple[Hashable, ...] = (), ends: tuple[int, ...] = ()
    ) -> None:
        self.parent, self.depth, self.names, self.ends = parent, depth, names, ends
        self.begin = parent.ends[-1] if parent is not None and parent.ends else 0
        self.num_pages = self.num_users = 0
        self.children: dict[Hashable, Run] = {}


@attrs.define(eq=False)
class Held:
    """What one sequence holds of a pool: the runs up to `run`, whose first `num_known` pages are those of its
    beginning, and `num_own` pages besides. `depth` is the number of its blocks in these runs."""

    run: Run | None = None
    depth: int = 0
    num_known: int = 0
    num_own: int = 0


class SimPages:
    """`num_free + num_cached + num_used == num_pages`. Domains know nothing of each other's runs."""

    def __init__(self, num_pages: int, *, prefix_cache: bool = True) -> None:
        self.num_pages = self.num_free = num_pages
        self.num_cached = 0
        self.most_used = 0
        self._prefix_cache = prefix_cache
        self._roots: dict[Hashable, Run] = {}
        self._resting: OrderedDict[Run, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Pages that can be taken: free ones, and cached ones, which are evicted then."""
        return self.num_free + self.num_cached

    @property
    def num_used(self) -> int:
        """Pages that sequences hold."""
        return self.num_pages - self.num_free - self.num_cached

    @property
    def max_share(self) -> float:
        """The greatest part of the pool that was held at a time."""
        return self.most_used / self.num_pages

    def find(self, keys: Keys, most: int, domain: Hashable = None) -> Held:
        """Return the longest known beginning of a sequence, at most `most` pages. Nobody holds it until `share`."""
        found, run = Held(), self._roots.get(domain)
        names, depth = keys.names, 0
        while run is not None and depth < len(names) and found.num_known < most:
            run = run.children.get(names[depth])
            if run is None:
                break
            equal = _num_equal(run.names, names, depth)
            depth += equal
            known = min(run.begin + run.num_pages, keys.ends[depth - 1])
            found.run, found.depth, found.num_known = run, depth, min(known, most)
            if equal < len(run.names) or known < run.ends[-1]:
                break
        return found

    def num_unused(self, found: Held) -> int:
        """Return how many pages `share` takes from the available ones."""
        run, count = found.run, 0
        if run is not None and not run.num_users:
            count, run = _upper_pages(run, found.depth), run.parent
            while run is not None and not run.num_users:
                count, run = count + run.num_pages, run.parent
        return count

    def share(self, found: Held) -> None:
        """Hold what was found."""
        if found.run is not None:
            found.run = self._split(found.run, found.depth)
            self._use(found.run)

    def take(self, count: int) -> None:
        """Take free pages, and evict what rests when they run out. Raise PDInferError when there are too few."""
        if count > self.num_available:
            raise PDInferError(f"{count} pages asked for, {self.num_available} of {self.num_pages} are there")
        if self.num_free < count:
            self._evict(count - self.num_free)
        self.num_free -= count
        self.most_used = max(self.most_used, self.num_used)

    def give_back(self, count: int) -> None:
        """Return pages that only one sequence has."""
        self.num_free += count

    def keep(self, held: Held, keys: Keys, domain: Hashable = None) -> None:
        """Let other sequences find the full pages of one. Where others have them, too, theirs are held from now on, and
        ours are free."""
        num_full = keys.num_pages
        if not self._prefix_cache or num_full <= held.num_known:
            return
        run, depth, num_new = held.run or self._roots.setdefault(domain, Run(None)), held.depth, 0
        if held.run is not None:
            num_new += _fill(run)
        while depth < len(keys.names):
            child = run.children.get(keys.names[depth])
            if child is None:
                child = run.children[keys.names[depth]] = Run(run, depth, keys.names[depth:], keys.ends[depth:])
                child.num_users = 1
                depth = len(keys.names)
            else:
                depth += _num_equal(child.names, keys.names, depth)
                child = self._split(child, depth)
                self._use(child, only=True)
            num_new += _fill(child)
            run = child
        num_kept = num_full - held.num_known
        held.run, held.depth, held.num_known = run, depth, num_full
        held.num_own -= num_kept
        self.num_free += num_kept - num_new

    def release(self, held: Held) -> None:
        """Let go of everything that a sequence holds."""
        self.num_free += held.num_own
        run = held.run
        while run is not None and run.parent is not None:
            run.num_users -= 1
            if not run.num_users:
                self._resting[run] = None
                self.num_cached += run.num_pages
            run = run.parent
        held.run, held.depth, held.num_known, held.num_own = None, 0, 0, 0

    def _use(self, run: Run, *, only: bool = False) -> None:
        """Count a user of a run and, unless this run `only`, of those that it continues."""
        while run.parent is not None:
            if not run.num_users:
                del self._resting[run]
                self.num_cached -= run.num_pages
            run.num_users += 1
            if only:
                return
            run = run.parent

    def _split(self, run: Run, depth: int) -> Run:
        """Return the run that ends after `depth` blocks of its sequence: this one, or its beginning, made a run of its
        own."""
        at = depth - run.depth
        if at == len(run.names):
            return run
        assert run.parent is not None
        upper = Run(run.parent, run.depth, run.names[:at], run.ends[:at])
        upper.num_pages, upper.num_users = _upper_pages(run, depth), run.num_users
        run.parent.children[upper.names[0]] = upper
        run.parent, run.depth, run.begin = upper, depth, upper.ends[-1]
        run.names, run.ends, run.num_pages = run.names[at:], run.ends[at:], run.num_pages - upper.num_pages
        upper.children[run.names[0]] = run
        if not upper.num_users:
            self._resting[upper] = None
            if not run.num_pages:
                self._drop(run)
        return upper

    def _evict(self, count: int) -> None:
        while count:
            for run in self._resting:  # the first, since what continues a run rests before it
                if not run.children:
                    break
            num_gone = min(count, run.num_pages)
            run.num_pages -= num_gone
            self.num_cached -= num_gone
            self.num_free += num_gone
            count -= num_gone
            if not run.num_pages:
                self._drop(run)

    def _drop(self, run: Run) -> None:
        del self._resting[run]
        if run.parent is not None:
            del run.parent.children[run.names[0]]


def _fill(run: Run) -> int:
    """Make all pages of a run be there, and return how many are new."""
    num_new = run.ends[-1] - run.begin - run.num_pages
    run.num_pages += num_new
    return num_new


def _upper_pages(run: Run, depth: int) -> int:
    """Return how many pages are there of the part of a run that ends after `depth` blocks of its sequence."""
    return min(run.num_pages, run.ends[depth - run.depth - 1] - run.begin)


def _num_equal(run: tuple[Hashable, ...], names: tuple[Hashable, ...], depth: int) -> int:
    """Return how many blocks of a run a sequence has from its block `depth` on. Blocks have equal names only if all
    blocks before them have, so that halving finds where they part. The first ones are known to be equal."""
    high = min(len(run), len(names) - depth)
    if run[:high] == names[depth : depth + high]:
        return high
    low, high = 1, high - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if run[middle - 1] == names[depth + middle - 1] else (low, middle - 1)
    return low
