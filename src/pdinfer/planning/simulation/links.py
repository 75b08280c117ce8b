"""Bytes on their way between engines: every engine's end has a capacity, which its transfers share max-min.

Max-min: no transfer can get more without one that has no more getting less (Bertsekas and Gallager, Data Networks,
1992, section 6.5.2). Transfers of one pair follow each other.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import attrs

from pdinfer.planning.simulation.deployment import Network
from pdinfer.planning.simulation.world import World

Pair = tuple[int, int]
"""The numbers of a prefill and a decode."""


@attrs.define(eq=False)
class SimTransfer:
    """Bytes of one prompt. `landing` is called `latency_s` after the last of them has left, not counting from before
    `ready_s`; it is None while more may follow."""

    left_bytes: float
    ready_s: float = 0.0
    landing: Callable[[], None] | None = None


class SimLinks:
    """The transfers of a cluster. `freed` is called when bytes have left. A network without a rate takes no time for
    any number of them."""

    def __init__(self, network: Network, world: World, freed: Callable[[], None]) -> None:
        self.network = network
        self.backlog: dict[Pair, float] = {}
        self.pushed_tokens = 0
        self._world, self._freed = world, freed
        self._queues: dict[Pair, deque[SimTransfer]] = {}
        self._rates: dict[Pair, float] = {}
        self._now_s = 0.0
        self._due_s = math.inf

    def push(self, pair: Pair, num_tokens: int) -> SimTransfer:
        """Send tokens while a step computes them."""
        self.pushed_tokens += num_tokens
        num_bytes = num_tokens * self.network.token_bytes
        transfer = SimTransfer(num_bytes)
        if self.network.bytes_per_s is not None:
            self._advance()
            self.backlog[pair] = self.backlog.get(pair, 0.0) + num_bytes
            if pair in self._queues:
                self._queues[pair].append(transfer)
            else:
                self._queues[pair] = deque([transfer])
                self._share()
            self._watch()
        return transfer

    def land(self, transfer: SimTransfer | None, num_tokens: int, landing: Callable[[], None]) -> None:
        """Do `landing` when everything has landed that was pushed for a prompt: `transfer` was the last, of a step of
        `num_tokens`, which has ended. Its last part leaves only now."""
        network, now_s = self.network, self._world.now_s
        if network.bytes_per_s is None:
            self._world.at(now_s + network.latency_s, landing)
            return
        self._advance()
        ready_s = now_s + num_tokens * network.token_bytes / network.num_pushes / network.bytes_per_s
        if transfer is None or not transfer.left_bytes:
            self._world.at(ready_s + network.latency_s, landing)
        else:
            transfer.ready_s, transfer.landing = ready_s, landing
        self._watch()

    def _advance(self) -> None:
        """Let the bytes leave that have by now. It is called at the end of each transfer, or before."""
        now_s = self._world.now_s
        took_s, self._now_s = now_s - self._now_s, now_s
        has_changed = False
        for pair in list(self._queues):
            queue, sent = self._queues[pair], self._rates[pair] * took_s
            self.backlog[pair] -= sent
            while queue and queue[0].left_bytes <= sent * (1 + 1e-12) + 1e-6:
                sent = max(0.0, sent - queue[0].left_bytes)
                self._end(queue.popleft())
                has_changed = True
            if queue:
                queue[0].left_bytes -= sent
            else:
                del self._queues[pair]
                self.backlog[pair] = 0.0
        if has_changed:
            self._share()

    def _end(self, transfer: SimTransfer) -> None:
        transfer.left_bytes = 0.0
        if transfer.landing is not None:
            self._world.at(max(self._now_s, transfer.ready_s) + self.network.latency_s, transfer.landing)

    def _share(self) -> None:
        assert self.network.bytes_per_s is not None
        self._rates = shares(list(self._queues), self.network.bytes_per_s)

    def _watch(self) -> None:
        """See to it that something happens at the end of the next transfer, if none begins before."""
        ends = (queue[0].left_bytes / self._rates[pair] for pair, queue in self._queues.items())
        due_s = self._now_s + min(ends, default=math.inf)
        if due_s != self._due_s:
            self._due_s = due_s
            if due_s < math.inf:
                self._world.at(due_s, self._reach)

    def _reach(self) -> None:
        if self._world.now_s == self._due_s:
            self._advance()
            self._watch()
            self._freed()


def shares(pairs: list[Pair], bytes_per_s: float) -> dict[Pair, float]:
    """Return the max-min rate of each pair, where every end carries `bytes_per_s` in all: fill all evenly, and fix
    those of the end that is full first."""
    if len(pairs) == 1:
        return {pairs[0]: bytes_per_s}
    rates: dict[Pair, float] = {}
    left = {(side, pair[side]): bytes_per_s for pair in pairs for side in (0, 1)}
    open_pairs = list(pairs)
    while open_pairs:
        counts: dict[tuple[int, int], int] = {}
        for pair in open_pairs:
            for side in (0, 1):
                counts[side, pair[side]] = counts.get((side, pair[side]), 0) + 1
        fullest = min(counts, key=lambda end: left[end] / counts[end])
        rate = left[fullest] / counts[fullest]
        for pair in [pair for pair in open_pairs if pair[fullest[0]] == fullest[1]]:
            rates[pair] = rate
            open_pairs.remove(pair)
            for side in (0, 1):
                left[side, pair[side]] = max(0.0, left[side, pair[side]] - rate)
    return rates
