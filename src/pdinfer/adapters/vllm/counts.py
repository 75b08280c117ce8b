"""Counts of transfers for vLLM's logger, in the form of its KVConnectorStats."""

from __future__ import annotations

from typing import Any

import attrs

ABORTED = "aborted_"


@attrs.define(eq=False)
class TransferCounts:
    """Counts since they were last taken: "landed", "aborted_<reason>", "bytes_received", "bytes_sent", "receive_s". It
    has the methods that vLLM asks of a KVConnectorStats."""

    data: dict[str, Any] = attrs.field(factory=dict)

    def add(self, name: str, amount: float = 1) -> None:
        """Count something."""
        if amount:
            self.data[name] = self.data.get(name, 0) + amount

    def take(self) -> TransferCounts | None:
        """Return what was counted since the last call, None when it is nothing."""
        if not self.data:
            return None
        taken, self.data = TransferCounts(self.data), {}
        return taken

    def to_dict(self) -> dict[str, Any]:
        return self.data

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: TransferCounts) -> TransferCounts:
        for name, amount in other.data.items():
            self.add(name, amount)
        return self

    def reduce(self) -> dict[str, int | float]:
        seconds, received = self.data.get("receive_s", 0.0), self.data.get("bytes_received", 0)
        speed = {"mb_per_s": round(received / 1e6 / seconds, 1)} if seconds else {}
        return {**{name: round(self.data[name], 3) for name in sorted(self.data)}, **speed}

    def is_empty(self) -> bool:
        return not self.data
