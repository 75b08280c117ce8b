"""Bytes on their way between engines: every engine's end has a capacity, which its transfers share max-min.

Max-min: no transfer can get more without one that has no more getting less (Bertsekas and Gallager, Data Networks,
1992, section 6.5.2). Transfers of one pair follow each other.
"""

from __future__ import annotations

import math
from collections import deque

import attrs

Pair = tuple[int, int]
"""The numbers of a prefill and a decode."""


@attrs.define(eq=False)
class SimTransfer:
    """Bytes of one prompt. `done_s` is when the last of them left, None before."""

    pair: Pair
    left_bytes: float
    done_s: float | None = None


class SimLinks:
    """The transfers of a cluster. Times that are passed in never decrease."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._queues: dict[Pair, deque[SimTransfer]] = {}
        self._rates: dict[Pair, float] = {}
        self._now_s = 0.0
        self.backlog: dict[Pair, float] = {}
        self.sent_bytes = 0.0

    def send(self, now_s: float, pair: Pair, num_bytes: float) -> SimTransfer:
        """Begin a transfer. Call `advance` first."""
        transfer = SimTransfer(pair, num_bytes)
        queue = self._queues.get(pair)
        self.backlog[pair] = self.backlog.get(pair, 0.0) + num_bytes
        if queue is None:
            self._queues[pair] = deque([transfer])
            self._rates = shares(list(self._queues), self._bytes_per_s)
        else:
            queue.append(transfer)
        return transfer

    def next_s(self) -> float:
        """Return when the next transfer is done if none begins before, or infinity."""
        ends = (queue[0].left_bytes / self._rates[pair] for pair, queue in self._queues.items())
        return self._now_s + min(ends, default=math.inf)

    def advance(self, now_s: float) -> list[SimTransfer]:
        """Go on to `now_s`, and return the transfers that are done by then. Call it at every `next_s`."""
        took_s, self._now_s = now_s - self._now_s, now_s
        done: list[SimTransfer] = []
        for pair in list(self._queues):
            queue, sent = self._queues[pair], self._rates[pair] * took_s
            self.backlog[pair] -= sent
            self.sent_bytes += sent
            while queue and queue[0].left_bytes <= sent * (1 + 1e-12) + 1e-6:
                sent = max(0.0, sent - queue[0].left_bytes)
                transfer = queue.popleft()
                transfer.left_bytes, transfer.done_s = 0.0, now_s
                done.append(transfer)
            if queue:
                queue[0].left_bytes -= sent
            else:
                del self._queues[pair]
                self.backlog[pair] = 0.0
        if done:
            self._rates = shares(list(self._queues), self._bytes_per_s)
        return done


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
